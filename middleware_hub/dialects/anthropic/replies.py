"""Replies of Anthropic's `POST /v1/messages`: a message, and the events of a streamed one.

Besides Anthropic's fields a message has `generation_id` and `weight_version`, and `meta_info` with everything else a worker
reported. In a stream the event `message_delta` has them, because they are unknown when a message begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from middleware_hub.chat.answer import Answer, ReplyHead, TokenLogprob
from middleware_hub.chat.errors import CONTEXT_LENGTH, ContextLengthError
from middleware_hub.chat.messages import ChatRequest, Piece, Text, ToolCall
from middleware_hub.dialects.events import TEXT, ServerSentEvents, around_text
from router.errors import RouterError

_STOPS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "abort"}
"""`abort` is SGLang's word. Anthropic has no such word, and any of its own words would make half a reply look complete."""

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}

_SIGNATURE = "dGl0by1yb3V0ZXI="
"""Ends a block of thinking, in place of the signature that only Anthropic can make: clients take a block without one for
broken, and send its thinking as a message of the user, or not at all. It is not read when it comes back.
"""

_encode = msgspec.json.encode


def whole(request: ChatRequest, head: ReplyHead, answers: Sequence[Answer]) -> bytes:
    """Return a message. This dialect has one sample only."""
    answer = answers[0]
    content = [_block(piece) for piece in answer.said]
    message = {**_message(head, _usage(answer)), "content": content, **_stopped(request, answer), **_meta(answer)}
    return _encode(message)


def error_body(error: RouterError) -> dict[str, Any]:
    """Return `{"type": "error", "error": {"type", "message"}}` with the details of the error."""
    details = dict(error.details)
    request_id = details.pop("request_id", None)
    body: dict[str, Any] = {
        "type": "error",
        "error": {"type": _ERRORS.get(error.status, "api_error"), "message": _words(error), **details},
    }
    return body if request_id is None else {**body, "request_id": request_id}


def _words(error: RouterError) -> str:
    """Return the message of an error; of a context that is exceeded in Anthropic's words, which agents match.

    Of a prompt that is too long they condense the conversation. Of a reply that has no room they ask for less.
    """
    if not isinstance(error, ContextLengthError):
        too_long = error.details.get("code") == CONTEXT_LENGTH
        return f"prompt is too long: {error.message}" if too_long else error.message
    if error.completion is None:
        return f"prompt is too long: {error.prompt} tokens > {error.context} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.prompt} + {error.completion} > {error.context},"
        " decrease input length or `max_tokens` and try again"
    )


class AnthropicStream(ServerSentEvents):
    """A stream of events: blocks of text, of thinking, of tool use, one after the other."""

    def __init__(self, request: ChatRequest, head: ReplyHead) -> None:
        self._request = request
        self._head = head
        self._blocks = 0
        self._open: str | None = None
        """The type of the block that is being written."""
        self._around: tuple[bytes, bytes] = b"", b""
        """What stands around the text of each delta of that block."""

    def begin(self, prompt_tokens: int) -> bytes:
        """Return `message_start`. Its numbers are replaced at the end, when the number of cached tokens is known."""
        message = _message(self._head, _tokens(prompt_tokens, 0, 0))
        return _event("message_start", {"message": {**message, "stop_reason": None, "stop_sequence": None}})

    def piece(self, index: int, piece: Piece, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        """Return a delta of the open block if the piece is of its type, else of a new block. This dialect has no logprobs."""
        if isinstance(piece, ToolCall):
            opened = self._opened("tool_use", {**_tool_use(piece), "input": {}})
            return opened + self._delta("input_json_delta", partial_json=piece.arguments) + self._closed()
        if not piece.text:
            return b""
        kind = "text" if isinstance(piece, Text) else "thinking"
        opened = b""
        if self._open != kind:
            signature = {} if kind == "text" else {"signature": ""}
            opened = self._opened(kind, {"type": kind, kind: "", **signature})
            self._around = around_text(self._delta(f"{kind}_delta", **{kind: TEXT}))
        return opened + self._around[0] + _encode(piece.text) + self._around[1]

    def finish(self, index: int, answer: Answer) -> bytes:
        return self._closed()

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return `message_delta` with the stop reason and all numbers, and `message_stop`."""
        answer = answers[0]
        ended = {"delta": _stopped(self._request, answer), "usage": _usage(answer), **_meta(answer)}
        return self._closed() + _event("message_delta", ended) + _event("message_stop", {})

    def failed(self, error: RouterError) -> bytes:
        """Return an error instead of an event; nothing follows it."""
        return b"event: error\ndata: " + _encode(error_body(error)) + b"\n\n"

    def ping(self) -> bytes:
        return _event("ping", {})

    def _opened(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        closed = self._closed()
        self._open = kind
        return closed + _event("content_block_start", {"index": self._blocks, "content_block": block})

    def _delta(self, kind: str, **what: str) -> bytes:
        return _event("content_block_delta", {"index": self._blocks, "delta": {"type": kind, **what}})

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        signature = self._delta("signature_delta", signature=_SIGNATURE) if self._open == "thinking" else b""
        stop = _event("content_block_stop", {"index": self._blocks})
        self._open = None
        self._blocks += 1
        return signature + stop


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **data}))


def _message(head: ReplyHead, usage: dict[str, int]) -> dict[str, Any]:
    """Return a message without content and stop reason."""
    return {
        "id": head.id if head.id.startswith("msg_") else f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "usage": usage,
    }


def _block(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, ToolCall):
        return {**_tool_use(piece), "input": Raw(piece.arguments.encode())}
    if isinstance(piece, Text):
        return {"type": "text", "text": piece.text}
    return {"type": "thinking", "thinking": piece.text, "signature": _SIGNATURE}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _stopped(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    # A stop string that the session added itself (the end of a tool call) is unknown to the client.
    matched = answer.matched if answer.finish == "stop" and answer.matched in request.sampling.get("stop", ()) else None
    reason = _STOPS.get(answer.finish, "end_turn") if matched is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": matched}


def _meta(answer: Answer) -> dict[str, Any]:
    meta: dict[str, Any] = {"generation_id": answer.generation_id, "weight_version": answer.weight_version}
    if answer.extra:
        meta["meta_info"] = answer.extra
    return meta


def _usage(answer: Answer) -> dict[str, int]:
    return _tokens(answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)


def _tokens(prompt: int, cached: int, sampled: int) -> dict[str, int]:
    """Return usage as Anthropic counts it: cached tokens are not part of the input."""
    return {
        "input_tokens": max(prompt - cached, 0),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": sampled,
    }
