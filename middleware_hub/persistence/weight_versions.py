"""The order of weight versions, written down: staleness and collection go on after a restart as if there had been none.

What the clock notes (`VersionClock.changes`), and which worker has which version, is a log in the store. It is appended
together with the reply that brought the news, and read before the first request, and when others have written. The order of the
log counts: what this process noted is repeated behind what others noted before it.
"""

from __future__ import annotations

import msgspec

from middleware_hub.spans.versions import VersionClock, WorkerVersions
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Event, new_id

LOG = "weight_versions"
_PAGE = 1_000
_News = list[tuple[str, str]]
_decoder = msgspec.msgpack.Decoder(tuple[bytes, _News])


class VersionLog:
    """See the top of this file."""

    def __init__(self, store: Store, clock: VersionClock, workers: WorkerVersions) -> None:
        self._store = store
        self._clock = clock
        self._workers = workers
        self._last = 0
        self._me = new_id()
        self._unread: list[_News] = []
        clock.changes = []
        workers.changes = []

    def news(self) -> tuple[Event, ...]:
        """Return what happened since the last call, to be appended: nothing, or one event."""
        if not self._clock.changes and not self._workers.changes:
            return ()
        found = [*self._clock.take_changes(), *self._workers.take_changes()]
        self._unread.append(found)
        return (Event(LOG, "news", msgspec.msgpack.encode((self._me, found))),)

    async def write(self) -> None:
        """Append what happened since the last call. Raises StoreError."""
        events = self.news()
        if events:
            await self._store.append(Batch(events=events))

    async def read(self) -> None:
        """Repeat what other processes, or this one in an earlier life, have noted since the last call. Raises StoreError."""
        while events := await self._store.read(LOG, after=self._last, limit=_PAGE):
            found = [_decoder.decode(event.data) for event in events]
            self._last = events[-1].number
            foreign = False
            for writer, news in found:
                if writer == self._me and self._unread:
                    self._unread.pop(0)
                foreign = foreign or writer != self._me
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
