"""The workers in turn."""

from __future__ import annotations

from collections.abc import Sequence

from router.workers.policy import RouteQuery
from router.workers.worker import Worker


class RoundRobin:
    """Chooses the workers in turn, whatever their load."""

    def __init__(self) -> None:
        self._next = 0

    def select(self, workers: Sequence[Worker], query: RouteQuery) -> Worker:
        index = self._next % len(workers)
        self._next = index + 1
        return workers[index]
