"""The drift of one chain, see `drifts`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

import numpy as np

from middleware_hub.inspector.conversations.chain import Chain


class Drifted(NamedTuple):
    """Tokens `start` to `end` of a chain become `encoded` if their text is encoded again."""

    start: int
    end: int
    encoded: tuple[int, ...]
    text: str


class Drift:
    """What re-encoding would change in one chain."""

    def __init__(self, chain: Chain, found: list[Drifted]) -> None:
        mask = chain.mask()
        counts = np.concatenate(([0], np.cumsum(mask)))
        self.sampled_tokens = chain.sampled
        self.found = [one for one in found if counts[one.end] > counts[one.start]]
        """Only the differences that affect a sampled token."""
        self.drifted_tokens = int(sum(counts[one.end] - counts[one.start] for one in self.found))
        self._ends = [one.end for one in self.found]
        self._starts = [one.start for one in self.found]

    def described(self) -> dict[str, Any]:
        share = self.drifted_tokens / self.sampled_tokens if self.sampled_tokens else 0.0
        return {
            "sampled_tokens": self.sampled_tokens,
            "drifted_tokens": self.drifted_tokens,
            "share": share,
            "spans": len(self.found),
        }

    def between(self, start: int, end: int) -> list[Drifted]:
        """Return the differences that overlap a window."""
        return self.found[bisect_right(self._ends, start) : bisect_left(self._starts, end)]

    def within(self, start: int, end: int) -> int:
        """Return how many tokens of a reply drifted."""
        return sum(min(one.end, end) - max(one.start, start) for one in self.between(start, end))

    def next(self, start: int) -> Drifted | None:
        """Return the first difference that begins at a token or after it."""
        at = bisect_left(self._starts, start)
        return self.found[at] if at < len(self.found) else None
