"""The workers in turn."""

from __future__ import annotations

from collections.abc import Sequence

from router.workers.policy import RouteQuery
from router.workers.worker import Target


class RoundRobin:
    """Chooses the workers in turn, whatever their load."""

    def __init__(self) -> None:
        self._next = 0

    def select(self, targets: Sequence[Target], query: RouteQuery) -> Target:
        index = self._next % len(targets)
        self._next = index + 1
        return targets[index]
