"""Time limits for others that leave out the lateness of this process.

All requests share one event loop. When the loop is late (a long computation, a machine with too few cores, a process that
was stopped), an answer may lie unread while a plain time limit passes, and the loop's first act would be to give up. So these
limits count turns of the loop: they pass in `TICKS` steps of one turn each, and a late step counts no more than one in time.
When a limit has passed, the loop had that many chances to send the request and to read the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

TICKS = 20
"""The least number of turns of the loop in a limit. A request on a new connection takes six."""

LONGEST_TICK = 0.25
"""Seconds: the most that a limit loses when the loop is late once."""


@contextlib.asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError once the block has had `seconds` in which the event loop was not late."""
    loop = asyncio.get_running_loop()
    step = min(seconds / TICKS, LONGEST_TICK)
    left = seconds
    due: asyncio.TimerHandle
    async with asyncio.timeout(None) as timeout:

        def tick() -> None:
            nonlocal left, due
            left -= step
            if left > 0:
                due = loop.call_later(step, tick)
            else:
                timeout.reschedule(loop.time())

        due = loop.call_later(step, tick)
        try:
            yield
        finally:
            due.cancel()
