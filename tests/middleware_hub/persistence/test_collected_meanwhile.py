"""What the tree collects while the store is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from middleware_hub.persistence import memory as memory_module
from middleware_hub.persistence.memory import Memory
from middleware_hub.radix.cut import end_of
from middleware_hub.radix.node import Generation
from middleware_hub.spans.chain import SpanFlag
from tests.middleware_hub.persistence.lives import Life, Lives
from tests.middleware_hub.persistence.test_turn_writer import NS, ask, played
from tests.middleware_hub.radix.recount import recount


def reply(life: Life, name: str) -> Generation:
    found = life.tree.reply(NS, name)
    assert found is not None
    return found


@pytest.mark.parametrize("scheme", ["memory", "sqlite", "redis"])
def test_all_that_is_brought_is_there_whatever_was_collected_meanwhile(scheme: str) -> None:
    """A claim would call the others lost, and no trainer would ever get them."""

    async def work(lives: Lives) -> None:
        life, store = lives.lives[0], lives.stores[0]
        assert life.memory is not None
        for text, name in (("a", "r0"), ("b", "r1"), ("a b", "r2")):
            await life.ask(ask(text, name))
        stored = [reply(life, name).span.stored for name in ("r0", "r1", "r2")]
        life.tree.max_tokens = 0
        life.tree.collect()
        await life.memory.bring({stored[0].id: stored[0].root})
        get = store.get

        async def slow(*given: Any, **more: Any) -> Any:
            found = await get(*given, **more)
            life.tree.collect()
            return found

        store.get = slow  # type: ignore[method-assign]
        await life.memory.bring({one.id: one.root for one in stored})
        assert [one.id in life.tree.stored for one in stored] == [True] * 3
        recount(life.tree)
        life.tree.collect()
        assert not life.tree.stored
        await life.memory.bring({bytes(16): bytes(16)})  # of what no store has
        assert not life.tree.stored

    played(work, scheme)


@pytest.mark.parametrize("collected", ["before it is asked", "before the task begins"])
def test_a_reply_that_is_collected_before_it_is_asked_for_is_not_counted_twice(
    collected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Released a second time, it would take the context with it that another reply builds on."""

    async def asked(_: Memory, __: Any) -> Sequence[str]:
        await asyncio.sleep(0)
        return ()

    doubt = SimpleNamespace(span=SimpleNamespace(flags=SpanFlag.UNASKED))
    monkeypatch.setattr(memory_module, "doubts", lambda *_: [doubt])
    monkeypatch.setattr(Memory, "_asked_late", asked)

    async def work(lives: Lives) -> None:
        life = lives.lives[0]
        memory, tree = life.memory, life.tree
        assert memory is not None
        for name in ("r0", "r1"):
            await life.ask(ask("a b", name))
        first = reply(life, "r0")
        tree.max_tokens = tree.stats.tokens - 1
        if collected == "before it is asked":
            cut = end_of(first.span)
            tree.collect()
            assert await memory.asked_late(NS, cut) == ()
        else:
            memory._handed_over(first)
            tree.collect()
            assert memory._asking is not None
            await memory._asking
            await asyncio.sleep(0)
        recount(tree)
        assert tree.stats.generations == 1
        tree.max_tokens = 0
        tree.collect()
        assert (tree.stats.spans, tree.stats.tokens) == (0, 0)

    played(work)
