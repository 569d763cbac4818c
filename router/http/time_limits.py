"""Time limits for workers and clients that do not count delays of this process.

All requests share one event loop. When the loop is late (a long computation, a machine with too few cores, a process that was
stopped), an answer may lie unread while a plain time limit passes, and the loop would give up before it reads. So these limits
count iterations of the loop: they pass in `TICKS` steps of one iteration each, a late step counts no more than a timely one,
and the last step has to be timely. When a limit has passed, the loop had that many chances to send the request and to read the
answer.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType

TICKS = 20
"""The number of steps of a limit, and the least number of turns of the loop in it. A request on a new connection takes six."""

LATE = 0.05
"""Seconds: a last step that ends later than this is repeated."""


class patience:
    """Raise TimeoutError once the block has had `seconds` in `TICKS` steps, of which the last one ended in time.

    So of a time in which the event loop stood still, at most one step counts. A loop that is always late delays the end until
    twice as many steps have passed.
    """

    __slots__ = ("_due", "_left", "_loop", "_step", "_timeout")

    def __init__(self, seconds: float) -> None:
        self._left = TICKS
        self._step = seconds / TICKS

    async def __aenter__(self) -> patience:
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        await self._timeout.__aenter__()
        self._due = self._loop.call_later(self._step, self._tick)
        return self

    def renew(self) -> None:
        """Begin again, after something has come. The step under way is not counted."""
        self._left = TICKS + 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._due.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def reschedule(self, when: float | None) -> None:
        """End at another time, however much has passed; see `asyncio.Timeout`."""
        self._due.cancel()
        self._timeout.reschedule(when)

    def _tick(self) -> None:
        now = self._loop.time()
        self._left -= 1
        if self._left > (-TICKS if now - self._due.when() > LATE else 0):
            self._due = self._loop.call_later(self._step, self._tick)
        else:
            self._timeout.reschedule(now)


def end_now(limit: asyncio.Timeout | patience) -> None:
    """Let the time of a block be over, unless the block ends by itself: `asyncio.Timeout` takes that for an error."""
    with suppress(RuntimeError):
        limit.reschedule(asyncio.get_running_loop().time())
