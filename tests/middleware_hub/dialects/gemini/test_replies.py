"""Replies in Google's form: each is what Google's own library reads, and a stream adds up to the reply in one piece."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from google.genai import types
from google.genai.models import _GenerateContentResponse_from_mldev
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.chat.answer import Answer, TokenLogprob
from middleware_hub.chat.errors import ContextLengthError
from middleware_hub.chat.messages import Piece, Reasoning, Text, ToolCall
from middleware_hub.dialects.gemini import GENERATE, STREAM, Gemini
from router.errors import BadRequestError, NoWorkerError
from tests.middleware_hub.dialects.drawn import ASKED, HEAD, answers, canonical, pieces, without_reasoning

DIALECT = Gemini("tiny", GENERATE, events=False)
SHOWN = msgspec.structs.replace(ASKED, include_reasoning=True, logprobs=True, top_logprobs=2)
HIDDEN = msgspec.structs.replace(ASKED, include_reasoning=False)
USER = {"role": "user", "parts": [{"text": "Hi"}]}


def read(body: bytes | dict[str, Any]) -> types.GenerateContentResponse:
    """As Google's library reads it, which refuses keys that it does not know within what it keeps."""
    found = json.loads(body) if isinstance(body, bytes) else body
    return types.GenerateContentResponse.model_validate(_GenerateContentResponse_from_mldev(found))


