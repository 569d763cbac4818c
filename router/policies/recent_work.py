"""The work that each worker got recently.

Requests in flight show which workers are busy now. They do not show which workers have conversations whose clients are
thinking, or long requests; recently routed tokens do. Time is counted in decisions: every decision makes all earlier work weigh
a little less. Instead of shrinking every sum, the weight of new work grows, so a decision costs the same for any fleet size.
"""

from __future__ import annotations

_MAX_WEIGHT = 1e100


class RecentWork:
    """Sums of work by worker that fade: after `half_life` decisions, work counts half."""

    def __init__(self, half_life: float) -> None:
        self._growth = 2.0 ** (1.0 / half_life)
        self._weight = 1.0
        self._sums: dict[str, float] = {}
        self._total = 0.0
        self._requests = 0.0

    def add(self, worker: str, units: int) -> None:
        """Count a request of this many units for a worker."""
        self._weight *= self._growth
        if self._weight > _MAX_WEIGHT:
            self._rescale()
        weighted = units * self._weight
        self._sums[worker] = self._sums.get(worker, 0.0) + weighted
        self._total += weighted
        self._requests += self._weight

    def given(self, worker: str) -> float:
        """Return the units that a worker was given lately."""
        return self._sums.get(worker, 0.0) / self._weight

    @property
    def total(self) -> float:
        """The units that all workers were given lately."""
        return max(0.0, self._total / self._weight)

    @property
    def mean(self) -> float:
        """The mean units of a recent request."""
        return self._total / self._requests if self._requests else 0.0

    def forget(self, worker: str) -> None:
        """Drop a worker and its work."""
        share = self._sums.pop(worker, 0.0)
        self._requests *= 1 - share / self._total if self._total else 0.0
        self._total -= share
        if not self._sums:
            self._total = self._requests = 0.0

    def _rescale(self) -> None:
        self._sums = {worker: weighted / self._weight for worker, weighted in self._sums.items()}
        self._total = sum(self._sums.values())
        self._requests /= self._weight
        self._weight = 1.0

    def __len__(self) -> int:
        return len(self._sums)
