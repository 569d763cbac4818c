"""`--force-logprobs off`: a chain of which one turn came without logprobs has none, and says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.agents import AgentSession, ids_of, user
from tests.support.stack import Stack, stack

TURNS = 3


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), radix={"force_logprobs": False}) as made:
        yield made


@pytest.mark.parametrize("without", range(TURNS))
def test_one_turn_without_them_makes_them_unknown(served: Stack, space: str, without: int) -> None:
    """Null, and not zeros in their place; the ids are exact all the same. Before that turn they are what was sampled."""
    headers, text = {"x-radix-namespace": space}, "A:"
    logprobs: list[float] = []
    for number in range(TURNS):
        asked = number != without
        ids = [number for piece in ("s", "um", "mary") for number in served.spelling.encode_tail(piece)]
        script = {"ids": ids, "finish": "length"}
        body = {"text": text, "return_logprob": asked, "sampling_params": {"custom_params": {"script": script}}}
        reply = served.generate(body, headers=headers)
        assert ("output_token_logprobs" in reply.body["meta_info"]) is asked
        assert reply.answer.headers["x-radix-recorded"] == "exact"
        text += "summary"
        found = served.retrieve(text, namespace=space)
        assert found["tokens"] == [*reply.record.input_ids, *reply.record.output_ids]
        assert found["exact"]
        logprobs += [0.0] * (len(reply.record.input_ids) - len(logprobs)) + reply.record.logprobs
        if number < without:
            assert found["rollout_logp"] == logprobs
            assert "no_logprobs" not in found["reasons"]
        else:
            assert found["rollout_logp"] is None
            assert found["reasons"] == ["no_logprobs"]


@pytest.mark.parametrize("without", range(TURNS))
def test_a_branch_of_a_session_has_none_either(served: Stack, without: int) -> None:
    agent, history = AgentSession.make(served), [user("a")]
    for number in range(TURNS):
        turn = agent.must(*history, says=f"said {number}", logprobs=number != without)
        history += [turn.message, user("And?")]
    (only,) = served.post(f"{agent.path}/finalize", {}).json()["trajectories"]
    assert ids_of(only) == turn.chain
    assert only["response_logprobs"] is None
    assert (only["exact"], only["reasons"]) == (True, ["no_logprobs"])
