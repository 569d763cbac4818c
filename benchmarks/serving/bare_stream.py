"""A proxy of uvloop and httptools that does nothing else: the minimal cost of a streamed token in Python.

`python -m benchmarks.serving.bare_stream --port PORT --worker-url URL`. It reads and writes HTTP in the calls in which bytes
come, without tasks. It has a connection to the worker for each of a client's, and knows no errors.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from urllib.parse import urlsplit

import httptools
import uvloop


class Worker(asyncio.Protocol):
    """A connection to the worker. Its replies are parsed, and written to the client with chunks of their own."""

    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.close()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._client.write(
            b"HTTP/1.1 %d -\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" % status
        )

    def on_body(self, body: bytes) -> None:
        self._client.write(b"%x\r\n%b\r\n" % (len(body), body))

    def on_message_complete(self) -> None:
        self._client.write(b"0\r\n\r\n")


class Client(asyncio.Protocol):
    """A client's connection. What comes is passed on as it is."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._waiting: list[bytes] | None = None
        self._worker: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._worker is not None:
            self._worker.write(data)
        elif self._waiting is not None:
            self._waiting.append(data)
        else:
            self._waiting = [data]
            self._connecting = asyncio.get_running_loop().create_task(self._connect(self._waiting))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._worker is not None:
            self._worker.close()

    async def _connect(self, waiting: list[bytes]) -> None:
        loop = asyncio.get_running_loop()
        self._worker, _ = await loop.create_connection(lambda: Worker(self._transport), *self._address)
        self._worker.writelines(waiting)


async def serve(port: int, worker_url: str) -> None:
    """Serve until the process ends."""
    address = urlsplit(worker_url)
    assert address.hostname is not None
    assert address.port is not None
    host, worker_port = address.hostname, address.port
    server = await asyncio.get_running_loop().create_server(
        lambda: Client(host, worker_port), "127.0.0.1", port, backlog=2048
    )
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker-url", required=True)
    args = parser.parse_args(sys.argv[1:])
    uvloop.run(serve(args.port, args.worker_url))


if __name__ == "__main__":
    main()
