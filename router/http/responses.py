"""Responses in JSON. An error's body has the form that the clients of its path read.

Nearly all clients read `{"error": {"message", "type", "code"}}`. Anthropic's clients, at `/v1/messages`, look for a `type` next
to `error`, and use their own names for a missing or wrong key. Google's have a form of their own, at paths of the version
`v1beta`, and at a model's calls. The layers in front of a dialect need to know no more.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence

import msgspec
from starlette.types import Send

from router.errors import RouterError
from router.http.google_errors import google_error

SEND_BYTES = 1024 * 1024
"""Bytes of a reply that are sent at a time; other requests have their turn in between."""

_ANTHROPICS = re.compile(r"/v1/messages(?:/count_tokens)?")
_GOOGLES = re.compile(r"/v1(?:alpha|beta)[0-9]*/|:(?:generateContent|streamGenerateContent|countTokens)$")
_OF_KEYS = {401: "authentication_error", 403: "permission_error"}


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
    """Send an error as the reply to a request for `path`, with the error's headers (`retry-after` among them)."""
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in error.headers]
    await send_json(send, error.status, error_body(error, path), headers)


def error_body(error: RouterError, path: str) -> bytes:
    """Return the body as JSON."""
    if _GOOGLES.search(path):
        return msgspec.json.encode(google_error(error))
    body = error.body()
    if not _ANTHROPICS.search(path):
        return msgspec.json.encode(body)
    inner = body["error"]
    assert isinstance(inner, dict)
    kind = _OF_KEYS.get(error.status, error.type)
    return msgspec.json.encode({"type": "error", "error": {**inner, "type": kind}})
