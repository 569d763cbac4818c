"""Replies in the form of OpenAI's Responses API are what OpenAI's own library takes for such."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from middleware_hub.chat.answer import Answer, Finish, ReplyHead
from middleware_hub.chat.messages import Piece, Text, ToolCall, ToolForm
from middleware_hub.dialects.responses import Responses
from router.errors import BadRequestError, NoWorkerError
from tests.middleware_hub.dialects.drawn import ASKED, HEAD, answers, joined, pieces, printed, streamed

DIALECT = Responses()
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ANSWER = Answer(
    generation_id="g1",
    content="Let me look.",
    reasoning="Hm.",
    tool_calls=(ToolCall("call_1", "add", '{"a": 1.0}'),),
    finish="tool_calls",
    prompt_tokens=10,
    cached_tokens=8,
    completion_tokens=3,
    reasoning_tokens=1,
    weight_version="7",
    extra={"routed_experts": msgspec.Raw(b'"AAEC"')},
    ended=1_700_000_009,
)


def whole(answer: Answer) -> dict[str, Any]:
    reply = DIALECT.whole(ASKED, HEAD, [answer])
    Response.model_validate_json(reply)
    return dict(json.loads(reply))


def events(sent: list[bytes]) -> list[dict[str, Any]]:
    """The events of a stream, each of them valid, under its own name, and numbered."""
    found = []
    for event in b"".join(sent).decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\ndata: ")
        found.append(json.loads(data))
        assert name == f"event: {found[-1]['type']}"
        EVENT.validate_json(data)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_a_whole_reply() -> None:
    request = msgspec.structs.replace(ASKED, tools=[ADD], sampling={"temperature": 0.5, "max_new_tokens": 9})
    assert json.loads(DIALECT.whole(request, HEAD, [ANSWER])) == {
        "id": "resp_0123abcd",
        "object": "response",
        "created_at": 1_700_000_000,
        "completed_at": 1_700_000_009,
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": "tiny",
        "output": [
            {
                "type": "reasoning",
                "id": "rs_0123abcd_0",
                "status": "completed",
                "summary": [],
                "encrypted_content": None,
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            {
                "type": "message",
                "id": "msg_0123abcd_0",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}],
            },
            {
                "type": "function_call",
                "id": "fc_0123abcd_0",
                "status": "completed",
                "call_id": "call_1",
                "name": "add",
                "arguments": '{"a": 1.0}',
            },
        ],
        "previous_response_id": None,
        "store": True,
        "instructions": None,
        "max_tool_calls": None,
        "metadata": {},
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "top_logprobs": 0,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [
            {"type": "function", "name": "add", "description": None, "parameters": {"type": "object"}, "strict": False}
        ],
        "max_output_tokens": 9,
        "temperature": 0.5,
        "top_p": 1.0,
        "usage": {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 1},
            "total_tokens": 13,
        },
        "generation_id": "g1",
        "weight_version": "7",
        "meta_info": {"routed_experts": "AAEC"},
    }


def test_an_id_that_has_its_prefix_keeps_it() -> None:
    assert json.loads(DIALECT.whole(ASKED, ReplyHead("resp_1", 0, "m"), [ANSWER]))["id"] == "resp_1"


@pytest.mark.parametrize(("choice", "shown"), [("none", "none"), ("add", {"type": "function", "name": "add"})])
def test_the_tool_choice_is_shown(choice: str, shown: Any) -> None:
    request = msgspec.structs.replace(ASKED, tools=[ADD], call_choice=choice)
    assert json.loads(DIALECT.whole(request, HEAD, [ANSWER]))["tool_choice"] == shown


@pytest.mark.parametrize(
    ("finish", "status", "reason"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("abort", "incomplete", "abort"),
    ],
)
def test_how_it_ended(finish: Finish, status: str, reason: str | None) -> None:
    answer = Answer(generation_id="g", content="x", finish=finish)
    reply = json.loads(DIALECT.whole(ASKED, HEAD, [answer]))
    assert (reply["status"], reply["output"][-1]["status"]) == (status, status)
    assert reply["incomplete_details"] == (reason and {"reason": reason})
    stream = DIALECT.stream(ASKED, HEAD)
    sent = [stream.begin(1), stream.piece(0, Text("x")), stream.finish(0, answer), stream.end([answer])]
    last = json.loads(sent[-1].partition(b"data: ")[2])
    assert (last["type"], last["response"]) == (f"response.{status}", reply)


def test_a_reply_that_says_nothing_has_an_empty_message() -> None:
    (message,) = whole(Answer(generation_id="g"))["output"]
    assert (message["type"], message["content"][0]["text"]) == ("message", "")


@st.composite
def streams(draw: st.DrawFn) -> tuple[Answer, list[Piece]]:
    answer = draw(answers())
    return answer, draw(pieces(answer))


@given(streams())
def test_the_events_of_a_stream_add_up_to_the_last_one(answered: tuple[Answer, list[Piece]]) -> None:
    answered = msgspec.structs.replace(answered[0], pieces=joined(answered[1])), answered[1]
    reply = whole(answered[0])
    created, working, *middle, last = events(streamed(DIALECT.stream(ASKED, HEAD), [answered]))
    assert (created["response"], working["response"]["status"]) == (working["response"], "in_progress")
    output = list[dict[str, Any]]()
    numbers = count()
    opened: dict[str, Any] = {}
    for event in middle:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not opened, "items come one after the other"
            opened, at = event["item"], next(numbers)
            assert opened["status"] == "in_progress"
            text = opened.get("arguments", "")
        elif kind == "content_part.added":
            assert event["part"].pop("text") == ""
            opened["content"].append(event["part"])
        elif kind.endswith(".delta"):
            text += event["delta"]
        elif kind == "output_item.done":
            if opened["type"] == "function_call":
                opened["arguments"] = text
            else:
                opened["content"][0]["text"] = text
            assert event["item"] == {**opened, "status": event["item"]["status"]}
            output.append(event["item"])
            opened = {}
        else:
            whole_text = event.get("arguments", event.get("text", event.get("part", {}).get("text")))
            assert whole_text == text, kind
        assert event["output_index"] == at
        assert event.get("item_id", output[-1]["id"] if not opened else opened["id"])
    assert not opened
    assert last["response"] == reply
    assert output == reply["output"], "in one order"


FORMS = {
    "function": ToolForm("function", "f", "ns"),
    **{kind: ToolForm(kind, kind) for kind in ("custom", "local_shell", "shell", "apply_patch", "tool_search")},
}


@given(st.sampled_from([*FORMS]), printed() | st.sampled_from(['{"command": "ls"}', '{"input": "x", "y": 1}', "[1]"]))
def test_a_call_is_valid_whatever_was_sampled(kind: str, arguments: str) -> None:
    call = ToolCall("call_1", "f", arguments)
    answer = Answer(generation_id="g", tool_calls=(call,), finish="tool_calls", pieces=(call,))
    request = msgspec.structs.replace(ASKED, forms={"f": FORMS[kind]})
    reply = DIALECT.whole(request, HEAD, [answer])
    Response.model_validate_json(reply)
    stream = DIALECT.stream(request, HEAD)
    sent = events([stream.begin(1), stream.piece(0, call), stream.finish(0, answer), stream.end([answer])])
    assert sent[-1]["response"] == json.loads(reply)


def test_pings_are_comments_and_an_error_is_an_event() -> None:
    stream = DIALECT.stream(ASKED, HEAD)
    assert stream.ping().startswith(b":")
    (failed,) = events([stream.failed(BadRequestError("too long", code="context_length_exceeded", param="input"))])
    assert {key: failed[key] for key in ("code", "message", "param")} == {
        "code": "context_length_exceeded",
        "message": "too long",
        "param": "input",
    }


def test_an_error_is_openais() -> None:
    error = json.loads(DIALECT.error(NoWorkerError("no worker is left")))["error"]
    assert (error["message"], error["param"]) == ("no worker is left", None)
