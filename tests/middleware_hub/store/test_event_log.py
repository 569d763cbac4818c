"""Readers of one log, against an oracle that knows which events the store has lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from middleware_hub.store import event_log
from middleware_hub.store.errors import DamagedRecordError, LogMovedError
from middleware_hub.store.event_log import EventLog, readable
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Event
from router.peers.channel import DAMAGED, SetBack
from tests.conftest import examples
from tests.support.dictionary_store import DictionaryStore

KEY = "log"
READERS = 3
"""The last one reads a log that has to be whole."""


class Fragile(DictionaryStore):
    """Loses the end of the log, and reads no page that has a damaged event."""

    def __init__(self) -> None:
        super().__init__()
        self.damaged: set[bytes] = set()

    @property
    def events(self) -> list[Event]:
        return self._logs.get(KEY, [])

    @property
    def end(self) -> int:
        return self._ends.get(KEY, (0, 0))[0]

    @property
    def is_damaged(self) -> bool:
        """Return whether one of the events is damaged. A second one could hide those between the two."""
        return any(event.data in self.damaged for event in self.events)

    def lose(self, count: int) -> list[Event]:
        kept, lost = self.events[:-count], self.events[-count:]
        self._logs[KEY], self._ends[KEY] = kept, (lost[0].number - 1, 0)
        return lost

    async def read(self, log: str, *, after: int = 0, limit: int = 1_000) -> list[Event]:
        found = await super().read(log, after=after, limit=limit)
        if any(event.data in self.damaged for event in found):
            raise DamagedRecordError("a page has a damaged event")
        return found


class Reader:
    """Takes events one by one, and keeps them until it is told that the store was set back."""

    def __init__(self, store: Fragile, *, whole: bool) -> None:
        self.store, self.whole = store, whole
        self.log = EventLog(store, KEY, whole=whole)
        self.heard: list[Event] = []
        self.place = b""
        """What the last one really said, even if it was damaged."""

    async def read(self, most: int, lost: set[bytes]) -> bool:
        """Read a page and take some of it; return whether there was one."""
        last = self.heard[-1] if self.heard else None
        try:
            found = await self.log.read_on()
        except DamagedRecordError:
            assert self.whole
            assert self.store.is_damaged
            return False
        was_lost, hidden = self.is_lost(lost), self.is_hidden(last)
        if isinstance(found, SetBack):
            assert was_lost
            assert last is not None
            assert found.number == last.number
            self.heard.clear()
            return True
        assert not was_lost or hidden, "a store that was set back is noticed"
        assert [event.number for event in found] == sorted(event.number for event in found)
        for event in found[:most]:
            assert event.number > self.log.number
            self.log.take(event)
            self.heard.append(event)
            (self.place,) = (there.data for there in self.store.events if there.number == event.number)
        return bool(found)

    def is_lost(self, lost: set[bytes]) -> bool:
        return bool(self.heard) and self.place in lost

    def is_hidden(self, last: Event | None) -> bool:
        """Return whether nobody can see that `last` is another event now: its place was trimmed away, or is damaged."""
        here = [event for event in self.store.events if last is not None and event.number >= last.number]
        return bool(here) and (last is None or here[0].number > last.number or here[0].data in self.store.damaged)


STEP = st.one_of(
    *[st.tuples(st.just("append"), st.integers(0, READERS - 1), st.booleans())] * 3,
    *[st.tuples(st.just("read"), st.integers(0, READERS - 1), st.integers(1, 3))] * 4,
    st.tuples(st.just("trim"), st.integers(0, 4), st.none()),
    st.tuples(st.just("lose"), st.integers(1, 4), st.none()),
    st.tuples(st.just("damage"), st.integers(0, 6), st.none()),
)


async def live(steps: list[Any]) -> None:
    store, lost, count = Fragile(), set[bytes](), 0
    readers = [Reader(store, whole=number == READERS - 1) for number in range(READERS)]
    blind = set[Reader]()
    for kind, one, two in steps:
        if kind == "append":
            log, data = readers[one].log, str(count).encode()
            count += 1
            expected, fits = (log.number, log.number == store.end) if two else (None, True)
            number = await log.append("said", data, expected=expected)
            assert number == (store.end if fits else None)
            if number is None:
                with pytest.raises(LogMovedError) as moved:
                    await store.append(Batch(events=[Event(KEY, "said", data, expected=expected)]))
                assert log.lost(moved.value) == max(0, log.number - store.end)
            else:
                assert store.events[-1].data == data
        elif kind == "read":
            await readers[one].read(two, lost)
        elif kind == "trim" and len(store.events) > one:
            await readers[0].log.trim(store.events[one].number)
        elif kind == "lose" and len(store.events) > one:
            lost.update(event.data for event in store.lose(one))
        elif kind == "damage" and len(store.events) > one and not store.is_damaged:
            store.damaged.add(store.events[one].data)
        blind |= {each for each in readers if each.is_lost(lost) and each.is_hidden(each.heard[-1])}
    for reader in readers:
        while await reader.read(100, lost):
            pass
        if reader not in blind and not (reader.whole and store.is_damaged):
            check(reader, store)
    damaged: list[int] = []
    said = [event async for event in readable(store, KEY, damaged.append)]
    assert said == [event for event in store.events if event.data not in store.damaged]
    assert damaged == [event.number for event in store.events if event.data in store.damaged]


def check(reader: Reader, store: Fragile) -> None:
    """A reader that is at the end has heard what the log says, and before that only what was trimmed."""
    heard = {event.number: event for event in reader.heard}
    assert len(heard) == len(reader.heard)
    assert reader.log.number == store.end == max(heard, default=0)
    for event in store.events:
        said = heard[event.number]
        assert said == event or (said.kind == DAMAGED and event.data in store.damaged)
    first = store.events[0].number if store.events else 1
    assert all(number < first or number in {event.number for event in store.events} for number in heard)


@settings(max_examples=examples(600), deadline=None)
@given(steps=st.lists(STEP, max_size=40))
def test_whatever_happens_to_a_log_its_readers_hear_what_it_says(steps: list[Any]) -> None:
    """Appends of several writers, pages, trims, losses and damage, in any order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_log, "PAGE", 3)
        asyncio.run(live(steps))


