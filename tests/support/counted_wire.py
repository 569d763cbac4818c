"""A wire between a router and a worker, which counts the bytes that pass."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

_PIECE = 1 << 16


@dataclass
class CountedWire:
    """`url` leads to the worker; `sent` is what has gone there, in bytes, headers included."""

    url: str = ""
    sent: int = 0


@contextlib.contextmanager
def counted_wire(worker_url: str) -> Iterator[CountedWire]:
    """Relay connections to a worker for a while."""
    wire, target = CountedWire(), urlsplit(worker_url)
    loop = asyncio.new_event_loop()

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, counted: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await source.read(_PIECE):
                wire.sent += len(piece) if counted else 0
                sink.write(piece)
                await sink.drain()
        sink.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection(target.hostname, target.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, forth, counted=True), copy(back, writer, counted=False))

    server = loop.run_until_complete(asyncio.start_server(relay, "127.0.0.1", 0))
    wire.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield wire
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        loop.close()
