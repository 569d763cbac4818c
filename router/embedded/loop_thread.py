"""An event loop in a thread of its own, for callers without a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE = 30.0  # seconds that a call may take by default


class LoopThread:
    """An event loop that runs from its construction to `stop`."""

    def __init__(self, name: str, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float = _PATIENCE) -> T:
        """Run a coroutine in the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Block the loop for the length of the block."""
        begun, over = threading.Event(), threading.Event()

        def hang() -> None:
            begun.set()
            over.wait()

        self._loop.call_soon_threadsafe(hang)
        begun.wait()
        try:
            yield
        finally:
            over.set()

    def stop(self) -> None:
        """End the loop. Tasks that still run are lost."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
