"""The gate in front of a stream, by itself: however its bytes are cut, the client gets all of them, in order."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from router.generate.abort_retries import Gate

START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}


def event(number: int, finish: Any = None) -> bytes:
    fields = {"text": "x" * number, "meta_info": {"id": "worker's", "finish_reason": finish}}
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


STREAM = event(1) + event(2) + b": a comment\n\n" + event(3, {"type": "stop"}) + b"data: [DONE]\n\n"
ABORTED = event(1, {"type": "abort"}) + b"data: [DONE]\n\n"


def at_once(sending: Coroutine[Any, Any, None]) -> None:
    """Nothing here waits, so no event loop is needed."""
    with pytest.raises(StopIteration):
        sending.send(None)


def passed(stream: bytes, cuts: list[int], *, name: str | None, again: bool) -> tuple[Gate, bytes, list[Message]]:
    """What comes through, of a stream that is cut at these places."""
    out: list[Message] = []

    async def send(message: Message) -> None:
        out.append(message)

    gate = Gate(send, name, again=again)
    at_once(gate.send(START))
    places = [0, *sorted({cut % len(stream) for cut in cuts}), len(stream)]
    for begin, end in pairwise(places):
        at_once(gate.send({"type": "http.response.body", "body": stream[begin:end], "more_body": True}))
    at_once(gate.send({"type": "http.response.body", "body": b"", "more_body": False}))
    return gate, b"".join(message.get("body", b"") for message in out), out


CUTS = st.lists(st.integers(0, 10_000), max_size=8)


@given(CUTS, st.booleans())
def test_a_stream_goes_through_byte_for_byte(cuts: list[int], again: bool) -> None:
    gate, body, out = passed(STREAM, cuts, name=None, again=again)
    assert gate.opened
    assert body == STREAM
    assert [message["type"] for message in out[:2]] == ["http.response.start", "http.response.body"]
    assert out[-1]["more_body"] is False


@given(CUTS, st.booleans())
def test_every_event_is_given_the_clients_name(cuts: list[int], again: bool) -> None:
    _, body, _ = passed(STREAM, cuts, name="mine", again=again)
    told = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    assert [one["meta_info"]["id"] for one in told] == ["mine"] * 3
    assert [one["text"] for one in told] == ["x", "xx", "xxx"]
    assert body.endswith(b"data: [DONE]\n\n")
    assert b": a comment\n\n" in body


@pytest.mark.parametrize("name", [None, "mine"])
@given(cuts=CUTS)
def test_a_stream_that_says_only_aborted_is_held_back(name: str | None, cuts: list[int]) -> None:
    gate, body, out = passed(ABORTED, cuts, name=name, again=False)
    assert (gate.opened, gate.refused, body, out) == (False, False, b"", [])
    held = b"".join(message.get("body", b"") for message in gate.held)
    told = json.loads(held[6 : held.index(b"\n\n")])
    assert (told["meta_info"]["id"], told["text"]) == (name or "worker's", "x")
    assert held.endswith(b"\n\ndata: [DONE]\n\n")
