"""One connection to a worker, which serves one request after another. httptools reads the replies.

A connection has at most one `Exchange`, from the first byte of a request to the last one of its reply:

    WAITING --head--> REPLYING --end of the body--> OVER
       |                 |
       +-- an error, a loss of the connection, or close() --> OVER

Only an end that leaves nothing in doubt makes the connection free for the next request: all of the request was sent, the worker
keeps the connection, and not a byte came behind the reply. Everything else closes the connection, so that a late byte of one
reply can never become part of another one.
"""

from __future__ import annotations

import asyncio
import enum
import re
from collections.abc import Callable
from typing import cast

import httptools

from router.http.upstream import (
    ClosedBeforeReplyError,
    Headers,
    NotHttpError,
    UpstreamBrokenError,
    UpstreamFailure,
    UpstreamResponse,
)

MAX_HEADER_BYTES = 64 * 1024
"""Bytes of the longest header of a reply, its name included."""
MAX_HEADERS = 1000
MAX_HEAD_BYTES = 1024 * 1024
READ_BUFFER_BYTES = 2 * 1024 * 1024
"""Bytes of a reply that may wait to be taken; then no more is read."""
PIECEWISE_BYTES = 1024 * 1024
"""A request that is larger is written in pieces, with other requests in between."""

_PIECE = 64 * 1024
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""Bytes that no value of a header may hold."""


class State(enum.Enum):
    """How far an exchange has come."""

    WAITING = "waiting"
    """The request is sent, and the head of its reply has not come."""
    REPLYING = "replying"
    """The head has come."""
    OVER = "over"
    """The reply is complete, or nothing more will come of it."""


class Exchange(UpstreamResponse):
    """A request and its reply. The connection calls the methods that `read` and `close` are not."""

    def __init__(self, connection: WorkerConnection, *, bodiless: bool) -> None:
        """`bodiless`: the request asks for no body (HEAD)."""
        self.connection = connection
        self.state = State.WAITING
        self.status = 0
        self.headers: Headers = []
        self.bodiless = bodiless
        self.framed = False
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._failure: UpstreamFailure | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def head(self) -> None:
        """Wait for the head. Raises ClosedBeforeReplyError and NotHttpError."""
        while self.state is State.WAITING:
            await self._more()
        if not self.status and self._failure is not None:
            raise self._failure

    async def read(self) -> bytes:
        """Return what has come of the body, or wait for it; empty at the end. Raises UpstreamBrokenError."""
        while not self._pieces and self.state is State.REPLYING:
            await self._more()
        if not self._pieces:
            if self._failure is not None:
                raise self._failure
            return b""
        found = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._buffered = 0
        self._resume()
        return found

    def close(self) -> None:
        """Release the reply. Before its end, this closes the connection."""
        if self.state is not State.OVER:
            self.connection.give_up()

    def begin(self, status: int, headers: Headers, *, framed: bool) -> None:
        """Take the head. `framed`: the head says where the body ends; otherwise the connection does."""
        self.status, self.headers, self.framed = status, headers, framed
        self.state = State.REPLYING
        self._wake()

    def add(self, piece: bytes) -> None:
        """Take a piece of the body."""
        self._pieces.append(piece)
        self._buffered += len(piece)
        if self._buffered > READ_BUFFER_BYTES and not self._paused:
            self._paused = True
            self.connection.transport.pause_reading()
        self._wake()

    def end(self, failure: UpstreamFailure | None) -> None:
        """Take the end. `failure`: why it is no good one."""
        self.state, self._failure = State.OVER, failure
        self._resume()
        self._wake()

    def _resume(self) -> None:
        """Read on. What comes after the end of this exchange belongs to another one."""
        if self._paused:
            self._paused = False
            self.connection.transport.resume_reading()

    async def _more(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class WorkerConnection(asyncio.Protocol):
    """A connection. `transport` is asyncio's; `free_since` the loop's time at which it became free."""

    transport: asyncio.Transport

    def __init__(self, on_free: Callable[[WorkerConnection], None] | None) -> None:
        """`on_free`: gets the connection when the next request may use it; None to close it then."""
        self._on_free = on_free
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._served = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._unsent = False
        self._room: asyncio.Future[None] | None = None  # while the transport takes no more
        self.free_since = 0.0

    @property
    def usable(self) -> bool:
        """Whether the next request may use it."""
        return self._exchange is None and not self.transport.is_closing()

    async def send(self, head: bytes, body: bytes | None, *, bodiless: bool) -> Exchange:
        """Send a request and wait for the head of its reply. A cancellation closes the connection.

        Raises ClosedBeforeReplyError and NotHttpError.
        """
        exchange = self._exchange = Exchange(self, bodiless=bodiless)
        self._headers, self._head_bytes = [], 0
        try:
            if not body:
                self.transport.write(head)
            elif len(body) <= PIECEWISE_BYTES:
                self.transport.writelines((head, body))
            else:
                self.transport.write(head)
                await self._write_in_pieces(exchange, body)
            await exchange.head()
        except BaseException:
            exchange.close()
            raise
        return exchange

    def give_up(self) -> None:
        """End the exchange in the middle, and close the connection."""
        self._end(UpstreamBrokenError("the reply was given up"))

    async def _write_in_pieces(self, exchange: Exchange, body: bytes) -> None:
        """Write a body, and no more of it once the reply has begun."""
        view = memoryview(body)
        self._unsent = True
        for at in range(0, len(body), _PIECE):
            if exchange.state is not State.WAITING:
                return
            self.transport.write(view[at : at + _PIECE])
            if self._room is not None:
                await self._room
            else:
                await asyncio.sleep(0)
        self._unsent = False

    def _end(self, failure: UpstreamFailure | None = None, *, keep: bool = False) -> None:
        """End the exchange. `keep`: the worker keeps the connection."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        exchange.end(failure)
        self._served += 1
        if not keep or self._on_free is None or self._unsent or self.transport.get_write_buffer_size():
            self.transport.abort()

    def _refuse(self, why: str) -> None:
        """End the exchange because of what the worker sent."""
        begun = self._exchange is not None and self._exchange.state is State.REPLYING
        self._end((UpstreamBrokenError if begun else NotHttpError)(f"not a valid HTTP reply: {why}"))

    # Callbacks of asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.transport.abort()  # nobody asked for anything
            return
        waiting = exchange.state is State.WAITING
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._refuse(str(error))
            self.transport.abort()
            return
        if waiting:
            self._head_bytes += len(data)
            if exchange.state is State.WAITING and self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(f"its head is longer than {MAX_HEAD_BYTES} bytes")
        if self._exchange is None and self._on_free is not None and not self.transport.is_closing():
            self.free_since = self._loop.time()
            self._on_free(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.resume_writing()
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.state is State.WAITING:
            why = str(exc) if exc else "the worker closed the connection"
            self._end(ClosedBeforeReplyError(why, kept=self._served > 0))
        elif exc is None and not exchange.framed:
            self._end()
        else:
            self._end(UpstreamBrokenError(str(exc) if exc else "the connection ended before the reply"))

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    # Callbacks of the parser ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._exchange is None:
            self.transport.abort()  # something came behind the reply

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is None or self._exchange.state is not State.WAITING:
            return  # a trailer
        self._headers.append((name, value))
        if len(self._headers) > MAX_HEADERS or len(name) + len(value) > MAX_HEADER_BYTES:
            self._refuse("its headers are too many, or too long")

    def on_headers_complete(self) -> None:
        status, headers, exchange = self._parser.get_status_code(), self._headers, self._exchange
        if exchange is None or (100 <= status < 200 and status != 101):
            return
        if not 200 <= status < 600 or _CONTROL.search(b"\t".join([value for _, value in headers])):
            self._refuse(f"status {status}, or a header that no client may be sent")
            return
        exchange.begin(status, headers, framed=any(_frames(name.lower(), value) for name, value in headers))
        if exchange.bodiless:
            self._end()  # the parser would wait for the body that the head describes

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.add(body)

    def on_message_complete(self) -> None:
        if self._exchange is not None and self._exchange.state is State.REPLYING:
            self._end(keep=self._parser.should_keep_alive())
        else:
            self._headers = []  # those of an interim reply, such as 100 Continue


def _frames(name: bytes, value: bytes) -> bool:
    """Return whether a header says where the body ends."""
    return name == b"content-length" or (name == b"transfer-encoding" and value.strip().lower().endswith(b"chunked"))
