"""The errors of sessions, and what a worker's refusal means to a client."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from router.errors import (
    BadRequestError,
    NoWorkerError,
    QueueFullError,
    RouterError,
    UpstreamError,
    UpstreamTimeoutError,
)

_NO_RETRY = (("x-should-retry", "false"),)
"""OpenAI's and Anthropic's own clients send again what was answered with 409, unless they are told."""
_TOO_LONG = re.compile(r"context.length|maximum.*(context|input).*(length|tokens)|longer than the model", re.IGNORECASE)
_EXCERPT = 500


class UnknownSessionError(RouterError):
    """There is no session of this name, or none of this tenant's."""

    status = 404
    type = "not_found"


class SessionExistsError(RouterError):
    """A session of this name is there already."""

    status = 409
    type = "session_exists"


class SessionOverError(RouterError):
    """The session was finalized or aborted: nothing is added to it any more."""

    status = 409
    type = "session_over"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers=_NO_RETRY)


class CapacityError(RouterError):
    """Sessions hold as many tokens as they may."""

    status = 429
    type = "over_capacity"


def context_length_error(message: str) -> BadRequestError:
    """The conversation does not fit into the model's context. Clients' libraries match on the code."""
    return BadRequestError(message, code="context_length_exceeded")


def refusal(status: int, body: bytes | str) -> RouterError:
    """The error that a worker's answer is to a client: a request's own fault stays 400, the workers' is 5xx."""
    message = _message(body)
    if status in (408, 504):
        return UpstreamTimeoutError(message)
    if status == 429:
        return QueueFullError(message)
    if status == 503:
        return NoWorkerError(message)
    if _TOO_LONG.search(message):
        return context_length_error(message)
    if status in (404, 405):
        return UpstreamError(f"the worker does not generate: {message}")
    if 400 <= status < 500:
        return BadRequestError(f"the worker refused the request: {message}")
    return UpstreamError(f"the worker failed: {message}")


def _message(body: bytes | str) -> str:
    """What an error body says, in any of SGLang's five shapes."""
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = body if isinstance(body, str) else body.decode("utf-8", "replace")
        return text[:_EXCERPT] or "no reason given"
    while isinstance(found, dict):
        found = found.get("error", found.get("message", found.get("detail")))
    return str(found)[:_EXCERPT]
