"""Which replies were aborted, found without reading the numbers in them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.form.outcome import may_be_aborted, was_aborted
from tests.router.engines.form.json_values import compact

ENTRIES = st.lists(st.tuples(st.floats(-30, 0), st.integers(0, 9), st.sampled_from([None, "a", '"', "[["])), max_size=3)
LOGPROBS = st.dictionaries(
    st.sampled_from(["input_token_logprobs", "output_token_logprobs", "output_top_logprobs"]), ENTRIES
)
FINISH = st.sampled_from(
    [
        None,
        {"type": "stop", "matched": "abort"},
        {"type": "abort", "message": "[[1]]}"},
        {"message": '"[[', "type": "abort"},
    ]
)
REPLIES = st.tuples(st.sampled_from(["", '"finish_reason"', "[[", '"abort"']), LOGPROBS, FINISH, LOGPROBS)


def reply_of(text: str, before: dict[str, Any], finish: Any, behind: dict[str, Any]) -> dict[str, Any]:
    return {"text": text, "output_ids": [7], "meta_info": {**before, "finish_reason": finish, **behind}}


@given(st.lists(REPLIES, min_size=1, max_size=3), st.booleans())
def test_no_aborted_reply_is_missed(parts: list[Any], spaced: bool) -> None:
    replies = [compact(reply_of(*part)) for part in parts]
    if spaced:
        replies = [reply.replace(b":", b" : ").replace(b"[[", b"[ [") for reply in replies]
    for body in (*replies, b"[%b]" % b",".join(replies)):
        if any(was_aborted(reply) for reply in replies if reply in body):
            assert may_be_aborted(body)


@pytest.mark.parametrize(("status", "aborted"), [(None, True), (400, False), (503, False)])
def test_a_reply_that_stands_for_an_error_was_not_aborted(status: int | None, aborted: bool) -> None:
    """To send it again would give the same error."""
    assert was_aborted(compact(reply_of("", {}, {"type": "abort", "status_code": status}, {}))) is aborted


def test_a_text_about_an_abort_is_not_looked_at_twice() -> None:
    assert not may_be_aborted(
        compact(reply_of('an "abort"', {}, {"type": "stop"}, {"output_token_logprobs": [[-1.0, 7, None]]}))
    )
    assert not may_be_aborted(b'{"error":{"message":"x"}}')
