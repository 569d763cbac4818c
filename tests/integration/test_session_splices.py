"""Earlier turns keep their ids wherever history was not edited: ten shapes of conversations, ten templates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.agents import AgentSession, ids_of
from tests.support.chat_models import chat_model
from tests.support.shapes import SHAPES, UNEDITED, ChatModel, Exchange, Message, Messages, converse, kept
from tests.support.stack import Stack, stack
from tests.support.usual import usual

MODELS = (
    *("qwen3", "qwen3_5_think", "qwen2_5", "llama3_1", "glm4moe", "deepseekv3"),
    *("kimi_k2", "minimax_m2", "mistral", "seed_oss"),
)
PLAYED = [f"{name}-{history}" for name in MODELS for history in ("keep", "template")]

REWRITTEN = {("glm4moe", "think switched")}
"""GLM's template writes `/nothink` behind every user's message when thinking is off: no earlier turn stands where it stood."""


@dataclass
class Served:
    model: ChatModel
    stack: Stack
    history: str


@pytest.fixture(
    scope="module", params=usual(PLAYED, "qwen3-keep", "qwen3-template", "llama3_1-keep", "glm4moe-template")
)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    name, history = request.param.split("-")
    radix = {"tokenizer_backend": "huggingface"}
    with stack(
        "qwen", styles=("cumulative",), folder=chat_model(name), radix=radix, sessions={"history": history}
    ) as made:
        yield Served(ChatModel(name), made, history)


def talk(served: Served, shape: str) -> tuple[AgentSession, list[Exchange]]:
    agent = AgentSession.make(served.stack)
    (worker,) = served.stack.workers

    def ask(messages: Messages, tools: Any, options: Any, ids: list[int], stop: int) -> tuple[Message, list[int]]:
        worker.script(ids=[*ids, stop], finish=None)
        turn = agent.must(
            *messages,
            **({"tools": tools} if tools else {}),
            **({"chat_template_kwargs": options} if options else {}),
            stop_token_ids=[stop],
            max_tokens=400,
            skip_special_tokens=False,
        )
        return turn.message, turn.sent

    return agent, converse(served.model, SHAPES[shape], ask)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_sampled_reaches_the_worker_again(served: Served, shape: str) -> None:
    """All of it where history was not edited, and as a prefix; up to the edit where it was. No token is trained twice."""
    agent, exchanges = talk(served, shape)
    found = kept(exchanges)
    if (served.model.name, shape) in REWRITTEN:
        assert found.prefixes == 0
    elif shape in UNEDITED:
        assert found.ids == found.earlier
        assert found.prefixes == found.requests
    for exchange in exchanges:
        # What is not sampled is what the template writes: nothing is lost, and nothing is there twice.
        spelled = served.model.spell(exchange.sent)
        for message in exchange.messages:
            if isinstance(message["content"], str) and message["role"] != "assistant":
                assert message["content"] in spelled
    trajectories = agent.finalize()
    assert all(one["exact"] for one in trajectories), [one["reasons"] for one in trajectories]
    chains = [[*exchange.sent, *exchange.sampled] for exchange in exchanges]
    for one in trajectories:
        assert any(ids_of(one)[: len(chain)] == chain for chain in chains)
    trained = sum(sum(one["response_mask"]) for one in trajectories)
    assert trained == sum(len(exchange.sampled) + 1 for exchange in exchanges)
