"""The lag of the event loop: how late it runs its tasks.

All requests share one loop. A computation that takes too long delays all of them, and shows here before it shows in their
latencies.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from router.observability.metrics import RouterMetrics

PERIOD = 0.05
"""Seconds between two measurements."""

RECENT_SECONDS = 60.0
"""How far back the maximum reaches: longer than the usual interval between two scrapes."""


class RecentMax:
    """The maximum of the values of the last `seconds`; 0 if there are none."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Falling values: one that is smaller than a later value can never be the maximum again.
        self._falling: deque[tuple[float, float]] = deque()

    def add(self, now: float, value: float) -> None:
        """Add the value of the time `now`, which never goes back."""
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now, value))
        self._forget(now)

    def at(self, now: float) -> float:
        self._forget(now)
        return self._falling[0][1] if self._falling else 0.0

    def _forget(self, now: float) -> None:
        while self._falling and self._falling[0][0] < now - self._seconds:
            self._falling.popleft()


class LoopLag:
    """Measures the running loop during its `async with` block."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._histogram = metrics.loop_lag
        self._recent = RecentMax(RECENT_SECONDS)
        metrics.loop_lag_max.set_function(lambda: self._recent.at(time.monotonic()))

    async def __aenter__(self) -> LoopLag:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + PERIOD
            await asyncio.sleep(PERIOD)
            now = time.monotonic()
            late = max(0.0, now - due)
            self._histogram.observe(late)
            self._recent.add(now, late)
