"""The list of a tree's conversations, followed through random histories: always what a new look at the tree makes."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from middleware_hub.inspector.conversations import texts as module
from middleware_hub.inspector.conversations.texts import Texts
from middleware_hub.radix.records import Context, SampledReply
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import links, pack_ids, pack_logprobs
from tests.middleware_hub import toy

WORDS = ("ab", "b", "e a", "abt", "  ")


def spell(ids: Sequence[int]) -> str:
    return toy.toy_vocabulary().spell(ids)


def record(tree: RadixTree, namespace: tuple[str, ...], text: str, reply: str, serial: int) -> str:
    """Record a reply to a text, as a request would; return the whole text."""
    match = tree.match(namespace, text)
    rest = text[match.cut.start :]
    context = None if match.known is not None or not rest else Context(pack_ids(toy.encode(rest)))
    ids = toy.encode(reply)
    tree.record(
        match,
        context,
        SampledReply(
            pack_ids(ids), reply, f"v{serial // 20}", pack_logprobs([-1.0] * len(ids)), request_ids=(f"r{serial}",)
        ),
        serial=serial,
    )
    return text + reply


def seen(shelf: Any) -> list[dict[str, Any]]:
    found = []
    for key, one in shelf.newest_first(None):
        nodes, truncated = one.nodes()
        assert not truncated
        summary = one.summary()
        assert key == (one.updated, one.id)
        assert summary["branches"] == len(list(one.branches()))
        assert summary["turns"] == sum(node["role"] == "assistant" for node in nodes)
        assert summary["tokens"] == sum(node["tokens"] for node in nodes)
        found.append({**summary, "names": sorted(branch.id for branch in one.branches()), "nodes": len(nodes)})
    return found


@pytest.mark.parametrize("seed", range(6))
def test_what_was_followed_is_what_is_there(seed: int) -> None:
    async def work() -> None:
        rng = random.Random(seed)
        tree = RadixTree(toy.toy_vocabulary(), max_tokens=120)
        followed = Texts(tree, spell)
        known: list[tuple[tuple[str, ...], str]] = []
        for step in range(1, 200):
            namespace, text = ("a", "", rng.choice(["", "x"])), rng.choice(WORDS)
            if known and rng.random() < 0.7:
                namespace, text = rng.choice(known)
                text += rng.choice(WORDS)
            known.append((namespace, record(tree, namespace, text, rng.choice(WORDS), step)))
            tree.collect()
            if rng.random() < 0.1:
                here = seen(await followed.shelf("a"))
                fresh = Texts(tree, spell)
                there = seen(await fresh.shelf("a"))
                fresh.forget()
                tree.watcher = followed._note
                assert sum(one["turns"] for one in here) == tree.stats.generations
                assert len(here) == len(there)
                for one, other in zip(sorted_by_names(here), sorted_by_names(there), strict=True):
                    for name in ("turns", "tokens", "sampled", "branches", "names", "nodes", "exact"):
                        assert one[name] == other[name], name
                    assert set(one["versions"]) == set(other["versions"])
        assert tree.stats.evicted

    asyncio.run(work())


def sorted_by_names(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda one: one["names"])


def test_a_conversation_begins_with_its_first_sampled_reply() -> None:
    """Samples of one prompt are conversations of one group, and what continues one is in it."""

    async def work() -> None:
        tree = RadixTree(toy.toy_vocabulary())
        space = ("a", "", "")
        first = record(tree, space, "ab", "e", 1)
        record(tree, space, "ab", "b b", 2)
        record(tree, space, first + "b", "a", 3)
        shelf = await Texts(tree, spell).shelf("a")
        found = {one.id: one.summary() for _, one in shelf.newest_first(None)}
        assert {name: one["turns"] for name, one in found.items()} == {"text:r1": 2, "text:r2": 1}
        assert found["text:r1"]["group"] == found["text:r2"]["group"]
        assert [name for _, name in shelf.order] == ["text:r2", "text:r1"]

    asyncio.run(work())


def test_equal_names_are_told_apart() -> None:
    async def work() -> None:
        tree = RadixTree(toy.toy_vocabulary())
        for space in ("x", "y"):
            record(tree, ("a", "", space), "ab", "e", 7)
        shelf = await Texts(tree, spell).shelf("a")
        assert len(shelf.ids) == 2
        assert all(name.startswith("text:r7") for name in shelf.ids)

    asyncio.run(work())


def test_while_nobody_looks_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE", -1.0)
    monkeypatch.setattr(module, "MOST_WAITING", 5)

    async def work() -> None:
        tree = RadixTree(toy.toy_vocabulary())
        space = ("a", "", "")
        followed = Texts(tree, spell)
        before = (await followed.shelf("a")).changes
        for number in range(1, 5):
            record(tree, space, f"{'ab' * number}", "e", number)
        assert tree.watcher is not None
        record(tree, space, "e", "e", 5)
        assert tree.watcher is None, "nobody has looked for long"
        shelf = await followed.shelf("a")
        assert len(shelf.order) == 5
        assert shelf.changes > before, "who polls hears that something is new"

    asyncio.run(work())


def test_many_changes_are_taken_in_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 5)

    async def work() -> None:
        tree = RadixTree(toy.toy_vocabulary())
        followed = Texts(tree, spell)
        await followed.shelf("a")
        for number in range(1, 13):
            record(tree, ("a", "", ""), "ab" * number, "e", number)
            await asyncio.sleep(0)
        assert len(followed._waiting) < 5
        assert len((await followed.shelf("a")).order) == 12

    asyncio.run(work())


def test_a_chain_is_whole_although_it_is_evicted_meanwhile() -> None:
    async def work() -> None:
        tree = RadixTree(toy.toy_vocabulary(), max_tokens=2)
        record(tree, ("a", "", ""), "ab e a", "abt", 1)
        shelf = await Texts(tree, spell).shelf("a")
        (one,) = shelf.ids.values()
        (branch,) = one.branches()
        chain = branch.chain()
        expected = b"".join(
            span.ids[: 4 * take] for span, take in reversed(list(links(branch.span, branch.span.count)))
        )
        tree.collect()
        tree.clear()
        assert tree.stats.generations == 0
        assert chain.ids().tobytes() == expected
        window = chain.window(0, len(chain), toy.toy_vocabulary())
        assert "".join(window["texts"]) == "ab e aabt"

    asyncio.run(work())


def test_the_garbage_collector_walks_one_object_for_each_conversation() -> None:
    """A pass over all that it tracks stops the event loop."""

    async def work() -> None:
        tree = RadixTree(toy.toy_vocabulary(), max_tokens=100_000)
        for number in range(200):
            record(tree, ("a", "", f"{number}"), "ab", "b", number)
        gc.collect()
        before = len(gc.get_objects())
        texts = Texts(tree, spell)
        assert len((await texts.shelf("a")).order) == 200
        gc.collect()
        each = 1 if sys.version_info < (3, 14) else 8  # from then on it walks each dict, whatever is in it
        assert len(gc.get_objects()) - before < (each + 1) * 200
        texts.forget()

    asyncio.run(work())
