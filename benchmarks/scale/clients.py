"""Clients that read one stream each, as cheaply as an event loop can: they count, and keep the last bytes."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, cast

from benchmarks.serving.client import LAST_CHUNK
from router.engines.events import EventSplitter, event_data

_EVENT = b"data: "
_ERROR = b'"error":'
_TAIL = 256


class StreamClient(asyncio.Protocol):
    """One connection that asks for one stream.

    Attributes:
        first: seconds from the request to the first event; None before it.
        events: how many came, `[DONE]` too.
        ended: resolves to why the stream is broken, empty if it is whole.
        kept: all that came, if it is to be kept.
    """

    def __init__(self, request: bytes, *, keep: bool = False) -> None:
        self._request = request
        self._keep = keep
        self.kept = b""
        self._transport: asyncio.Transport
        self._begun = 0.0
        self._tail = b""
        self._wrong = ""
        self.first: float | None = None
        self.events = 0
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass
        self._begun = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._keep:
            self.kept += data
        self.events += (self._tail[1 - len(_EVENT) :] + data).count(_EVENT)  # one may have come in two pieces
        if self.first is None:
            if not self._tail and not data.startswith(b"HTTP/1.1 200"):
                self._wrong = repr(data[:300])
            if self.events:
                self.first = time.perf_counter() - self._begun
        seen = self._tail[1 - len(_ERROR) :] + data
        if (at := seen.find(_ERROR)) >= 0:
            self._wrong = self._wrong or repr(seen[at : at + 300])
        self._tail = data[-_TAIL:] if len(data) >= _TAIL else (self._tail + data)[-_TAIL:]
        if self._tail.endswith(LAST_CHUNK):
            whole = b"data: [DONE]\n\n" in self._tail
            self._end(self._wrong or ("" if whole else f"it ends with {self._tail!r}"))
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(self._wrong or f"closed after {self.events} events: {error}")

    def close(self) -> None:
        self._transport.close()

    def _end(self, wrong: str) -> None:
        if not self.ended.done():
            self.ended.set_result(wrong)


def request(path: str, body: bytes, key: str = "") -> bytes:
    """Return a POST of JSON, of a tenant if there is a key."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n" + (f"authorization: Bearer {key}\r\n" if key else "")
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def open_stream(host: str, port: int, content: bytes, *, keep: bool = False) -> StreamClient:
    """Connect and ask. Return when the request is sent."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: StreamClient(content, keep=keep), host, port)
    return client


def events_of(answer: bytes) -> list[Any]:
    """Return the events of a stream but `[DONE]`, given with its head and its frames."""
    lines = answer.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2]
    found = (event_data(event) for event in EventSplitter().feed(b"".join(lines)))
    return [json.loads(data) for data in found if data and data != b"[DONE]"]
