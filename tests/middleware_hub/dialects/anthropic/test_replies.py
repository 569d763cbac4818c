"""Replies in Anthropic's dialect are what Anthropic's own library takes for such."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from middleware_hub.chat.answer import Answer, Finish, ReplyHead
from middleware_hub.chat.errors import ContextLengthError
from middleware_hub.chat.messages import Piece, Reasoning, Text, ToolCall
from middleware_hub.dialects.anthropic import Anthropic
from router.errors import (
    BadRequestError,
    BodyTooLargeError,
    ForbiddenError,
    NotExactError,
    NotFoundError,
    NoWorkerError,
    QueueFullError,
    RouterError,
    UpstreamError,
    UpstreamTimeoutError,
)
from tests.middleware_hub.dialects.drawn import ASKED, HEAD, answers, joined, pieces, streamed

DIALECT = Anthropic()
SIGNATURE = "dGl0by1yb3V0ZXI="
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
ANSWER = Answer(
    generation_id="g1",
    content="Let me look.",
    reasoning="Hm.",
    tool_calls=(ToolCall("call_1", "add", '{"a": 1.0, "b": [true]}'),),
    finish="tool_calls",
    prompt_tokens=10,
    cached_tokens=8,
    completion_tokens=3,
    weight_version="7",
    extra={"routed_experts": msgspec.Raw(b'"AAEC"')},
)


def whole(answer: Answer) -> dict[str, Any]:
    reply = DIALECT.whole(ASKED, HEAD, [answer])
    Message.model_validate_json(reply)
    return dict(json.loads(reply))


def events(sent: list[bytes]) -> list[dict[str, Any]]:
    """The events of a stream, each of them valid and under its own name."""
    found = []
    for event in b"".join(sent).decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\ndata: ")
        found.append(json.loads(data))
        assert name == f"event: {found[-1]['type']}"
        if found[-1]["type"] != "ping":
            EVENT.validate_json(data)
    return found


def test_a_whole_reply() -> None:
    assert whole(ANSWER) == {
        "id": "msg_0123abcd",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1.0, "b": [True]}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_read_input_tokens": 8,
            "cache_creation_input_tokens": 0,
            "output_tokens": 3,
        },
        "generation_id": "g1",
        "weight_version": "7",
        "meta_info": {"routed_experts": "AAEC"},
    }


def test_an_id_that_has_its_prefix_keeps_it() -> None:
    assert json.loads(DIALECT.whole(ASKED, ReplyHead("msg_1", 0, "m"), [ANSWER]))["id"] == "msg_1"


@pytest.mark.parametrize(
    ("finish", "matched", "reason", "sequence"),
    [
        ("stop", None, "end_turn", None),
        ("stop", 151645, "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        pytest.param("stop", "</tool_call>", "end_turn", None, id="a stop string that the client knows nothing of"),
        ("length", None, "max_tokens", None),
        ("tool_calls", None, "tool_use", None),
        ("tool_calls", "END", "tool_use", None),
        ("abort", None, "abort", None),
    ],
)
def test_why_it_stopped(finish: Finish, matched: str | int | None, reason: str, sequence: str | None) -> None:
    request = msgspec.structs.replace(ASKED, sampling={"stop": ["END"]})
    answer = Answer(generation_id="g", content="x", finish=finish, matched=matched)
    reply = json.loads(DIALECT.whole(request, HEAD, [answer]))
    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, sequence)
    *_, ended, _ = events([DIALECT.stream(request, HEAD).end([answer])]) if finish != "abort" else [reply, 0]
    assert ended.get("delta", ended)["stop_reason"] == reason


@given(answers())
def test_every_whole_reply_is_valid(answer: Answer) -> None:
    reply = whole(answer)
    texts = {"thinking": answer.reasoning, "text": answer.content}
    for kind, text in texts.items():
        found = [block[kind] for block in reply["content"] if block["type"] == kind]
        assert found == ([text] if text else [])
    inputs = [block["input"] for block in reply["content"] if block["type"] == "tool_use"]
    assert inputs == [json.loads(call.arguments) for call in answer.tool_calls]
    usage = reply["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == answer.prompt_tokens


# Streams -----------------------------------------------------------------------------------------------------------------


@st.composite
def streams(draw: st.DrawFn) -> tuple[Answer, list[Piece]]:
    answer = draw(answers())
    return answer, draw(pieces(answer))


@given(streams())
def test_the_events_of_a_stream_add_up_to_the_whole_reply(answered: tuple[Answer, list[Piece]]) -> None:
    answered = msgspec.structs.replace(answered[0], pieces=joined(answered[1])), answered[1]
    reply = whole(answered[0])
    first, *middle, ended, last = events(streamed(DIALECT.stream(ASKED, HEAD), [answered]))
    assert first["message"]["content"] == []
    assert first["message"]["usage"]["input_tokens"] == answered[0].prompt_tokens
    assert ended["delta"] == {key: reply[key] for key in ("stop_reason", "stop_sequence")}
    assert ended["usage"] == reply["usage"]
    assert ended["generation_id"] == reply["generation_id"]
    assert last == {"type": "message_stop"}
    blocks: list[dict[str, Any]] = []
    inside = False
    for event in middle:
        kind = event["type"]
        assert inside is (kind != "content_block_start"), "blocks come one after the other"
        if kind == "content_block_start":
            blocks.append(event["content_block"])
            inside = True
        elif kind == "content_block_stop":
            inside = False
        else:
            delta = event["delta"]
            match delta["type"]:
                case "text_delta":
                    blocks[-1]["text"] += delta["text"]
                case "thinking_delta":
                    blocks[-1]["thinking"] += delta["thinking"]
                case "signature_delta":
                    blocks[-1]["signature"] += delta["signature"]
                case "input_json_delta":
                    blocks[-1]["input"] = json.loads(delta["partial_json"])
        assert event["index"] == len(blocks) - 1
    assert not inside
    assert blocks == reply["content"], "in one order"
    assert all(a["type"] != b["type"] or a["type"] == "tool_use" for a, b in pairwise(blocks))


def test_thinking_ends_with_a_signature() -> None:
    """Clients send thinking without one back as a message of the user, or not at all."""
    stream = DIALECT.stream(ASKED, HEAD)
    found = events([stream.piece(0, Reasoning("Hm.")), stream.piece(0, Text("Yes."))])
    assert [event.get("delta", event).get("type") for event in found] == [
        "content_block_start",
        "thinking_delta",
        "signature_delta",
        "content_block_stop",
        "content_block_start",
        "text_delta",
    ]


def test_an_empty_piece_is_not_sent() -> None:
    assert DIALECT.stream(ASKED, HEAD).piece(0, Text("")) == b""


def test_pings_and_errors_are_events() -> None:
    stream = DIALECT.stream(ASKED, HEAD)
    assert events([stream.ping()]) == [{"type": "ping"}]
    failed = stream.failed(NoWorkerError("no worker is left"))
    assert failed.startswith(b"event: error\ndata: ")
    assert json.loads(failed.partition(b"data: ")[2]) == json.loads(DIALECT.error(NoWorkerError("no worker is left")))


# Errors ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequestError, "invalid_request_error"),
        (ForbiddenError, "permission_error"),
        (NotFoundError, "not_found_error"),
        (NotExactError, "invalid_request_error"),
        (BodyTooLargeError, "request_too_large"),
        (QueueFullError, "rate_limit_error"),
        (NoWorkerError, "overloaded_error"),
        (UpstreamError, "api_error"),
        (UpstreamTimeoutError, "timeout_error"),
        (RouterError, "api_error"),
    ],
)
def test_errors_are_named_by_their_status(error: type[RouterError], kind: str) -> None:
    assert json.loads(DIALECT.error(error("why"))) == {"type": "error", "error": {"type": kind, "message": "why"}}


def test_a_request_id_stands_at_the_top() -> None:
    found = json.loads(DIALECT.error(BadRequestError("why", request_id="r1", param="x")))
    assert found["request_id"] == "r1"
    assert found["error"] == {"type": "invalid_request_error", "message": "why", "param": "x"}


def test_a_prompt_that_is_too_long_is_called_so_in_anthropics_words() -> None:
    error = BadRequestError("it has 9 tokens, and 8 fit", code="context_length_exceeded")
    message = json.loads(DIALECT.error(error))["error"]["message"]
    assert message == "prompt is too long: it has 9 tokens, and 8 fit"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            10,
            "input length and `max_tokens` exceed context limit: 10 + 500 > 200, decrease input length or `max_tokens` and"
            " try again",
        ),
        (200, "prompt is too long: 200 tokens > 200 maximum"),
        (210, "prompt is too long: 210 tokens > 200 maximum"),
    ],
)
def test_a_reply_that_does_not_fit_behind_a_prompt_that_does_is_no_long_prompt(prompt: int, message: str) -> None:
    """Agents that read the first ask for less; those that read the second condense the conversation."""
    assert json.loads(DIALECT.error(ContextLengthError(200, prompt, 500)))["error"]["message"] == message


def test_counted_tokens() -> None:
    assert json.loads(DIALECT.count(7)) == {"input_tokens": 7}
