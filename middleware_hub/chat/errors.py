"""The errors of sessions and chats, and the meaning of a worker's refusal for a client."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from router.engines.form.outcome import refusal_status
from router.engines.form.stream import StreamedReply
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

_NO_RETRY = (("x-should-retry", "false"),)
"""OpenAI's and Anthropic's own clients retry a 409 unless this header forbids it."""

CONTEXT_LENGTH = "context_length_exceeded"
"""OpenAI's code of an error for a prompt or a reply that does not fit the context. Client libraries match it."""


class UnknownSessionError(RouterError):
    """The tenant has no session of this name."""

    status = 404
    type = "not_found"


class SessionExistsError(RouterError):
    """A session of this name exists already."""

    status = 409
    type = "session_exists"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is a session {name!r} already: choose another `session_id`, or leave it out. DELETE /sessions/{name} "
            "forgets the one that is there"
        )


class SessionOverError(RouterError):
    """The session was finalized or aborted and takes no more turns."""

    status = 409
    type = "session_over"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers=_NO_RETRY)


class CapacityError(RouterError):
    """Sessions hold as many tokens as they may."""

    status = 429
    type = "over_capacity"


class ContextLengthError(BadRequestError):
    """A conversation does not fit the model's context. The message has OpenAI's words: agents match them, and condense.

    Attributes:
        context: the tokens that the model takes.
        prompt: the tokens of the messages.
        completion: the tokens that the reply may have; None if the messages alone are too many.
    """

    def __init__(self, context: int, prompt: int, completion: int | None = None) -> None:
        self.context = context
        self.prompt = prompt
        self.completion = None if prompt >= context else completion
        if self.completion is None:
            counted = f"your messages resulted in {prompt} tokens. Shorten the messages, or condense what came first."
        else:
            counted = (
                f"you requested {prompt + self.completion} tokens ({prompt} in the messages, {self.completion} in the"
                " completion). Shorten the messages or the completion."
            )
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, {counted}", code=CONTEXT_LENGTH
        )


_TOO_LONG = re.compile(
    r"context.length|maximum.*(context|input).*(length|tokens)|longer than the (maximum )?model", re.IGNORECASE
)
_OVERFLOWS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        # SGLang 0.5.23
        r"input \((?P<prompt>\d+) tokens\) is longer than the model's context length \((?P<context>\d+) tokens\)",
        r"maximum context length of (?P<context>\d+) tokens.* (?P<prompt>\d+) tokens from the input messages"
        r" and (?P<completion>\d+) tokens for the completion",
        r"Input length \((?P<prompt>\d+) tokens\) exceeds the maximum allowed length \((?P<context>\d+) tokens\)",
        # vLLM 0.32, and its earlier versions
        r"prompt \(length (?P<prompt>\d+)\) is longer than the maximum model length of (?P<context>\d+)",
        r"context length is (?P<context>\d+) tokens.* (?P<completion>\d+) output tokens.* (?P<prompt>\d+) input tokens",
        r"max_tokens=(?P<completion>\d+) cannot be greater than max_model_len=(?P<context>\d+)",
        r"too large: (?P<completion>\d+)\. .*context length is (?P<context>\d+) tokens.* (?P<prompt>\d+) input tokens",
        r"context length is (?P<context>\d+) tokens.*\((?P<prompt>\d+) in the messages,"
        r" (?P<completion>\d+) in the completion\)",
        r"context length is (?P<context>\d+) tokens.* (?P<prompt>\d+) input tokens",
        r"(?P<prompt>\d+) input tokens and requested (?P<completion>\d+) output tokens.*"
        r"context length is only (?P<context>\d+) tokens",
    )
)
"""Engines' messages about a prompt, or a reply, that does not fit; the first pattern that is found counts."""
_EXCERPT = 500


def refusal(status: int, body: bytes | str, prompt_tokens: int | None = None) -> RouterError:
    """Translate a worker's error for a client: the fault of the request stays 400, the fault of the worker becomes 5xx.

    `prompt_tokens` is the length of the prompt that was sent, if it is known: not every engine names it.
    """
    message = _message(body)
    if status in (408, 504):
        return UpstreamTimeoutError(message)
    if status == 429:
        return QueueFullError(message)
    if status == 503:
        return NoWorkerError(message)
    overflow = _overflow(message, prompt_tokens)
    if overflow is not None:
        return overflow
    if _TOO_LONG.search(message):
        return BadRequestError(message, code=CONTEXT_LENGTH)
    if status == 401:
        return UnauthorizedError(f"the worker refused the key: {message}")
    if status == 403:
        return ForbiddenError(f"the worker forbids the request: {message}")
    if status in (404, 405):
        return UpstreamError(f"the worker does not generate: {message}")
    if 400 <= status < 500:
        return BadRequestError(f"the worker refused the request: {message}", **_word(body))
    return UpstreamError(f"the worker failed: {message}")


def unreadable(error: Exception) -> UpstreamError:
    """Return the error for a reply that is not an answer of `/generate`."""
    return UpstreamError(f"the worker's reply is not what /generate answers: {error}")


def feed_event(streamed: StreamedReply, data: bytes) -> None:
    """Feed one event to a streamed reply. Raises RouterError for an event that says why there is no reply."""
    streamed.feed(data)
    if streamed.error is not None:
        raise refusal(refusal_status(data) or 502, streamed.error)
    if streamed.values is not None:
        return  # it is like one that was not the end
    # A worker that cannot serve a request ends its stream with an abort that has a status.
    status = refusal_status(data) if streamed.finished else None
    if status is not None:
        raise refusal(status, bytes(streamed.last_meta["finish_reason"]))


def _overflow(message: str, prompt_tokens: int | None) -> ContextLengthError | None:
    for pattern in _OVERFLOWS:
        found = pattern.search(message)
        if found is not None:
            numbers = {name: int(number) for name, number in found.groupdict().items()}
            prompt = numbers.get("prompt", prompt_tokens)
            return None if prompt is None else ContextLengthError(numbers["context"], prompt, numbers.get("completion"))
    return None


def _word(body: bytes | str) -> dict[str, Any]:
    """Return the code of an error body if it is a word, as the adapters of engines give one: engines give numbers."""
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return {}
    return {"code": code} if isinstance(code, str) else {}


def _message(body: bytes | str) -> str:
    """Return the message of an error body, in any of SGLang's five shapes."""
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = body if isinstance(body, str) else body.decode("utf-8", "replace")
    while isinstance(found, dict):
        found = next((found[name] for name in ("error", "message", "detail") if found.get(name) is not None), None)
    if not isinstance(found, str | None):
        found = msgspec.json.encode(found).decode()  # the `detail` of FastAPI's 422 is a list
    return (found or "")[:_EXCERPT] or "no reason given"
