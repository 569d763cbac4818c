"""The body of an error, in the form that the clients of a path read.

Nearly all of them read `{"error": {"message", "type", "code"}}`. Anthropic's clients, at `/v1/messages`, look for a `type`
beside `error`, and have words of their own for a missing or wrong key. The layers in front of a dialect know no more.
"""

from __future__ import annotations

import re

import msgspec

from router.errors import RouterError

_ANTHROPICS = re.compile(r"/v1/messages(?:/count_tokens)?")
_OF_KEYS = {401: "authentication_error", 403: "permission_error"}


def error_body(error: RouterError, path: str) -> bytes:
    """Return the body as JSON."""
    body = error.body()
    if not _ANTHROPICS.search(path):
        return msgspec.json.encode(body)
    inner = body["error"]
    assert isinstance(inner, dict)
    kind = _OF_KEYS.get(error.status, error.type)
    return msgspec.json.encode({"type": "error", "error": {**inner, "type": kind}})
