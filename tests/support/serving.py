"""Real servers for tests: an ASGI application, or a bare socket handler, on an ephemeral port of this machine."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from starlette.types import ASGIApp

from worker.http.serve import stop_listening

SocketHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp, *, keep_alive: int = 60, protocol: type[asyncio.Protocol] | None = None
) -> AsyncIterator[str]:
    """Serve `app` in the running loop and yield its base URL. Ends with the lifespan's shutdown and without waiting.

    uvicorn's own startup and protocol (or another one); its polling main loop is left out, which would cost each test 0.2 s.
    """
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http=protocol or "httptools",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=keep_alive,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # With its protocol number: asyncio turns Nagle's algorithm off only then, and a reply in two writes would take 40 ms.
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        await server.startup(sockets=[listener])
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            for listening in server.servers:
                await stop_listening(listening)
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            tasks = list(server.server_state.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.lifespan.shutdown()


@contextlib.contextmanager
def serve(app: ASGIApp, *, keep_alive: int = 60, protocol: type[asyncio.Protocol] | None = None) -> Iterator[str]:
    """Like `serving`, in a thread with a loop of its own, for tests that are not async themselves."""
    with _in_thread(lambda: serving(app, keep_alive=keep_alive, protocol=protocol)) as url:
        yield url


@contextlib.contextmanager
def serve_socket(handler: SocketHandler) -> Iterator[str]:
    """Like `serving_socket`, in a thread."""
    with _in_thread(lambda: serving_socket(handler)) as url:
        yield url


@contextlib.contextmanager
def _in_thread(server: Callable[[], contextlib.AbstractAsyncContextManager[str]]) -> Iterator[str]:
    started: list[str] = []
    stops: list[Callable[[], object]] = []
    ready = threading.Event()

    async def run() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with server() as url:
            started.append(url)
            stops.append(lambda: loop.call_soon_threadsafe(stopping.set))
            ready.set()
            await stopping.wait()

    with ThreadPoolExecutor(1) as executor:
        served = executor.submit(lambda: asyncio.run(run()))
        served.add_done_callback(lambda _: ready.set())
        ready.wait()
        try:
            if started:
                yield started[0]
        finally:
            for stop in stops:
                stop()
            served.result()


@contextlib.asynccontextmanager
async def serving_socket(handler: SocketHandler) -> AsyncIterator[str]:
    """Serve a bare connection handler, for workers that misbehave below HTTP. Connections end with their handler.

    Ends without waiting: handlers that still run are cancelled, and what is not sent yet stays unsent.
    """
    connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}  # nothing else holds an unread connection's task

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections[task] = writer
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the other side went first
        finally:
            writer.transport.abort() if writer.is_closing() else writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await stop_listening(server)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        for writer in connections.values():
            writer.transport.abort()  # waits for a client to read, if it was only closed


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """One request with a content-length (or none) off a bare connection: its head, its body. IncompleteReadError at EOF."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = 0
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            length = int(value)
    return head, await reader.readexactly(length)


def dead_url() -> str:
    """The URL of a port where nobody listens, now or later: a socket that does not listen keeps it, to the end of all tests."""
    keeper = socket.socket()
    keeper.bind(("127.0.0.1", 0))
    atexit.register(keeper.close)
    return f"http://127.0.0.1:{keeper.getsockname()[1]}"
