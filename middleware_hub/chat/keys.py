"""Message keys: when two messages count as the same, although a client never sends back exactly what it received.

A message that comes back (an *echo*) loses its reasoning, gains empty fields, and has its tool arguments serialized again.
Tokens come from the trie and never from the echo, so an echo only needs to be recognized: `canonical` compares the meaning of a
message, `strict` all of its fields. A user's own function takes the message and returns anything hashable.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from middleware_hub.chat.messages import ChatRequest, Message, MessageKey
from router.errors import BadRequestError, RouterError

logger = logging.getLogger(__name__)

KeyFunction = Callable[[Message], MessageKey]

_encode = msgspec.json.Encoder(order="deterministic").encode
_DIGEST = 16


class MessageKeyError(RouterError):
    """The user's own function for `--session-match` failed with a message."""

    type = "session_match_failed"

    def __init__(self, message: str) -> None:
        # OpenAI's and Anthropic's own clients send a request again after a 5xx, and it would fail again.
        super().__init__(message, headers=(("x-should-retry", "false"),))


def canonical(message: Message) -> bytes:
    """Return the digest of what a message says.

    `None`, `""`, `[]` and an absent field are equal, a lone text part equals its string, and neither white space nor the order
    of keys counts in arguments. `reasoning_content` does not count at all, because many clients drop it.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    said: list[Any] = [
        message.get("role"),
        (content or None) if type(content) is str else _content(content),
        message.get("name") or None,
        [said_by(call) for call in calls] if calls else [],
        message.get("tool_call_id") or None,
    ]
    return blake2b(_encode(said), digest_size=_DIGEST).digest()


def strict(message: Message) -> bytes:
    """Return the digest of all fields of a message, whatever the order of keys."""
    return _digest(message)


def setting_of(request: ChatRequest) -> bytes:
    """Return the setting of a conversation: the digests of its adapter, its tools and its options, concatenated.

    Under another adapter no token can be shared; under other tools or options some can (see `splice`).
    """
    return _adapter_key(request) + _digest(request.tools or None) + _digest(request.template)


def in_other_setting(setting: bytes, request: ChatRequest) -> bytes:
    """Return `setting_of` for a request that has the tools of `setting`, and perhaps another adapter and other options."""
    return _adapter_key(request) + tools_of(setting) + _digest(request.template)


def _adapter_key(request: ChatRequest) -> bytes:
    adapter = request.extra.get("lora_path")
    return _digest(adapter and bytes(adapter).decode("utf-8", "replace"))


def adapter_of(setting: bytes) -> bytes:
    return setting[:_DIGEST]


def tools_of(setting: bytes) -> bytes:
    return setting[_DIGEST : 2 * _DIGEST]


def offers_tools(setting: bytes) -> bool:
    return tools_of(setting) not in (_NO_TOOLS, b"")


def system_digest(contents: Sequence[Any]) -> str:
    """Return the digest of the contents of system messages."""
    return _digest([_content(content) for content in contents]).hex()


def call_id(before: MessageKey, depth: int, number: int, name: str, arguments: str, *, short: bool = False) -> str:
    """Return an id for the `number`-th tool call of a turn.

    The same calls at the same place of a conversation get the same ids, so that a turn that was sampled twice is one message.
    `short`: nine letters and digits, as Mistral's templates demand.
    """
    made = _digest([repr(before), depth, number, name, _arguments(arguments)]).hex()
    return made[:9] if short else f"call_{made[:24]}"


def mended(echo: Message, said: Message) -> Message | None:
    """Return an echo with the arguments of the message `said` in the place of those that are no JSON object any more.

    None if the echo's calls have other ids. An id that the router gave names one call with its arguments, see `call_id`.
    """
    calls, own = echo.get("tool_calls") or (), said.get("tool_calls") or ()
    if len(calls) != len(own) or any(
        not one.get("id") or one["id"] != its.get("id") for one, its in zip(calls, own, strict=True)
    ):
        return None
    whole = [
        {**one, "function": {**one["function"], "arguments": its["function"]["arguments"]}}
        if isinstance(one["function"]["arguments"], str)
        else one
        for one, its in zip(calls, own, strict=True)
    ]
    return {**echo, "tool_calls": whole}


def load(name: str) -> KeyFunction:
    """Return `canonical`, `strict`, or the user's function at `pkg.mod:function`. Raises BadRequestError.

    If the user's function fails, or returns what cannot be hashed, the returned function raises MessageKeyError.
    """
    if name in NAMED:
        return NAMED[name]
    module, _, attribute = name.partition(":")
    if not module or not attribute or module.startswith("."):
        raise BadRequestError(f"--session-match must be canonical, strict or pkg.mod:function, not {name!r}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadRequestError(f"--session-match {name}: {error}") from error
    if not callable(found):
        raise BadRequestError(f"--session-match {name}: this is no function")
    function: KeyFunction = found

    def checked(message: Message) -> MessageKey:
        try:
            key = function(message)
            hash(key)
        except Exception as error:
            role = message.get("role")
            logger.exception("--session-match %s failed with a message of the role %s", name, role)
            raise MessageKeyError(
                f"--session-match {name} failed with a message of the role {role} ({type(error).__name__}): "
                "the router's log has the traceback"
            ) from error
        return key

    return checked


NAMED: dict[str, KeyFunction] = {"canonical": canonical, "strict": strict}


def _content(content: Any) -> Any:
    if not content:
        return None
    if isinstance(content, list) and len(content) == 1:
        (part,) = content
        if isinstance(part, dict) and part.get("type") == "text":
            return part.get("text") or None
    return content


def said_by(call: dict[str, Any]) -> list[Any]:
    """Return a tool call's id, name and arguments, without regard to white space and the order of keys."""
    function: dict[str, Any] = call.get("function") or {}
    return [call.get("id") or None, function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: Any) -> Any:
    """Return the arguments as an object if they are one: a client may send its text."""
    try:
        return _decode(arguments if isinstance(arguments, str) else _encode(arguments)) or None
    except (msgspec.DecodeError, RecursionError):
        return arguments or None


def _number(written: str) -> float:
    """Return `1` for `1.0`: JavaScript prints `1` for both."""
    value = float(written)
    if math.isinf(value):
        raise msgspec.DecodeError("a number that is out of range")
    return int(value) if value.is_integer() else value


_decode = msgspec.json.Decoder(float_hook=_number).decode


def _digest(value: Any) -> bytes:
    return blake2b(_encode(value), digest_size=_DIGEST).digest()


_NO_TOOLS = _digest(None)
