"""Replies in OpenAI's dialect are what OpenAI's own library takes for such."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from middleware_hub.chat.answer import Answer, ReplyHead, TokenLogprob
from middleware_hub.chat.messages import ChatRequest, Piece, Text, ToolCall
from middleware_hub.dialects.openai import OpenAI
from router.errors import BadRequestError, NoWorkerError
from tests.middleware_hub.dialects.drawn import ASKED, HEAD, TOKENS, answers, pieces, streamed

DIALECT = OpenAI()
ANSWER = Answer(
    generation_id="g1",
    content="Four.",
    matched="\n",
    prompt_tokens=10,
    cached_tokens=8,
    completion_tokens=3,
    reasoning_tokens=1,
    weight_version="7",
    extra={"routed_experts": msgspec.Raw(b'"AAEC"')},
)
CALL = ToolCall("call_1", "add", '{"a": 1}')


def whole(*given: Answer) -> dict[str, Any]:
    reply = DIALECT.whole(ASKED, HEAD, given)
    ChatCompletion.model_validate_json(reply)
    return dict(json.loads(reply))


def chunks(events: list[bytes]) -> list[dict[str, Any]]:
    """The chunks of a stream, each of them valid; `[DONE]` comes last, and once."""
    *found, done = b"".join(events).decode().removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    for event in found:
        ChatCompletionChunk.model_validate_json(event.removeprefix("data: "))
    return [json.loads(event.removeprefix("data: ")) for event in found]


def test_a_whole_reply() -> None:
    assert whole(ANSWER) == {
        "id": "chatcmpl-0123abcd",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Four.", "refusal": None, "reasoning_content": None},
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": "\n",
                "meta_info": {"generation_id": "g1", "weight_version": "7", "routed_experts": "AAEC"},
            }
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 3,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 8},
            "completion_tokens_details": {"reasoning_tokens": 1},
        },
    }


def test_the_prompt_of_several_samples_counts_once() -> None:
    reply = whole(ANSWER, msgspec.structs.replace(ANSWER, generation_id="g2", cached_tokens=10))
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (10, 6)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 8


def test_token_ids_are_under_the_names_of_both_engines() -> None:
    asked = msgspec.structs.replace(ANSWER, ids=[7, 8], prompt_ids=msgspec.Raw(b"[1,2,3]"))
    names = {"prompt_token_ids": [1, 2, 3], "token_ids": [7, 8], "response_token_ids": [7, 8]}
    reply = whole(asked, asked)
    assert reply["prompt_token_ids"] == [1, 2, 3]
    for choice in reply["choices"]:
        assert {key: choice[key] for key in names} == names
    *others, last = chunks(streamed(DIALECT.stream(ASKED, HEAD), [(asked, [Text("Four.")])]))
    assert last["prompt_token_ids"] == [1, 2, 3]
    assert {key: last["choices"][0][key] for key in names} == names
    for told in (*others, *chunks(streamed(DIALECT.stream(ASKED, HEAD), [(ANSWER, [])])), whole(ANSWER)):
        assert not names.keys() & {*told, *told["choices"][0]}


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        pytest.param(Answer(generation_id="g"), "", id="nothing was said"),
        pytest.param(Answer(generation_id="g", reasoning="Hm."), "", id="only thought"),
        pytest.param(Answer(generation_id="g", tool_calls=(CALL,), finish="tool_calls"), None, id="only called"),
    ],
)
def test_content_is_null_only_beside_calls(answer: Answer, content: str | None) -> None:
    assert whole(answer)["choices"][0]["message"]["content"] == content


def test_an_aborted_reply_says_so_in_sglangs_word() -> None:
    reply = DIALECT.whole(ASKED, HEAD, [Answer(generation_id="g", finish="abort")])
    assert json.loads(reply)["choices"][0]["finish_reason"] == "abort"


def test_an_id_that_has_its_prefix_keeps_it() -> None:
    reply = json.loads(DIALECT.whole(ASKED, ReplyHead("chatcmpl-1", 0, "m"), [ANSWER]))
    assert reply["id"] == "chatcmpl-1"


def test_logprobs() -> None:
    tokens = [
        TokenLogprob(5, b"caf\xc3", -0.5, [(5, b"caf\xc3", -0.5), (6, b"x", -math.inf), (7, b"y", None)]),
        TokenLogprob(2, b"", -0.25),
    ]
    reply = whole(msgspec.structs.replace(ANSWER, logprobs=tokens))
    assert reply["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "caf\ufffd",
                "bytes": [99, 97, 102, 195],
                "logprob": -0.5,
                "top_logprobs": [
                    {"token": "caf\ufffd", "bytes": [99, 97, 102, 195], "logprob": -0.5},
                    {"token": "x", "bytes": [120], "logprob": -9999.0},
                    {"token": "y", "bytes": [121], "logprob": -9999.0},
                ],
            },
            {"token": "", "bytes": [], "logprob": -0.25, "top_logprobs": []},
        ],
        "refusal": None,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_named_by_their_ids_where_a_client_asks(stream: bool) -> None:
    tokens = [TokenLogprob(5, b" a", -0.5, [(5, b" a", -0.5), (6, b" a", -1.5)])]
    asked = ChatRequest(messages=[], logprobs=True, tokens_as_ids=True)
    answer = msgspec.structs.replace(ANSWER, logprobs=tokens)
    if stream:
        made = DIALECT.stream(asked, HEAD)
        reply = json.loads(made.piece(0, Text(" a"), tokens).removeprefix(b"data: "))
    else:
        reply = json.loads(DIALECT.whole(asked, HEAD, [answer]))
    (told,) = reply["choices"][0]["logprobs"]["content"]
    assert (told["token"], told["bytes"]) == ("token_id:5", [32, 97])
    assert [one["token"] for one in told["top_logprobs"]] == ["token_id:5", "token_id:6"]


@given(st.lists(answers(logprobs=True), min_size=1, max_size=3))
def test_every_whole_reply_is_valid(given: list[Answer]) -> None:
    reply = whole(*given)
    for answer, choice in zip(given, reply["choices"], strict=True):
        assert (choice["message"]["content"] or "") == answer.content
        assert choice["message"]["reasoning_content"] == (answer.reasoning or None)
        called = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
        assert called == [call.arguments for call in answer.tool_calls]
        assert len(choice["logprobs"]["content"]) == len(answer.logprobs or ())


# Streams -----------------------------------------------------------------------------------------------------------------


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[Answer, list[Piece]]]:
    return [(answer, draw(pieces(answer))) for answer in draw(st.lists(answers(), min_size=1, max_size=3))]


@given(streams(), st.booleans())
def test_the_chunks_of_a_stream_add_up_to_the_whole_reply(
    answered: list[tuple[Answer, list[Piece]]], usage: bool
) -> None:
    request = ChatRequest(messages=[], stream=True, stream_usage=usage, samples=len(answered))
    whole_reply = json.loads(DIALECT.whole(request, HEAD, [answer for answer, _ in answered]))
    found = chunks(streamed(DIALECT.stream(request, HEAD), answered))
    assert {chunk["id"] for chunk in found} == {whole_reply["id"]}
    if usage:
        last = found.pop()
        assert (last["choices"], last["usage"]) == ([], whole_reply["usage"])
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in found)
    for choice in whole_reply["choices"]:
        mine = [chunk["choices"][0] for chunk in found if chunk["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": "", "reasoning_content": None}
        assert all("reasoning_content" in one["delta"] for one in mine)
        assert [one["finish_reason"] for one in mine[:-1]] == [None] * (len(mine) - 1)
        for key in ("finish_reason", "matched_stop", "meta_info"):
            assert mine[-1][key] == choice[key]
        message = choice["message"]
        for key in ("content", "reasoning_content"):
            assert "".join(one["delta"].get(key) or "" for one in mine) == (message.get(key) or "")
        called = [call for one in mine for call in one["delta"].get("tool_calls", ())]
        assert [call.pop("index") for call in called] == list(range(len(called)))
        assert called == message.get("tool_calls", [])


@given(st.lists(TOKENS, max_size=6), st.data())
def test_the_logprobs_of_a_stream_are_those_of_all_tokens(tokens: list[TokenLogprob], data: st.DataObject) -> None:
    """Those of a hidden tail, too, which has no text of its own; and of a choice of which nothing else was sent."""
    seen = data.draw(st.integers(0, len(tokens)))
    first = data.draw(st.integers(0, seen))
    answer = msgspec.structs.replace(ANSWER, logprobs=tokens)
    stream = DIALECT.stream(ChatRequest(messages=[], logprobs=True, samples=2), HEAD)
    events = [
        stream.begin(10),
        stream.piece(0, Text("Fo"), tokens[:first]),
        stream.piece(0, Text(""), tokens[first:seen]),
        stream.finish(0, answer),
        stream.finish(1, answer),
        stream.end([answer] * 2),
    ]
    whole_reply = json.loads(DIALECT.whole(ASKED, HEAD, [answer]))
    for index in range(2):
        found = [
            choice["logprobs"] for chunk in chunks(events) for choice in chunk["choices"] if choice["index"] == index
        ]
        told = [token for part in found if part for token in part["content"]]
        assert told == whole_reply["choices"][0]["logprobs"]["content"]


def test_an_empty_piece_is_not_sent() -> None:
    assert DIALECT.stream(ASKED, HEAD).piece(0, Text("")) == b""


def test_a_stream_that_fails_ends_with_the_error() -> None:
    event = DIALECT.stream(ASKED, HEAD).failed(NoWorkerError("no worker is left"))
    assert event.startswith(b"data: ")
    assert event.endswith(b"}\n\n")
    assert json.loads(event[6:])["error"]["message"] == "no worker is left"


def test_a_ping_is_a_comment() -> None:
    assert DIALECT.stream(ASKED, HEAD).ping() == b": ping\n\n"


def test_errors_have_openais_fields() -> None:
    assert json.loads(DIALECT.error(NoWorkerError("none"))) == {
        "error": {"message": "none", "type": "no_worker", "param": None, "code": 503}
    }
    error = BadRequestError("too long", code="context_length_exceeded", param="messages", limit=8)
    assert json.loads(DIALECT.error(error)) == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
            "limit": 8,
        }
    }
