"""Time limits for others, in which the lateness of this process does not count.

All requests share one event loop. When the loop is late (a long computation, a machine with too few cores, a process that
was stopped), an answer may lie unread while a plain time limit passes, and the first thing that the loop does is to give up.
So these limits count what the loop has done: they pass in `TICKS` steps, each of which is a turn of the loop, and a late step
counts no more than one in time. When a limit has passed, the loop had that many chances to send the question and to read the
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

TICKS = 20
"""Turns of the loop in a limit, at least. A question on a new connection takes six of them."""

LONGEST_TICK = 0.25
"""Seconds. So much at most is lost of a limit when the loop is late once."""


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
