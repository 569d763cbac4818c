"""Which prefixes the engine has computed, apart for each salt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

_MOST = 1 << 20  # prefixes; with more it begins anew


class PrefixCache:
    """The prefixes of all sequences that were added, each as one hash. It holds no ids.

    Args:
        on: whether it keeps anything. One that does not never hits.
    """

    def __init__(self, *, on: bool) -> None:
        self._on = on
        self._known: set[int] = set()

    def add(self, ids: Sequence[int], salt: Hashable = None) -> None:
        """Remember a sequence, whose tokens have been computed. Only those of the same salt find it."""
        if not self._on:
            return
        if len(self._known) > _MOST:
            self.clear()
        prefix = hash(salt)
        for number in ids:
            prefix = hash((prefix, number))
            self._known.add(prefix)

    def match(self, ids: Sequence[int], salt: Hashable = None) -> int:
        """Return how many of the first ids are known. The last one never is: an engine samples from what it computes."""
        prefix = hash(salt)
        for count, number in enumerate(ids[:-1]):
            prefix = hash((prefix, number))
            if prefix not in self._known:
                return count
        return max(0, len(ids) - 1)

    def clear(self) -> None:
        self._known.clear()
