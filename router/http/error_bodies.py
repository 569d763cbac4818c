"""The body of an error as the clients of a path read it.

Nearly all of them read `{"error": {"message", "type", "code"}}`. Anthropic's, at `/v1/messages`, look for a `type` in front of
that, and have words of their own for a key that is none. This is all that the layers in front of a dialect know of it.
"""

from __future__ import annotations

import re

import msgspec

from router.errors import RouterError

_ANTHROPICS = re.compile(r"/v1/messages(?:/count_tokens)?")
_OF_KEYS = {401: "authentication_error", 403: "permission_error"}


def error_body(error: RouterError, path: str) -> bytes:
    """JSON. What is more in it than a client looks for, it leaves alone."""
    body = error.body()
    if not _ANTHROPICS.search(path):
        return msgspec.json.encode(body)
    inner = body["error"]
    assert isinstance(inner, dict)
    kind = _OF_KEYS.get(error.status, error.type)
    return msgspec.json.encode({"type": "error", "error": {**inner, "type": kind}})