async def live_again(steps: list[Any]) -> None:
    store, lost_since = Fragile(), 0
    reader, writer = Reader(store, whole=True), EventLog(store, KEY, whole=True)
    for kind, one in steps:
        if kind == "append":
            for data in range(one):
                await writer.append("said", f"{data}".encode())
        elif kind == "read":
            await read_whole(reader)
            lost_since = 0
        elif kind == "trim" and len(store.events) > one:
            await writer.trim(store.events[one].number)
        elif kind == "lose" and len(store.events) > one and lost_since + one <= 8:
            lost_since += one
            for number, event in enumerate(store.lose(one)):
                await writer.append("said", event.data if number else b"new")
    await read_whole(reader)
    check(reader, store)


async def read_whole(reader: Reader) -> None:
    """Read to the end, and begin anew whenever the log says so."""
    while found := await reader.log.read_on():
        if isinstance(found, SetBack):
            reader.heard.clear()
            continue
        for event in found:
            reader.log.take(event)
            reader.heard.append(event)


@settings(max_examples=examples(600), deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(("append", "read")), st.integers(0, 9)),
            st.tuples(st.just("lose"), st.integers(1, 8)),
            st.tuples(st.just("trim"), st.integers(0, 4)),
        ),
        max_size=40,
    )
)
@example(steps=[("append", 9), ("read", 0), ("lose", 8)])
def test_events_that_are_written_again_after_a_loss_hide_none_of_the_others(steps: list[Any]) -> None:
    """Their writers append the same bytes, which get their old numbers, behind one that is new."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_log, "PAGE", 3)
        asyncio.run(live_again(steps))


def test_the_last_event_is_written_again_at_its_old_number_behind_a_new_one() -> None:
    async def work() -> None:
        store = Fragile()
        log = (await two_events(store, whole=False)).log
        store.lose(2)
        for data in (b"new", b"b"):
            await log.append("said", data)
        assert await log.read_on() == SetBack(2)
        assert [event.data for event in await log.read_on()] == [b"new", b"b"]

    asyncio.run(work())


async def two_events(store: Fragile, *, whole: bool) -> Reader:
    """Return a reader that has taken all that is there."""
    reader = Reader(store, whole=whole)
    for data in (b"a", b"b"):
        await reader.log.append("said", data)
    await reader.read(9, set())
    assert not await reader.log.read_on()
    return reader


@pytest.mark.parametrize("after", [(), (b"c", b"d", b"e")])
def test_a_log_without_the_last_event_was_set_back(after: tuple[bytes, ...]) -> None:
    """Also if it is longer than before by now."""

    async def work() -> None:
        store = Fragile()
        log = (await two_events(store, whole=True)).log
        store.lose(1)
        for data in after:
            await log.append("said", data)
        assert await log.read_on() == SetBack(2)
        assert [event.data for event in await log.read_on()] == [b"a", *after]

    asyncio.run(work())


def test_a_last_event_that_is_damaged_now_was_not_lost() -> None:
    async def work() -> None:
        store = Fragile()
        log = (await two_events(store, whole=False)).log
        store.damaged.add(b"b")
        assert not await log.read_on()
        await log.append("said", b"c")
        assert [event.data for event in await log.read_on()] == [b"c"]

    asyncio.run(work())


def test_a_last_event_that_was_trimmed_was_not_lost() -> None:
    async def work() -> None:
        store = Fragile()
        log = (await two_events(store, whole=True)).log
        await log.append("said", b"c")
        await log.trim(3)
        assert [event.data for event in await log.read_on()] == [b"c"]

    asyncio.run(work())
