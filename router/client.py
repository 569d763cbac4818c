"""The client's side of one exchange: its body as it comes, and the moment it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType

from starlette.types import Receive

from router.errors import ClientDisconnectedError


class ClientConnection:
    """Cancels the work inside its `async with` block as soon as the client is gone.

    One task reads `receive` for as long as the block runs. `http.disconnect` cancels the task of the block, which then
    ends with ClientDisconnectedError; a cancellation from outside stays a CancelledError. (The bookkeeping with
    `uncancel` is that of `asyncio.timeout`.) So the work itself needs no second task and no check per chunk.
    """

    def __init__(self, receive: Receive, *, reads_body: bool) -> None:
        """With `reads_body`, the messages that still come are the request's body, to be taken from `body()`."""
        self._receive = receive
        self._reads_body = reads_body
        # One chunk ahead: behind it the server stops reading from the client, so an upload is never piled up here.
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1)
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
        """To be called before the last message of a reply: from there on a server reports every client as gone."""
        self._watching = False  # it may have seen the end already, and be about to tell
        self._watcher.cancel()

    async def body(self) -> AsyncIterator[bytes]:
        """The request body, chunk by chunk. What was taken from it is gone; until then it may be asked for again."""
        while (chunk := await self._chunks.get()) is not None:
            yield chunk

    async def _watch(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return
            if self._reads_body:
                if chunk := message.get("body", b""):
                    await self._chunks.put(chunk)
                if not message.get("more_body", False):
                    self._reads_body = False
                    await self._chunks.put(None)

    def _on_gone(self, watcher: asyncio.Task[None]) -> None:
        if watcher.cancelled() or not self._watching:
            return
        # A middleware's `receive` may raise as well: that ends the request in the same way.
        self._reason = watcher.exception() or ClientDisconnectedError("the client left")
        self._task.cancel()
