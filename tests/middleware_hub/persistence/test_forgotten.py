"""Conversations that the store forgets while they go on, and replies that it cannot take."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from middleware_hub.store.errors import MissingRecordError, StoreUnreachableError
from middleware_hub.store.protocol import Batch
from tests.middleware_hub.persistence.lives import Ask, Lives
from tests.middleware_hub.toy import EOS, A, B

NS = ("", "", "")


def ask(text: str, name: str, sampled: list[int] | None = None) -> Ask:
    return Ask(NS, text, None, None, sampled or [A, B, EOS], name, "1")


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
@pytest.mark.parametrize("spelled", ["<e>b", " b", "b"])
def test_a_conversation_that_was_forgotten_is_written_down_again(scheme: str, spelled: str) -> None:
    """All of it, when it goes on: its tokens are still here."""

    async def play() -> None:
        async with Lives(scheme, 1) as lives:
            texts = [await lives.ask(0, ask("a b", "r0"))]
            for number in range(1, 6):
                if number % 2:
                    gone = await lives.stores[0].forget(0)
                    assert gone.records
                texts.append(await lives.ask(0, ask(texts[-1] + spelled, f"r{number}")))
            assert lives.lives[0].memory is not None
            assert lives.lives[0].memory.saving.unsaved == 0
            await lives.restart(0)
            for text in texts[-1:]:
                await lives.retrieve(0, NS, text)
            assert [finding async for finding in lives.stores[0].verify()] == []

    asyncio.run(play())


def test_what_waits_for_the_store_is_handed_over_in_order() -> None:
    async def play() -> None:
        async with Lives("sqlite", 1) as lives:
            memory, store = lives.lives[0].memory, lives.stores[0]
            assert memory is not None
            append, broken = store.append, True

            async def sometimes(batch: Batch) -> list[int]:
                if broken:
                    raise StoreUnreachableError("the disk is full")
                return await append(batch)

            store.append = sometimes  # type: ignore[method-assign]
            await lives.one.ask(ask("a b", "r0"))
            with pytest.raises(AssertionError):
                await lives.lives[0].ask(ask("a b", "r0"))  # it says that it was not saved
            assert memory.saving.waiting == 1
            text = "a bab<e>b"
            await lives.one.ask(ask(text, "r1"))
            with pytest.raises(AssertionError):
                await lives.lives[0].ask(ask(text, "r1"))
            assert memory.saving.waiting == 2
            broken = False
            await lives.restart(0)
            await lives.retrieve(0, NS, text + "ab")
            await lives.retrieve(0, NS, "a bab")

    asyncio.run(play())


@pytest.mark.parametrize("scheme", ["memory", "sqlite", "redis"])
def test_a_context_that_comes_later_than_a_reply_behind_it_is_there_once(scheme: str) -> None:
    """Samples share the context that is appended with the first of them; a later one is appended before it, and brings it."""

    async def play() -> None:
        async with Lives(scheme, 1) as lives:
            text = await lives.ask(0, ask("a b<e>b", "r0"))
            store: Any = lives.stores[0]
            append, lacks = store.append, True

            async def lacking(batch: Batch) -> Any:
                nonlocal lacks
                here = {record.id for record in batch.records}
                missing = [link for record in batch.records for link in record.links if link not in here]
                if lacks and missing:
                    lacks = False
                    raise MissingRecordError(tuple(dict.fromkeys(missing)))
                return await append(batch)

            await lives.ask(0, ask("a b<e>", "cuts the context, so that it is known where its tokens end"))
            store.append = lacking
            await lives.ask(0, ask(text + "b", "r1"))
            assert not lacks
            store.append = append
            assert [finding async for finding in store.verify()] == []
            names = [name async for record in store.scan() for name in record.request_ids]
            assert len(names) == len(set(names))
            await lives.restart(0)
            await lives.retrieve(0, NS, text + "bab")

    asyncio.run(play())
