"""Responses and their events are whole by the published schemas: Open Responses' own types, and those of OpenAI's library."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Iterator
from typing import Any, get_args

import openresponses_types.types as published
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.support import templates
from tests.support.agents import TOOLS, AgentSession, call_text
from tests.support.stack import Stack, stack

OPENAI: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FUNCTION = {"type": "function", **TOOLS[0]["function"]}  # type: ignore[dict-item]
CUSTOM = {"type": "custom", "name": "patch", "description": "Patches."}
THOUGHT = "<think>\nhm\n</think>\n\n"
SENT = {
    "instructions": "Be brief.",
    "metadata": {"run": "7"},
    "truncation": "auto",
    "text": {"format": {"type": "json_object"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "temperature": 0.5,
    "top_p": 0.75,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.5,
    "max_tool_calls": 3,
    "service_tier": "flex",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "store": False,
    "max_output_tokens": 300,
    "parallel_tool_calls": False,
    "tools": [{**FUNCTION, "strict": True}],
    "tool_choice": "auto",
}
MATRIX: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("One.", {}),
    "nothing": ("", {}),
    "reasoning": (f"{THOUGHT}One.", {}),
    "sealed": (f"{THOUGHT}One.", {"include": ["reasoning.encrypted_content"], "store": False}),
    "call": (f"{THOUGHT}I look.\n{call_text('a')}\n{call_text('b')}", {"tools": [FUNCTION]}),
    "bare tool": (
        "One.",
        {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "f"}},
    ),
    "incomplete": ("One two three four.", {"max_output_tokens": 2}),
    "sent": ("{}", SENT),
}
RENAMED = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}
"""OpenAI's library has the first names, and Open Responses the second. Clients read the first."""


def _event_types() -> dict[str, type[BaseModel]]:
    found = {}
    for name, kind in inspect.getmembers(published, inspect.isclass):
        if name.endswith("StreamingEvent"):
            (value,) = get_args(kind.model_fields["type"].annotation) or kind.model_fields["type"].annotation  # type: ignore[union-attr]
            found[str(value)] = kind
    return found


EVENTS = _event_types()


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    sessions = {"chat_template": str(templates.folder() / "qwen3.jinja")}
    with stack("qwen", styles=("cumulative",), sessions=sessions) as made:
        yield made
        assert made.idle()


def ask(served: Stack, says: str, *, stream: bool, **fields: Any) -> Any:
    agent = AgentSession.make(served)
    served.workers[0].script(text=says) if says else served.workers[0].script()
    answer = served.post(f"{agent.path}/v1/responses", {"model": "m", "input": "Go.", "stream": stream, **fields})
    assert answer.status == 200, answer.content
    if not stream:
        return answer.json()
    return [json.loads(line[6:]) for line in answer.content.split(b"\n") if line.startswith(b"data: ")]


def check(event: dict[str, Any]) -> None:
    OPENAI.validate_python(event)
    kind = RENAMED.get(event["type"], event["type"])
    EVENTS[kind].model_validate({**event, "type": kind})


@pytest.mark.parametrize("case", MATRIX)
def test_a_whole_response(served: Stack, case: str) -> None:
    says, fields = MATRIX[case]
    response = ask(served, says, stream=False, **fields)
    published.ResponseResource.model_validate(response)
    Response.model_validate(response)
    ended = response["completed_at"]
    assert (ended is None) == (response["status"] == "incomplete")
    assert ended is None or 0 <= time.time() - ended < 60


@pytest.mark.parametrize("case", MATRIX)
def test_the_events_of_a_stream(served: Stack, case: str) -> None:
    says, fields = MATRIX[case]
    found = ask(served, says, stream=True, **fields)
    for event in found:
        check(event)
    assert found[0]["response"]["completed_at"] is None
    assert found[-1]["type"] == ("response.incomplete" if case == "incomplete" else "response.completed")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_was_sent_is_repeated(served: Stack, stream: bool) -> None:
    found = ask(served, "{}", stream=stream, **SENT)
    for response in [event["response"] for event in found if "response" in event] if stream else [found]:
        assert {key: response[key] for key in SENT} == SENT


def test_what_was_not_sent_has_openais_defaults(served: Stack) -> None:
    response = ask(served, "One.", stream=False)
    expected = {
        "background": False,
        "error": None,
        "frequency_penalty": 0,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "presence_penalty": 0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1,
        "truncation": "disabled",
    }
    assert {key: response[key] for key in expected} == expected


@pytest.mark.parametrize("strict", [None, True])
def test_a_schema_is_repeated(served: Stack, strict: bool | None) -> None:
    """Open Responses' types take no schema here, whatever it is; OpenAI's do."""
    wanted: dict[str, Any] = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    if strict is not None:
        wanted["strict"] = strict
    response = ask(served, "{}", stream=False, text={"format": wanted})
    Response.model_validate(response)
    assert response["text"]["format"] == {"description": None, "strict": False, **wanted}


def test_the_sessions_own_sampling_is_shown(served: Stack) -> None:
    agent = AgentSession.make(served, sampling_params={"temperature": 0.25})
    answer = served.post(f"{agent.path}/v1/responses", {"model": "m", "input": "Go.", "top_p": 0.5})
    response = answer.json()
    assert (response["temperature"], response["top_p"]) == (0.25, 0.5)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_custom_call(served: Stack, stream: bool) -> None:
    says = '<tool_call>\n{"name": "patch", "arguments": {"input": "x"}}\n</tool_call>'
    found = ask(served, says, stream=stream, tools=[CUSTOM, FUNCTION])
    if stream:
        for event in found:
            OPENAI.validate_python(event)
        found = found[-1]["response"]
    Response.model_validate(found)
    assert found["tools"][0] == CUSTOM
    assert found["output"][0]["type"] == "custom_tool_call"


def test_a_failure_in_the_middle_of_a_stream(served: Stack) -> None:
    agent, worker = AgentSession.make(served), served.workers[0]
    worker.script(text="One two three four five six.", fault="error_event")
    answer = served.post(f"{agent.path}/v1/responses", {"model": "m", "input": "Go.", "stream": True})
    found = [json.loads(line[6:]) for line in answer.content.split(b"\n") if line.startswith(b"data: ")]
    for event in found:
        check(event)
    assert found[-1]["type"] == "error"
