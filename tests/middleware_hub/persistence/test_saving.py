"""What is appended while the store does not answer: counted once, told once, and in the store in the order of recording."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from middleware_hub.persistence import saving
from middleware_hub.persistence.saving import Append, AppendState, Saving
from middleware_hub.persistence.turn_writer import joined
from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.guarded import GuardedStore
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Event
from middleware_hub.store.spool.file import _OVERDRAFT
from middleware_hub.store.spool.packing import pack
from tests.middleware_hub.store.troubled import TroubledStore
from tests.middleware_hub.store.world import World
from tests.support.dictionary_store import DictionaryStore


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "ANSWER_SECONDS", 0.004)
    monkeypatch.setattr(saving, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(saving, "RETRY_SECONDS", 3600.0)


def test_an_append_that_ends_after_its_caller_was_answered_counts_once() -> None:
    """It is handed over as well, because nobody knows whether it will end."""

    async def main() -> None:
        troubled = TroubledStore(DictionaryStore())
        saver = Saving(GuardedStore(troubled))  # type: ignore[arg-type]
        over: list[bool] = []
        troubled.appends = "hangs"
        assert not await saver.append(World().turn(None, "a", "b").batch, on_done=over.append)
        assert (saver.saved, saver.unsaved, saver.waiting, over) == (0, 1, 1, [])
        troubled.mend()
        for _ in range(50):  # it ends now, and has been answered already
            await asyncio.sleep(0)
        assert not troubled.hung
        assert await saver.hand_over()
        await saver.close()
        assert (saver.saved, saver.unsaved, saver.handed_over, saver.waiting, over) == (0, 1, 1, 0, [True])

    asyncio.run(main())


def test_what_is_appended_later_stands_behind_what_waits() -> None:
    async def main() -> None:
        troubled = TroubledStore(DictionaryStore())
        saver = Saving(GuardedStore(troubled))  # type: ignore[arg-type]
        first, second = (Batch(events=[Event("log", "kind", data)]) for data in (b"1", b"2"))
        troubled.appends = "raises"
        assert not await saver.append(first)
        troubled.mend()
        assert await saver.append(second)
        assert [event.data for event in await troubled.store.read("log")] == [b"1", b"2"]
        await saver.close()

    asyncio.run(main())


def test_who_appended_what_is_given_up_hears_of_it() -> None:
    """Until then, what was recorded is kept in memory."""

    async def main() -> None:
        saver = Saving(DictionaryStore())
        world, over = World(), list[bool]()
        assert not await saver.append(world.turn(world.turn(None, "a", "b"), "c", "d").batch, on_done=over.append)
        assert (saver.lost, over) == (1, [False])
        await saver.close()

    asyncio.run(main())


def test_a_batch_that_is_mended_in_vain_is_not_taken_for_saved() -> None:
    async def main() -> None:
        saver = Saving(DictionaryStore())
        world = World()
        assert not await saver.append(
            world.turn(world.turn(None, "a", "b"), "c", "d").batch, on_missing=lambda batch, error: batch
        )
        assert (saver.saved, saver.lost) == (0, 1)
        await saver.close()

    asyncio.run(main())


def test_one_of_several_replies_for_which_there_is_no_room_is_held_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing new is begun until it is in the store."""

    async def main() -> None:
        troubled = TroubledStore(DictionaryStore())
        saver = Saving(GuardedStore(troubled))  # type: ignore[arg-type]
        world, over = World(), list[bool]()
        parts = [world.turn(None, "a", "b").batch, world.turn(None, "c", "d").batch]
        saver._spool._max_bytes = len(pack(parts[0])) - _OVERDRAFT
        troubled.appends = "raises"
        assert not await saver.append(joined(parts), on_done=over.append, parts=parts)
        assert (saver.waiting, saver.lost, over) == (2, 0, [])
        assert saver.held_bytes > len(pack(parts[1]))
        assert "kept in memory only" in caplog.text
        with pytest.raises(StoreUnreachableError, match="in memory only"):
            saver.admit()
        troubled.mend()
        assert await saver.hand_over()
        saver._spool._max_bytes = 1 << 20
        saver.admit()
        assert (over, saver.handed_over, saver.held_bytes) == ([True], 2, 0)
        await saver.close()

    asyncio.run(main())


def test_a_loop_that_is_late_is_no_store_that_does_not_answer() -> None:
    """Of a claim the client would be told that it failed, and its samples would be held all the same."""

    class Answering(DictionaryStore):
        async def append(self, batch: Batch) -> list[int]:
            answer = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.001, answer.set_result, None)
            await answer
            return await super().append(batch)

    async def main() -> None:
        store = Answering()
        saver = Saving(GuardedStore(store))
        asyncio.get_running_loop().call_soon(time.sleep, 0.1)  # longer than any answer may take
        await saver.write(Batch(events=[Event("log", "kind", b"1")]))
        assert [event.data for event in await store.read("log")] == [b"1"]
        await saver.close()

    asyncio.run(main())


def test_the_time_without_the_store_begins_with_the_first_of_what_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And it is logged once a minute, however much waits."""
    now = [1000.0]
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def main() -> None:
        troubled = TroubledStore(DictionaryStore())
        saver = Saving(GuardedStore(troubled))  # type: ignore[arg-type]
        troubled.appends = "raises"
        for _ in range(3):
            assert not await saver.append(World().turn(None, "a", "b").batch)
            now[0] += 10.0
        assert saver.away_seconds == 30.0
        troubled.mend()
        assert await saver.hand_over()
        now[0] += 10.0
        assert saver.away_seconds == 30.0
        await saver.close()

    asyncio.run(main())
    assert caplog.text.count("replies are answered without being saved") == 1


def test_an_append_that_hangs_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "GIVE_UP_SECONDS", 0.01)

    async def main() -> None:
        troubled = TroubledStore(DictionaryStore())
        saver = Saving(GuardedStore(troubled))  # type: ignore[arg-type]
        troubled.appends = "hangs"
        assert not await saver.append(World().turn(None, "a", "b").batch)
        async with asyncio.timeout(30):
            while saver._stuck:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.001)
        troubled.mend()
        assert await saver.hand_over()
        assert (saver.saved, saver.handed_over) == (0, 1)
        await saver.close()

    asyncio.run(main())


@pytest.mark.parametrize("first", [AppendState.SAVED, AppendState.KEPT, AppendState.REFUSED])
@pytest.mark.parametrize("second", list(AppendState))
def test_an_append_ends_once(first: AppendState, second: AppendState) -> None:
    async def main() -> None:
        one = Append(Batch())
        one.end(first)
        with pytest.raises(RuntimeError, match=f"that is {first.value} cannot be {second.value}"):
            one.end(second)
        assert await one.answered is (first is AppendState.SAVED)

    asyncio.run(main())
