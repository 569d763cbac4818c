"""`x-router-affinity`: a value by which a load balancer keeps a conversation at one of several routers.

Every router of a store answers every request exactly, so this only saves look-ups. A client sends back the value of the reply,
or one of its own. Without the header, a client gets the same value at every turn of a conversation:

    a text, ids      a hash of the end of the first prompt: the text before the first sampled token of the chain
    a session        its id, which its URL has too
    other chats      a hash of the messages before the first reply

All samples of one prompt have one value, so one router encodes their prompt once; groups are many and small.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from xxhash import xxh3_64_hexdigest

from middleware_hub.chat.messages import KeyedMessage, Message
from middleware_hub.spans.chain import TokenSpan

HEADER = b"x-router-affinity"
HASHED = 1024
"""Characters at the end of a first prompt that are hashed: many conversations share its beginning."""

_sane = re.compile(rb"[A-Za-z0-9._~-]{1,128}").fullmatch


class _Reused(Protocol):
    @property
    def span(self) -> TokenSpan | None: ...


class Matched(Protocol):
    """The match of a text in the radix tree; see `radix.match.PrefixMatch`."""

    @property
    def namespace(self) -> tuple[str, ...]: ...
    @property
    def text(self) -> str: ...
    @property
    def cut(self) -> _Reused: ...


def given(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the word of a request; None if it has no word, or one that is too long or has characters that no id has."""
    value = headers.get(HEADER)
    return value if value is not None and _sane(value) else None


def of_text(headers: Mapping[bytes, bytes], match: Matched) -> bytes:
    """Return the word of a request with a text: its own word, or the same for every text that continues its first prompt."""
    word = headers.get(HEADER)
    if word is not None and _sane(word):
        return word
    text, span = match.text, match.cut.span
    # The first prompt ends where the first sampled span begins. So a long chain need not be walked at each turn.
    end = len(text) if span is None or span.answered < 0 else span.answered
    return _hash(match.namespace, end, text[max(0, end - HASHED) : end])


def of_chat(namespace: Sequence[str], messages: Sequence[Message]) -> bytes:
    """Return the word of a conversation: the same for every list of messages that continues its first prompt.

    That prompt ends before the first reply after a user's message, or before the first reply if there is no user's message.
    """
    keys: list[str] = []
    asked, first = False, 0
    for message in messages:
        role = message.get("role")
        if role == "assistant" and keys:
            if asked:
                break
            first = first or len(keys)
        asked = asked or role == "user"
        keys.append(repr(message.key if isinstance(message, KeyedMessage) else message))
    if first and not asked:
        del keys[first:]
    return _hash(namespace, len(keys), "\n".join(keys))


def _hash(namespace: Sequence[str], size: int, text: str) -> bytes:
    whole = "\0".join((*namespace, str(size), text))
    return xxh3_64_hexdigest(whole.encode("utf-8", "surrogatepass")).encode()
