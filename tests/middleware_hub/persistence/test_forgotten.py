"""Conversations that the store forgets while they go on, and replies that it cannot take."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.spans.chain import chain_ids, unpack_ids
from middleware_hub.store.errors import MissingRecordError, StoreUnreachableError
from middleware_hub.store.protocol import Batch
from tests.conftest import DEAR, examples
from tests.middleware_hub.persistence.drawn import NAMESPACES, PICK, REQUEST, request_of
from tests.middleware_hub.persistence.lives import Ask, Life, Lives, Namespace
from tests.middleware_hub.toy import EOS, A, B
from tests.support.usual import usual

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


PROBES = ("b", "<e>b", "<t>")


class Pruned:
    """Lives beside which conversations are pruned, and what each reply was when it was recorded."""

    def __init__(self, scheme: str, count: int, max_tokens: int | None, seed: int | None) -> None:
        self.lives = Lives(scheme, count, max_tokens, seed)
        self.said: list[tuple[int, str, str, list[int]]] = []
        self.recorded: dict[str, tuple[Namespace, str, dict[str, Any], list[list[int]]]] = {}
        self.count = 0

    async def ask(self, number: int, how: dict[str, Any], *, pruning: bool = False) -> None:
        """Ask, and keep what was recorded. If it is pruned meanwhile, it may be gone at once."""
        self.count += 1
        asked, life = request_of(how, self.said, self.count), self.lives.lives[number % self.lives.count]
        if asked is None:
            return
        asked.name = f"r{self.count}"
        text = (await life.ask(asked))["text"]
        found = await life.retrieve(asked.namespace, text, asked.name)
        chain = await life.chain_of(asked.namespace, asked.name)
        if pruning and (found is None or chain is None):
            return
        assert found is not None
        assert chain is not None
        kept = await self.kept(life, asked.namespace, text, asked.name, len(found["tokens"]))
        if text == asked.text:
            kept = []  # no request goes on from an empty reply, so other replies decide how much context is reused
        self.recorded[asked.name] = asked.namespace, text, found, kept
        self.said.append((NAMESPACES.index(asked.namespace), text, asked.name, chain))
        assert pruning or asked.name in await self.names()

    @staticmethod
    async def kept(life: Life, namespace: Namespace, text: str, name: str, size: int) -> list[list[int]]:
        """The tokens that requests have of a reply, if they go on with its text, or spell its hidden tail."""
        found = []
        for more in PROBES:
            match = await life.match(Ask(namespace, text + more, None, name, [], "", ""))
            found.append(unpack_ids(chain_ids(match.cut.span, match.cut.take))[:size])
            life.tree.unpin(match)
        return found

    def beyond(self, names: Collection[str], namespace: Namespace, text: str, more: str) -> list[list[int]]:
        """The tokens of the replies whose text begins with a text and the first character of what comes then."""
        there = [self.recorded[name] for name in names]
        begins = text + more[0]
        return [
            answer["tokens"] for space, other, answer, _ in there if space == namespace and other.startswith(begins)
        ]

    async def names(self) -> set[str]:
        """The names of all replies in the store."""
        return {name async for record in self.lives.stores[0].scan() for name in record.request_ids}

    async def prune(self, pick: int) -> None:
        store = self.lives.stores[pick % self.lives.count]
        roots = sorted({record.root async for record in store.scan()})
        await store.forget_roots(roots[pick % len(roots) :][:1] if roots else [])

    async def check(self) -> None:
        """What is in the store is whole, and every router has it as it was recorded."""
        names = await self.names() & self.recorded.keys()
        for name in names:
            namespace, text, expected, kept = self.recorded[name]
            size = len(expected["tokens"])
            for life in self.lives.lives:
                found = await life.retrieve(namespace, text, name)
                assert found is not None
                assert {**found, "request_ids": ()} == {**expected, "request_ids": ()}
                now = await self.kept(life, namespace, text, name, size) if kept else []
                for more, ids, then in zip(PROBES, now, kept, strict=False):
                    # A reply that was recorded later may go on from inside of this one, with the same characters.
                    assert ids == then or ids in [one[:size] for one in self.beyond(names, namespace, text, more)]
        assert [finding async for finding in self.lives.stores[0].verify()] == []

    async def run(self, steps: list[Any]) -> None:
        async with self.lives:
            for kind, pick, how in steps:
                if kind == "ask":
                    await self.ask(pick, how)
                elif kind == "prune":
                    await self.prune(pick)
                elif kind == "both":
                    await asyncio.gather(self.ask(pick, how, pruning=True), self.prune(pick))
                else:
                    await self.lives.restart(pick, killed=kind == "kill")
                if kind in ("prune", "both"):
                    await self.check()
            for number in range(self.lives.count):
                await self.lives.restart(number)
            await self.check()


STEP = st.tuples(st.sampled_from(["ask"] * 5 + ["prune", "prune", "both", "restart", "kill"]), PICK, REQUEST)


@pytest.mark.parametrize("scheme", usual(["memory", "sqlite", "redis"], "memory", "sqlite"))
@settings(max_examples=examples(200, DEAR), deadline=None, report_multiple_bugs=False)
@given(
    lives=st.integers(1, 3),
    steps=st.lists(STEP, min_size=4, max_size=16),
    budget=st.none() | st.integers(0, 30),
    seed=st.none() | st.integers(0, 9),
)
def test_a_conversation_that_goes_on_after_it_was_pruned_is_whole_at_every_router(
    scheme: str, lives: int, steps: list[Any], budget: int | None, seed: int | None
) -> None:
    asyncio.run(Pruned(scheme, lives, budget, seed).run(steps))
