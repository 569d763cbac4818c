"""What waited is appended in whatever order it can be, once, and what no store takes is kept beside."""

from __future__ import annotations

import asyncio
from pathlib import Path

from msgspec.structs import replace

from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Event
from middleware_hub.store.spool.file import SpoolFile, SpoolHead
from middleware_hub.store.spool.handover import TURN, Adoption, Drain
from middleware_hub.store.spool.packing import pack
from tests.middleware_hub.store.troubled import TroubledStore
from tests.middleware_hub.store.world import World
from tests.support.dictionary_store import DictionaryStore

HEAD = SpoolHead("s", "toy")


def waiting(path: Path, *batches: Batch) -> SpoolFile:
    spool = SpoolFile.make(path, HEAD, 1 << 20)
    for batch in batches:
        spool.put(pack(batch))
    return spool


def test_what_builds_on_something_behind_it_waits_for_that(tmp_path: Path) -> None:
    """Two replies that were under way together may have failed in the other order."""
    world = World()
    first = world.turn(None, "a", "b")
    second = world.turn(first, "c", "d")
    third = world.turn(second, "e", "f")

    async def work() -> None:
        store = DictionaryStore()
        spool = waiting(tmp_path / "a.spool", third.batch, second.batch, first.batch)
        drain = Drain(store)
        assert await drain.empty(spool)
        assert (drain.handed_over, drain.lost) == (3, 0)
        assert {record.id async for record in store.scan()} == {
            record.id for turn in (first, second, third) for record in turn.records
        }
        spool.close()

    asyncio.run(work())
    assert list(tmp_path.iterdir()) == []


def test_what_lacks_something_is_kept_beside(tmp_path: Path) -> None:
    world = World()
    first = world.turn(None, "a", "b")
    second = world.turn(first, "c", "d")
    other = world.turn(None, "x", "y")

    async def work() -> None:
        store = DictionaryStore()
        spool = waiting(tmp_path / "a.spool", second.batch, other.batch)
        drain = Drain(store)
        assert await drain.empty(spool)
        assert (drain.handed_over, drain.lost) == (1, 1)
        spool.close()
        kept = SpoolFile.adopt(tmp_path / "a.refused", HEAD)
        assert kept is not None
        await store.append(first.batch)
        assert await drain.empty(kept), "it is there when that can be mended"
        assert drain.handed_over == 2
        kept.close()

    asyncio.run(work())
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_refused_does_not_take_the_others_through_the_store_again_and_again(tmp_path: Path) -> None:
    world = World()
    good = [world.turn(None, f"question {number}", "answer").batch for number in range(120)]
    orphan = world.turn(world.turn(None, "a", "b"), "c", "d").batch
    sizes: list[int] = []

    class CountingStore(DictionaryStore):
        async def append(self, batch: Batch) -> list[int]:
            sizes.append(len(batch.records))
            return await super().append(batch)

    async def work() -> None:
        spool = waiting(tmp_path / "a.spool", *good[:20], orphan, *good[20:])
        drain = Drain(CountingStore())
        assert await drain.empty(spool)
        assert (drain.handed_over, drain.lost) == (120, 1)
        spool.close()

    asyncio.run(work())
    assert sum(sizes) < 2 * 3 * len(good), "records that were sent, of which a batch has two"
    assert len(sizes) < 40


def test_a_file_in_which_nothing_waits_is_removed_and_nothing_is_missed(tmp_path: Path) -> None:
    """A killed router leaves one, also if the store was never away: no answer is less exact for that."""
    waiting(tmp_path / "a.spool").close()
    spool = SpoolFile.make(tmp_path / "b.spool", HEAD, 1 << 20)

    async def no_store() -> Store:
        raise AssertionError("there is nothing to append")

    async def work() -> None:
        adoption = Adoption(lambda: [spool], no_store)
        await adoption.run()
        assert adoption.left == []

    asyncio.run(work())
    assert list(tmp_path.iterdir()) == []


def test_events_are_appended_once_whatever_was_acknowledged(tmp_path: Path) -> None:
    batches = [Batch(events=[Event("a", "k", b"%d" % n, expected=n)]) for n in range(5)]
    batches.append(Batch(events=[Event("news", "k", b"n")]))

    async def work() -> None:
        troubled = TroubledStore(DictionaryStore())
        spool = waiting(tmp_path / "a.spool", *batches)
        await troubled.store.append(batches[0])
        await troubled.store.append(Batch(events=[Event("a", "k", b"another's")]))
        drain = Drain(troubled)  # type: ignore[arg-type]
        for _ in range(3):
            troubled.appends = "fails after"
            assert not await drain.empty(spool)
            troubled.mend()
        assert await drain.empty(spool)
        found = [event.data for event in await troubled.store.read("a")]
        assert found == [b"0", b"another's", b"1", b"2", b"3", b"4"]
        assert [event.data for event in await troubled.store.read("news")] == [b"n"]
        spool.close()

    asyncio.run(work())


def test_whoever_waits_hears_what_became_of_it(tmp_path: Path) -> None:
    """What is neither in the store nor given up stays in the memory of the router that recorded it."""
    world = World()
    orphan = world.turn(world.turn(None, "a", "b"), "c", "d")
    other = world.turn(None, "x", "y")
    told: list[tuple[str, bool]] = []

    async def work() -> None:
        spool = SpoolFile.make(tmp_path / "a.spool", HEAD, 1 << 20)
        for name, turn in (("orphan", orphan), ("other", other)):
            spool.put(pack(turn.batch), 1, None, lambda saved, name=name: told.append((name, saved)))
        assert await Drain(DictionaryStore()).empty(spool)
        spool.close()

    asyncio.run(work())
    assert sorted(told) == [("orphan", False), ("other", True)]


def test_later_turns_of_a_session_do_not_take_the_place_of_one_that_is_given_up(tmp_path: Path) -> None:
    """They may name it, and then no router could read the session. A reward is kept."""
    world = World()
    orphan = world.turn(world.turn(None, "a", "b"), "c", "d").batch
    first = replace(orphan, events=[Event("s", TURN, b"first", expected=0)])
    later = [Batch(events=[Event("s", kind, kind.encode(), expected=n)]) for n, kind in [(1, TURN), (2, "reward")]]

    async def work() -> None:
        store = DictionaryStore()
        await store.append(Batch(events=[Event("s", "reward", b"another's", expected=0)]))
        spool = waiting(tmp_path / "a.spool", first, *later)
        assert await Drain(store).empty(spool)
        assert [event.data for event in await store.read("s")] == [b"another's", b"reward"]
        spool.close()

    asyncio.run(work())