def entries(answer: Answer, told: list[Piece], *, events: bool, shown: Any = SHOWN) -> list[dict[str, Any]]:
    """A stream, taken apart as its media type says."""
    stream = Gemini("tiny", STREAM, events=events).stream(shown, HEAD)
    written = [stream.begin(answer.prompt_tokens), stream.ping()]
    shown_so_far = 0
    for number, piece in enumerate(told):
        # The first pieces have a token each, as long as there are some; what is left is told at the end.
        news = (answer.logprobs or [])[shown_so_far : shown_so_far + 1] if answer.logprobs is not None else None
        shown_so_far += len(news or ())
        written.append(stream.piece(0, piece, news))
        if number % 2:
            written.append(stream.ping())
    written += [stream.finish(0, answer), stream.end([answer])]
    body = b"".join(written)
    if not events:
        assert stream.content_type == b"application/json"
        return list(json.loads(body))
    assert stream.content_type == b"text/event-stream"
    lines = [line for line in body.decode().split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def echo(contents: list[types.Content | None]) -> dict[str, Any]:
    """What the library sends back of these, read as a request."""
    sent = [json.loads(one.model_dump_json(by_alias=True, exclude_none=True)) for one in contents if one is not None]
    body = {"contents": [USER, *sent, USER]}
    return dict(DIALECT.parse(json.dumps(body).encode()).messages[1])


@given(answers(logprobs=True))
def test_whole(answer: Answer) -> None:
    found = read(DIALECT.whole(SHOWN, HEAD, [answer]))
    assert (found.response_id, found.model_version) == ("0123abcd", "tiny")
    (candidate,) = found.candidates or ()
    wanted = types.FinishReason.MAX_TOKENS if answer.finish == "length" else types.FinishReason.STOP
    assert (candidate.finish_reason, candidate.index) == (wanted, 0)
    assert echo([candidate.content]) == canonical(answer)
    usage = found.usage_metadata
    assert usage is not None
    assert usage.prompt_token_count == answer.prompt_tokens
    assert (usage.cached_content_token_count or 0) == answer.cached_tokens
    assert (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0) == answer.completion_tokens
    assert usage.total_token_count == answer.prompt_tokens + answer.completion_tokens
    if not answer.logprobs:
        assert candidate.logprobs_result is None
        return
    assert candidate.logprobs_result is not None
    chosen = candidate.logprobs_result.chosen_candidates or []
    values = [-9999.0 if math.isinf(one.logprob or 0) else one.logprob for one in answer.logprobs]
    assert [(one.token_id, one.log_probability) for one in chosen] == [
        (one.token_id, value) for one, value in zip(answer.logprobs, values, strict=True)
    ]
    assert [len(one.candidates or ()) for one in candidate.logprobs_result.top_candidates or ()] == [
        len(one.top) for one in answer.logprobs
    ]


@given(st.data(), answers(logprobs=True), st.booleans())
def test_a_stream_is_the_whole_reply(data: st.DataObject, answer: Answer, events: bool) -> None:
    found = [read(one) for one in entries(answer, data.draw(pieces(answer)), events=events)]
    candidates = [one.candidates[0] for one in found if one.candidates]
    whole = read(DIALECT.whole(SHOWN, HEAD, [answer]))
    assert whole.candidates is not None
    assert echo([one.content for one in candidates]) == canonical(answer)
    assert [one.finish_reason for one in candidates[:-1]] == [None] * (len(candidates) - 1)
    assert candidates[-1].finish_reason == whole.candidates[0].finish_reason
    assert found[-1].usage_metadata == whole.usage_metadata
    results = [one.logprobs_result for one in candidates if one.logprobs_result]
    told = [token.token_id for one in results for token in one.chosen_candidates or ()]
    assert told == [one.token_id for one in answer.logprobs or ()]
    assert {one.response_id for one in found} == {"0123abcd"}


@given(st.data(), answers())
def test_thoughts_are_shown_if_they_are_wanted(data: st.DataObject, answer: Answer) -> None:
    whole = read(DIALECT.whole(HIDDEN, HEAD, [answer]))
    streamed = [read(one) for one in entries(answer, data.draw(pieces(answer)), events=True, shown=HIDDEN)]
    for found in ([whole], streamed):
        contents = [one.candidates[0].content for one in found if one.candidates]
        assert echo(contents) == without_reasoning(canonical(answer))


def test_what_google_lacks_is_beside_the_candidate() -> None:
    extra = {"routed_experts": msgspec.Raw(b"[1]")}
    answer = Answer(generation_id="g", weight_version="7", extra=extra, ids=[1, 2], prompt_ids=msgspec.Raw(b"[3]"))
    body = DIALECT.whole(ASKED, HEAD, [answer])
    (candidate,) = json.loads(body)["candidates"]
    assert candidate["content"] == {"parts": [{"text": ""}], "role": "model"}
    assert {key: candidate[key] for key in ("generation_id", "weight_version", "meta_info")} == {
        "generation_id": "g",
        "weight_version": "7",
        "meta_info": {"routed_experts": [1]},
    }
    assert (candidate["prompt_token_ids"], candidate["token_ids"]) == ([3], [1, 2])
    assert read(body).candidates


@pytest.mark.parametrize("events", [False, True])
def test_samples_that_failed_beside_others(events: bool) -> None:
    """Their partial replies do not look complete, and count no tokens."""
    asked = msgspec.structs.replace(ASKED, samples=2)
    stream = Gemini("tiny", STREAM, events=events).stream(asked, HEAD)
    good = Answer(generation_id="a", content="yes", prompt_tokens=5, completion_tokens=2)
    body = b"".join(
        [
            stream.begin(5),
            stream.piece(1, Text("no")),
            stream.piece(0, Text("yes")),
            stream.finish(0, good),
            stream.comment("x-radix-saved", "no"),
            stream.finish(1, Answer(generation_id="b", finish="abort")),
            stream.end([good]),
        ]
    )
    if events:
        assert b": x-radix-saved: no\n\n" in body
        last = json.loads(body.decode().split("\n\n")[-2].removeprefix("data: "))
    else:
        last = json.loads(body)[-1]
        assert last["x-radix-saved"] == "no"
    assert [(one["index"], one["finishReason"]) for one in last["candidates"]] == [(0, "STOP"), (1, "OTHER")]
    assert last["usageMetadata"] == {"promptTokenCount": 5, "candidatesTokenCount": 2, "totalTokenCount": 7}
    assert read(last)


@pytest.mark.parametrize("begun", [False, True])
def test_a_list_that_fails_is_whole_json(begun: bool) -> None:
    stream = Gemini("tiny", STREAM, events=False).stream(ASKED, HEAD)
    body = stream.begin(5) + (stream.piece(0, Text("a")) if begun else b"") + stream.failed(NoWorkerError("gone"))
    found = json.loads(body)
    assert len(found) == 1 + begun
    assert (found[-1]["error"]["code"], found[-1]["error"]["status"]) == (503, "UNAVAILABLE")


@pytest.mark.parametrize(
    ("choice", "answer", "reason"),
    [
        ("required", Answer(generation_id="g", content="no"), "MALFORMED_FUNCTION_CALL"),
        ("look", Answer(generation_id="g", content="no"), "MALFORMED_FUNCTION_CALL"),
        ("auto", Answer(generation_id="g", content="no"), "STOP"),
        ("none", Answer(generation_id="g", content="no"), "STOP"),
        ("required", Answer(generation_id="g", finish="length"), "MAX_TOKENS"),
        ("required", Answer(generation_id="g", finish="tool_calls", tool_calls=(ToolCall("c", "look", "{}"),)), "STOP"),
        ("auto", Answer(generation_id="g", finish="abort"), "OTHER"),
    ],
)
def test_reasons(choice: str, answer: Answer, reason: str) -> None:
    asked = msgspec.structs.replace(ASKED, call_choice=choice)
    (candidate,) = json.loads(DIALECT.whole(asked, HEAD, [answer]))["candidates"]
    assert candidate["finishReason"] == reason
    assert ("finishMessage" in candidate) == (reason == "OTHER")


def test_long_logprobs_are_one_list() -> None:
    """They are written piece by piece, and read as one."""
    tokens = [TokenLogprob(at, b"a", -float(at), [(at, b"b", -1.0)]) for at in range(1001)]
    found = read(DIALECT.whole(SHOWN, HEAD, [Answer(generation_id="g", logprobs=tokens)]))
    assert found.candidates is not None
    result = found.candidates[0].logprobs_result
    assert result is not None
    assert [one.token_id for one in result.chosen_candidates or ()] == [*range(1001)]
    assert [(one.candidates or [])[0].token_id for one in result.top_candidates or ()] == [*range(1001)]
    assert found.candidates[0].avg_logprobs == -500


def test_errors() -> None:
    found = json.loads(DIALECT.error(ContextLengthError(100, 120)))["error"]
    assert found["message"] == "The input token count (120) exceeds the maximum number of tokens allowed (100)."
    assert (found["code"], found["status"]) == (400, "INVALID_ARGUMENT")
    assert found["details"][0]["reason"] == "context_length_exceeded"
    found = json.loads(DIALECT.error(ContextLengthError(100, 90, 20)))["error"]
    assert "(90 in the messages, 20 in the completion)" in found["message"]
    found = json.loads(DIALECT.error(BadRequestError("no", param="a", code="media_url")))["error"]
    assert found["details"][0]["reason"] == "media_url"
    assert found["details"][0]["metadata"] == {"param": "a"}
    found = json.loads(DIALECT.error(BadRequestError("no", tried=["http://a: gone", 'b: "no"'], count=2, sure=True)))[
        "error"
    ]
    assert {name: json.loads(value) for name, value in found["details"][0]["metadata"].items()} == {
        "tried": ["http://a: gone", 'b: "no"'],
        "count": 2,
        "sure": True,
    }


def test_hidden_thoughts_leave_their_tokens() -> None:
    """A piece that is not shown still tells the logprobs of its tokens."""
    stream = Gemini("tiny", STREAM, events=True).stream(msgspec.structs.replace(HIDDEN, logprobs=True), HEAD)
    told = stream.piece(0, Reasoning("h"), [TokenLogprob(1, b"h", -1.0)])
    (entry,) = [json.loads(told.removeprefix(b"data: "))]
    assert entry["candidates"][0]["content"]["parts"] == [{"text": ""}]
    assert entry["candidates"][0]["logprobsResult"]["chosenCandidates"][0]["tokenId"] == 1
    assert stream.piece(0, Reasoning("h")) == b""
