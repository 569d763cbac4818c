"""Answers, and what they are in the one form that messages have inside; drawn at random, and written down naively."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from middleware_hub.chat.answer import Answer, ReplyHead, TokenLogprob
from middleware_hub.chat.dialect import DialectStream
from middleware_hub.chat.messages import ChatRequest, Piece, Reasoning, Text, ToolCall

HEAD = ReplyHead("0123abcd", 1_700_000_000, "tiny")
ASKED = ChatRequest(messages=[{"role": "user", "content": "Hi"}])

TEXTS = st.text(max_size=12) | st.sampled_from(["", " ", "\n", "<think>", "data: [DONE]", "a\u2028b", "\x00", "😀é"])
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


@st.composite
def printed(draw: st.DrawFn) -> str:
    """The JSON text of an object, as models write it: with any white space, with and without escapes."""
    indent, ascii_only = draw(st.sampled_from([None, 0, 2])), draw(st.booleans())
    separators = draw(st.sampled_from([None, (",", ":"), (" , ", " : ")]))
    return json.dumps(draw(OBJECTS), indent=indent, ensure_ascii=ascii_only, separators=separators)


CALLS = st.builds(ToolCall, id=st.from_regex(r"call_[0-9a-f]{4}", fullmatch=True), name=NAMES, arguments=printed())
TOKENS = st.builds(
    TokenLogprob,
    token_id=st.integers(0, 1000),
    spelled=st.binary(max_size=4),
    logprob=st.floats(max_value=0, allow_nan=False),
    top=st.lists(
        st.tuples(st.integers(0, 1000), st.binary(max_size=4), st.floats(max_value=0, allow_nan=False)), max_size=2
    ),
)


@st.composite
def answers(draw: st.DrawFn, *, logprobs: bool = False) -> Answer:
    """One answer; its finish fits what is in it."""
    calls = tuple(draw(st.lists(CALLS, max_size=3, unique_by=lambda call: call.id)))
    prompt = draw(st.integers(0, 10_000))
    return Answer(
        generation_id=draw(st.uuids()).hex,
        content=draw(TEXTS),
        reasoning=draw(TEXTS),
        tool_calls=calls,
        finish="tool_calls" if calls else draw(st.sampled_from(["stop", "length"])),
        prompt_tokens=prompt,
        cached_tokens=draw(st.integers(0, prompt)),
        completion_tokens=draw(st.integers(0, 10_000)),
        reasoning_tokens=draw(st.integers(0, 100)),
        weight_version=draw(st.none() | st.just("7")),
        logprobs=draw(st.lists(TOKENS, max_size=5)) if logprobs else None,
    )


@st.composite
def pieces(draw: st.DrawFn, answer: Answer) -> list[Piece]:
    """An answer in pieces, thoughts first, then texts and calls in any order, each kind in its own."""
    thoughts = [Reasoning(text) for text in draw(cut(answer.reasoning))]
    texts: list[Piece] = [Text(text) for text in draw(cut(answer.content))]
    calls: list[Piece] = list(answer.tool_calls)
    mixed: list[Piece] = []
    while texts or calls:
        mixed.append((texts if texts and (not calls or draw(st.booleans())) else calls).pop(0))
    return [*thoughts, *mixed]


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    """A text in pieces, some of them empty."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[low:high] for low, high in zip([0, *places], [*places, len(text)], strict=True)]


def joined(parts: list[Piece]) -> list[Piece]:
    """Pieces without empty ones, each text whole."""
    found: list[Piece] = []
    for piece in parts:
        last = found[-1] if found else None
        if isinstance(piece, ToolCall):
            found.append(piece)
        elif last is not None and type(last) is type(piece):
            found[-1] = type(piece)(last.text + piece.text)
        elif piece.text:
            found.append(piece)
    return found


def streamed(stream: DialectStream, answered: list[tuple[Answer, list[Piece]]]) -> list[bytes]:
    """All events of a stream, choice by choice."""
    events = [stream.begin(answered[0][0].prompt_tokens if answered else 0)]
    for index, (answer, parts) in enumerate(answered):
        events += [stream.piece(index, piece) for piece in parts]
        events.append(stream.finish(index, answer))
    events.append(stream.end([answer for answer, _ in answered]))
    return [event for event in events if event]


def canonical(answer: Answer) -> dict[str, Any]:
    """What an answer has to be when it comes back."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.tool_calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in answer.tool_calls
        ]
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return message


def without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """As many clients send it back."""
    return {key: value for key, value in message.items() if key != "reasoning_content"}
