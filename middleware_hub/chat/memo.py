"""What a dialect may remember of earlier bodies: the messages that they were parsed into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import Raw

from middleware_hub.chat.messages import Message


class Recalled(msgspec.Struct, frozen=True):
    """The part of a body that is known already.

    Attributes:
        body: the body to read instead: a mark replaces all messages that are known.
        mark: the mark as it is written in `body`.
        items: how many of the client's messages the mark replaces.
        messages: the messages that they were parsed into.
        source: where the memo found them; only the memo reads it.
    """

    body: bytes
    mark: bytes
    items: int
    messages: Sequence[Message]
    source: object = None


class Memo(Protocol):
    """Remembers what the first messages of earlier bodies were parsed into."""

    def recall(self, body: bytes) -> Recalled | None:
        """Return what is known of the body's messages. At least one message is left to parse."""

    def keep(
        self,
        body: bytes,
        front: Sequence[Message],
        listed: Sequence[Raw],
        read: Sequence[Sequence[Message]],
        recalled: Recalled | None,
    ) -> list[Message]:
        """Remember what a body was parsed into, and return all of its messages, which the caller uses from then on.

        Args:
            body: the body as it came.
            front: messages that the dialect keeps elsewhere in the body (a system prompt), in front of all others.
            listed: its other messages, without the recalled ones.
            read: what each of `listed` was parsed into: one message, or several that a dialect folds into one.
            recalled: what `recall` returned, if the dialect used it.
        """
