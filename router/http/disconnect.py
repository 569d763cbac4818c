"""Ends the work for a client in the moment in which the client leaves."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from router.errors import ClientDisconnectedError


class ClientConnection:
    """Cancels the work inside its `async with` block as soon as the client is gone.

    One task reads `receive` for as long as the block runs. `http.disconnect` cancels the task of the block, which then
    ends with ClientDisconnectedError; a cancellation from outside stays a CancelledError. (The bookkeeping with
    `uncancel` follows `asyncio.timeout`.) So the work itself needs no second task and no check per chunk.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._reason: BaseException | None = None
        self._watching = True

    async def __aenter__(self) -> ClientConnection:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._watch())
        self._watcher.add_done_callback(self._on_gone)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop_watching()
        if (
            self._reason is not None
            and self._task.uncancel() <= self._cancelling
            and kind is not None
            and issubclass(kind, asyncio.CancelledError)
        ):
            raise self._reason from None

    def stop_watching(self) -> None:
        """Stop before the last message of a reply is sent: after it, a server reports every client as gone."""
        self._watching = False  # the watcher may have seen the end, with its callback still to come
        self._watcher.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _on_gone(self, watcher: asyncio.Task[None]) -> None:
        if watcher.cancelled() or not self._watching:
            return
        # A middleware's `receive` may raise, too: that ends the request in the same way.
        self._reason = watcher.exception() or ClientDisconnectedError("the client left")
        self._task.cancel()
