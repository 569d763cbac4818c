"""The errors of sessions, and what a worker's refusal means to a client."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from router.engines.sglang.outcome import refusal_status
from router.engines.sglang.stream import StreamedReply
from router.errors import (
    BadRequestError,
    NoWorkerError,
    QueueFullError,
    RouterError,
    UpstreamError,
    UpstreamTimeoutError,
)

_NO_RETRY = (("x-should-retry", "false"),)
"""OpenAI's and Anthropic's own clients retry a 409 unless this header forbids it."""
_TOO_LONG = re.compile(r"context.length|maximum.*(context|input).*(length|tokens)|longer than the model", re.IGNORECASE)
_EXCERPT = 500


class UnknownSessionError(RouterError):
    """The tenant has no session of this name."""

    status = 404
    type = "not_found"


class SessionExistsError(RouterError):
    """A session of this name exists already."""

    status = 409
    type = "session_exists"


class SessionOverError(RouterError):
    """The session was finalized or aborted and takes no more turns."""

    status = 409
    type = "session_over"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers=_NO_RETRY)


class CapacityError(RouterError):
    """Sessions hold as many tokens as they may hold."""

    status = 429
    type = "over_capacity"


def context_length_error(message: str) -> BadRequestError:
    """Return the error for a conversation that does not fit the model's context. Client libraries match on the code."""
    return BadRequestError(message, code="context_length_exceeded")


def refusal(status: int, body: bytes | str) -> RouterError:
    """Translate a worker's error for a client: the fault of the request stays 400, the fault of the worker becomes 5xx."""
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


def feed(streamed: StreamedReply, data: bytes) -> None:
    """Feed one event to a streamed reply. Raises RouterError for an event that says why there is no reply."""
    streamed.feed(data)
    if streamed.error is not None:
        raise refusal(refusal_status(data) or 502, streamed.error)
    # A worker that cannot serve a request ends its stream with an abort that has a status.
    status = refusal_status(data) if streamed.finished else None
    if status is not None:
        raise refusal(status, bytes(streamed.last_meta["finish_reason"]))


def _message(body: bytes | str) -> str:
    """Return the message of an error body, in any of SGLang's five shapes."""
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = body if isinstance(body, str) else body.decode("utf-8", "replace")
        return text[:_EXCERPT] or "no reason given"
    while isinstance(found, dict):
        found = found.get("error", found.get("message", found.get("detail")))
    return str(found)[:_EXCERPT]
