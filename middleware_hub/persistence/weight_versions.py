"""The order of weight versions in the store, so that staleness and collection continue after a restart.

The changes of the clock (`VersionClock.changes`), and which worker has which version, are a log in the store. It is appended
together with the reply that brought the news, and read before the first request and when others have written. The order of the
log counts: a change of this process is repeated after the changes of others that stand before it. If two routers get replies
below the current version at the same moment, only one is counted (`FALL_AFTER`): a fall is noticed one reply later.

A store that was set back may have lost the end of the log. Then it is read from its beginning (not repeating what is known),
and each process writes down again which versions it knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from middleware_hub.spans.versions import VersionClock, WorkerVersions
from middleware_hub.store.errors import StoreError
from middleware_hub.store.event_log import EventLog
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Event, new_id
from router.peers.channel import DAMAGED, SetBack

logger = logging.getLogger(__name__)

LOG = "weight_versions"
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
        self._unread: list[_News] = []
        self._unwritten: _News = []
        self._repeated: set[bytes] = set()
        clock.changes = []
        workers.changes = []

    def news(self) -> tuple[Event, ...]:
        """Return the changes since the last call: nothing, or one event to be appended."""
        if not self._clock.changes and not self._workers.changes and not self._unwritten:
            return ()
        found = [*self._unwritten, *self._clock.take_changes(), *self._workers.take_changes()]
        self._unwritten = []
        self._unread.append(found)
        # No two are equal: an event in the spool is not handed over if the log has it already.
        self._count += 1
        return (Event(LOG, "news", msgspec.msgpack.encode((self._me + self._count.to_bytes(8, "big"), found))),)

    async def write(self) -> None:
        """Append the changes since the last call. Raises StoreError: then it is appended by the next one."""
        events = self.news()
        if events:
            found = self._unread[-1]
            try:
                await self._store.append(Batch(events=events))
            except StoreError:
                self._unread.remove(found)
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
                    order = [("order", version) for version in self._clock.known]
                    self._unwritten = [*order, *current, *self._unwritten]
                else:
                    self._take(found)
            self._done = self._begun

    def _take(self, events: Sequence[Event]) -> None:
        foreign = False
        for event in events:
            if event.kind == DAMAGED:
                logger.error(
                    "weight versions may be in the wrong order: event %d of the log %r is damaged", event.number, LOG
                )
                self._log.take(event)
                continue
            writer, news = event.decoded(_decoder)
            self._log.take(event)
            if writer in self._repeated:
                continue
            self._repeated.add(writer)
            mine = writer.startswith(self._me)
            if mine and self._unread:
                self._unread.pop(0)
            foreign = foreign or not mine
            if foreign:
                self._repeat(news)
        if foreign:
            for news in self._unread:
                self._repeat(news)

    def _repeat(self, news: _News) -> None:
        for kind, value in news:
            if kind in ("worker", "everywhere"):
                self._workers.repeat(kind, value)
            else:
                self._clock.repeat(kind, value)
