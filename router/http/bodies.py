"""Bodies of requests: read within limits, and sent onward after a change.

The limits hold for what a client sends. What a middleware makes of a body may be longer: `RequestState.body_read` tells the
layers inside that the limits were checked.
"""

from __future__ import annotations

import sys
from typing import Any

from starlette.types import Message, Receive, Scope

from router.engines.json_cost import LIGHT, check_weight
from router.errors import BodyTooLargeError, ClientDisconnectedError
from router.http.disconnect import ClientMessages
from router.http.headers import header
from router.http.offload import offload
from router.http.packed_bodies import unpacker
from router.http.request_state import request_state, with_state

_ENVELOPE = frozenset({b"content-length", b"transfer-encoding", b"content-encoding", b"expect"})


async def read_json(
    scope: Scope, receive: Receive, limit: int, *, ids: bool = False, media: int = 0, check: bool = True
) -> bytes:
    """Return a request body that is JSON and does not hold up others when it is parsed.

    Args:
        limit: bytes.
        ids: it may hold token ids.
        media: bytes of files that it may hold in base64 besides. The caller measures what is none.
        check: whether to count its values; if not, the caller does it.

    Raises BodyTooLargeError for one that has too many values in it, or bytes; other errors as `read_body` does.
    """
    # What the entrance itself has made shows that no layer in between has read the body.
    if type(receive) is not ClientMessages and request_state(scope).body_read:
        if isinstance(receive, Replay) and (body := receive.unread) is not None:
            receive.unread = None
            return body
        return await _gather(receive, sys.maxsize)
    body = await _gather_unpacked(scope, receive, limit + (media + 2) // 3 * 4)
    if check and len(body) > LIGHT:
        await offload(True, check_weight, body, ids=ids)
    return body


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the whole request body, for a layer that has to understand it.

    A compressed body is unpacked, and `content-encoding` taken out of the headers of the scope: whoever sends the request on
    sends what is returned here.

    Raises:
        UnsupportedEncodingError, BadRequestError: the body is compressed, and cannot be unpacked.
        BodyTooLargeError, ClientDisconnectedError: as `gather_body` does, also for what a body unpacks to.
    """
    if request_state(scope).body_read:
        limit = sys.maxsize
    return await _gather_unpacked(scope, receive, limit)


async def gather_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the whole request body, as it came.

    Raises:
        BodyTooLargeError: more than `limit` bytes are announced, or come.
        ClientDisconnectedError: the client left before the end.
    """
    if request_state(scope).body_read:
        limit = sys.maxsize
    length = header(scope, b"content-length") or ""
    if length.isdigit() and int(length) > limit:
        raise too_large(limit)
    return await _gather(receive, limit)


async def _gather_unpacked(scope: Scope, receive: Receive, limit: int) -> bytes:
    encodings = []
    for name, value in scope["headers"]:
        if name == b"content-encoding":
            encodings.append(value)
        elif name == b"content-length" and value.isdigit() and int(value) > limit:
            raise too_large(limit)
    unpack = unpacker(b", ".join(encodings).decode("latin-1")) if encodings else None
    body = await _gather(receive, limit)
    if unpack is not None:
        body = await offload(True, unpack, body, limit)
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"content-encoding"]
    return body


async def _gather(receive: Receive, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError("the client left while its request was being read")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        chunks.append(chunk)
        more = message.get("more_body", False)
    return b"".join(chunks)


def too_large(limit: int) -> BodyTooLargeError:
    """Return the error for a body of more bytes."""
    return BodyTooLargeError(f"the request body is larger than {limit} bytes (--max-body-bytes)")


class Replay(ClientMessages):
    """A `receive` that gives the whole body once, and then the messages of the real one: a disconnect is still seen.

    Attributes:
        unread: the body; None once it was given. A cancelled task that waits here would keep it for long.
    """

    __slots__ = ("unread",)

    def __init__(self, body: bytes, receive: Receive) -> None:
        super().__init__(receive, receive.client if isinstance(receive, ClientMessages) else None)
        self.unread: bytes | None = body

    async def __call__(self) -> Message:
        body = self.unread
        if body is None:
            return await super().__call__()
        self.unread = None
        return {"type": "http.request", "body": body, "more_body": False}


def with_body(scope: Scope, body: bytes, **changes: Any) -> Scope:
    """Return a copy of the scope whose headers describe `body`, to send a rewritten request onward.

    Args:
        scope: that of the request.
        body: what is sent instead of its own.
        changes: further attributes of the `RequestState` that goes along.
    """
    inner = with_state(scope, body_read=True, **changes)
    headers = [pair for pair in scope["headers"] if pair[0] not in _ENVELOPE]
    headers.append((b"content-length", b"%d" % len(body)))
    return {**inner, "headers": headers}
