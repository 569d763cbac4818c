"""How many tokens pictures become, learned from what workers answer.

A length belongs to a picture and to the settings of model and processor (`Family.settings`). All workers of a fleet must
agree: where one says another length than is known, its reply is not exact.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

_MAX_KNOWN: Final = 100_000
"""Lengths to know; 300 bytes each."""


class Lengths:
    """Numbers of tokens by settings and digest. Over the limit, the least recently used are forgotten."""

    def __init__(self, max_known: int = _MAX_KNOWN) -> None:
        self._max_known = max_known
        self._known: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._doubted: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._settings: set[str] = set()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, settings: str, digest: str) -> int | None:
        """Return the number of tokens of a picture; None if it is not known."""
        tokens = self._known.get((settings, digest))
        if tokens is not None:
            self._known.move_to_end((settings, digest))
        return tokens

    def of(self, digest: str) -> dict[str, int]:
        """Return the numbers of tokens of a picture, by settings."""
        return {settings: tokens for settings in self._settings if (tokens := self.get(settings, digest)) is not None}

    def recall(self, settings: str, digest: str, tokens: int) -> None:
        """Note the number of tokens that a store remembers, unless a worker has contradicted it here."""
        if (settings, digest) not in self._doubted:
            self.learn(settings, digest, tokens)

    def learn(self, settings: str, digest: str, tokens: int) -> bool:
        """Note the number of tokens of a picture. Return False, and keep what is known, if that is another number."""
        known = self.get(settings, digest)
        if known is not None:
            return known == tokens
        self._known[settings, digest] = tokens
        self._settings.add(settings)
        self._doubted.pop((settings, digest), None)
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)
        return True

    def forget(self, settings: str, digest: str) -> None:
        """Forget a number, if it is known: a worker has answered with another one, and it is not known which is right."""
        if self._known.pop((settings, digest), None) is not None:
            self._doubted[settings, digest] = None
            if len(self._doubted) > self._max_known:
                self._doubted.popitem(last=False)
