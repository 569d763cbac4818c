"""The starts of replies, which a policy learns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from router.engines.events import EventSplitter, event_data
from router.engines.form.beginnings import ReplyBeginnings

Heard = list[str | list[int]]


def listener() -> tuple[Heard, Any]:
    heard: Heard = []

    def told(one: str | Sequence[int]) -> None:
        heard.append(one if isinstance(one, str) else list(one))

    return heard, told


class Stream:
    """A stream on its way to a client."""

    def __init__(self, watcher: ReplyBeginnings) -> None:
        self._watcher = watcher
        self._events = EventSplitter()

    def feed(self, chunk: bytes) -> None:
        for event in self._events.feed(chunk):
            if (data := event_data(event)) is not None:
                self._watcher.event(data)


def watched(told: Any, *, ids: bool, enough: int) -> Stream:
    return Stream(ReplyBeginnings(told, ids=ids, enough=enough))


def whole(body: bytes, told: Any, *, ids: bool) -> None:
    ReplyBeginnings(told, ids=ids, enough=100).whole(body)


def reply(text: str, ids: list[int], *, index: int | None = None, over: bool = False) -> dict[str, Any]:
    meta = {"id": "x", "completion_tokens": len(ids), "finish_reason": {"type": "stop"} if over else None}
    found: dict[str, Any] = {"text": text, "output_ids": ids, "meta_info": meta}
    return found if index is None else {**found, "index": index}


@pytest.mark.parametrize(("ids", "expected"), [(False, ["hello"]), (True, [[1, 2]])])
def test_a_reply_in_one_piece(ids: bool, expected: Heard) -> None:
    heard, told = listener()
    whole(json.dumps(reply("hello", [1, 2])).encode(), told, ids=ids)
    assert heard == expected


def test_several_samples_of_one_prompt() -> None:
    heard, told = listener()
    whole(json.dumps([reply("one", [1]), reply("two", [2])]).encode(), told, ids=False)
    assert heard == ["one", "two"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"text": 5}', b'{"embedding": [1.0]}', b"[" * 100_000, b'{"text": "\xff"}']
)
def test_a_body_that_is_no_reply_is_ignored(body: bytes) -> None:
    heard, told = listener()
    whole(body, told, ids=False)
    whole(body, told, ids=True)
    assert heard == []


def events(form: str, words: list[str], index: int | None = None) -> list[bytes]:
    found = []
    for end in range(1, len(words) + 1):
        one = reply("".join(words[:end]), list(range(end)), index=index, over=end == len(words))
        if form == "incremental":
            one |= {"text": words[end - 1], "output_ids": [end - 1]}
        found.append(b"data: " + json.dumps(one).encode() + b"\n\n")
    return found


@pytest.mark.parametrize("form", ["cumulative", "incremental"])
@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("ids", [False, True])
def test_a_stream_is_reported_once_and_before_its_last_event_goes_on(form: str, size: int, ids: bool) -> None:
    """With any chunking."""
    heard, told = listener()
    words = [f" word{number}" for number in range(5)]
    stream = watched(told, ids=ids, enough=100)
    data = b"".join(events(form, words))
    for start in range(0, len(data), size):
        stream.feed(data[start : start + size])
    assert heard == ([[0, 1, 2, 3, 4]] if ids else ["".join(words)])
    stream.feed(b"data: [DONE]\n\n")
    assert len(heard) == 1


def test_the_start_of_a_long_stream_is_enough() -> None:
    heard, told = listener()
    stream = watched(told, ids=True, enough=3)
    for event in events("cumulative", ["a"] * 10):
        stream.feed(event)
    assert heard == [[0, 1, 2]]


def test_mixed_events_of_several_samples() -> None:
    heard, told = listener()
    stream = watched(told, ids=False, enough=100)
    for pair in zip(events("cumulative", ["a", "b"], 0), events("cumulative", ["c", "d"], 1), strict=True):
        for event in pair:
            stream.feed(event)
    assert heard == ["ab", "cd"]


def test_an_unreadable_event_is_ignored() -> None:
    heard, told = listener()
    stream = watched(told, ids=False, enough=100)
    stream.feed(b'data: {"text": 5}\n\ndata: {"error": "no"}\n\n: comment\n\ndata: [DONE]\n\n')
    assert heard == []
