"""When two messages are the same one: what a client sends back is never quite what it got.

An echo loses its reasoning, gains empty fields, has its tool arguments printed anew. Tokens come from the store and never
from the echo, so all that an echo has to do is to be recognized: `canonical` compares what a message says, `strict` every
field of it. A function of the user's gets the message and gives anything that can be hashed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from hashlib import blake2b
from typing import Any

import msgspec

from middleware_hub.chat.messages import ChatRequest, Message
from router.errors import BadRequestError

MessageKey = Hashable
KeyFunction = Callable[[Message], MessageKey]

_encode = msgspec.json.Encoder(order="deterministic").encode
_DIGEST = 16


class KeyedMessage(dict[str, Any]):
    """A message whose key is known; `looked_at` is for who looks at all messages of a conversation, at every turn."""

    __slots__ = ("key", "looked_at")

    def __init__(self, message: Message, key: MessageKey) -> None:
        super().__init__(message)
        self.key = key
        self.looked_at: tuple[object, bool] | None = None


def canonical(message: Message) -> bytes:
    """The digest of what a message says.

    `None`, `""`, `[]` and nothing are equal, a lone text part equals its string, and of arguments neither white space nor the
    order of keys counts. `reasoning_content` does not count at all: many clients drop it.
    """
    said: list[Any] = [
        message.get("role"),
        _content(message.get("content")),
        message.get("name") or None,
        [said_by(call) for call in message.get("tool_calls") or ()],
        message.get("tool_call_id") or None,
    ]
    return _digest(said)


def strict(message: Message) -> bytes:
    """The digest of every field of a message as it is, but for the order of keys."""
    return _digest(message)


def setting_of(request: ChatRequest) -> bytes:
    """What a conversation is rendered with: a digest of its adapter, behind it one of its tools, and one of its options.

    Under another adapter no token is the same; under other tools or options some may be (see `segments`).
    """
    adapter = request.extra.get("lora_path")
    named = adapter and bytes(adapter).decode("utf-8", "replace")
    return b"".join(map(_digest, (named, request.tools or None, request.template)))


def adapter_of(setting: bytes) -> bytes:
    """The digest of its adapter."""
    return setting[:_DIGEST]


def tools_of(setting: bytes) -> bytes:
    """The digest of its tools."""
    return setting[_DIGEST : 2 * _DIGEST]


def call_id(before: MessageKey, depth: int, number: int, name: str, arguments: str) -> str:
    """An id for the `number`-th tool call of a turn.

    The same calls at the same place of a conversation get the same ids: then a turn that was sampled twice is one message.
    """
    return f"call_{_digest([repr(before), depth, number, name, _arguments(arguments)]).hex()[:24]}"


def load(name: str) -> KeyFunction:
    """`canonical`, `strict`, or a function of the user's as `pkg.mod:function`. Raises BadRequestError."""
    if name in _NAMED:
        return _NAMED[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise BadRequestError(f"--session-match must be canonical, strict or pkg.mod:function, not {name!r}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadRequestError(f"--session-match {name}: {error}") from error
    if not callable(found):
        raise BadRequestError(f"--session-match {name}: this is no function")
    function: KeyFunction = found
    return function


_NAMED: dict[str, KeyFunction] = {"canonical": canonical, "strict": strict}


def _content(content: Any) -> Any:
    if not content:
        return None
    if isinstance(content, list) and len(content) == 1:
        (part,) = content
        if isinstance(part, dict) and part.get("type") == "text":
            return part.get("text") or None
    return content


def said_by(call: dict[str, Any]) -> list[Any]:
    """What a tool call says: its id, its name, and its arguments, where neither white space nor the order of keys counts."""
    function: dict[str, Any] = call.get("function") or {}
    return [call.get("id") or None, function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: Any) -> Any:
    """An object, wherever there is one: a client may send its text."""
    try:
        value = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
        return _numbers(value) or None
    except (msgspec.DecodeError, RecursionError):
        return arguments or None


def _numbers(value: Any) -> Any:
    """With `1` for `1.0`: JavaScript knows no difference, and prints the one for the other."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(value: Any) -> bytes:
    return blake2b(_encode(value), digest_size=_DIGEST).digest()
