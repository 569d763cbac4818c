"""Clients that post JSON over a connection that stays open.

The clients share the machine's cores with what they measure. `RawClient` therefore speaks just enough HTTP/1.1 by itself;
`LibraryClient` is aiohttp, as a real client would use it, and costs several times as much.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import aiohttp


class Answer(NamedTuple):
    """An answer. Of a stream of events, `body` is only the end."""

    status: int
    body: bytes
    size: int
    """Bytes of the body, with the frames of a chunked one."""
    first: float
    """When its first bytes came, by `time.perf_counter`."""


class Client(Protocol):
    """One connection, for one request at a time."""

    async def post(self, path: str, body: bytes) -> Answer: ...

    async def close(self) -> None: ...


KEPT = 1 << 20  # bytes of a stream's end: more than one event
LAST_CHUNK = b"\r\n0\r\n\r\n"


class _Connection(asyncio.Protocol):
    """Reads one answer after the other. Keeps the end of a stream, and all of any other body."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self._answered: asyncio.Future[Answer] | None = None
        self._begin()

    def _begin(self) -> None:
        self._buffer = bytearray()
        self._status = self._size = 0
        self._length: int | None = None  # None: chunked
        self._first = 0.0
        self._stream = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error or ConnectionError(f"closed after {self._size} bytes"))

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        self._answered = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answered

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._status:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._read_head(bytes(self._buffer[:end]).lower())
            data = bytes(self._buffer[end + 4 :])
            self._buffer = bytearray(data)
        if data and not self._size:
            self._first = time.perf_counter()
        self._size += len(data)
        if self._stream and len(self._buffer) > 2 * KEPT:
            del self._buffer[:-KEPT]
        if self._size == self._length or (self._length is None and self._buffer.endswith(LAST_CHUNK)):
            self._finish()

    def _read_head(self, head: bytes) -> None:
        self._status = int(head[9:12])
        at = head.find(b"\r\ncontent-length:")
        self._length = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else None
        self._stream = b"text/event-stream" in head

    def _finish(self) -> None:
        body = bytes(self._buffer)
        if self._length is None and not self._stream:
            body = _without_frames(body)
        assert self._answered is not None
        self._answered.set_result(Answer(self._status, body, self._size, self._first))
        self._begin()


def _without_frames(chunked: bytes) -> bytes:
    """Return the content of a chunked body."""
    content, at = bytearray(), 0
    while True:
        end = chunked.index(b"\r\n", at)
        size = int(chunked[at:end], 16)
        if not size:
            return bytes(content)
        content += chunked[end + 2 : end + 2 + size]
        at = end + 4 + size


class RawClient:
    """A client that speaks just enough HTTP/1.1, and costs little."""

    def __init__(self, connection: _Connection, key: str = "") -> None:
        self._connection = connection
        self._key = f"authorization: Bearer {key}\r\n" if key else ""

    @classmethod
    async def connect(cls, url: str, key: str = "") -> RawClient:
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, parts.hostname or "", parts.port or 80)
        return cls(connection, key)

    async def post(self, path: str, body: bytes) -> Answer:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{self._key}content-type: application/json\r\n"
        return await self._connection.ask(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def get(self, path: str) -> Answer:
        return await self._connection.ask(f"GET {path} HTTP/1.1\r\nhost: x\r\n{self._key}\r\n".encode())

    async def delete(self, path: str) -> Answer:
        return await self._connection.ask(f"DELETE {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())

    async def close(self) -> None:
        self._connection.transport.close()


class LibraryClient:
    """A client on aiohttp, as a real program would use it."""

    def __init__(self, url: str) -> None:
        self._url = url
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    @classmethod
    async def connect(cls, url: str) -> LibraryClient:
        return cls(url)

    async def post(self, path: str, body: bytes) -> Answer:
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url + path, data=body, headers=headers) as response:
            start = await response.content.readany()
            first = time.perf_counter()
            content = start + await response.content.read()
            return Answer(response.status, content, len(content), first)

    async def close(self) -> None:
        await self._session.close()


CLIENTS: dict[str, type[RawClient | LibraryClient]] = {"raw": RawClient, "aiohttp": LibraryClient}
