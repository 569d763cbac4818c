"""Small tools for plain ASGI: read a body, send a rewritten one onward, answer in JSON, and which headers may pass.

Nothing here knows workers or tokens, and nothing needs a framework: a middleware uses the same functions as the proxy.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.types import Message, Receive, Scope, Send

from router.errors import (
    BadRequestError,
    BodyTooLargeError,
    ClientDisconnectedError,
    MethodNotAllowedError,
    RouterError,
)
from router.http.error_bodies import error_body
from router.http.json_cost import LIGHT, check_weight
from router.http.offload import offload
from router.http.request_state import request_state, with_state

HeaderList = list[tuple[bytes, bytes]]
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]

SEND_BYTES = 1024 * 1024
"""Bytes of a reply that are sent at a time; other requests have their turn in between."""


# RFC 9110, 7.6.1, and the older names that are still seen.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# The HTTP client frames the body again and names the worker's host. Our own server has answered `expect`.
_NOT_TO_WORKER = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding", b"x-abort-policy"}
# Our server writes its own date and framing; the body is already decoded here.
_NOT_TO_CLIENT = _HOP_BY_HOP | {
    b"content-length",
    b"content-encoding",
    b"date",
    b"server",
    b"x-router-worker",
    b"x-router-reason",
}
_NOT_TO_WORKER_BUT_TO_US = _NOT_TO_WORKER | {b"authorization", b"x-api-key"}
_ENVELOPE = frozenset({b"content-length", b"transfer-encoding", b"content-encoding", b"expect"})


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first value of a request header, or None. `name` is in lower case, as ASGI has it."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def first_values(scope: Scope) -> dict[bytes, bytes]:
    """Return the request headers by name, each with its first value."""
    return dict(reversed(scope["headers"]))


def request_target(scope: Scope) -> str:
    """Return path and query as the client wrote them, escapes included. Raises BadRequestError for what is no path."""
    raw: bytes | None = scope.get("raw_path")
    path = quote(scope["path"]) if raw is None else raw.decode("latin-1")
    if not path.startswith("/"):
        # Behind a worker's URL, anything else would change the host or the port.
        raise BadRequestError(f"the request target must begin with a slash, not {path!r}")
    query: bytes = scope.get("query_string", b"")
    return f"{path}?{query.decode('latin-1')}" if query else path


def request_headers(scope: Scope, *, forward_authorization: bool) -> HeaderList:
    """Return the headers of a client's request that go to a worker.

    Compression is declined for the client: a reply has to be readable here, and between machines of one rack it
    costs more than it saves.
    """
    dropped = _NOT_TO_WORKER if forward_authorization else _NOT_TO_WORKER_BUT_TO_US
    kept = [pair for pair in _passing(scope["headers"], dropped) if not pair[0].startswith(b"x-radix-")]
    kept.append((b"accept-encoding", b"identity"))
    return kept


def reply_headers(headers: Iterable[tuple[bytes, bytes]]) -> HeaderList:
    """Return the headers of a worker's reply that go to the client, names in lower case."""
    return _passing([(name.lower(), value) for name, value in headers], _NOT_TO_CLIENT)


def _passing(headers: HeaderList, dropped: frozenset[bytes]) -> HeaderList:
    """Return the headers that are not dropped, nor named by a `connection` header."""
    for name, value in headers:
        if name == b"connection":
            dropped = dropped.union(token.strip().lower() for token in value.split(b","))
    return [pair for pair in headers if pair[0] not in dropped]


async def read_json(scope: Scope, receive: Receive, limit: int, *, ids: bool = False) -> bytes:
    """Return a request body that is JSON and does not hold up others when it is parsed; `ids`: it may hold token ids.

    Raises:
        BodyTooLargeError: it has too many values in it, or bytes.
        BadRequestError, ClientDisconnectedError: as `read_body` does.
    """
    body = await read_body(scope, receive, limit)
    if len(body) > LIGHT and not request_state(scope).body_read:
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

    return replaying


def with_body(scope: Scope, body: bytes, **changes: Any) -> Scope:
    """Return a copy of the scope whose headers describe `body`, to send a rewritten request onward.

    `changes`: further attributes of the `RequestState` that goes along.
    """
    inner = with_state(scope, body_read=True, **changes)
    inner["headers"] = [pair for pair in scope["headers"] if pair[0] not in _ENVELOPE]
    inner["headers"].append((b"content-length", b"%d" % len(body)))
    return inner


def has_body(scope: Scope) -> bool:
    """Return whether the request announces a body."""
    if header(scope, b"transfer-encoding") is not None:
        return True
    return (header(scope, b"content-length") or "0").strip("0 ") != ""


class ByMethod:
    """One path, a handler for each method. A class, because Starlette takes a function for an endpoint of its own form."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises MethodNotAllowedError."""
        await self.handler(scope)(scope, receive, send)

    def handler(self, scope: Scope) -> Handler:
        """Return the handler for the method of a request. Raises MethodNotAllowedError with the methods that there are."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        handler = self._handlers.get(method)
        if handler is None:
            allowed = ", ".join(self._handlers)
            raise MethodNotAllowedError(f"{scope['path']} takes {allowed}", headers=(("allow", allowed),))
        return handler


async def send_json(
    send: Send, status: int, body: bytes | Sequence[bytes], headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send a whole reply. `body` is JSON, in one piece or several. A large one goes out in pieces."""
    parts = [body] if isinstance(body, bytes) else body
    size = sum(map(len, parts))
    start = [(b"content-type", b"application/json"), (b"content-length", b"%d" % size), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    if size > SEND_BYTES:
        for part in parts:
            for at in range(0, len(part), SEND_BYTES):
                await send({"type": "http.response.body", "body": part[at : at + SEND_BYTES], "more_body": True})
                await asyncio.sleep(0)
        parts = ()
    await send({"type": "http.response.body", "body": b"".join(parts), "more_body": False})


async def send_error(send: Send, error: RouterError, path: str = "") -> None:
    """Send the reply that an error stands for at a path, with its headers (`retry-after` among them)."""
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in error.headers]
    await send_json(send, error.status, error_body(error, path), headers)
