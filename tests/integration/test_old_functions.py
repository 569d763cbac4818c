"""OpenAI's old functions: a tool loop of a client that knows nothing else, on several templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.agents import TOOLS, AgentSession, ids_of, user
from tests.support.chat_models import chat_model
from tests.support.shapes import CALLS
from tests.support.stack import Stack, stack

FUNCTIONS = [tool["function"] for tool in TOOLS]
MODELS = ["qwen3", "qwen3_5_think", "glm4moe", "gptoss", "kimi_k2", "minimax_m2", "mistral", "seed_oss", "llama3_1"]
BEFORE = {"qwen3_5_think": "</think>\n\n", "minimax_m2": "</think>\n\n"}


def called(name: str) -> str:
    if name == "gptoss":
        return '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"where": "here"}<|call|>'
    call = re.sub(r"\bALL\b", '{"where": "here"}', CALLS[name].replace("NAME", "look"))
    return BEFORE.get(name, "") + call.replace("KEY", "where").replace("VALUE", "here")


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[str, Stack]]:
    folder = chat_model(request.param)
    with stack("qwen", styles=("cumulative",), folder=folder, radix={"tokenizer_backend": "huggingface"}) as made:
        yield request.param, made
        assert made.idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("session", [False, True])
def test_a_loop_of_functions(model: tuple[str, Stack], stream: bool, session: bool) -> None:
    name, made = model
    (worker,) = made.workers
    agent = AgentSession.make(made)
    base = f"{made.url}{agent.path if session else ''}/v1"
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    messages: list[Any] = [user(f"Where is it? {session} {stream}")]
    chain: list[int] = []
    for number in range(3):
        worker.script(text=called(name), finish="eos")
        asked: dict[str, Any] = {"model": "m", "messages": messages, "functions": FUNCTIONS, "max_tokens": 300}
        if stream:
            chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
            (call,) = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call is not None]
            finish = chunks[-1].finish_reason
            assert not any(chunk.delta.tool_calls for chunk in chunks)
        else:
            (choice,) = client.chat.completions.create(**asked).choices
            call, finish = choice.message.function_call, choice.finish_reason
            assert call is not None
            assert choice.message.tool_calls is None
        assert (call.name, json.loads(call.arguments or ""), finish) == ("look", {"where": "here"}, "function_call")
        record = worker.log[-1]
        # A template may write another token in place of the stop token.
        assert not chain or list(record.input_ids)[: len(chain) - 1] == chain[:-1]
        chain = [*record.input_ids, *record.output_ids]
        echo = {"role": "assistant", "content": None, "function_call": {"name": call.name, "arguments": call.arguments}}
        messages += [echo, {"role": "function", "name": "look", "content": f"nothing {number}"}]
    if session:
        (only,) = agent.finalize()
        assert (ids_of(only), only["exact"], only["num_turns"]) == (chain, True, 3)


def test_of_two_calls_the_old_form_has_the_first(model: tuple[str, Stack]) -> None:
    name, made = model
    if name != "qwen3":
        pytest.skip("the same for all")
    made.workers[0].script(text=f"{called(name)}\n{called(name)}", finish="eos")
    body = {"messages": [user("Twice.")], "functions": FUNCTIONS, "function_call": "auto"}
    (choice,) = made.post("/v1/chat/completions", body).json()["choices"]
    assert choice["message"]["function_call"]["name"] == "look"
    assert choice["finish_reason"] == "function_call"
    made.workers[0].script(text=called(name), finish="eos")
    (choice,) = made.post("/v1/chat/completions", {**body, "tools": TOOLS}).json()["choices"]
    assert "function_call" not in choice["message"], "who sends tools reads tool calls"
    assert choice["finish_reason"] == "tool_calls"
