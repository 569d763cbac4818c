"""The order of weight versions, read by several requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from middleware_hub.persistence import weight_versions
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


@pytest.fixture
def every_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_versions, "SNAPSHOT_EVERY", 10)


@pytest.mark.usefixtures("every_ten")
def test_the_log_of_a_fleet_with_two_versions_stays_short() -> None:
    """Each reply of the worker without the last update is news. Whoever starts later knows as much as the others."""

    async def work() -> None:
        store, clock, workers = DictionaryStore(), VersionClock(), WorkerVersions()
        log = VersionLog(store, clock, workers)
        workers.set_everywhere("d")
        for version in ("d", "b", "a", "c"):
            clock.observe(version)
        await log.write()
        workers.observe("http://late", "b")
        for _ in range(200):
            for version in ("c", "c", "a", "a"):
                clock.observe(version)
                await log.write()
                await log.read()
            assert len(await store.read(LOG)) <= 2 * 10 + 3
        later, their = VersionClock(), WorkerVersions()
        await VersionLog(store, later, their).read()
        assert later.known == clock.known == ["default", "d", "b", "a", "c"]
        assert later.current == clock.current == "c"
        assert (their.latest("http://late"), their.latest("http://other")) == ("b", "d")

    asyncio.run(work())


@pytest.mark.usefixtures("every_ten")
def test_a_process_that_always_has_news_shortens_the_log_as_well() -> None:
    async def work() -> None:
        store, clock = DictionaryStore(), VersionClock()
        log = VersionLog(store, clock, WorkerVersions())
        for number in range(200):
            clock.observe(f"name {number}")
            on_its_way = Batch(events=log.news())
            await log.read()
            await store.append(on_its_way)
            assert len(await store.read(LOG)) <= 4 * 10 + 3
        later = VersionClock()
        await VersionLog(store, later, WorkerVersions()).read()
        assert (later.known, later.current) == (clock.known, clock.current)

    asyncio.run(work())


@pytest.mark.usefixtures("every_ten")
def test_a_process_that_has_read_all_is_not_touched_by_a_snapshot() -> None:
    """Else all workers would seem to have changed, and replies that are on their way would have uncertain versions."""

    async def work() -> None:
        store, clock, workers = DictionaryStore(), VersionClock(), WorkerVersions()
        mine = VersionLog(store, clock, workers)
        theirs = VersionLog(store, other := VersionClock(), WorkerVersions())
        workers.set_everywhere("1")
        await mine.write()
        await mine.read()
        moment = workers.moment()
        for number in range(40):
            other.observe(str(number))
            await theirs.write()
            await theirs.read()
            await mine.read()
        assert (await store.read(LOG, limit=1))[0].kind == "snapshot"
        assert clock.current == other.current == "39"
        assert not workers.changed_since("http://worker", "1", moment)

    asyncio.run(work())


@pytest.mark.usefixtures("every_ten")
def test_a_process_that_missed_what_is_forgotten_goes_on_with_the_snapshot() -> None:
    async def work() -> None:
        store, clock, other = DictionaryStore(), VersionClock(), VersionClock()
        mine, theirs = VersionLog(store, clock, WorkerVersions()), VersionLog(store, other, WorkerVersions())
        other.observe("first")
        await theirs.write()
        await mine.read()
        for number in range(50):
            other.observe(f"step {number}")
            await theirs.write()
            await theirs.read()
        assert (await store.read(LOG, limit=1))[0].number > 2
        await mine.read()
        assert clock.known == other.known
        assert clock.current == other.current == "step 49"
        clock.observe("mine")
        await mine.write()
        await theirs.read()
        assert other.current == "mine"

    asyncio.run(work())


@pytest.mark.usefixtures("every_ten")
def test_news_of_which_the_log_has_nothing_do_not_hide_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store refused them, or has forgotten them. What this process notes later is not taken for them."""
    monkeypatch.setattr(weight_versions, "_PATIENCE", 0.0)

    async def work() -> None:
        store, clock, other = DictionaryStore(), VersionClock(), VersionClock()
        mine, theirs = VersionLog(store, clock, WorkerVersions()), VersionLog(store, other, WorkerVersions())
        clock.observe("1")
        await mine.write()  # it is forgotten before it is read
        clock.observe("2")
        mine.news()  # it is refused
        for number in range(3, 60):
            other.observe(str(number))
            await theirs.write()
            await theirs.read()
        for number in range(60, 66):
            await mine.read()
            assert clock.current == other.current
            observed = clock if number % 3 == 0 else other
            observed.observe(str(number))
            await mine.write()
            await theirs.write()
            await theirs.read()

    asyncio.run(work())


