"""Answered turns that the store may have lost: they are looked for when a session is read again."""

from __future__ import annotations

from typing import Final, Protocol

from middleware_hub.sessions.trie.trie import MessageTrie

_MOST: Final = 1_000
"""Sessions that are remembered."""


class Dropped(Protocol):
    """A session that this router is about to drop; its attributes are those of `Session`."""

    id: str
    tenant: str
    trie: MessageTrie
    lost: tuple[str, ...]


class LostTurns:
    """Remembers the answered generations of a session (tenant and id) until the session is read again."""

    def __init__(self) -> None:
        self._answered: dict[tuple[str, str], tuple[str, ...]] = {}

    def note(self, session: Dropped, *, diverged: bool = False) -> None:
        """Remember the turns of a session that are known to be lost.

        `diverged`: its log lacks events that were applied here, so remember every turn.
        """
        answered = (*session.lost, *(one.id for one in session.trie.checkpoints() if diverged))
        if answered:
            self._answered[session.tenant, session.id] = answered
            if len(self._answered) > _MOST:
                del self._answered[next(iter(self._answered))]

    def take(self, session: Dropped) -> tuple[str, ...]:
        """Return the remembered turns that a session lacks after it was read again, and forget them."""
        answered = self._answered.pop((session.tenant, session.id), ())
        return tuple(one for one in answered if session.trie.checkpoint(one) is None)
