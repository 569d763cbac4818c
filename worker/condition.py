"""Waiting for a condition in an event loop, without locks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Condition:
    """Wakes the waiters whose predicate holds. Call `notify` after every change that can make one true."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiting)

    def notify(self) -> None:
        """Evaluate all predicates."""
        for future, predicate in list(self._waiting.items()):
            if future.done():
                continue
            try:
                if predicate():
                    future.set_result(None)
            except Exception as error:  # noqa: BLE001 - it is the waiter's predicate, and so the waiter's error
                future.set_exception(error)

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return when `predicate` holds, now or at a later `notify`."""
        if predicate():
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = predicate
        try:
            await future
        finally:
            del self._waiting[future]
