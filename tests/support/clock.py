"""A clock on which only waiting takes time: how long a test waits is exact, however busy the machine is."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any

import pytest


class _Clock(selectors.DefaultSelector):
    """Moves only when an event loop has nothing to do, and then at once as far as the loop's next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "nothing is left to wait for"
            self.now += timeout
        return found


def run_by_a_clock(monkeypatch: pytest.MonkeyPatch, work: Coroutine[Any, Any, None]) -> None:
    """Run what needs neither threads nor connections. Event loops, too, ask `time.monotonic`, which tells this clock's time."""
    clock = _Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner:
        runner.run(work)
