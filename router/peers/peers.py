"""The other routers of the fleet: this router tells them its changes, and applies theirs.

Everything that concerns all routers is an entry of one log (`events`). A router applies an entry when it reads it, its own
entries too, so all of them reach the same state, whichever wrote first. Each reads the log all the time, and to its end before
anything depends on it (`catch_up`). A call that changes something is answered when every live router (`presence`) has read its
entry.

While a router cannot reach the log, it continues alone: calls take effect here, their answers say that no other router was
told, and the router appends the entries, in their order, when the log is back, after the entries that others appended
meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.peers.channel import ChannelError, FleetChannel
from router.peers.control_log import ControlLog, in_time
from router.peers.events import CallBegan, CallOver, ControlEvent, RouterCame, WorkerAdded, WorkerRemoved
from router.peers.presence import LEASE_SECONDS, RENEW_SECONDS, Presence

logger = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 0.5
_SOON, _LATER = 0.004, 0.03
UNTIL_GONE: Final = 2 * LEASE_SECONDS
"""Seconds within which every other router has read an entry, or is not there any more."""
MOMENT: Final = 0.25
"""Seconds within which the other routers read an entry, if they can."""
_RUSHED: Final = 2.0
"""Seconds that a request waits for the store, and an announcement: so it fails before the last one has run out."""
_DOUBT: Final = 1.0
"""Seconds after a failure in which requests still try: a question to the store fails if this process is stopped meanwhile."""
_LATE_IS_RIGHT = (WorkerAdded, WorkerRemoved, CallOver)
"""Events that are appended later if they cannot be appended now. An abort concerns only the present."""


class Heard(msgspec.Struct, frozen=True):
    """Which routers have read an entry.

    Attributes:
        number: of the entry; 0 if it could not be written, or there is no channel.
        missing: ids of routers whose announcement ran out before they had read it. They read it before they go on.
        error: why no other router knows.
    """

    number: int = 0
    missing: tuple[str, ...] = ()
    error: str | None = None

    def shown(self) -> dict[str, Any]:
        """Return the part of a call's answer that says which routers know."""
        return {"told": self.error is None, "missing": list(self.missing), "error": self.error}


