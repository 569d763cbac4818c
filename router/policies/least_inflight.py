"""Fewest requests in flight."""

from __future__ import annotations

from collections.abc import Sequence

from router.workers.policy import RouteQuery
from router.workers.worker import Target


class LeastInflight:
    """Chooses the worker with the fewest requests in flight; among equals in turn, so that an idle fleet is used evenly."""

    def __init__(self) -> None:
        self._next = 0

    def select(self, targets: Sequence[Target], query: RouteQuery) -> Target:
        if len(targets) == 1:
            return targets[0]
        loads = [target.inflight for target in targets]
        least, start = min(loads), self._next % len(loads)
        try:
            best = loads.index(least, start)
        except ValueError:
            best = loads.index(least)
        self._next = best + 1
        return targets[best]
