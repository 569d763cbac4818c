"""Ends the work for a client the moment the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec
from starlette.types import Message, Receive, Send

from router.errors import ClientDisconnectedError

EXTENSION = "router.client"


class ServedClient(msgspec.Struct, eq=False):
    """What the server knows of the client of one request. A server that knows it puts it in `scope["extensions"]`.

    Attributes:
        all_here: whether all of the request has come.
        gone: whether the client has left.
        write: writes a piece of the reply's body, which has begun, as `DirectSend.write`; None if the server has no such call.
    """

    all_here: bool = False
    gone: bool = False
    write: Callable[[bytes], bool] | None = None
    _watching: list[Callable[[], object]] = []

    def leave(self) -> None:
        """Note that the client is gone, and run the callbacks of `watch`."""
        self.gone = True
        for call in tuple(self._watching):
            call()

    def watch(self, call: Callable[[], object]) -> None:
        """Run `call` when the client leaves, or soon if it has left already."""
        self._watching.append(call)
        if self.gone:
            asyncio.get_running_loop().call_soon(call)

    def unwatch(self, call: Callable[[], object]) -> None:
        self._watching.remove(call)


def served_client(scope: Mapping[str, Any]) -> ServedClient | None:
    """Return what the server knows of the client of a request; None if it reports nothing."""
    found: ServedClient | None = (scope.get("extensions") or {}).get(EXTENSION)
    return found


class DirectSend:
    """A `send` past which a piece of a body can be written, without a task. A middleware around it has a `send` of its own."""

    __slots__ = ("_client", "_send")

    def __init__(self, send: Send, client: ServedClient | None) -> None:
        self._send = send
        self._client = client

    async def __call__(self, message: Message) -> None:
        await self._send(message)

    @property
    def write(self) -> Callable[[bytes], bool]:
        """A function that writes a piece of a body that has begun, at once. It may return False, and has written nothing then.

        So it does while the client takes no more, once it has left, for a reply without chunks, and if the server has no way.
        Then a message takes the piece.
        """
        return (None if self._client is None else self._client.write) or leave


def leave(_: bytes) -> bool:
    """Write nothing: a message has to take the piece."""
    return False


@dataclass(slots=True, eq=False)
class ClientMessages:
    """A `receive` for a request that has come as a whole: nothing but the client's end can follow.

    `client` reports that end, too; it is None if the server does not report it.
    """

    _receive: Receive
    client: ServedClient | None

    def __call__(self) -> Awaitable[Message]:
        return self._receive()


class ClientConnection:
    """Cancels the work inside its `async with` block as soon as the client is gone.

    The client's end cancels the task of the block, which then ends with ClientDisconnectedError; a cancellation from outside
    stays a CancelledError. (The bookkeeping with `uncancel` follows `asyncio.timeout`.) So the work itself needs no check per
    chunk. Where the server reports nothing, a second task reads `receive` for as long as the block runs.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._client = receive.client if isinstance(receive, ClientMessages) else None
        self._reason: BaseException | None = None
        self._watching = True

    async def __aenter__(self) -> ClientConnection:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        if self._client is not None:
            self._client.watch(self._on_gone)
        else:
            self._watcher = asyncio.create_task(self._watch())
            self._watcher.add_done_callback(self._on_end_of)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._watching:
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
        if not self._watching:
            return
        self._watching = False  # the watcher may have seen the end, with its callback still to come
        if self._client is not None:
            self._client.unwatch(self._on_gone)
        else:
            self._watcher.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _on_end_of(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled():
            # A middleware's `receive` may raise, too: that ends the request in the same way.
            self._on_gone(watcher.exception())

    def _on_gone(self, error: BaseException | None = None) -> None:
        if self._watching:
            self._reason = error or ClientDisconnectedError("the client left")
            self._task.cancel()
