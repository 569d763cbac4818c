"""What is looked up before the tree decides, and what is left out because nobody needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from middleware_hub.persistence.memory import Memory
from middleware_hub.radix.records import NO_PARENT
from middleware_hub.store.look_up import MOST_VARIANTS
from middleware_hub.store.protocol import Found, Query
from tests.middleware_hub.persistence.lives import Ask, Lives
from tests.middleware_hub.toy import EOS, A, B

NS = ("", "", "")


def ask(text: str, name: str, *, parent: str | None = None, version: str = "1") -> Ask:
    return Ask(NS, text, None, parent, [A, B, EOS], name, version)


def played(work: Callable[[Lives], Awaitable[None]], scheme: str, lives: int = 1) -> None:
    async def play() -> None:
        async with Lives(scheme, lives) as made:
            await work(made)

    asyncio.run(play())


def memory_of(lives: Lives, number: int = 0) -> Memory:
    found = lives.lives[number].memory
    assert found is not None
    return found


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
def test_a_text_that_is_all_context_is_not_looked_up(scheme: str) -> None:
    """Only the news are read: the version that the other router has noted is the current one."""

    async def work(lives: Lives) -> None:
        await lives.ask(0, ask("a b", "r0", version="1"))
        await lives.ask(1, ask("a b", "r1", parent=NO_PARENT, version="1"))
        await lives.ask(0, ask("b a", "r2", version="2"))
        await lives.ask(1, ask("b a", "r3", parent=NO_PARENT, version="1"))
        assert not memory_of(lives, 1).lookups

    played(work, scheme, lives=2)


@pytest.mark.parametrize("scheme", ["memory", "sqlite", "redis"])
def test_a_reply_is_brought_whose_conversation_has_another_root_now(scheme: str) -> None:
    async def work(lives: Lives) -> None:
        await lives.ask(0, ask("a b", "r0"))
        first = lives.lives[0].tree.reply(NS, "r0")
        assert first is not None
        name = first.span.stored.id
        await lives.restart(0)
        await memory_of(lives).bring({name: bytes(16), bytes(range(16)): bytes(16)})
        assert name in lives.lives[0].tree.stored

    played(work, scheme)


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
def test_a_note_on_a_reply_that_is_collected_and_forgotten_brings_nothing_back(scheme: str) -> None:
    """Its tokens are nowhere any more, so the store cannot have it again."""

    async def work(lives: Lives) -> None:
        await lives.ask(0, ask("a b", "r0"))
        tree, memory = lives.lives[0].tree, memory_of(lives)
        first = tree.reply(NS, "r0")
        assert first is not None
        note = memory.noting(first.span, NS, ["n"], b"note")
        tree.max_tokens = 0
        assert not tree.collect()
        assert (await lives.stores[0].forget(0)).records
        assert not await memory.note(first, lambda: [note])
        assert not tree.stored
        assert [record async for record in lives.stores[0].scan()] == []

    played(work, scheme)


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
def test_any_of_a_crowd_of_samples_is_retrieved_by_its_name(scheme: str) -> None:
    """A look-up brings only the newest of them, unless one is named."""

    async def work(lives: Lives) -> None:
        for number in range(MOST_VARIANTS + 2):
            text = await lives.ask(0, ask("a b", f"r{number}", parent=NO_PARENT))
        await lives.restart(0)
        found = await lives.lives[0].retrieve(NS, text, "r0")
        assert found is not None
        assert found == {**(await lives.one.retrieve(NS, text, "r0") or {}), "request_ids": found["request_ids"]}

    played(work, scheme)


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_reply_of_which_the_store_has_only_the_end_is_told(damaged: int) -> None:
    """Without its beginning it is left out, and its text would read as context, and exact."""

    async def work(lives: Lives) -> None:
        text = await lives.ask(0, ask("a b", "r0"))
        await lives.restart(0)
        store: Any = lives.stores[0]
        find = store.find

        async def without_first(query: Query) -> Found:
            found: Found = await find(query)
            return replace(found, records=found.records[1:])

        async def nothing(*_: object, **__: object) -> Found:
            return Found(damaged=damaged)

        store.find, store.get = without_first, nothing
        assert not await memory_of(lives).cover(NS, text)
        store.find = find
        assert await memory_of(lives).cover(NS, text)

    played(work, "memory")
