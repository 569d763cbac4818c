"""Sampled tokens that the next turn's prompt does not have: it is told that they were left out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.agents import AgentSession, ids_of, user
from tests.support.chat_models import chat_model
from tests.support.stack import Stack, stack


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), folder=chat_model("qwen3")) as made:
        yield made


def test_a_stop_string_that_nobody_saw_is_left_out_and_told(served: Stack) -> None:
    agent = AgentSession.make(served)
    first = agent.must(user("a"), says="one two END", stop=["END"], finish="length")
    assert first.message["content"] == "one two "
    second = agent.must(user("a"), first.message, user("b"), says="three")
    assert "left_out" in second.answer.headers["x-radix-reasons"]
    kept = next(at for at, (one, other) in enumerate(zip(first.chain, second.sent, strict=False)) if one != other)
    assert len(first.sent) < kept < len(first.chain)
    assert second.answer.headers["x-radix-reused-tokens"] == str(kept)
    assert "three" in second.message["content"]
    (only,) = agent.finalize()
    assert ids_of(only) == second.chain
    assert only["extra_fields"]["turns"][0] == {
        "generation_id": first.generation,
        "start": 0,
        "end": kept - len(first.sent),
    }
    assert only["response_mask"][: kept - len(first.sent) + 1] == [1] * (kept - len(first.sent)) + [0]


def test_a_turn_that_is_kept_whole_is_not(served: Stack) -> None:
    agent = AgentSession.make(served)
    first = agent.must(user("a"), says="one two")
    second = agent.must(user("a"), first.message, user("b"), says="three")
    assert second.sent[: len(first.chain)] == first.chain
    assert "left_out" not in second.answer.headers.get("x-radix-reasons", "")


def test_a_turn_of_which_nothing_is_kept_is_exported_by_itself(served: Stack) -> None:
    """Its only token is the stop string that nobody saw. No later trajectory has it, and it was sampled all the same."""
    agent = AgentSession.make(served)
    first = agent.must(user("a"), says="END", stop=["END"], finish="length")
    assert not first.message["content"]
    second = agent.must(user("a"), first.message, user("b"), says="two")
    assert second.sent[len(first.sent)] != first.sampled[0]
    one, other = agent.finalize()
    assert (ids_of(one), ids_of(other)) == (first.chain, second.chain)
    assert [sum(one["response_mask"]), sum(other["response_mask"])] == [len(first.sampled), len(second.sampled)]
    assert all(found["exact"] for found in (one, other))