class Peers:
    """The others, as one router sees them; without a channel there are none.

    Attributes:
        log: the entries of all routers; it calls the handlers.
        until: the moment (`time.monotonic`) from which on `look_again` is to be awaited before a request is served.
    """

    def __init__(self, presence: Presence | None = None) -> None:
        self.presence = presence or Presence()
        self.log = ControlLog(self.presence.token)
        self.until = math.inf
        self.on_version: Callable[[str | None], Awaitable[None]] = _nothing
        """Awaited with a weight version that a call here has set at all workers, before others hear of it; with None when
        another router reports one."""
        self._channel: FleetChannel | None = None
        self._renewing = asyncio.Lock()
        self._telling = asyncio.Lock()
        self._untold: list[ControlEvent] = []
        self.log.on_set_back = self._untold.extend
        self._away_since = math.inf
        self._listening: asyncio.Task[None] | None = None

    # Beginning and end -------------------------------------------------------------------------------------------------

    def join(self, channel: FleetChannel) -> None:
        """Take the channel by which the others are reached. It can be used from `start` on."""
        self._channel = channel

        async def came(*_: object) -> None:
            try:
                await in_time(self.presence.look(channel))
            except ChannelError as error:  # it is looked again when the channel can be reached
                self._failed(error)

        self.log.hear(RouterCame, came)

    @property
    def kind(self) -> str | None:
        """Return the kind of the channel; None without one."""
        return None if self._channel is None else self._channel.kind

    @property
    def away(self) -> bool:
        """Return whether the channel could not be reached when it was last tried."""
        return self._away_since < math.inf

    @property
    def alone(self) -> bool:
        """Return whether no other router was there when this one last looked."""
        return not self.presence.others

    async def start(self) -> None:
        """Read the log into `log.state`, without calling any handler."""
        await self.catch_up()

    async def go_live(self) -> None:
        """Handle entries from now on, and tell the others of this router. The caller has applied `log.state`."""
        self.log.live = True
        if self._channel is not None:
            self._listening = asyncio.create_task(self._listen(self._channel), name="control log")
            self.until = -math.inf
            await self.look_again()
            await self.tell(RouterCame(), seconds=0.0)  # no start waits for a router that was killed

    async def close(self) -> None:
        """Append the events that others were not told yet, and take the announcement back."""
        if self._listening is None or self._channel is None:
            return
        self._listening.cancel()
        await asyncio.wait([self._listening])
        self._listening, self.until = None, math.inf
        try:
            await self._tell_untold(self._channel)
            await in_time(self.presence.leave(self._channel))
        except ChannelError as error:
            logger.warning("the other routers do not know that this one ends: %s", error)
        if self._untold:
            logger.error("other routers do not know of %d changes of the fleet", len(self._untold))

    # Telling -----------------------------------------------------------------------------------------------------------

    async def tell(self, event: ControlEvent, *, seconds: float = UNTIL_GONE) -> Heard:
        """Append an entry and apply it here. Wait some seconds at most until all others that are there have read it."""
        channel = self._channel
        if channel is None:
            await self.log.do(event, own=True)
            return Heard()
        try:
            await self._tell_untold(channel)
            number = await self.log.append(channel, event)
            assert number is not None
        except ChannelError as error:
            self._failed(error)
            logger.error("other routers were not told: %s: %s", event, error)
            if isinstance(event, _LATE_IS_RIGHT):
                self._untold.append(event)
            await self.log.do(event, own=True)
            return Heard(error=error.message)
        try:
            if self.log.live:  # else the entries of others would be noted, and not handled
                await self.log.read_on(channel)
            missing = await self._until_heard(channel, number, seconds) if seconds else ()
            if missing:
                logger.warning("routers that did not hear in time: %s: %s", event, ", ".join(missing))
            return Heard(number, missing)
        except ChannelError as error:
            self._failed(error)
            if self.log.read < number:
                await self.log.do(event, number, own=True)  # it is done again when it can be read
            return Heard(number, error=error.message)

    async def settle(self) -> Heard:
        """Wait until all others have read as far as this router."""
        channel, number = self._channel, self.log.read
        if channel is None:
            return Heard()
        try:
            return Heard(number, await self._until_heard(channel, number, UNTIL_GONE))
        except ChannelError as error:
            self._failed(error)
            return Heard(number, error=error.message)

    async def _until_heard(self, channel: FleetChannel, number: int, seconds: float) -> tuple[str, ...]:
        """Wait until all live routers have handled an entry. Return the ids of the routers that left meanwhile."""
        deadline, pause = time.monotonic() + seconds, _SOON
        waited: dict[str, str] = {}
        while True:
            others = await in_time(self.presence.look(channel))
            behind = {token: one.id for token, one in others.items() if one.read < number or number in one.busy}
            waited |= behind
            if not behind or time.monotonic() > deadline:
                break
            await asyncio.sleep(pause)
            pause = min(_LATER, pause * 1.5)
        return tuple(name for token, name in waited.items() if token in behind or token not in others)

    async def take_turn(self, call: CallBegan, *, seconds: float = 0.0) -> Heard:
        """Append the beginning of a call. One that updates waits until no router has another such call in progress.

        The others have some `seconds` to hear of it. Otherwise they might send requests from their queues to workers that have
        just aborted everything, or requests that share a cache to workers that are paused, and get new weights meanwhile.
        """
        channel = self._channel
        if channel is None:
            return Heard()
        try:
            while True:
                await self._tell_untold(channel)
                await self.log.read_on(channel)
                others = await in_time(self.presence.look(channel))
                if call.updates and any(one.updates and one.by in others for one in self.log.state.calls.values()):
                    await self.log.wait(channel, 1.0)
                    continue
                number = await self.log.append(channel, call, self.log.read if call.updates else None)
                if number is not None:
                    if seconds:
                        await self._until_heard(channel, number, seconds)
                    return Heard(number)
        except ChannelError as error:
            self._failed(error)
            logger.error("other routers were not told: %s: %s", call, error)
            return Heard(error=error.message)

    async def _tell_untold(self, channel: FleetChannel) -> None:
        if not self._untold:
            return
        async with self._telling:
            while self._untold:
                event = self._untold[0]
                if isinstance(event, CallOver) and event.version is not None:
                    await self.on_version(event.version)  # that could not be written down, either
                await self.log.append(channel, event)
                del self._untold[0]
                logger.warning("other routers are told only now: %s", event)

    # Hearing -----------------------------------------------------------------------------------------------------------

    async def catch_up(self) -> bool:
        """Read the log to its end; return whether that was possible."""
        if self._channel is None:
            return True
        try:
            await self.log.read_on(self._channel)
        except ChannelError as error:
            self._failed(error)
            return False
        return True

    async def look_again(self) -> None:
        """Read on before a request is served, because the others may have gone on without this router.

        A request waits for `_RUSHED` seconds at most, and not at all while the store is known to be away.
        """
        begun, pause = time.monotonic(), _SOON
        while self._channel is not None:
            left = min(begun + _RUSHED, self._away_since + _DOUBT) - time.monotonic()
            if left <= 0:
                break
            try:
                async with asyncio.timeout(left):
                    await self._renew(self._channel, overdue=True)
                return
            except (ChannelError, TimeoutError) as error:
                self._failed(error, begun)
            await asyncio.sleep(pause)
            pause = min(_LATER, pause * 1.5)
        self.until = time.monotonic() + _RETRY_SECONDS  # the listening task goes on trying

    async def announce(self) -> None:
        """Announce a change of this router at once. If that is not possible now, it is announced with the next one."""
        if self._channel is not None:
            try:
                await self._renew(self._channel)
            except ChannelError as error:
                self._failed(error)

    async def _renew(self, channel: FleetChannel, *, overdue: bool = False) -> None:
        """Announce this router. If it was not announced for a time, read on before anything else. Raises ChannelError.

        `overdue`: only if no other task has done it meanwhile.
        """
        async with self._renewing:
            if overdue and time.monotonic() < self.until:
                return
            while not await in_time(self.presence.announce(channel, self.log.read), _RUSHED):
                await self.log.read_on(channel)
                if self.log.read == self.presence.told:
                    self.presence.held()
                    break
            self.until = self.presence.until

    async def _listen(self, channel: FleetChannel) -> None:
        """Read on whenever there is something, and stay announced."""
        looked = -math.inf
        while True:
            try:
                if not self.away:
                    await self.log.wait(channel, max(0.0, looked + RENEW_SECONDS - time.monotonic()))
                await self.log.read_on(channel)
                due = self.away or time.monotonic() >= looked + RENEW_SECONDS
                if due or self.log.read != self.presence.told:
                    await self._renew(channel)
                await self._tell_untold(channel)
                if due:
                    looked = time.monotonic()
                    await self._look_around(channel)
                if self.away:
                    logger.warning("the other routers can be reached again")
                    self._away_since = math.inf
            except ChannelError as error:
                self._failed(error)
                await asyncio.sleep(_RETRY_SECONDS)
            except Exception:
                logger.exception("this router could not read the entries of the others")
                await asyncio.sleep(_RETRY_SECONDS)

    async def _look_around(self, channel: FleetChannel) -> None:
        """Look which routers are there. The calls of routers that left are over; and one router keeps the log short."""
        others = await in_time(self.presence.look(channel))
        for call in list(self.log.state.calls.values()):
            if call.by not in others and call.by != self.presence.token:
                logger.warning("the router that made a call to all workers is gone: %s", call)
                over = CallOver(call.call)
                self.log.state.apply(over)
                await self.log.do(over, own=False)
        if self.presence.token == min([self.presence.token, *others]):
            await self.log.shorten(channel)

    def _failed(self, error: Exception, since: float | None = None) -> None:
        if not self.away:
            why = str(error) or "the store has not answered in time"  # a TimeoutError has no words
            logger.error("the other routers cannot be reached, this one goes on alone: %s", why)
            self._away_since = since or time.monotonic()

    # For people --------------------------------------------------------------------------------------------------------

    async def list(self) -> list[dict[str, Any]]:
        """Return all routers that are there, this one first, for GET /routers."""
        others = []
        if self._channel is not None:
            try:
                others = list((await in_time(self.presence.look(self._channel))).values())
            except ChannelError as error:
                self._failed(error)
        store = "unreachable" if self.away else self.kind
        shown = [self.presence.shown(one, store=self.kind, this=False) for one in others]
        return [
            self.presence.shown(self.presence.own(self.log.read), store=store, this=True),
            *sorted(shown, key=lambda one: (one["started"], one["id"])),
        ]


async def _nothing(_: str | None) -> None:
    pass


class PeersCollector(Collector):
    """The metrics of the other routers, read at each scrape."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def collect(self) -> Iterator[Metric]:
        peers = self._peers
        there = 1 if peers.kind is None or peers.away else 1 + len(peers.presence.others)
        yield GaugeMetricFamily("tito_router_routers", "Live routers of the fleet, this one included.", value=there)
        entries = CounterMetricFamily(
            "tito_router_control_entries",
            "Entries of the control log that this router has read, by kind; lost: they were damaged, or gone.",
            labels=("kind",),
        )
        for kind, count in {"lost": 0, **peers.log.entries}.items():
            entries.add_metric((kind or "damaged",), count)
        yield entries
        behind = 0.0 if peers.kind is None else max(0.0, time.monotonic() - peers.log.heard_at)
        yield GaugeMetricFamily(
            "tito_router_control_lag_seconds",
            "Seconds since this router last knew that it had read the control log to its end: at most 2, if all is well.",
            value=behind,
        )
