"""The circuit breaker of one worker.

    closed --- failures in a row ---> open --- its time is over ---> half open
       ^                               ^                                |  |
       |                               +-------- a trial fails ---------+  |
       +------------------- enough trials succeed -------------------------+

A half-open breaker lets one request at a time through: a trial. After a trial without a result (its client left, or no other
worker could answer it either) the next request is the trial. `router/proxy/attempts.py` decides what counts as a failure.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

from router.config.workers import BreakerConfig


class BreakerState(enum.Enum):
    """Whether requests pass: all (closed), none (open), or one at a time (half open)."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


_DISABLED = BreakerConfig(enabled=False)


class Breaker:
    """Counts a worker's failures, and keeps requests from it after too many of them."""

    __slots__ = ("_clock", "_config", "_in_a_row", "_opened_at", "_trial", "on_change", "state")

    def __init__(
        self,
        config: BreakerConfig = _DISABLED,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[BreakerState], None] | None = None,
    ) -> None:
        """`clock` returns seconds; `on_change` is called with each new state."""
        self._config = config
        self._clock = clock
        self._in_a_row = 0
        self._opened_at = 0.0
        self._trial = False
        self.state = BreakerState.CLOSED
        self.on_change = on_change

    @property
    def allows(self) -> bool:
        if self.state is BreakerState.CLOSED:
            return True
        return not self._trial and self.seconds_left <= 0

    @property
    def seconds_left(self) -> float:
        """Seconds until an open breaker lets a trial through; 0 for others."""
        if self.state is not BreakerState.OPEN:
            return 0.0
        return max(0.0, self._opened_at + self._config.timeout - self._clock())

    def begin(self) -> bool:
        """Note that a request is sent. Return whether it is a trial, whose end the caller reports to `trial_over`."""
        if self.state is BreakerState.CLOSED:
            return False
        self._trial = True
        if self.state is BreakerState.OPEN:
            self._move_to(BreakerState.HALF_OPEN)
        return True

    def trial_over(self) -> None:
        """Note the end of a trial, with or without a result."""
        self._trial = False

    def succeeded(self) -> None:
        if self.state is BreakerState.CLOSED:
            self._in_a_row = 0
        elif self.state is BreakerState.HALF_OPEN:
            self._in_a_row += 1
            if self._in_a_row >= self._config.success_threshold:
                self._in_a_row = 0
                self._move_to(BreakerState.CLOSED)

    def failed(self) -> None:
        """Note a failure by the worker's own fault."""
        if not self._config.enabled:
            return
        if self.state is BreakerState.CLOSED:
            self._in_a_row += 1
            if self._in_a_row >= self._config.failure_threshold:
                self._open()
        elif self.state is BreakerState.HALF_OPEN:
            self._open()

    def forget(self) -> None:
        """Close and start counting from zero: the process that failed is gone, and another one is there."""
        self._in_a_row = 0
        if self.state is not BreakerState.CLOSED:
            self._move_to(BreakerState.CLOSED)

    def _open(self) -> None:
        self._in_a_row = 0
        self._opened_at = self._clock()
        self._move_to(BreakerState.OPEN)

    def _move_to(self, state: BreakerState) -> None:
        self.state = state
        if self.on_change is not None:
            self.on_change(state)

    def __repr__(self) -> str:
        return f"<Breaker {self.state.value} {self._in_a_row} in a row>"
