"""Gathers the work that is asked for while the event loop is busy: ten turns at once cost a third of ten single turns.

    add   add      add                       add
     |     |        |                         |
     other work  other work  other work       nothing else to do
                          |                    |
                          after `patience`     at once

No work waits while the processor is idle. An event loop does not say that it has nothing to do, but then its next turn is
quick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_IDLE: Final = 30e-6
"""A turn of the event loop that takes fewer seconds has done nothing else."""


class Gathering(Generic[T]):
    """Hands over the added work, in order.

    Args:
        work: called with it, in a separate turn of the event loop; raises nothing.
        patience: seconds to wait at most.
        enough: the weight at which the work is handed over at once.
    """

    def __init__(self, work: Callable[[list[T]], None], patience: float, enough: int) -> None:
        self._work = work
        self._patience = patience
        self._enough = enough
        self._gathered: list[T] = []
        self._weight = 0
        self._since = self._looked = 0.0

    def __len__(self) -> int:
        return len(self._gathered)

    def add(self, one: T, weight: int) -> None:
        if not self._gathered:
            loop = asyncio.get_running_loop()
            self._since = self._looked = perf_counter()
            self._weight = 0
            loop.call_soon(self._look, loop)
        self._gathered.append(one)
        self._weight += weight

    def take(self) -> list[T]:
        """Return the added work, which is then not handed over."""
        taken, self._gathered = self._gathered, []
        return taken

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = perf_counter()
        idle = now - self._looked < _IDLE
        if idle or now - self._since > self._patience or self._weight >= self._enough or not self._gathered:
            self._work(self.take())
        else:
            self._looked = now
            loop.call_soon(self._look, loop)
