"""Waiting for a condition in an event loop, without locks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Bell:
    """Wakes those whose condition holds. It must be rung after whatever may have changed one."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    @property
    def waited_for(self) -> bool:
        """Whether anybody would hear it."""
        return bool(self._waiting)

    def ring(self) -> None:
        """Look at all conditions."""
        for future, condition in list(self._waiting.items()):
            if future.done():
                continue
            try:
                if condition():
                    future.set_result(None)
            except Exception as error:  # noqa: BLE001 - it is the waiter's condition, and so the waiter's error
                future.set_exception(error)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return when `condition` has held at a ring, or holds at once."""
        if condition():
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = condition
        try:
            await future
        finally:
            del self._waiting[future]
