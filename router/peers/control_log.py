"""The log of changes that concern all routers: each router reads it in order, and applies it in the same way."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec

from router.http.time_limits import patience
from router.peers.channel import DAMAGED, ChannelError, Entry, FleetChannel, SetBack
from router.peers.events import ControlEvent, FleetState, Snapshot, WorkerAdded, WorkerRemoved, decoded, encoded

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=ControlEvent)
R = TypeVar("R")

PATIENCE: Final = 5.0
"""Seconds after which a step of the channel has failed."""
SNAPSHOT_EVERY: Final = 1_000
"""Entries after which a snapshot is taken. As many are kept before it, for routers that lag behind."""


async def in_time(step: Awaitable[R], seconds: float | None = None) -> R:
    """Await a step of a channel. Raises ChannelError, also if the step takes longer than `seconds` (`PATIENCE`)."""
    seconds = PATIENCE if seconds is None else seconds
    try:
        async with patience(seconds):
            return await step
    except TimeoutError as error:
        raise ChannelError(f"the store has not answered within {seconds:g} s") from error


class ControlLog:
    """The log in a channel, as one router sees it. All methods that read or append may raise ChannelError.

    Attributes:
        live: whether entries are not only noted in `state`, but handled.
        state: the sum of the entries.
        read: the number of the last entry that was read.
        entries: how many were read, by kind; `lost` counts gaps and damaged entries.
        heard_at: the moment (`time.monotonic`) at which the log was last known to be read to its end.
    """

    def __init__(self, token: str) -> None:
        """`token`: of this router, which signs its entries."""
        self.live = False
        self.state = FleetState()
        self.read = 0
        self.entries: Counter[str] = Counter()
        self.heard_at = -math.inf
        self.on_lost: Callable[[], None] = lambda: None
        """Called when entries were missed: the router must assume that they asked for anything."""
        self._token = token
        self._handlers: dict[type[ControlEvent], Callable[[Any, int, bool], Awaitable[object]]] = {}
        self.on_set_back: Callable[[list[ControlEvent]], None] = lambda told: None
        """Called with the entries to append again, because the log has lost them."""
        self._reading = asyncio.Lock()
        self._lost: FleetState | None = None
        """The state before the store was set back, until the log is read to its end again."""

    def hear(self, kind: type[T], handler: Callable[[T, int, bool], Awaitable[object]]) -> None:
        """Call `handler(event, number, own)` for each entry of a kind, in their order; `own`: this router has appended it.

        The number is 0 for an event without an entry: there is no channel, or it cannot be reached.
        """
        self._handlers[kind] = handler

    async def append(self, channel: FleetChannel, event: ControlEvent, expected: int | None = None) -> int | None:
        """Append an entry and return its number; None if the last one is not `expected`."""
        return await in_time(channel.append(event.KIND, encoded(event, self._token), expected))

    async def read_on(self, channel: FleetChannel) -> None:
        """Read to the end, and apply the entries.

        If the store was set back, others may have gone on with the log since: all of it is read again.
        """
        async with self._reading:
            while found := await in_time(channel.read_on()):
                if isinstance(found, SetBack):
                    logger.error(
                        "the control log has lost entry %d, which was read: the store was set back", found.number
                    )
                    self._lost = self._lost or self.state
                    self.state, self.read = FleetState(), 0
                    self.on_lost()
                    continue
                for entry in found:
                    await self._take(entry)
                    channel.take(entry)
                    self.read = entry.number
            self.heard_at = time.monotonic()
            lost, self._lost = self._lost, None
        if lost is not None:
            now = self.state.workers
            gone = [(url, there) for url, there in lost.workers.items() if now.get(url) is not there]
            self.on_set_back([WorkerAdded(url) if there else WorkerRemoved(url) for url, there in gone])

    async def wait(self, channel: FleetChannel, seconds: float) -> None:
        """Wait until there is more to read, for this many seconds at most."""
        await in_time(channel.wait(seconds), PATIENCE + seconds)

    async def shorten(self, channel: FleetChannel) -> None:
        """Take a snapshot after many entries, and forget the entries long before it."""
        if self.state.entries > SNAPSHOT_EVERY:
            number = await self.append(channel, self.state.snapshot(), self.read)
            if number is not None:
                await in_time(channel.trim(max(1, number - SNAPSHOT_EVERY)))

    async def do(self, event: ControlEvent, number: int = 0, *, own: bool) -> None:
        """Call the handler of an event."""
        handler = self._handlers.get(type(event))
        if handler is None:
            return
        try:
            await handler(event, number, own)
        except Exception:
            logger.exception("the router could not do what an entry says: %s", event)

    async def _take(self, entry: Entry) -> None:
        if entry.kind == DAMAGED or (self.read and entry.number > self.read + 1):
            logger.error("entries of the control log up to %d are damaged, or gone too early", entry.number)
            self.entries["lost"] += 1
            self.on_lost()
        event = self._decoded(entry)
        self.entries[entry.kind or "damaged"] += 1
        before = dict(self.state.workers) if isinstance(event, Snapshot) else {}
        self.state.apply(event)
        if event is None or not self.live:
            return
        if isinstance(event, Snapshot):
            for url, there in self.state.workers.items():
                if before.get(url, False) is not there:
                    await self.do(WorkerAdded(url) if there else WorkerRemoved(url), own=False)
        else:
            await self.do(event, entry.number, own=event.by == self._token)

    def _decoded(self, entry: Entry) -> ControlEvent | None:
        if entry.kind == DAMAGED:
            return None
        try:
            event = decoded(entry.kind, entry.data)
        except msgspec.MsgspecError as error:
            logger.error("entry %d of the control log (%s) cannot be read: %s", entry.number, entry.kind, error)
            return None
        if event is None and not self.entries[entry.kind]:
            logger.warning("other routers tell what this one does not know (%s): they are newer", entry.kind)
        return event
