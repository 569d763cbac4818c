"""The better of two random workers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.workers.policy import RouteQuery
from router.workers.worker import Target


class PowerOfTwo:
    """Draws two distinct workers and chooses the one with fewer requests in flight (Mitzenmacher, 2001)."""

    def __init__(self, generator: random.Random | None = None) -> None:
        self._random = generator or random.Random()

    def select(self, targets: Sequence[Target], query: RouteQuery) -> Target:
        if len(targets) == 1:
            return targets[0]
        first, second = self._random.sample(targets, 2)
        return first if first.inflight <= second.inflight else second
