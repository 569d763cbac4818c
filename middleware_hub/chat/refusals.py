"""The meaning of a worker's refusal for a client."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from middleware_hub.chat.errors import context_length_error
from router.engines.sglang.outcome import refusal_status
from router.engines.sglang.stream import StreamedReply
from router.errors import (
    BadRequestError,
    ForbiddenError,
    NoWorkerError,
    QueueFullError,
    RouterError,
    UnauthorizedError,
    UpstreamError,
    UpstreamTimeoutError,
)

_TOO_LONG = re.compile(
    r"context.length|maximum.*(context|input).*(length|tokens)|longer than the (maximum )?model", re.IGNORECASE
)
_EXCERPT = 500


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
    if status == 401:
        return UnauthorizedError(f"the worker refused the key: {message}")
    if status == 403:
        return ForbiddenError(f"the worker forbids the request: {message}")
    if status in (404, 405):
        return UpstreamError(f"the worker does not generate: {message}")
    if 400 <= status < 500:
        return BadRequestError(f"the worker refused the request: {message}")
    return UpstreamError(f"the worker failed: {message}")


def unreadable(error: Exception) -> UpstreamError:
    """Return the error for a reply that is not an answer of `/generate`."""
    return UpstreamError(f"the worker's reply is not what /generate answers: {error}")


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
