"""Switches of thinking and of reasoning at the top level of a request, as engines and proxies know them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.agents import AgentSession, deltas, ids_of, user
from tests.support.chat_models import chat_model
from tests.support.stack import Stack, stack

MODELS = ["qwen3", "qwen3_5_think", "glm4moe"]
OPENS = {"qwen3": "<think>\n", "glm4moe": "<think>", "qwen3_5_think": ""}
REASONED = "Hm.\n</think>\n\nYes."


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[str, Stack]]:
    folder = chat_model(request.param)
    with stack("qwen", styles=("cumulative",), folder=folder, radix={"tokenizer_backend": "huggingface"}) as made:
        yield request.param, made
        assert made.idle()


def sent(made: Stack, path: str, body: dict[str, Any]) -> list[int]:
    path = path.replace("NAME", made.post("/sessions", {}).json()["session_id"]) if "NAME" in path else path
    answer = made.post(path, {"model": "m", **body})
    assert answer.status == 200, answer.content
    return list(made.workers[0].log[-1].input_ids)


CHAT: dict[str, Any] = {"messages": [user("Hi.")], "max_tokens": 5}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/sessions/NAME/v1/chat/completions", CHAT),
        ("/sessions/NAME/v1/messages", CHAT),
        ("/sessions/NAME/v1/responses", {"input": "Hi.", "max_output_tokens": 5}),
    ],
)
def test_thinking_is_switched_at_the_top_level(model: tuple[str, Stack], path: str, body: dict[str, Any]) -> None:
    _, made = model
    off = sent(made, path, {**body, "chat_template_kwargs": {"enable_thinking": False}})
    assert sent(made, path, body) != off
    assert sent(made, path, {**body, "enable_thinking": False}) == off
    assert sent(made, path, {**body, "thinking": False}) == off
    assert sent(made, path, {**body, "thinking": {"type": "disabled"}}) == off
    assert sent(made, path, {**body, "enable_thinking": True}) == sent(made, path, body)
    answer = made.post("/v1/chat/completions", {**CHAT, "enable_thinking": "no"})
    assert answer.status == 400
    assert answer.json()["error"]["param"] == "enable_thinking"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_is_not_separated_stays_in_the_text(model: tuple[str, Stack], stream: bool) -> None:
    name, made = model
    agent = AgentSession.make(made)
    asked = {"separate_reasoning": False, "stream": stream}
    first = agent.must(user("Well?"), says=OPENS[name] + REASONED, **asked)
    message = deltas(first.answer) if stream else first.message
    assert (message["content"], message["reasoning_content"] or "") == (OPENS[name] + REASONED, "")
    echo = {"role": "assistant", "content": message["content"]}
    second = agent.must(user("Well?"), echo, user("So?"), says=OPENS[name] + REASONED, **asked)
    assert second.sent[: len(first.chain) - 1] == first.chain[:-1]
    (only,) = agent.finalize()
    assert (ids_of(only), only["exact"]) == (second.chain, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_reasoning_that_is_not_wanted_is_not_shown(model: tuple[str, Stack], stream: bool, logprobs: bool) -> None:
    name, made = model
    agent = AgentSession.make(made)
    asked = {"include_reasoning": False, "stream": stream, "logprobs": logprobs}
    first = agent.must(user("Well?"), says=OPENS[name] + REASONED, **asked)
    message = deltas(first.answer) if stream else first.message
    assert (message["content"], message["reasoning_content"] or "") == ("Yes.", "")
    assert b"Hm." not in first.answer.content or logprobs
    echo = {"role": "assistant", "content": message["content"]}
    second = agent.must(user("Well?"), echo, user("So?"), says=OPENS[name] + REASONED)
    assert second.sent[: len(first.chain) - 1] == first.chain[:-1]
    (only,) = agent.finalize()
    assert (ids_of(only), only["exact"]) == (second.chain, True)
    assert only["messages"][1]["reasoning_content"] == "Hm."


@pytest.mark.parametrize("path", ["/v1/messages", "/sessions/NAME/v1/messages", "/sessions/NAME/v1/responses"])
@pytest.mark.parametrize("field", ["separate_reasoning", "include_reasoning"])
def test_where_a_switch_has_no_meaning_it_is_refused_by_name(model: tuple[str, Stack], path: str, field: str) -> None:
    _, made = model
    path = path.replace("NAME", made.post("/sessions", {}).json()["session_id"])
    body = {"input": "Hi."} if "responses" in path else CHAT
    answer = made.post(path, {**body, field: False})
    assert answer.status == 400
    assert f"`{field}`" in answer.json()["error"]["message"]
    assert "chat_template_kwargs" in answer.json()["error"]["message"]
    assert made.post(path, {**body, field: True}).status == 200


def test_channels_cannot_stay_in_the_text() -> None:
    with stack("qwen", folder=chat_model("gptoss"), styles=("cumulative",)) as made:
        answer = made.post("/v1/chat/completions", {**CHAT, "separate_reasoning": False})
        assert answer.status == 400
        assert answer.json()["error"]["param"] == "separate_reasoning"


def test_an_edited_echo_of_a_turn_that_was_not_separated_keeps_what_was_not_edited(model: tuple[str, Stack]) -> None:
    name, made = model
    if name == "glm4moe":
        pytest.skip("its template takes the reasoning out of an edited turn's content, so nothing of it is left")
    agent = AgentSession.make(made)
    asked = {"separate_reasoning": False}
    first = agent.must(user("Well?"), says=f"{OPENS[name]}Hm.\n</think>\n\nYes, one two three.", **asked)
    text = first.message["content"].replace("three", "four")
    second = agent.must(user("Well?"), {"role": "assistant", "content": text}, user("So?"), says="Yes.", **asked)
    assert second.answer.headers["x-radix-reasons"] == "edited_turn"
    kept = first.sampled[: first.sampled.index(made.workers[0].vocabulary.encode_bare(" three")[0])]
    assert second.sent[: len(first.sent) + len(kept)] == [*first.sent, *kept]
