"""The jobs of the writer, and their waiting callers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import apsw

from middleware_hub.store.sqlite.appending import Prepared

logger = logging.getLogger(__name__)

OF_ALL: Final = (apsw.BusyError, apsw.CantOpenError, apsw.FullError, apsw.IOError, apsw.LockedError, apsw.ReadOnlyError)
"""Errors of the whole file: they do not come from one of the batches that are written together."""

Step = Callable[[apsw.Connection], Any]
Answer = tuple[asyncio.Future[Any], Any, BaseException | None]


class Job:
    """A batch or a step, and its waiting caller."""

    __slots__ = ("future", "work")

    def __init__(self, work: Prepared | Step, future: asyncio.Future[Any] | None) -> None:
        self.work = work
        self.future = future


def result(job: Job, value: Any, error: BaseException | None) -> list[Answer]:
    """Return the result to deliver, if a caller waits for it."""
    if job.future is None:
        if error is not None:
            logger.error("a write that nobody waited for failed: %s", error)
        return []
    return [(job.future, value, error)]


def answer(answers: Sequence[Answer]) -> None:
    """Wake all waiting callers, with one call into each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
    for one in answers:
        loops.setdefault(one[0].get_loop(), []).append(one)
    for loop, some in loops.items():
        try:
            loop.call_soon_threadsafe(settle, some)
        except RuntimeError:  # the loop is closed: no caller waits any more
            logger.debug("%d answers came too late", len(some))


def settle(answers: Sequence[Answer]) -> None:
    """Wake all waiting callers, in their event loop."""
    for future, value, error in answers:
        if not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
