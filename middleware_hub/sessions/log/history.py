"""The events of one session's log as they are in the store, kept by a router that has the session.

If a store was emptied or set back, the missing events are written again with the same numbers. So several routers that have the
session may do that at once, and none of them has to read it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from middleware_hub.sessions.log.events import Ended, Exported, TurnCommitted, read, stored
from middleware_hub.store.errors import ClosedLogError, DamagedRecordError, LogMovedError
from middleware_hub.store.event_log import EventLog
from middleware_hub.store.paths import TextPath
from middleware_hub.store.protocol import Batch, Refill, Store
from middleware_hub.store.records import Blob, Event, SpanRecord

_AT_ONCE: Final = 200
"""Records, or events, that are appended in one step."""


class Book(Protocol):
    """Has the records of the session, see `SpanBook`."""

    @property
    def root(self) -> bytes:
        """Return the id of the first record."""
        ...

    @property
    def kept(self) -> list[bytes]:
        """Return the ids of all records, those that others build on first."""
        ...

    def again(self, missing: Iterable[bytes], stamp: str) -> list[SpanRecord]:
        """Return records, given by their ids."""
        ...

    def paths(self, records: Iterable[SpanRecord]) -> dict[bytes, TextPath]:
        """Return their paths."""
        ...

    def blobs(self, records: Iterable[SpanRecord]) -> list[Blob]:
        """Return what is stored beside them."""
        ...


class History:
    """See the top of this file; `log` is the key of the log."""

    def __init__(self, log: str) -> None:
        self._log = log
        self._events: list[Event] = []

    def __len__(self) -> int:
        return len(self._events)

    def add(self, after: int, events: Iterable[Event]) -> None:
        """Take the events of the log after a number."""
        self._events[after:] = events

    async def refill(self, store: Refill, book: Book, stamp: str) -> bool:
        """Append what a store lacks of the session; return whether its log is as it was known. Raises StoreError."""
        events = tuple(self._events)
        (end,) = await store.ends([self._log])
        if not await self._is_same(store, events[:end]):
            return False
        lacking = await store.lacking(dict.fromkeys(book.kept, book.root))
        records = book.again([one for one in book.kept if one in lacking], stamp)
        for at in range(0, len(records), _AT_ONCE):
            some = records[at : at + _AT_ONCE]
            await store.append(Batch(some, book.paths(some), book.blobs(some)))
        while end < len(events):
            new = [replace(one, expected=at) for at, one in enumerate(events[end : end + _AT_ONCE], end)]
            try:
                await store.append(Batch(events=new))
                end += len(new)
            except LogMovedError as moved:
                end = moved.last  # another router does the same work
            except ClosedLogError:
                return False
        return True

    async def _is_same(self, store: Refill, events: Sequence[Event]) -> bool:
        """Return whether the last of some events is the one that a store has in its place."""
        if not events:
            return True
        there = await store.event(self._log, len(events))
        return there is not None and (there.kind, there.data) == (events[-1].kind, events[-1].data)


async def close_log(store: Refill, log: str) -> None:
    """Close the log of a session that was deleted. Another router that has not heard of that may be writing it again."""
    (last,) = await store.ends([log])
    while True:
        try:
            return await store.append(Batch(events=stored(log, [Ended(time=time.time(), why="deleted")], last)))
        except LogMovedError as moved:
            last = moved.last
        except ClosedLogError:
            return None


async def unexported(store: Store, log: str) -> bool:
    """Whether a session has samples that no client got, by its log alone; a damaged one may have."""
    samples, exported, events = 0, 0, EventLog(store, log, whole=True)
    try:
        while page := await events.next_page():
            for event in map(read, page):
                samples += isinstance(event, TurnCommitted)
                exported = event.samples if isinstance(event, Exported) else exported
            events.take(page[-1])
            await asyncio.sleep(0)
    except DamagedRecordError:
        return True
    return exported < samples
