"""That a server of the tests leaves no connection behind, whenever it ends: another test would be blamed for it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette

from tests.support.serving import serving, serving_socket
from worker.http.serve import RestartableServer


async def reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def writes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Write more than the client's system takes: the rest waits until the client reads."""
    writer.write(bytes(1 << 24))


@contextlib.asynccontextmanager
async def restartable() -> AsyncIterator[str]:
    server = RestartableServer(Starlette(), "127.0.0.1", 0)
    await server.listen()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.close()


SERVERS: dict[str, Callable[[], AbstractAsyncContextManager[str]]] = {
    "of an application": lambda: serving(Starlette()),
    "of a handler that reads": lambda: serving_socket(reads),
    "of a handler that writes": lambda: serving_socket(writes),
    "of a worker": restartable,
}


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
@pytest.mark.parametrize("turns", range(8))
def test_a_connection_is_closed_however_far_its_server_had_accepted_it(
    server: Callable[[], AbstractAsyncContextManager[str]], turns: int
) -> None:
    """asyncio accepts a connection in some turns of its event loop; the server ends before, between or after them."""

    async def run() -> None:
        async with server() as url:
            clients.extend(socket.create_connection(("127.0.0.1", urlsplit(url).port), 30) for _ in range(3))
            for _ in range(turns):
                await asyncio.sleep(0)

    clients: list[socket.socket] = []
    gc.collect()  # what other tests left is theirs
    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always")
        asyncio.run(run())
        gc.collect()
    assert len(clients) == 3
    for client in clients:
        client.close()
    assert [str(warning.message) for warning in left] == []
