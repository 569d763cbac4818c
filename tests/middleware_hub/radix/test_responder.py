"""What is said of streams from which nothing is recorded."""

from __future__ import annotations

from typing import Any

import pytest

from middleware_hub.radix.responder import _ExpectedReply


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "no; no reply: a stream without events"),
        ([b"[DONE]"], "no; no reply: a stream without events"),
        ([b'{"text": "half a rep', b"[DONE]"], "no; unreadable reply: an event that cannot be read"),
        ([b'{"detail": "hm"}', b"[DONE]"], "no; unreadable reply: an event that cannot be read"),
        ([b'{"error": {"message": "busy"}}', b"[DONE]"], 'no; worker error: {"message": "busy"}'),
    ],
)
def test_the_verdict_on_a_stream_without_a_reply_says_why(events: list[bytes], said: str) -> None:
    nothing: Any = None
    expected = _ExpectedReply(nothing, nothing, nothing, None, frozenset(), trajectory=False)
    for event in events:
        assert expected.event(event) == event
    expected.close()
    assert expected.verdict is not None
    assert expected.verdict.header.startswith(said)
