"""Bodies of requests: read within limits, and sent onward after a change.

The limits hold for what a client sends. What a middleware makes of a body may be longer: `RequestState.body_read` tells the
layers inside that the limits were checked.
"""

from __future__ import annotations

import sys
from typing import Any

from starlette.types import Message, Receive, Scope

from router.errors import BadRequestError, BodyTooLargeError, ClientDisconnectedError
from router.http.disconnect import ClientMessages
from router.http.headers import header
from router.http.json_cost import LIGHT, check_weight
from router.http.offload import offload
from router.http.request_state import request_state, with_state

_ENVELOPE = frozenset({b"content-length", b"transfer-encoding", b"content-encoding", b"expect"})


async def read_json(scope: Scope, receive: Receive, limit: int, *, ids: bool = False) -> bytes:
    """Return a request body that is JSON and does not hold up others when it is parsed; `ids`: it may hold token ids.

    Raises:
        BodyTooLargeError: it has too many values in it, or bytes.
        BadRequestError, ClientDisconnectedError: as `read_body` does.
    """
    if request_state(scope).body_read:
        return await gather_body(scope, receive, limit)
    body = await read_body(scope, receive, limit)
    if len(body) > LIGHT:
        await offload(True, check_weight, body, ids=ids)
    return body


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the whole request body, for a layer that has to understand it.

    Raises:
        BadRequestError: the body is compressed.
        BodyTooLargeError, ClientDisconnectedError: as `gather_body` does.
    """
    encoding = header(scope, b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise BadRequestError(f"content-encoding {encoding!r} is not supported here: send the body uncompressed")
    return await gather_body(scope, receive, limit)


async def gather_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the whole request body, as it came.

    Raises:
        BodyTooLargeError: more than `limit` bytes are announced, or come.
        ClientDisconnectedError: the client left before the end.
    """
    if request_state(scope).body_read:
        limit = sys.maxsize
    else:
        announced = header(scope, b"content-length")
        if announced is not None and announced.isdecimal() and int(announced) > limit:
            raise _too_large(limit)
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
            raise _too_large(limit)
        chunks.append(chunk)
        more = message.get("more_body", False)
    return b"".join(chunks)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the request body is larger than {limit} bytes (--max-body-bytes)")


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the whole body once, and then the messages of the real one: a disconnect is still seen."""
    given = False

    async def replaying() -> Message:
        nonlocal given, body
        if given:
            return await receive()
        # Drop the reference: a cancelled task that waits here keeps what it holds until the next garbage collection.
        given, whole, body = True, body, b""
        return {"type": "http.request", "body": whole, "more_body": False}

    return ClientMessages(replaying, receive.client) if isinstance(receive, ClientMessages) else replaying


def with_body(scope: Scope, body: bytes, **changes: Any) -> Scope:
    """Return a copy of the scope whose headers describe `body`, to send a rewritten request onward.

    `changes`: further attributes of the `RequestState` that goes along.
    """
    inner = with_state(scope, body_read=True, **changes)
    inner["headers"] = [pair for pair in scope["headers"] if pair[0] not in _ENVELOPE]
    inner["headers"].append((b"content-length", b"%d" % len(body)))
    return inner
