"""The ids of a prompt that are kept for the next turn equal those gathered and printed again, whatever was forgotten."""

from __future__ import annotations

import json
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.sessions.prompt.composed_prompt import PromptIds, PromptIdsCache
from middleware_hub.sessions.trie.nodes import Checkpoint, MessageNode
from middleware_hub.spans.chain import TokenSpan, chain_ids, pack_ids, unpack_ids

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=4)
NODE = MessageNode(b"", "assistant", b"{}", None, 1)


@given(st.lists(st.tuples(st.integers(0, 20), IDS, IDS.filter(bool)), min_size=1, max_size=20), st.integers(0, 2_000))
def test_they_are_the_chains_own(turns: list[tuple[int, list[int], list[int]]], room: int) -> None:
    """Turns go on from any earlier one, with some context or none; there is room for a few of them at the most."""
    written = PromptIdsCache(room)
    made: list[Checkpoint] = []
    for at, context, sampled in turns:
        parent = made[at % len(made)] if made and at else None
        span, take = (None, 0) if parent is None else (parent.span, len(parent.span))
        if context or span is None:
            span = TokenSpan(span, take, 0, pack_ids(context or [1]), 0)
            take = len(span)
        found = written.of(span, take, parent)
        assert found.packed == chain_ids(span, take)
        assert json.loads(found.written) == unpack_ids(found.packed)
        reply = TokenSpan(span, take, 0, pack_ids(sampled), 0, versions="1")
        checkpoint = Checkpoint(str(len(made)), NODE, reply, parent, len(made), "stop")
        written.keep(checkpoint, found)
        made.append(checkpoint)


def test_short_prompts_take_no_more_room_than_long_ones() -> None:
    """Most of a short prompt is what keeps it."""
    room, span = 200_000, TokenSpan(None, 0, 0, pack_ids([1]), 0, versions="1")
    kept = PromptIdsCache(room)
    tracemalloc.start()
    for number in range(5_000):
        prompt = PromptIds.of(pack_ids([number]))
        kept.keep(Checkpoint(f"{number:032x}", NODE, span, None, number, "stop"), prompt)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 1.25 * room
