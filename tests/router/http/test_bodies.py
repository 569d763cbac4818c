"""Bodies of requests are read within limits, and sent onward."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterable
from typing import Any

import pytest
import zstandard
from starlette.types import Message, Receive

from router.errors import BadRequestError, BodyTooLargeError, ClientDisconnectedError, UnsupportedEncodingError
from router.http.bodies import Replay, read_body, with_body


def scope_of(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "headers": list(headers)}


def receiving(messages: Iterable[Message]) -> Receive:
    iterator = iter(messages)

    async def receive() -> Message:
        return next(iterator)

    return receive


def piece(body: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def test_body_in_pieces() -> None:
    receive = receiving([piece(b"a", True), {"type": "http.request", "more_body": True}, piece(b"bc")])
    assert asyncio.run(read_body(scope_of(), receive, 3)) == b"abc"


@pytest.mark.parametrize(
    ("headers", "messages", "error"),
    [
        ([(b"content-length", b"4")], [], BodyTooLargeError),  # nothing is read
        ([], [piece(b"ab", True), piece(b"cd", True)], BodyTooLargeError),  # nor is the rest
        ([(b"content-encoding", b"br")], [], UnsupportedEncodingError),
        ([(b"content-encoding", b"gzip, gzip")], [], UnsupportedEncodingError),
        ([(b"content-encoding", b"gzip"), (b"content-encoding", b"gzip")], [], UnsupportedEncodingError),
        ([(b"content-encoding", b"gzip")], [piece(b"a")], BadRequestError),
        ([], [piece(b"ab", True), {"type": "http.disconnect"}], ClientDisconnectedError),
    ],
)
def test_body_that_cannot_be_had(headers: Any, messages: list[Message], error: type[Exception]) -> None:
    with pytest.raises(error):
        asyncio.run(read_body(scope_of(*headers), receiving(messages), 3))


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "X-Gzip"])
def test_a_packed_body_is_unpacked_and_no_longer_said_to_be_packed(encoding: str) -> None:
    packed = zstandard.compress(b"abc") if encoding == "zstd" else gzip.compress(b"abc")
    scope = scope_of((b"content-encoding", encoding.encode()), (b"x", b"1"))
    assert asyncio.run(read_body(scope, receiving([piece(packed[:5], True), piece(packed[5:])]), 100)) == b"abc"
    assert scope["headers"] == [(b"x", b"1")]


def test_identity_is_no_encoding() -> None:
    assert asyncio.run(read_body(scope_of((b"content-encoding", b"Identity")), receiving([piece(b"a")]), 3)) == b"a"


def test_replay_gives_the_body_once_and_then_what_really_comes() -> None:
    async def main() -> None:
        receive = Replay(b"body", receiving([{"type": "http.disconnect"}]))
        assert await receive() == piece(b"body")
        assert await receive() == {"type": "http.disconnect"}

    asyncio.run(main())


def test_with_body_describes_the_new_body_and_leaves_the_scope_alone() -> None:
    scope = scope_of(
        (b"transfer-encoding", b"chunked"),
        (b"content-encoding", b"identity"),
        (b"expect", b"100-continue"),
        (b"x", b"1"),
    )
    before = list(scope["headers"])
    assert with_body(scope, b"abcd")["headers"] == [(b"x", b"1"), (b"content-length", b"4")]
    assert scope["headers"] == before