@pytest.mark.usefixtures("every_ten")
def test_a_snapshot_behind_a_damaged_event_is_repeated() -> None:
    class Damaged(DictionaryStore):
        number = 0

        async def read(self, log: str, *, after: int = 0, limit: int = 1_000) -> list[Event]:
            found = await super().read(log, after=after, limit=limit)
            if found and found[0].number == self.number:
                raise DamagedRecordError("it cannot be read")
            return [event for event in found if event.number < self.number or found[0].number > self.number]

    async def work() -> None:
        store, clock = Damaged(), VersionClock()
        mine = VersionLog(store, clock, WorkerVersions())
        for number in range(39):
            clock.observe(f"name {number}")
            await mine.write()
            await mine.read()
        (first, *_) = await store.read(LOG, limit=1)
        assert first.kind == "snapshot"
        store.number = first.number
        fresh = VersionClock()
        await VersionLog(store, fresh, WorkerVersions()).read()
        assert set(fresh.known) == set(clock.known)
        assert fresh.current == clock.current

    asyncio.run(work())


@pytest.mark.usefixtures("every_ten")
def test_a_process_that_only_reads_writes_no_snapshot() -> None:
    async def work() -> None:
        store, other = DictionaryStore(), VersionClock()
        theirs = VersionLog(store, other, WorkerVersions())
        for number in range(30):
            other.observe(str(number))
            await theirs.write()
        before = await store.read(LOG)
        await VersionLog(store, VersionClock(), WorkerVersions()).read()
        assert await store.read(LOG) == before

    asyncio.run(work())


@pytest.mark.usefixtures("every_ten")
def test_a_snapshot_leaves_nothing_out_that_is_written_meanwhile() -> None:
    class Overtaken(DictionaryStore):
        news: Sequence[Event] = ()

        async def append(self, batch: Batch) -> list[int]:
            if batch.events[0].kind == "snapshot" and self.news:
                await super().append(Batch(events=self.news))
                self.news = ()
            return await super().append(batch)

    async def work() -> None:
        store, clock, other = Overtaken(), VersionClock(), VersionClock()
        mine, theirs = VersionLog(store, clock, WorkerVersions()), VersionLog(store, other, WorkerVersions())
        for number in range(50):
            clock.observe(str(number))
            await mine.write()
            await mine.read()
            if number % 10 == 5:
                await theirs.read()
                other.observe(f"name {number}")
                store.news = theirs.news()
        fresh = VersionClock()
        await VersionLog(store, fresh, WorkerVersions()).read()
        assert set(clock.known) >= {"name 5", "name 15", "name 25", "name 35"}
        assert set(fresh.known) == set(clock.known)

    asyncio.run(work())


@pytest.mark.usefixtures("every_ten")
@pytest.mark.parametrize("back", [25, 18, 12, 3])
def test_a_shortened_log_that_was_set_back_repeats_nothing_that_is_known(back: int) -> None:
    async def work() -> None:
        store, clock, other = DictionaryStore(), VersionClock(), VersionClock()
        mine, theirs = VersionLog(store, clock, WorkerVersions()), VersionLog(store, other, WorkerVersions())
        kept: list[Event] = []
        for number in range(24):
            other.observe(str(number))
            await theirs.write()
            await theirs.read()
            await mine.read()
            found = await store.read(LOG)
            if found[-1].number <= back:
                kept = found
        store._logs[LOG] = kept
        store._ends[LOG] = (kept[-1].number, 0)
        await mine.read()
        assert clock.current == "23"
        await mine.write()
        for number in range(24, 64):
            fresh = VersionClock()
            await VersionLog(store, fresh, WorkerVersions()).read()
            assert (fresh.known, fresh.current) == (clock.known, clock.current)
            clock.observe(f"name {number}")
            await mine.write()
            await mine.read()

    asyncio.run(work())
