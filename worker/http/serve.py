"""Uvicorn in a running loop, which a test can kill at any moment and start again."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any

import uvicorn


class RestartableServer:
    """Serves an ASGI application on a port. Port 0 takes a free one, and keeps it while the server is dead."""

    def __init__(self, app: Any, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._app = app
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._held: socket.socket | None = None

    @property
    def up(self) -> bool:
        return self._server is not None

    async def listen(self) -> None:
        """Return when connections are accepted.

        Raises:
            OSError: the port is not available.
        """
        listener = self._bound()
        self.port = listener.getsockname()[1]
        self._release()
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=5,
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for this, and it takes only a few turns
            await asyncio.sleep(0)

    def _bound(self) -> socket.socket:
        # Without the protocol number asyncio leaves Nagle's algorithm on, and a reply in two writes takes 40 ms.
        found = socket.socket(proto=socket.IPPROTO_TCP)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((self.host, self.port))
        except OSError:
            found.close()
            raise
        return found

    def _release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    async def die(self) -> None:
        """Cut all connections and accept no more."""
        if self._server is None:
            return
        server, self._server = self._server, None
        for listening in server.servers:
            await stop_listening(listening)
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.force_exit = server.should_exit = True
        await asyncio.sleep(0)
        with suppress(OSError):  # a socket that does not listen refuses connections, and keeps the port from others
            self._held = self._bound()

    async def close(self) -> None:
        """Die, and leave no task in the loop."""
        tasks = list(self._server.server_state.tasks) if self._server else []
        await self.die()
        self._release()
        if tasks:
            await asyncio.wait(tasks, timeout=1)  # they notice that their client has left
        # uvicorn's own shutdown waits 0.2 s for connections, which are already cut here.
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def reset(self, client: tuple[Any, ...]) -> None:
        """Cut the connection of this client only."""
        for connection in list(self._server.server_state.connections) if self._server else []:
            if getattr(connection, "client", None) == client:
                connection.transport.abort()


async def stop_listening(server: asyncio.AbstractServer) -> None:
    """Close a server's listening sockets, when each connection that it has accepted has a protocol.

    Until then, nobody but asyncio knows of the connection. If its server closes at that moment, asyncio fails to make the
    transport, says nothing, and leaves the connection open until Python's garbage collector finds it.
    """
    while _accepting():  # noqa: ASYNC110 - asyncio has no event for this, and it takes only a few turns
        await asyncio.sleep(0)
    server.close()


def _accepting() -> bool:
    """Return whether an accepted connection has no protocol yet."""
    return any(getattr(task.get_coro(), "__name__", "") == "_accept_connection2" for task in asyncio.all_tasks())
