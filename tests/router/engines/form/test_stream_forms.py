"""Streams whose events change their form: only the numbers of an event show its form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.engines.form.stream import StreamedReply


def event(text: str, ids: list[int], completed: int, logprobs: list[float] | None, finish: Any = None) -> bytes:
    meta: dict[str, Any] = {
        "id": "x",
        "finish_reason": finish,
        "prompt_tokens": 1,
        "weight_version": "1",
        "completion_tokens": completed,
    }
    if logprobs is not None:
        meta["output_token_logprobs"] = [[value, number, None] for value, number in zip(logprobs, ids, strict=True)]
    # SGLang prints it without white space.
    return json.dumps({"text": text, "output_ids": ids, "meta_info": meta}, separators=(",", ":")).encode()


@pytest.mark.parametrize("logprobs", [True, False], ids=["logprobs", "no logprobs"])
def test_a_delta_that_starts_like_the_whole_text_is_a_delta(logprobs: bool) -> None:
    """`ab`, then `abc`, which starts like a cumulative event; but five tokens are complete, and these are three."""
    reply = StreamedReply()
    values = [-1.0, -2.0, -3.0]
    given = values if logprobs else None
    reply.feed(event("a", [1], 1, given[:1] if given else None))
    reply.feed(event("ab", [1, 2], 2, given[:2] if given else None))
    reply.feed(event("abc", [1, 2, 3], 5, given, {"type": "length", "length": 5}))
    found = reply.reply()
    assert found is not None
    assert found.ids == [1, 2, 1, 2, 3]
    if logprobs:
        assert found.logprobs == [-1.0, -2.0, -1.0, -2.0, -3.0]
    assert found.fault(1, logprobs_asked=logprobs) is None


@pytest.mark.parametrize("logprobs", [True, False], ids=["logprobs", "no logprobs"])
def test_a_cumulative_event_adds_only_its_new_part(logprobs: bool) -> None:
    """The same bytes with three complete tokens are the whole reply."""
    reply = StreamedReply()
    for count, text in ((1, "a"), (2, "ab"), (3, "abc")):
        given = [-float(number) for number in range(1, count + 1)] if logprobs else None
        finish = {"type": "length", "length": 3} if count == 3 else None
        reply.feed(event(text, list(range(1, count + 1)), count, given, finish))
    found = reply.reply()
    assert found is not None
    assert (found.ids, found.text) == ([1, 2, 3], "abc")
    assert found.logprobs == ([-1.0, -2.0, -3.0] if logprobs else None)
    assert found.fault(1, logprobs_asked=logprobs) is None
