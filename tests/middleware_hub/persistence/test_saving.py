"""What is appended while the store does not answer: counted once, told once, and in the store in the order of recording."""

from __future__ import annotations

import asyncio

import pytest

from middleware_hub.persistence import saving
from middleware_hub.persistence.saving import Saving
from middleware_hub.store.dictionary import DictionaryStore
from middleware_hub.store.guarded import GuardedStore
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Event
from tests.middleware_hub.store.troubled import TroubledStore
from tests.middleware_hub.store.world import World


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
        assert not await saver.append(World().turn(None, "a", "b").batch, over=over.append)
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
