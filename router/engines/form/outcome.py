"""The outcome of a generation, by its reply or the first event of its stream: aborted, refused, or an error."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec import Raw

from router.engines.events import EventSplitter, event_data
from router.engines.form.reply import UnreadableReplyError, edit_meta, split_list
from router.engines.json import JSON_ERRORS, decode_any


class _Finish(msgspec.Struct):
    type: str | None = None
    status_code: int | None = None


class _HeadMeta(msgspec.Struct):
    finish_reason: _Finish | None = None


class _Head(msgspec.Struct):
    meta_info: _HeadMeta | None = None
    error: Any = None
    object: Any = None


_head = msgspec.json.Decoder(_Head)
_ABORT = b'"abort"'


def may_be_aborted(body: bytes) -> bool:
    """Return whether one of the replies in a body may be aborted.

    Most of a long reply are the numbers of its logprobs, with no quote among them. The next quote is found many times faster
    than a word.
    """
    begin = body.find(b'"finish_reason"')
    numbers = body.find(b"[[", begin)
    if begin < 0 or numbers < 0:
        return begin >= 0 and _ABORT in body
    return body.find(_ABORT, begin, numbers) >= 0 or body.find(_ABORT, body.find(b'"', numbers)) >= 0


def was_aborted(reply: bytes | Raw) -> bool:
    """Return whether a generation was aborted, but not because of an error."""
    if _ABORT not in bytes(reply):
        return False
    try:
        meta = _head.decode(reply).meta_info
    except JSON_ERRORS:
        return False
    finish = None if meta is None else meta.finish_reason
    return finish is not None and finish.type == "abort" and finish.status_code is None


def refusal_status(event: bytes) -> int | None:
    """Return the HTTP status that a stream's first event stands for if it refuses the generation; else None.

    The stream's own status is 200 even then. `event` is the payload of the event, or the start of the stream.
    """
    if b'"error"' not in event and _ABORT not in event:
        return None
    try:
        head = _first(event)
    except JSON_ERRORS:
        return None
    finish = None if head.meta_info is None else head.meta_info.finish_reason
    if head.error is not None:
        return _code(head.error)
    return finish.status_code if finish is not None and finish.type == "abort" else None


def _first(event: bytes) -> _Head:
    return _head.decode(event_data(next(EventSplitter().feed(event), event)) or event)


def was_refused(event: bytes) -> bool:
    """Return whether an event refuses the generation of its stream."""
    return refusal_status(event) is not None


def lacks_adapter(event: bytes) -> bool:
    """Return whether a refusal, in a body or in a stream's first event, says that the worker has no such adapter.

    SGLang says so in words only (`tokenizer_manager.py`, 0.5.23). vLLM takes an adapter for a model.
    """
    if b"LoRA adapter" not in event and b'"model"' not in event:
        return False
    try:
        error = _first(event).error
    except JSON_ERRORS:
        return False
    if not isinstance(error, dict):
        return False
    message = error.get("message")
    return error.get("param") == "model" or (isinstance(message, str) and "LoRA adapter" in message)


def is_error(body: bytes) -> bool:
    """Return whether a body is an engine's error, and not that of a web server in front of the engine or in its place."""
    try:
        head = _head.decode(body)
    except JSON_ERRORS:
        return False
    return isinstance(head.error, dict) or head.object == "error"


def lacks_path(body: bytes) -> bool:
    """Return whether a 404 says that there is no such path: then an engine's web framework answers, not the engine."""
    try:
        return bool(decode_any(body) == {"detail": "Not Found"})
    except JSON_ERRORS:
        return False


def _code(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


class Expected(Protocol):
    """A request, as far as the shape of its reply goes: how many replies there are, and whether they come as a list."""

    @property
    def replies(self) -> int: ...

    @property
    def listed(self) -> bool: ...


def aborted_replies(body: bytes, request: Expected) -> tuple[list[Raw], list[int]]:
    """Return the replies of a body and the numbers of the aborted ones; two empty lists if it cannot be read."""
    try:
        replies = split_list(body, request.replies) if request.listed else [Raw(body)]
    except UnreadableReplyError:
        return [], []
    return replies, [number for number, reply in enumerate(replies) if was_aborted(reply)]


def renamed(reply: bytes | Raw, rid: str) -> bytes:
    """Return a reply with the id that the client knows; unchanged if it cannot be read."""
    try:
        return edit_meta(reply, add={"id": msgspec.json.encode(rid)})
    except UnreadableReplyError:
        return bytes(reply)
