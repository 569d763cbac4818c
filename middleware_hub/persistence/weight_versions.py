"""The order of weight versions, written down: staleness and collection go on after a restart as if there had been none.

What the clock notes (`VersionClock.changes`), and which worker has which version, is a log in the store. It is appended
together with the reply that brought the news, and read before the first request, and when others have written.
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
        clock.changes = []
        workers.changes = []

    def news(self) -> tuple[Event, ...]:
        """Return what happened since the last call, to be appended: nothing, or one event."""
        if not self._clock.changes and not self._workers.changes:
            return ()
        found = [*self._clock.take_changes(), *self._workers.take_changes()]
        return (Event(LOG, "news", msgspec.msgpack.encode((self._me, found))),)

    async def write(self) -> None:
        """Append what happened since the last call. Raises StoreError."""
        events = self.news()
        if events:
            await self._store.append(Batch(events=events))

    async def read(self) -> None:
        """Repeat what other processes, or this one in an earlier life, have noted since the last call. Raises StoreError."""
        while events := await self._store.read(LOG, after=self._last, limit=_PAGE):
            for event in events:
                self._last = event.number
                writer, news = _decoder.decode(event.data)
                for kind, value in news if writer != self._me else ():
                    if kind in ("worker", "everywhere"):
                        self._workers.repeat(kind, value)
                    else:
                        self._clock.repeat(kind, value)
