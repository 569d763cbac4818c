"""Headers of a request."""

from __future__ import annotations

from typing import Any

import pytest

from router.http.headers import has_body, header


def scope_of(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "headers": list(headers)}


def test_header() -> None:
    scope = scope_of((b"a", b"1"), (b"a", b"2"))
    assert header(scope, b"a") == "1"
    assert header(scope, b"b") is None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], False),
        ([(b"content-length", b"0")], False),
        ([(b"content-length", b"10")], True),
        ([(b"transfer-encoding", b"chunked")], True),
    ],
)
def test_has_body(headers: list[tuple[bytes, bytes]], expected: bool) -> None:
    assert has_body(scope_of(*headers)) is expected
