"""Headers of a request."""

from __future__ import annotations

from typing import Any

import pytest

from router.errors import BadRequestError
from router.http import headers
from router.http.headers import first_values, has_body, header


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


def test_the_first_of_several_headers_counts() -> None:
    assert first_values([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]) == {b"a": b"1", b"b": b"2"}


def test_a_misspelt_header_of_ours_is_refused() -> None:
    others = [(b"x-radix-reasons", b""), (b"x-radix-recorded", b"exact"), (b"x-radix-namespace", b"n")]
    assert first_values(others)[b"x-radix-namespace"] == b"n"
    with pytest.raises(BadRequestError, match="x-radix-namespaces: did you mean x-radix-namespace"):
        first_values([*others, (b"x-radix-namespaces", b"n")])


def test_thousands_of_names_like_ours_are_not_all_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a tenth of a millisecond, and a head has room for six thousand."""
    compared = []

    def compare(end: str, *rest: Any) -> list[str]:
        compared.append(end)
        return []

    monkeypatch.setattr(headers, "get_close_matches", compare)
    given = [(b"x-radix-%d" % number, b"") for number in range(5000)]
    assert len(first_values(given)) == 5000
    assert 0 < len(compared) < 100
