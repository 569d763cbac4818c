"""Message keys: when two messages count as the same, although a client never sends back exactly what it received.

A message that comes back (an *echo*) loses its reasoning, gains empty fields and a name, has its tool arguments serialized
again, and the ids of its calls replaced. Tokens come from the trie and never from the echo, so an echo only needs to be
recognized: `canonical` compares the meaning of a message, `strict` all of its fields. A user's own function takes the message
and returns anything hashable. What a key cannot show, because it depends on what was sampled, `same_turn` compares.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from middleware_hub.chat.messages import ChatRequest, Message, MessageKey
from router.errors import BadRequestError, RouterError

logger = logging.getLogger(__name__)

CallIds = Sequence[str | None]
"""The ids of the calls of a message, in their order."""


class KeyFunction(Protocol):
    """Returns the key of a message."""

    def __call__(self, message: Message, answers: CallIds = (), /) -> MessageKey:
        """`answers`: the ids of the calls that a tool's message may answer: of the last calls before it."""


_encode = msgspec.json.Encoder(order="deterministic").encode
_DIGEST = 16


class MessageKeyError(RouterError):
    """The user's own function for `--session-match` failed with a message."""

    type = "session_match_failed"

    def __init__(self, message: str) -> None:
        # OpenAI's and Anthropic's own clients send a request again after a 5xx, and it would fail again.
        super().__init__(message, headers=(("x-should-retry", "false"),))


def canonical(message: Message, answers: CallIds = (), /) -> bytes:
    """Return the digest of the meaning of a message.

    `None`, `""`, `[]` and an absent field are equal, a lone text part equals its string, and neither white space nor the order
    of keys counts in arguments, nor what a double loses of a number. `reasoning_content` does not count at all, because many
    clients drop it; nor do the `name` of an assistant, and the ids of calls: a result counts as that of the first, second, ...
    of them, whatever name it has.
    """
    role, content, called = message.get("role"), message.get("content"), message.get("tool_calls")
    answered = message.get("tool_call_id")
    is_named_elsewhere = role == "assistant" or (answered is not None and answered in answers)
    said: list[Any] = [
        role,
        (content or None) if type(content) is str else _content(content),
        None if is_named_elsewhere else message.get("name") or None,
        [said_by(call) for call in called] if called else [],
        None if answered is None else _place(answered, answers),
    ]
    return blake2b(_encode(said), digest_size=_DIGEST).digest()


def calls(message: Message, answers: CallIds = (), /) -> bytes:
    """Return the key that `canonical` gives. With calls, a message is also recognized by their ids alone (see `echoes`)."""
    return canonical(message, answers)


def strict(message: Message, _: CallIds = (), /) -> bytes:
    """Return the digest of all fields of a message, whatever the order of keys."""
    return _digest(message)


def call_ids(message: Message) -> CallIds:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def answered_by(messages: Sequence[Message], at: int) -> CallIds:
    """Return the ids of the calls that `messages[at]` may answer: of the last message before it that has calls."""
    if messages[at].get("role") != "tool":
        return ()
    for message in reversed(messages[:at]):
        if message.get("tool_calls"):
            return call_ids(message)
    return ()


def _place(answered: object, answers: CallIds) -> object:
    """Return the place of a call among the calls that may be answered; its id if it is none of them."""
    return answers.index(answered) if answered in answers else answered or None


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


def load(name: str) -> KeyFunction:
    """Return the function of `canonical`, `strict` or `calls`, or the user's own at `pkg.mod:function`. Raises BadRequestError.

    If the user's function fails, or returns what cannot be hashed, the returned function raises MessageKeyError.
    """
    if name in NAMED:
        return NAMED[name]
    module, _, attribute = name.partition(":")
    if not module or not attribute or module.startswith("."):
        raise BadRequestError(f"--session-match must be {', '.join(NAMED)} or pkg.mod:function, not {name!r}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadRequestError(f"--session-match {name}: {error}") from error
    if not callable(found):
        raise BadRequestError(f"--session-match {name}: this is no function")

    def checked(message: Message, _: CallIds = (), /) -> MessageKey:
        try:
            key: MessageKey = found(message)
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


NAMED: dict[str, KeyFunction] = {"canonical": canonical, "strict": strict, "calls": calls}


def _content(content: Any) -> Any:
    if not content:
        return None
    if isinstance(content, list) and len(content) == 1:
        (part,) = content
        if isinstance(part, dict) and part.get("type") == "text":
            return part.get("text") or None
    return content


def said_by(call: Mapping[str, Any]) -> list[Any]:
    """Return a tool call's name and arguments, without regard to white space and the order of keys."""
    function: dict[str, Any] = call.get("function") or {}
    return [function.get("name"), arguments_of(function.get("arguments"))]


def arguments_of(arguments: Any) -> Any:
    """Return the arguments of a call as an object if they are one: a client may send its text.

    Numbers are as JavaScript reads them: `1` for `1.0`, a double for an integer beyond 2^53, and null for one that no double
    holds (`1e400`), as it writes it again.
    """
    if not isinstance(arguments, str):
        try:
            return as_read(arguments) or None
        except RecursionError:
            return arguments or None
    try:
        found = _decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        if not _NO_NUMBER.search(arguments):
            return arguments or None
        try:  # Python writes a double that is no number as `Infinity`
            found = json.loads(arguments, parse_constant=lambda _: None, parse_float=_number)
        except (ValueError, RecursionError):
            return arguments or None
    return (_as_doubles(found) if _LONG.search(arguments) else found) or None


def as_read(value: Any) -> Any:
    """Return a value of JSON with its numbers as JavaScript reads them, see `arguments_of`."""
    written = _encode(value)
    found = _decode(written)
    return _as_doubles(found) if _LONG_BYTES.search(written) else found


def _number(written: str) -> float | None:
    """Return `1` for `1.0`: JavaScript prints `1` for both."""
    value = float(written)
    if math.isinf(value):
        return None
    return int(value) if value.is_integer() else value


def _as_doubles(value: Any) -> Any:
    """Return a value with integers beyond 2^53 as doubles have them."""
    match value:
        case bool():
            return value
        case int() if abs(value) > _SAFE:
            return _number(str(value))
        case dict():
            return {name: _as_doubles(one) for name, one in value.items()}
        case list():
            return [_as_doubles(one) for one in value]
    return value


_SAFE = 2**53
_LONG = re.compile(r"\d{16}")
_LONG_BYTES = re.compile(rb"\d{16}")
_NO_NUMBER = re.compile(r"\b(?:Infinity|NaN)\b")
_decode = msgspec.json.Decoder(float_hook=_number).decode


def _digest(value: Any) -> bytes:
    return blake2b(_encode(value), digest_size=_DIGEST).digest()


_NO_TOOLS = _digest(None)
