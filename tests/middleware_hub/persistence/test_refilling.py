"""What a tree appends to a store that has lost something."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from middleware_hub.persistence import turn_writer
from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.protocol import Batch
from tests.middleware_hub.persistence.lives import Ask, Life, Lives
from tests.middleware_hub.toy import EOS, A, B
from tests.support.dictionary_store import DictionaryStore

NS = ("", "", "")


def ask(text: str, name: str) -> Ask:
    return Ask(NS, text, None, None, [A, B, EOS], name, "1")


class Lost:
    """A store that has lost something, as `Refill`."""

    def __init__(self, store: DictionaryStore, *, finds: bool = True) -> None:
        self.store = store
        self.asked: list[bytes] = []
        self.looked_for: list[str] = []
        self.appended: list[str] = []
        self.meanwhile: Callable[[str], None] = lambda what: None
        """Is told what the store is asked to do."""
        self._finds = finds

    async def lacking(self, records: Mapping[bytes, bytes]) -> set[bytes]:
        self.asked += records
        self.meanwhile("lacking")
        return {one for one in records if one not in self.store._records}

    async def finds(self, batch: Batch) -> bool:
        self.meanwhile("finds")
        self.looked_for += names_in(batch)
        return self._finds

    async def append(self, batch: Batch) -> None:
        names = names_in(batch)
        self.meanwhile(f"append {names[-1]}")
        await self.store.append(batch)
        self.appended += names

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is for logs")


def names_in(batch: Batch) -> list[str]:
    return [name for record in batch.records for name in record.request_ids]


async def refill(life: Life, lost: Lost) -> None:
    assert life.memory is not None
    await life.memory._turns.refill(lost)


def emptied(life: Life) -> None:
    life.tree.max_tokens = 0
    assert not life.tree.collect()


def played(work: Callable[[Lives, Life, DictionaryStore], Awaitable[None]]) -> None:
    """`work` gets the life that has a store, and another store, which is empty."""

    async def play() -> None:
        async with Lives("memory", 1) as lives:
            await work(lives, lives.lives[0], DictionaryStore())

    asyncio.run(play())


@pytest.mark.parametrize("finds", [False, True])
def test_each_record_is_appended_once(finds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store has is not; but all if it does not find what is newest, for then it has lost places."""
    monkeypatch.setattr(turn_writer, "_ASKED", 3)

    async def work(lives: Lives, life: Life, store: DictionaryStore) -> None:
        text = await lives.ask(0, ask("a b", "r0"))
        await refill(life, Lost(store))
        for number in range(1, 4):
            text = await lives.ask(0, ask(text + "b", f"r{number}"))
            await lives.ask(0, ask("b" * number, f"aside{number}"))
        lost = Lost(store, finds=finds)
        await refill(life, lost)
        assert lost.appended == (["r0"] * (not finds)) + ["r1", "aside1", "r2", "aside2", "r3", "aside3"]
        assert store._records.keys() == life.tree.stored.keys()

    played(work)


def test_what_is_on_its_way_is_left_to_itself() -> None:
    async def work(lives: Lives, life: Life, store: DictionaryStore) -> None:
        await lives.ask(0, ask("a b", "r0"))
        asking = asyncio.create_task(life.ask(ask("a b", "r1")))
        while life.tree.stats.generations < 2:  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0)
        lost = Lost(store)
        first = life.tree.reply(NS, "r0")
        assert first is not None
        await refill(life, lost)
        assert {*lost.asked} == {first.span.stored.id, first.span.parent.stored.id}
        assert lost.looked_for == lost.appended == ["r0"]
        await asking
        await refill(life, lost)
        assert lost.appended == ["r0", "r1"]

    played(work)


def test_one_that_the_store_refuses_does_not_keep_the_others_out(caplog: pytest.LogCaptureFixture) -> None:
    async def work(lives: Lives, life: Life, store: DictionaryStore) -> None:
        for number in range(3):
            await lives.ask(0, ask("ab"[: number + 1] + "b" * number, f"r{number}"))
        lost = Lost(store)

        def refuse(what: str) -> None:
            if what == "append r1":
                raise ValueError("it cannot be")

        lost.meanwhile = refuse
        await refill(life, lost)
        assert lost.appended == ["r0", "r2"]

        def away(what: str) -> None:
            if what == "append r1":
                raise StoreUnreachableError("it is away")

        lost.meanwhile = away
        with pytest.raises(StoreUnreachableError):
            await refill(life, lost)

    played(work)
    assert [one.message for one in caplog.records if "cannot be written again" in one.message] == [
        "a reply that the store has lost cannot be written again: it cannot be"
    ]


@pytest.mark.parametrize("when", ["finds", "lacking", "append r0"])
def test_what_is_collected_meanwhile_is_left_out(when: str) -> None:
    async def work(lives: Lives, life: Life, store: DictionaryStore) -> None:
        for number in range(40):
            await lives.ask(0, ask("a" * (number + 1) + "b", f"r{number}"))
        lost = Lost(store)

        def collected(what: str) -> None:
            if what == when:
                emptied(life)

        lost.meanwhile = collected
        await refill(life, lost)
        assert len(lost.appended) == (32 if when == "append r0" else 0), "those that were to be appended at once"
        assert not life.tree.stored

    played(work)
