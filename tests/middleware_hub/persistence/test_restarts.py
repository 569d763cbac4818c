"""A tree over a store answers as one that never died: restarted anywhere, beside another one, and with no room."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import DEAR, examples
from tests.middleware_hub.persistence.drawn import NAMESPACES, PICK, REQUEST, request_of
from tests.middleware_hub.persistence.lives import VOCABULARY, Ask, Lives
from tests.middleware_hub.toy import encode
from tests.support.usual import usual

STEP = st.one_of(
    st.tuples(st.just("ask"), PICK, REQUEST),
    st.tuples(st.just("ask"), PICK, REQUEST),
    st.tuples(st.just("ask"), PICK, REQUEST),
    st.tuples(st.just("retrieve"), PICK, PICK, st.integers(0, 6), st.none() | PICK),
    st.tuples(st.just("name"), PICK, PICK),
    st.tuples(st.just("restart"), PICK),
)


async def play(lives: Lives, steps: list[Any]) -> None:
    said: list[tuple[int, str, str, list[int]]] = []
    async with lives:
        for number, (kind, *rest) in enumerate(steps):
            if kind == "restart":
                await lives.restart(rest[0])
            elif kind == "ask":
                ask = request_of(rest[1], said, number)
                if ask is None:
                    continue
                text = await lives.ask(rest[0], ask)
                chain = await lives.chain_of(rest[0], ask.namespace, ask.name)
                assert chain is not None
                said.append((NAMESPACES.index(ask.namespace), text, ask.name, chain))
                await lives.retrieve(rest[0], ask.namespace, text)
            elif said and kind == "name":
                namespace, _, name, _ = said[rest[1] % len(said)]
                await lives.chain_of(rest[0], NAMESPACES[namespace], name)
            elif said:
                namespace, text, _, _ = said[rest[1] % len(said)]
                name = None if rest[3] is None else said[rest[3] % len(said)][2]
                await lives.retrieve(rest[0], NAMESPACES[namespace], text[: len(text) - rest[2]] or "a", name)
        for namespace, text, name, _ in said:
            await lives.retrieve(len(text), NAMESPACES[namespace], text)
            await lives.retrieve(len(text), NAMESPACES[namespace], text, name)


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
@settings(max_examples=examples(300, DEAR), deadline=None, report_multiple_bugs=False)
@given(steps=st.lists(STEP, min_size=2, max_size=14))
def test_a_tree_that_is_restarted_answers_as_one_that_never_died(scheme: str, steps: list[Any]) -> None:
    asyncio.run(play(Lives(scheme, 1), steps))


@pytest.mark.parametrize("scheme", usual(["memory", "sqlite"], "memory"))
@settings(max_examples=examples(300, DEAR), deadline=None, report_multiple_bugs=False)
@given(steps=st.lists(STEP, min_size=2, max_size=14))
def test_two_trees_in_turns_answer_as_one(scheme: str, steps: list[Any]) -> None:
    asyncio.run(play(Lives(scheme, 2), steps))


@pytest.mark.parametrize("scheme", usual(["memory", "sqlite"], "memory"))
@settings(max_examples=examples(300, DEAR), deadline=None, report_multiple_bugs=False)
@given(steps=st.lists(STEP, min_size=2, max_size=14), budget=st.integers(0, 30))
def test_a_tree_with_no_room_answers_as_one_with_plenty(scheme: str, steps: list[Any], budget: int) -> None:
    asyncio.run(play(Lives(scheme, 1, budget), steps))


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
def test_a_text_leaves_a_prompt_of_ids_in_its_middle(scheme: str) -> None:
    """Ids continued a chain that was recorded under another text: their prompt holds sampled tokens, and is found by them."""
    namespace = ("other", "", "")

    async def run() -> None:
        async with Lives(scheme, 1) as lives:
            await lives.ask(0, Ask(namespace, "a", None, None, [5, 0], "r0", "2"))
            ids = [0, 5, 0, 0]
            await lives.ask(0, Ask(namespace, VOCABULARY.spell(ids), ids, None, [0] * 5, "r1", "1"))
            await lives.restart(0)
            await lives.ask(0, Ask(namespace, "a<e>ab a", None, None, [4], "r2", "2"))

    asyncio.run(run())


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
@pytest.mark.parametrize("extra", ["a b", "<e>", ""])
def test_of_equal_tokens_the_newest_are_reused_whoever_else_reused_others(scheme: str, extra: str) -> None:
    """A text leaves a chain in its context, which has a token of an older reply; a store does not bring such a chain."""
    namespace = ("other", "", "")

    async def run() -> None:
        async with Lives(scheme, 2, 0) as lives:
            for name, version in (("r0", "1"), ("r2", "2")):
                await lives.ask(0, Ask(namespace, "b a", None, None, [9, 4], name, version))
                if name == "r0":
                    await lives.ask(0, Ask(namespace, "b a ab aab aa", None, None, [5], "r1", "1"))
            said = await lives.ask(1, Ask(namespace, "b a ab aab" + extra, None, None, [5], "r3", "2"))
            for number in range(2):
                await lives.retrieve(number, namespace, said)

    asyncio.run(run())


def test_a_long_chain_from_the_store_is_indexed_by_ids_once_its_request_has_gone_on() -> None:
    namespace, turns = ("other", "", ""), 70

    async def run() -> None:
        async with Lives("sqlite", 2) as lives:
            text = "a"
            for number in range(turns):
                text = await lives.ask(0, Ask(namespace, text, None, None, encode("ab"), f"r{number}", "1")) + " b"
            tree, memory = lives.lives[1].tree, lives.lives[1].memory
            assert memory is not None
            match = await memory.matched(tree.match(namespace, text), None, lambda: tree.match(namespace, text))
            assert match.continues is not None
            assert match.continues.request_ids == (f"r{turns - 1}",)
            first = tree.reply(namespace, "r0")
            assert first is not None
            assert not first.fingerprints
            await asyncio.sleep(0)
            assert first.fingerprints

    asyncio.run(run())
