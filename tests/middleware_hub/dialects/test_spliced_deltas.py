"""Deltas of streams are put together around their text; they are what encoding each as a whole would give."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from middleware_hub.chat.dialect import Dialect
from middleware_hub.chat.messages import Piece, Reasoning, Text, ToolCall
from middleware_hub.dialects.anthropic import Anthropic
from middleware_hub.dialects.events import TEXT
from middleware_hub.dialects.openai import OpenAI
from middleware_hub.dialects.responses import Responses
from tests.middleware_hub.dialects.drawn import ASKED, HEAD

DIALECTS: dict[str, Dialect] = {"openai": OpenAI(), "anthropic": Anthropic(), "responses": Responses()}
TEXTS = st.text(min_size=1, max_size=20) | st.just(TEXT)
PIECES = st.lists(
    TEXTS.map(Text) | TEXTS.map(Reasoning) | st.just(ToolCall("call_1", "add", '{"a": 1}')), min_size=1, max_size=8
)


def events(streamed: bytes) -> list[dict[str, Any]]:
    """Return the payloads of some events."""
    lines = [line for line in streamed.split(b"\n") if line.startswith(b"data: ")]
    return [msgspec.json.decode(line[6:]) for line in lines]


def delta_of(dialect: str, event: dict[str, Any]) -> tuple[str, str] | None:
    """Return the kind and the text of an event that brings text."""
    if dialect == "openai":
        delta = event["choices"][0]["delta"]
        if delta.get("content"):
            return "text", delta["content"]
        return ("reasoning", delta["reasoning_content"]) if delta["reasoning_content"] else None
    if dialect == "anthropic":
        delta = event.get("delta", {})
        kinds = {"text_delta": ("text", "text"), "thinking_delta": ("reasoning", "thinking")}
        kind, field = kinds.get(delta.get("type"), ("", ""))
        return (kind, delta[field]) if kind else None
    kind = {"response.output_text.delta": "text", "response.reasoning_text.delta": "reasoning"}.get(event["type"], "")
    return (kind, event["delta"]) if kind else None


@pytest.mark.parametrize("name", DIALECTS)
@given(pieces=PIECES, model=TEXTS)
@example(pieces=[Text(TEXT), Reasoning(TEXT), Text('"' + TEXT + '"')], model=TEXT)
def test_every_text_arrives_as_it_is_and_events_stay_in_order(name: str, pieces: list[Piece], model: str) -> None:
    """Whatever the model is called, and whatever the texts are."""
    stream = DIALECTS[name].stream(ASKED, msgspec.structs.replace(HEAD, model=model))
    found = events(stream.begin(3))
    for piece in pieces:
        found += events(stream.piece(0, piece))
    said = [delta for event in found if (delta := delta_of(name, event)) is not None]
    kinds = {Text: "text", Reasoning: "reasoning"}
    assert said == [(kinds[type(piece)], piece.text) for piece in pieces if not isinstance(piece, ToolCall)]
    if name == "responses":
        assert [event["sequence_number"] for event in found] == [*range(len(found))]
    if name == "anthropic":
        opened = [event["index"] for event in found if event["type"] == "content_block_start"]
        assert opened == [*range(len(opened))]
        at = -1
        for event in found:
            at = event["index"] if event["type"] == "content_block_start" else at
            assert event.get("index", at) == at
    if name == "openai":
        assert {(event["model"], event["choices"][0]["index"]) for event in found} == {(model, 0)}


def test_choices_of_a_chat_stay_apart() -> None:
    stream = OpenAI().stream(msgspec.structs.replace(ASKED, samples=3), HEAD)
    pieces = [(2, Text("a")), (0, Text("b")), (2, Reasoning("c")), (1, Text("d")), (0, Text("e"))]
    found = [events(stream.piece(index, piece))[0]["choices"][0]["index"] for index, piece in pieces]
    assert found == [index for index, _ in pieces]
