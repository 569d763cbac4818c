"""The order of weight versions, read by several requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from middleware_hub.persistence.weight_versions import LOG, VersionLog
from middleware_hub.spans.versions import VersionClock, WorkerVersions
from middleware_hub.store.errors import DamagedRecordError, StoreUnreachableError
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Event
from tests.support.dictionary_store import DictionaryStore


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


@pytest.mark.parametrize("failures", [0, 1])
def test_requests_that_wait_for_news_are_served_by_one_read(failures: int) -> None:
    """It has begun after all of them, and is not the one that was on its way. One that fails serves nobody else."""

    class Counting(Slow):
        reads = failures = 0

        async def read(self, log: str, *, after: int = 0, limit: int = 1_000) -> list[Event]:
            self.reads += 1
            found = await super().read(log, after=after, limit=limit)
            for _ in range(3):  # so that the others ask meanwhile
                await asyncio.sleep(0)
            if self.failures:
                self.failures -= 1
                raise StoreUnreachableError("it is away")
            return found

    async def work() -> None:
        store, clock, other = Counting(), VersionClock(), VersionClock()
        mine, theirs = VersionLog(store, clock, WorkerVersions()), VersionLog(store, other, WorkerVersions())
        await mine.read()
        first = asyncio.create_task(mine.read())
        await asyncio.sleep(0)  # it has asked the store
        other.observe("a")
        await theirs.write()
        store.reads, store.failures = 0, 2 * failures  # of the first, and of the next one
        rest = await asyncio.gather(first, *(mine.read() for _ in range(8)), return_exceptions=True)
        assert clock.current == "a"
        assert store.reads == 2 + failures
        assert sum(isinstance(one, StoreUnreachableError) for one in rest) == 2 * failures

    asyncio.run(work())


def test_an_entry_of_another_shape_is_damage_and_says_where() -> None:
    """So a router that meets one does not start, with a message, in the place of a traceback."""

    async def work() -> None:
        store = DictionaryStore()
        await store.append(Batch(events=[Event(LOG, "news", b"\xc0")]))
        await VersionLog(store, VersionClock(), WorkerVersions()).read()

    with pytest.raises(DamagedRecordError, match="event 1 of 'weight_versions'"):
        asyncio.run(work())


def test_news_that_could_not_be_written_happen_once() -> None:
    """They are written with the next ones, and do not come behind what others note after them."""

    class Away(DictionaryStore):
        away = False

        async def append(self, batch: Batch) -> list[int]:
            if self.away:
                raise StoreUnreachableError("it is away")
            return await super().append(batch)

    async def work() -> None:
        store, clock, other = Away(), VersionClock(), VersionClock()
        mine, theirs = VersionLog(store, clock, WorkerVersions()), VersionLog(store, other, WorkerVersions())
        clock.observe("a")
        store.away = True
        with pytest.raises(StoreUnreachableError):
            await mine.write()
        store.away = False
        for version in ("b", "c"):
            other.observe(version)
            await theirs.write()
            await mine.write()
            await mine.read()
        await theirs.read()
        assert clock.current == other.current == "c"

    asyncio.run(work())


def test_a_log_that_was_set_back_repeats_nothing_that_is_known() -> None:
    async def work() -> None:
        store, clock, other = DictionaryStore(), VersionClock(), VersionClock()
        mine, theirs = VersionLog(store, clock, WorkerVersions()), VersionLog(store, other, WorkerVersions())
        for version in ("a", "b"):
            other.observe(version)
            await theirs.write()
        await mine.read()
        clock.observe("c")
        await mine.write()
        await mine.read()
        kept = await store.read(LOG, limit=2)
        store._logs.pop(LOG)
        store._ends.pop(LOG)
        await store.append(Batch(events=kept))
        await mine.read_to(2)
        assert clock.current == "c"
        await mine.write()
        await theirs.read()
        assert other.current == "c"

    asyncio.run(work())


def test_an_older_answer_of_the_store_sets_nothing_back() -> None:
    """It was on its way while another request read on."""

    async def work() -> None:
        store, clock, other = DictionaryStore(), VersionClock(), VersionClock()
        mine, theirs = VersionLog(store, clock, WorkerVersions()), VersionLog(store, other, WorkerVersions())
        for version in ("a", "b"):
            other.observe(version)
            await theirs.write()
        await mine.read_to(2)
        clock.observe("c")
        waiting = Batch(events=mine.news())
        await mine.read_to(1)
        other.observe("d")
        await theirs.write()
        await mine.read_to(3)
        assert clock.current == "c", "it is written behind the other one's"
        await store.append(waiting)
        await theirs.read()
        assert other.current == "c"

    asyncio.run(work())
