"""Replies in the form of OpenAI's older API, as its own library takes them."""

from __future__ import annotations

import json
import math
from itertools import accumulate, pairwise
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion

from middleware_hub.chat.answer import Answer, ReplyHead, TokenLogprob
from middleware_hub.dialects.completions import DONE, Choices, CompletionRequest, LegacyLogprobs

HEAD = ReplyHead("cmpl-0123abcd", 1_700_000_000, "tiny")
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
EOS = 7
TOKENS = [TokenLogprob(1, b"hey", -0.5), TokenLogprob(EOS, b"<e>", -1.0)]


def request(**fields: Any) -> CompletionRequest:
    return CompletionRequest(**{"prompts": ["a"], "sampling": {}, **fields})


def choices(fronts: list[str] | None = None, **fields: Any) -> Choices:
    made = request(**fields)
    return Choices(HEAD, made, fronts or [""] * len(made.prompts), frozenset([EOS]))


def whole(made: Choices, *answers: Answer) -> dict[str, Any]:
    reply = made.whole(answers)
    Completion.model_validate_json(reply)
    return dict(json.loads(reply))


def event(data: bytes) -> dict[str, Any]:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    found: dict[str, Any] = json.loads(data[6:])
    # Their class has no null for it, and their server sends one in every event but the last.
    said = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in found["choices"]]
    Completion.model_validate({**found, "choices": said})
    return found


def test_a_whole_reply() -> None:
    assert whole(choices(), ANSWER) == {
        "id": "cmpl-0123abcd",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "Four.",
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


def test_every_prompt_counts_once_and_every_sample_by_itself() -> None:
    answers = [
        msgspec.structs.replace(ANSWER, prompt_tokens=prompt, cached_tokens=cached, content=text)
        for prompt, cached, text in [(10, 8, "a"), (10, 10, "b"), (5, 0, "c"), (5, 5, "d")]
    ]
    reply = whole(choices(prompts=["one", "two"], samples=2), *answers)
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
        (3, "d"),
    ]
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (15, 12, 27)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 8


def test_a_stream() -> None:
    made = choices(stream=True, stream_usage=True)
    first, last = event(made.piece(0, "Fo")), event(made.piece(0, "ur.", None, ANSWER))
    assert first["choices"] == [{"index": 0, "text": "Fo", "logprobs": None, "finish_reason": None}]
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("ur.", "stop")
    assert last["choices"][0]["meta_info"]["generation_id"] == "g1"
    usage, done = made.end([ANSWER]).removesuffix(DONE), made.end([ANSWER])[-len(DONE) :]
    assert event(usage)["usage"]["total_tokens"] == 13
    assert event(usage)["choices"] == []
    assert done == DONE
    assert choices(stream=True).end([ANSWER]) == DONE


def test_an_echo_comes_once() -> None:
    fronts = ["one ", "two "]
    reply = whole(choices(fronts, prompts=fronts, samples=2, echo=True), ANSWER, ANSWER, ANSWER, ANSWER)
    assert [choice["text"] for choice in reply["choices"]] == ["one Four."] * 2 + ["two Four."] * 2
    made = choices(["one "], echo=True, stream=True)
    texts = [event(made.piece(0, text))["choices"][0]["text"] for text in ("Fo", "ur.")]
    assert texts == ["one Fo", "ur."]


def test_tokens_are_named_by_their_ids_where_a_client_asks() -> None:
    tokens = [TokenLogprob(5, b" a", -0.5, [(5, b" a", -0.5), (6, b" a", -1.5)]), TokenLogprob(EOS, b"<e>", -1.0)]
    made = choices(logprobs=2, tokens_as_ids=True)
    (choice,) = whole(made, msgspec.structs.replace(ANSWER, logprobs=tokens))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["token_id:5", "token_id:7"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"token_id:5": -0.5, "token_id:6": -1.5}, {"token_id:7": -1.0}],
        "text_offset": [0, 2],
    }


def test_logprobs_are_four_lists() -> None:
    top = [(1, b"hey", -0.5), (2, b"hi", -1.5), (3, b"hi", -2.5)]
    told = [msgspec.structs.replace(TOKENS[0], top=top), TOKENS[1]]
    answer = msgspec.structs.replace(ANSWER, content="hey", logprobs=told)
    assert whole(choices(logprobs=2), answer)["choices"][0]["logprobs"] == {
        "tokens": ["hey", "<e>"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"hey": -0.5, "hi": -1.5}, {"<e>": -1.0}],
        "text_offset": [0, 3],
    }
    assert whole(choices(logprobs=0), answer)["choices"][0]["logprobs"]["top_logprobs"] is None


def test_a_token_is_its_bytes_where_it_is_no_text() -> None:
    pieces = [b"hey", b" ", b"\xf0\x9f", b"\x98\x80", b"!"]
    lists = LegacyLogprobs(0, frozenset(), top=False).lists([TokenLogprob(1, piece, -1.0) for piece in pieces])
    assert lists["tokens"] == ["hey", " ", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "!"]
    assert lists["text_offset"] == [0, 3, 4, 4, 5]


def test_json_has_no_infinity() -> None:
    tokens = [TokenLogprob(1, b"a", -math.inf, [(2, b"b", -math.inf)])]
    lists = LegacyLogprobs(0, frozenset(), top=True).lists(tokens)
    assert lists["token_logprobs"] == [-9999.0]
    assert lists["top_logprobs"] == [{"a": -9999.0, "b": -9999.0}]


@st.composite
def cut(draw: st.DrawFn) -> tuple[str, list[TokenLogprob]]:
    """A text, and tokens that are pieces of its bytes, some of them with hidden ones between."""
    text = draw(st.text(st.sampled_from("ab é😀\ufffd"), max_size=10))
    raw = text.encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    pieces = [raw[begin:end] for begin, end in pairwise([0, *cuts, len(raw)])]
    hidden = draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    tokens = []
    for piece, follows in zip(pieces, hidden, strict=True):
        tokens.append(TokenLogprob(1, piece, -0.5))
        tokens += [TokenLogprob(EOS, b"<e>", -1.0)] * follows
    return text, tokens


@given(drawn=cut(), start=st.integers(0, 5), data=st.data())
def test_offsets_are_characters_of_the_text(
    drawn: tuple[str, list[TokenLogprob]], start: int, data: st.DataObject
) -> None:
    """Oracle: the characters that lie wholly in front of a token, counted; however many tokens come at a time."""
    text, tokens = drawn
    ends = list(accumulate(len(character.encode()) for character in text))
    widths = [0 if token.token_id == EOS else len(token.spelled) for token in tokens]
    wanted = [start + sum(end <= sum(widths[:number]) for end in ends) for number in range(len(tokens))]
    made = LegacyLogprobs(start, frozenset([EOS]), top=False)
    at = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=3)))
    found = [made.lists(tokens[begin:end]) for begin, end in pairwise([0, *at, len(tokens)])]
    assert [offset for lists in found for offset in lists["text_offset"]] == wanted
