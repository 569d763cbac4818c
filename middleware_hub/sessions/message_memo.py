"""The messages of a session, by the text that they came in: a client sends all of them again at every turn, and nearly all
are old ones, letter for letter. What was read once is not read again, and neither is its key worked out.
"""

from __future__ import annotations

from collections.abc import Sequence

from middleware_hub.sessions.chat import Message
from middleware_hub.sessions.message_key import KeyedMessage, KeyFunction


class MessageMemo:
    """One dialect's, of one session. It lasts as long as the session, and grows with it: by what a turn adds."""

    def __init__(self, key: KeyFunction) -> None:
        self._key = key
        self._known: dict[bytes, tuple[Message, ...]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, raw: bytes) -> tuple[Message, ...] | None:
        """What was made of this text; nobody may change it."""
        return self._known.get(raw)

    def put(self, raw: bytes, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Remember what was made of a text: one message, or several where a dialect folds them into one."""
        found = self._known[raw] = tuple(KeyedMessage(message, self._key(message)) for message in messages)
        return found
