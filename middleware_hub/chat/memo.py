"""What a session has read of earlier bodies of its client, as a dialect uses it: only what is new has to be parsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import Raw

from middleware_hub.chat.messages import ChatRequest, Message


class Recalled(msgspec.Struct, frozen=True):
    """The part of a body that is known already.

    Attributes:
        body: the bytes to read instead: the list of the unknown messages if `request` is known, else the body with a mark
            in place of all known messages.
        mark: the mark as it is written in `body`.
        items: how many of the client's messages are known.
        messages: the messages that they were parsed into.
        request: the parsed request of all other fields, if they are the same, byte for byte; else None.
        source: where the memo found them; only the memo reads it.
    """

    body: bytes
    mark: bytes
    items: int
    messages: Sequence[Message]
    request: ChatRequest | None = None
    source: object = None


class AnsweredTurns(Protocol):
    """The turns that were answered here. Each is found by the id of its reply; None if it was answered elsewhere, or never."""

    def answered(self, reply: str) -> Message | None:
        """Return a turn, with its reasoning."""

    def conversation(self, reply: str) -> Sequence[Message] | None:
        """Return all messages of the conversation that a turn ends, the turn itself included. Takes time for each of them."""


class Memo(Protocol):
    """Remembers the messages and requests of earlier bodies."""

    turns: AnsweredTurns | None
    """The turns of the same session; None if there are none."""

    def recall(self, body: bytes) -> Recalled | None:
        """Return the known part of the body's messages. At least one message is left to parse."""

    def keep(
        self,
        body: bytes,
        request: ChatRequest,
        listed: Sequence[Raw],
        read: Sequence[Sequence[Message]],
        recalled: Recalled | None,
    ) -> list[Message]:
        """Remember the result of parsing a body, and return all of its messages, which the caller uses from then on.

        Args:
            body: the body as it came.
            request: the parsed request of all other fields: `recalled.request`, or a new one that does not depend on
                `messages`. Its messages are the ones elsewhere in the body (a system prompt); they come
                first.
            listed: its other messages, without the recalled ones.
            read: the result for each of `listed`: one message, or several that a dialect folds into one.
            recalled: the result of `recall`, if the dialect used it.
        """
