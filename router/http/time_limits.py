"""Time limits for others that leave out the lateness of this process.

All requests share one event loop. When the loop is late (a long computation, a machine with too few cores, a process that
was stopped), an answer may lie unread while a plain time limit passes, and the loop's first act would be to give up. So these
limits count turns of the loop: they pass in `TICKS` steps of one turn each, and a late step counts no more than one in time.
When a limit has passed, the loop had that many chances to send the request and to read the answer.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

TICKS = 20
"""The least number of turns of the loop in a limit. A request on a new connection takes six."""

LONGEST_TICK = 0.25
"""Seconds: the most that a limit loses when the loop is late once."""


class patience:
    """Raise TimeoutError once the block has had `seconds` in which the event loop was not late."""

    __slots__ = ("_due", "_left", "_loop", "_step", "_timeout")

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._step = min(seconds / TICKS, LONGEST_TICK)

    async def __aenter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        await self._timeout.__aenter__()
        self._due = self._loop.call_later(self._step, self._tick)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._due.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _tick(self) -> None:
        self._left -= self._step
        if self._left > 0:
            self._due = self._loop.call_later(self._step, self._tick)
        else:
            self._timeout.reschedule(self._loop.time())
