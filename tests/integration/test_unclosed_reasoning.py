"""A model that calls a tool and forgets to close its reasoning: the call ends it, in every dialect, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.agents import TOOLS, AgentSession, ids_of, tool, user
from tests.support.chat_models import chat_model
from tests.support.client import Answer
from tests.support.shapes import CALLS
from tests.support.stack import Stack, stack

OPENING = {"qwen3": "<think>\n", "glm4moe": "<think>"}
"""Where the template leaves it to the model."""
ARGUMENTS = {"where": "/a"}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_think", "glm4moe", "minimax_m2"])
def model(request: pytest.FixtureRequest) -> Iterator[tuple[Stack, str, str]]:
    """A stack, what opens the reasoning, and a call of the model."""
    form = CALLS[request.param]
    call = form.replace("NAME", "look").replace("ALL", json.dumps(ARGUMENTS))
    call = call.replace("KEY", "where").replace("VALUE", "/a")
    folder = chat_model(request.param)
    with stack("qwen", styles=("cumulative",), folder=folder, radix={"tokenizer_backend": "huggingface"}) as made:
        yield made, OPENING.get(request.param, ""), call
        assert made.idle()


def payloads(answer: Answer) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.content.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def read_chat(answer: Answer, stream: bool) -> tuple[str, str, list[Any], str]:
    """Reasoning, content, the arguments of the calls, and how it ended."""
    if not stream:
        (choice,) = answer.json()["choices"]
        found = choice["message"]
        return (
            found["reasoning_content"] or "",
            found["content"] or "",
            [json.loads(call["function"]["arguments"]) for call in found.get("tool_calls") or ()],
            choice["finish_reason"],
        )
    choices = [choice for event in payloads(answer) for choice in event["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
    return (
        "".join(choice["delta"].get("reasoning_content") or "" for choice in choices),
        "".join(choice["delta"].get("content") or "" for choice in choices),
        [json.loads(call["function"]["arguments"]) for call in calls],
        choices[-1]["finish_reason"],
    )


def read_messages(answer: Answer, stream: bool) -> tuple[str, str, list[Any], str]:
    if not stream:
        whole = answer.json()
        texts = {
            kind: "".join(one[kind] for one in whole["content"] if one["type"] == kind) for kind in ("thinking", "text")
        }
        calls = [one["input"] for one in whole["content"] if one["type"] == "tool_use"]
        return texts["thinking"], texts["text"], calls, whole["stop_reason"]
    deltas = [event["delta"] for event in payloads(answer) if event["type"] == "content_block_delta"]
    (ended,) = [event["delta"] for event in payloads(answer) if event["type"] == "message_delta"]
    return (
        "".join(delta.get("thinking", "") for delta in deltas),
        "".join(delta.get("text", "") for delta in deltas),
        [json.loads(delta["partial_json"]) for delta in deltas if "partial_json" in delta],
        ended["stop_reason"],
    )


def read_responses(answer: Answer, stream: bool) -> tuple[str, str, list[Any], str]:
    whole = answer.json() if not stream else payloads(answer)[-1]["response"]
    items = whole["output"]

    def texts(kind: str) -> str:
        return "".join(part["text"] for item in items if item["type"] == kind for part in item.get("content") or ())

    calls = [json.loads(item["arguments"]) for item in items if item["type"] == "function_call"]
    if stream:
        deltas = [event for event in payloads(answer) if event["type"].endswith(".delta")]
        assert texts("reasoning") == "".join(one["delta"] for one in deltas if "reasoning" in one["type"])
    return texts("reasoning"), texts("message"), calls, whole["status"]


DIALECTS: dict[str, Any] = {
    "chat/completions": (read_chat, {"messages": [user("Look.")], "tools": TOOLS}, "tool_calls", "stop"),
    "messages": (
        read_messages,
        {
            "max_tokens": 500,
            "messages": [user("Look.")],
            "tools": [{"name": "look", "input_schema": TOOLS[0]["function"]["parameters"]}],
        },
        "tool_use",
        "end_turn",
    ),
    "responses": (
        read_responses,
        {"input": "Look.", "tools": [{"type": "function", **TOOLS[0]["function"]}]},
        "completed",
        "completed",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("dialect", "session"),
    [*((dialect, True) for dialect in DIALECTS), ("chat/completions", False), ("messages", False)],
)
def test_a_call_in_reasoning_that_is_not_closed_is_a_call(
    model: tuple[Stack, str, str], dialect: str, stream: bool, session: bool
) -> None:
    made, opening, call = model
    (worker,) = made.workers
    read, body, called, said = DIALECTS[dialect]
    path = AgentSession.make(made).path if session else ""

    def ask(says: str) -> Any:
        worker.script(text=opening + says, finish="eos")
        answer = made.post(f"{path}/v1/{dialect}", {"model": "m", **body, "stream": stream})
        assert answer.status == 200, answer.content
        return read(answer, stream)

    assert ask(f"I should look.\n{call}") == ("I should look.", "", [ARGUMENTS], called)
    assert ask(f"I should look.\n{call}\n{call}") == ("I should look.", "", [ARGUMENTS] * 2, called)
    assert ask(f"So: {call} Done.") == ("So: ", " Done.", [ARGUMENTS], called)
    assert ask(f"Write {call}?\n</think>\n\nNo.") == (f"Write {call}?", "No.", [], said)
    assert ask(f"Write {call}?\n</think>\n\n{call}") == (f"Write {call}?", "", [ARGUMENTS], called)
    assert ask("I should <tool_call>") == ("I should <tool_call>", "", [], said)


def test_the_conversation_goes_on_behind_such_a_call(model: tuple[Stack, str, str]) -> None:
    made, opening, call = model
    agent = AgentSession.make(made, tools=TOOLS)
    messages, chain = [user("Look.")], list[int]()
    for number in range(3):
        turn = agent.must(*messages, says=f"{opening}I should look.\n{call}")
        # GLM's template writes another token in place of the stop token.
        assert not chain or turn.sent[: len(chain) - 1] == chain[:-1]
        chain = turn.chain
        messages += [turn.message, tool(turn.message["tool_calls"][0], f"nothing {number}")]
    (only,) = agent.finalize()
    assert ids_of(only) == chain
    assert (only["exact"], only["reasons"], only["num_turns"]) == (True, [], 3)
