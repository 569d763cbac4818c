"""How much each worker was given lately.

Requests in flight tell who is busy now. They do not tell who holds the conversations whose clients are thinking, nor whose
requests are long; the tokens that were routed lately do. Time is counted in decisions: with each one, all that came before
weighs a little less. Instead of making every sum smaller, the weight of what is added grows, so that a decision costs the
same whatever the number of workers.
"""

from __future__ import annotations

_TOO_HEAVY = 1e100


class RecentWork:
    """Sums that fade: after `half_life` decisions what was added counts half."""

    def __init__(self, half_life: float) -> None:
        self._growth = 2.0 ** (1.0 / half_life)
        self._weight = 1.0
        self._sums: dict[str, float] = {}
        self._total = 0.0
        self._requests = 0.0

    def add(self, worker: str, units: int) -> None:
        """A request of so many units goes to a worker."""
        self._weight *= self._growth
        if self._weight > _TOO_HEAVY:
            self._rescale()
        heavy = units * self._weight
        self._sums[worker] = self._sums.get(worker, 0.0) + heavy
        self._total += heavy
        self._requests += self._weight

    def given(self, worker: str) -> float:
        """What a worker was given lately."""
        return self._sums.get(worker, 0.0) / self._weight

    @property
    def total(self) -> float:
        """And all of them."""
        return max(0.0, self._total / self._weight)

    @property
    def mean(self) -> float:
        """Units of a request, on average."""
        return self._total / self._requests if self._requests else 0.0

    def forget(self, worker: str) -> None:
        """It is gone, and its work with it."""
        share = self._sums.pop(worker, 0.0)
        self._requests *= 1 - share / self._total if self._total else 0.0
        self._total -= share
        if not self._sums:
            self._total = self._requests = 0.0

    def _rescale(self) -> None:
        self._sums = {worker: heavy / self._weight for worker, heavy in self._sums.items()}
        self._total = sum(self._sums.values())
        self._requests /= self._weight
        self._weight = 1.0

    def __len__(self) -> int:
        return len(self._sums)
