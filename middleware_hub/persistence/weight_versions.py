"""The order of weight versions in the store, so that staleness and collection continue after a restart.

The changes of the clock (`VersionClock.changes`), and which worker has which version, are a log in the store. It is appended
together with the reply that brought the news, and read before the first request and when others have written. The order of the
log counts: a change of this process is repeated after the changes of others that stand before it. If two routers get replies
below the current version at the same moment, only one is counted (`FALL_AFTER`): a fall is noticed one reply later.

A store that was set back may have lost the end of the log. Then it is read from its beginning (not repeating what is known),
and each process writes down again which versions it knows.

While workers have several versions, as in a fleet that is updated worker by worker, many replies bring news. So after
`SNAPSHOT_EVERY` events a process writes down the state, and forgets all events before the snapshot before that. A log that is
not whole begins with a snapshot. A process that has read all events before a snapshot skips it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from middleware_hub.spans.versions import VersionClock, WorkerVersions
from middleware_hub.store.errors import StoreError
from middleware_hub.store.event_log import EventLog
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Event, new_id
from router.peers.channel import DAMAGED, SetBack

logger = logging.getLogger(__name__)

LOG = "weight_versions"
_NEWS, _SNAPSHOT = "news", "snapshot"
_COUNT = 8  # bytes, behind the id of a process
_PATIENCE = 5.0
"""Seconds for which news of this process that are not in the log yet count as newer than all that is there."""
SNAPSHOT_EVERY: Final = 5_000
_News = list[tuple[str, str]]
_decoder = msgspec.msgpack.Decoder(tuple[bytes, _News])


class VersionLog:
    """See the top of this file."""

    def __init__(self, store: Store, clock: VersionClock, workers: WorkerVersions) -> None:
        self._store = store
        self._clock = clock
        self._workers = workers
        self._log = EventLog(store, LOG, whole=False)
        self._reading = asyncio.Lock()
        self._begun = self._done = 0
        self._me = new_id()
        self._count = 0
        self._unread: dict[int, tuple[_News, float]] = {}  # by the count of its event, and since when
        self._unwritten: _News = []
        self._snapshot = 0  # the number of the last one
        self._gap = False  # whether events were damaged since
        self._repeated: set[bytes] = set()
        self._repeated_before: set[bytes] = set()  # the last snapshot
        self._repeated_long_ago: dict[bytes, bytes] = {}  # by process, the count of its last event
        clock.changes = []
        workers.changes = []

    def news(self) -> tuple[Event, ...]:
        """Return the changes since the last call: nothing, or one event to be appended."""
        if not self._clock.changes and not self._workers.changes and not self._unwritten:
            return ()
        found = [*self._unwritten, *self._clock.take_changes(), *self._workers.take_changes()]
        self._unwritten = []
        data = self._encoded(found)
        self._unread[self._count] = found, time.monotonic()
        return (Event(LOG, _NEWS, data),)

    def _encoded(self, news: _News) -> bytes:
        """Return the data of an event. No two are equal: the spool does not hand over an event that the log has already."""
        self._count += 1
        return msgspec.msgpack.encode((self._me + self._count.to_bytes(_COUNT, "big"), news))

    def _is_known(self, writer: bytes) -> bool:
        """Return whether an event was repeated before. The last thousands of events of a process may have come in any order."""
        recent = writer in self._repeated or writer in self._repeated_before
        return recent or writer[-_COUNT:] <= self._repeated_long_ago.get(writer[:-_COUNT], b"")

    async def write(self) -> None:
        """Append the changes since the last call. Raises StoreError: then it is appended by the next one."""
        events = self.news()
        if events:
            count = self._count
            try:
                await self._store.append(Batch(events=events))
            except StoreError:
                found, _ = self._unread.pop(count)
                self._unwritten = [*found, *self._unwritten]
                raise

    async def read_to(self, last: int) -> None:
        """Do what `read` does, given the number of the last event. Raises StoreError."""
        if last != self._log.number:
            await self.read()

    async def read(self) -> None:
        """Repeat the changes that others, or an earlier life of this process, noted since the last call. Raises StoreError."""
        wanted = self._begun + 1
        async with self._reading:
            if self._done >= wanted:
                return  # a call that waited with this one has begun after it, and has read to the end
            self._begun += 1
            while found := await self._log.read_on():
                if isinstance(found, SetBack):
                    self._unread.clear()
                    current = [] if self._clock.current is None else [("become", self._clock.current)]
                    self._unwritten = [*self._clock.orders(), *current, *self._unwritten]
                    self._snapshot, self._gap = 0, False
                else:
                    self._take(found)
            self._done = self._begun
            await self._shorten()

    async def _shorten(self) -> None:
        """Write a snapshot after many events. A process that only reads writes none.

        A process whose own news are not in the log yet waits longer: the snapshot has them, and so has an event behind it.
        """
        ahead = self._unread or self._unwritten or self._clock.changes or self._workers.changes
        if not self._count or self._log.number - self._snapshot < SNAPSHOT_EVERY * (2 if ahead else 1):
            return
        current = [] if self._clock.current is None else [("fall", self._clock.current)]  # whatever was current before
        state = self._encoded([*self._clock.orders(), *current, *self._workers.state()])
        with suppress(StoreError):  # the next read tries again
            if await self._log.append(_SNAPSHOT, state, expected=self._log.number) is not None and self._snapshot:
                await self._log.trim(self._snapshot)

    def _take(self, events: Sequence[Event]) -> None:
        foreign = False
        for event in events:
            if event.kind == DAMAGED:
                logger.error(
                    "weight versions may be in the wrong order: event %d of the log %r is damaged", event.number, LOG
                )
                self._log.take(event)
                self._gap = True
                continue
            writer, news = event.decoded(_decoder)
            whole = event.number == self._log.number + 1 and not self._gap
            self._log.take(event)
            if event.kind == _SNAPSHOT:
                self._snapshot, self._gap = event.number, False
            count = int.from_bytes(writer[-_COUNT:], "big")
            mine = writer.startswith(self._me) and self._unread.pop(count, None) is not None
            if self._is_known(writer):
                continue
            if event.kind == _SNAPSHOT:
                long_ago = self._repeated_long_ago
                for one in self._repeated_before:
                    long_ago[one[:-_COUNT]] = max(one[-_COUNT:], long_ago.get(one[:-_COUNT], b""))
                self._repeated, self._repeated_before = set(), self._repeated
            self._repeated.add(writer)
            if event.kind == _SNAPSHOT and whole and event.number > 1:
                continue
            foreign = foreign or not mine
            if foreign:
                self._repeat(news)
        if foreign:
            # The store may have refused the rest, or forgotten it behind a snapshot. If it comes, it is repeated.
            since = time.monotonic() - _PATIENCE
            self._unread = {count: found for count, found in self._unread.items() if found[1] > since}
            for news, _ in self._unread.values():
                self._repeat(news)

    def _repeat(self, news: _News) -> None:
        for kind, value in news:
            if kind in ("worker", "everywhere"):
                self._workers.repeat(kind, value)
            else:
                self._clock.repeat(kind, value)
