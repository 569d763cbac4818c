"""A log of the store as one process reads it: page by page, past damage, and from its beginning if the store was set back.

The control log, the log of weight versions, the logs of sessions and the logs of groups are read by this code. Each owner knows
the meaning of its events.

*Set back.* A store may lose the end of a log that it had acknowledged: a server loses its last second, or a file is replaced by
its backup. Others may have appended since, so the log may be as long as before, or longer. A reader sees it in two ways:

    read on   the last events that were taken are read once more: another event is in the place of one, or nothing is there
    append    at an expected place: the log ends before that place (`lost`)

The reader then forgets its place, and its owner forgets the state that the events had added up to. If the last event was
trimmed, the log goes on behind it: then nothing was lost. The last event alone would not do: its writer, who notices the loss
first, may append the same bytes again, and they get their old number if others have appended as much as was lost before it.

*Damage.* The bytes of an event may have changed since they were written. Where each event is news of its own, the reader
hands out `DAMAGED` in its place, and its owner goes on. Where events add up to a state, the log cannot be read on (`whole`):
a session without one of its turns would send other ids, and groups without a claim would hand out its samples twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from middleware_hub.store.errors import DamagedRecordError, LogMovedError
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Event
from router.peers.channel import DAMAGED, Entry, SetBack

PAGE: Final = 500
"""Events that are read at once."""
COMPARED: Final = 8
"""Events that are read once more. A store that loses no more than these since the last read is always seen to be set back."""


class EventLog:
    """See the top of this file. It has no lock: its owner reads in one task at a time.

    Args:
        key: of the log in the store.
        whole: whether its events add up, so that a damaged one is an error.

    Attributes:
        number: that of the last event that was taken, or that its owner has appended at an expected place.
    """

    def __init__(self, store: Store, key: str, *, whole: bool) -> None:
        self.key = key
        self.number = 0
        self._store = store
        self._whole = whole
        self._taken: deque[Entry] = deque(maxlen=COMPARED)

    def __repr__(self) -> str:
        return f"<EventLog {self.key}: {self.number} events>"

    def take(self, event: Entry) -> None:
        """Note that an event was applied: `read_on` goes on after it."""
        self.number = event.number
        self._taken.append(event)

    async def read_on(self) -> Sequence[Event] | SetBack:
        """Return the next events; none at the end of the log. After `SetBack` the log begins anew.

        Raises DamagedRecordError if the log has to be whole.
        """
        if not self._taken:
            return await self.next_page()
        oldest, cut = self._taken[0].number, False
        page: Sequence[Event]
        try:
            page = await self._store.read(self.key, after=oldest - 1, limit=len(self._taken) + PAGE)
        except DamagedRecordError:  # it can be compared with none, so the last event has to do
            page, cut = await self._page(self.number - 1)
        there = {event.number: event for event in page}
        first = page[0].number if page else 0
        if not page or any(
            known.number >= first and not _is_same(there.get(known.number), known) for known in self._taken
        ):
            lost, self.number = self.number, 0
            self._taken.clear()
            return SetBack(lost)
        new = [event for event in page if event.number > self.number]
        return new or (await self.next_page() if cut else ())

    async def next_page(self) -> Sequence[Event]:
        """Return the next events without a look whether the store was set back.

        Use this where each append expects its place, and where the last event may be too long to be sent each time.
        """
        page, _ = await self._page(self.number)
        return page

    async def _page(self, after: int) -> tuple[Sequence[Event], bool]:
        """Return the events after a number, and whether damage cuts the page short."""
        try:
            return await self._store.read(self.key, after=after, limit=PAGE), False
        except DamagedRecordError:
            if self._whole:
                raise
            return [await self._next(after)], True

    async def _next(self, after: int) -> Event:
        """Return the next event of a log that has a damaged one after `after`.

        Raises DamagedRecordError if none of its events can be told from another.
        """
        if not await self._is_damaged(after):
            (event,) = await self._store.read(self.key, after=after, limit=1)
            return event
        # Its number may be any after `after`: the events in between were forgotten.
        behind = await self._store.wait(self.key, after, 0.0)
        if await self._is_damaged(behind):
            raise DamagedRecordError(f"the log {self.key!r} is damaged")
        before = after
        while behind - before > 1:
            middle = (before + behind) // 2
            if await self._is_damaged(middle):
                before = middle
            else:
                behind = middle
        return Event(self.key, DAMAGED, number=behind)

    async def _is_damaged(self, after: int) -> bool:
        """Return whether the next event cannot be read."""
        try:
            await self._store.read(self.key, after=after, limit=1)
        except DamagedRecordError:
            return True
        return False

    async def append(self, kind: str, data: bytes, *, expected: int | None = None) -> int | None:
        """Append an event and return its number; None if the last event does not have the number `expected`."""
        try:
            (number,) = await self._store.append(Batch(events=[Event(self.key, kind, data, expected=expected)]))
        except LogMovedError:
            return None
        return number

    def lost(self, moved: LogMovedError) -> int:
        """Return how many events the log has lost, as an append has found that expected its place behind them."""
        return max(0, self.number - moved.last)

    async def wait(self, seconds: float) -> None:
        """Return when there is more to read, or when the time is up."""
        await self._store.wait(self.key, self.number, seconds)

    async def trim(self, before: int) -> None:
        """Forget the events before a number."""
        await self._store.trim(self.key, before)


def _is_same(there: Event | None, known: Entry) -> bool:
    """Return whether nothing says that the event is another one now."""
    return there is not None and (there == known or there.kind == DAMAGED)


async def readable(store: Store, key: str, damaged: Callable[[int], None]) -> AsyncIterator[Event]:
    """Yield the events of a log that can be read; `damaged` is called with the numbers of the others."""
    log = EventLog(store, key, whole=False)
    while page := await log.next_page():
        for event in page:
            if event.kind == DAMAGED:
                damaged(event.number)
            else:
                yield event
        log.take(page[-1])
