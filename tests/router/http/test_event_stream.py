"""Which replies are streams."""

from __future__ import annotations

import pytest

from router.http.upstream import is_event_stream


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([(b"content-type", b"text/event-stream; charset=utf-8")], True),
        ([(b"Content-Type", b"text/event-stream")], True),
        ([], False),
        ([(b"content-type", b"application/json"), (b"x", b"text/event-stream")], False),
    ],
)
def test_a_stream_is_known_by_its_content_type(headers: list[tuple[bytes, bytes]], expected: bool) -> None:
    assert is_event_stream(headers) is expected
