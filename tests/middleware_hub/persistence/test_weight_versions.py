"""The order of weight versions, read by several requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from middleware_hub.persistence.weight_versions import LOG, VersionLog
from middleware_hub.spans.versions import VersionClock, WorkerVersions
from middleware_hub.store.dictionary import DictionaryStore
from middleware_hub.store.errors import DamagedRecordError
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Event


class Slow(DictionaryStore):
    """As a store on another machine: whoever reads lets others go on meanwhile."""

    async def read(self, log: str, *, after: int = 0, limit: int = 1_000) -> list[Event]:
        found = await super().read(log, after=after, limit=limit)
        await asyncio.sleep(0)
        return found


def test_what_two_read_at_once_happens_once() -> None:
    """What is not written yet stays behind what others noted, however many read at the same time."""

    async def work() -> Sequence[str]:
        store, clock, other = Slow(), VersionClock(), VersionClock()
        mine, theirs = VersionLog(store, clock, WorkerVersions()), VersionLog(store, other, WorkerVersions())
        clock.observe("a")
        await mine.write()
        clock.observe("c")
        waiting = Batch(events=mine.news())  # its reply is on its way
        other.observe("b")
        await theirs.write()
        await asyncio.gather(*(mine.read_to(2) for _ in range(4)))
        assert clock.current == "c"
        await store.append(waiting)
        await asyncio.gather(mine.read_to(3), theirs.read_to(3))
        assert [event.number for event in await store.read(LOG)] == [1, 2, 3]
        assert clock.current == other.current == "c"
        return clock.known

    assert set(asyncio.run(work())) >= {"a", "b", "c"}


def test_an_entry_of_another_shape_is_damage_and_says_where() -> None:
    """So a router that meets one does not start, with a message, in the place of a traceback."""

    async def work() -> None:
        store = DictionaryStore()
        await store.append(Batch(events=[Event(LOG, "news", b"\xc0")]))
        await VersionLog(store, VersionClock(), WorkerVersions()).read()

    with pytest.raises(DamagedRecordError, match="event 1 of 'weight_versions'"):
        asyncio.run(work())
