"""The HTTP client towards the workers: aiohttp behind a small protocol, and the only file that imports it.

Three things can go wrong with a worker. They differ in how far the request got, because that decides what may be done
about it: `ConnectFailedError` (nothing was sent: try anywhere), `ClosedBeforeReplyError` (sent, but not a byte came
back: may be tried again if doing it twice does no harm) and `UpstreamBrokenError` (the reply had begun).
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from contextvars import ContextVar, copy_context
from functools import lru_cache, partial
from operator import itemgetter
from typing import Protocol

import aiohttp
from aiohttp import StreamReader
from aiohttp.connector import Connection
from aiohttp.http import HttpProcessingError, RawResponseMessage
from aiohttp.tracing import Trace
from yarl import URL

from router.http.time_limits import patience
from router.http.unpacking import Unpacker, UnpackingError

Headers = Sequence[tuple[bytes, bytes]]
Body = bytes | None
Take = Callable[[bytes], bool]
"""Takes the next piece of a reply; returns whether it takes another one at once."""

# SGLang's and vLLM's server (uvicorn) closes a connection that was idle for 5 s, and a busy engine reads late.
IDLE_SECONDS = 2.0
DNS_SECONDS = 30
KEEPALIVE_SECONDS = 30
"""Seconds of silence after which a worker's machine is probed; after twice as many it counts as gone."""
_KEEPALIVE = {"TCP_KEEPIDLE": KEEPALIVE_SECONDS, "TCP_KEEPINTVL": KEEPALIVE_SECONDS // 3, "TCP_KEEPCNT": 3}
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 1000
READ_BUFFER_BYTES = 1024 * 1024

_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_INTERIM = frozenset(range(100, 200)) - {101}
_AT_ONCE = 0.8  # of the time limit of a connection: see `_Connector`
_UNLIMITED = aiohttp.ClientTimeout()


class UpstreamFailure(Exception):
    """A worker failed. The message says how; the caller knows which worker."""


class ConnectFailedError(UpstreamFailure):
    """There was no connection, so nothing was sent."""


class ClosedBeforeReplyError(UpstreamFailure):
    """The request was sent, at least in part, and the connection ended before any of the reply came.

    `kept`: the connection had served another request. The worker may have closed it as idle at the moment of use.
    """

    def __init__(self, message: str, *, kept: bool = False) -> None:
        super().__init__(message)
        self.kept = kept


class UpstreamBrokenError(UpstreamFailure):
    """The reply had begun and does not end as it should."""


class NotHttpError(UpstreamBrokenError):
    """What came is not HTTP."""


class UpstreamResponse(Protocol):
    """A reply whose head has arrived and whose body is still on its way."""

    status: int
    headers: Headers
    """As the worker sent them, repeated ones too."""
    stream: bool
    """Whether the body comes as server-sent events."""

    async def read(self) -> bytes:
        """Return the next piece of the body, empty at the end. Raises UpstreamBrokenError."""

    async def flow(self, take: Take) -> None:
        """Hand each piece to `take` in the call in which it comes, as long as that takes more. No task wakes for a piece.

        It may return at any time, at once too. `read` goes on from there, and alone tells the end. Raises UpstreamBrokenError,
        and what `take` raises.
        """

    def close(self) -> None:
        """Release the reply. Before the body's end, this closes the connection, so that the worker notices."""


class Upstream(Protocol):
    """Sends requests to workers."""

    async def send(
        self, method: str, url: str, headers: Headers, body: Body = None, *, fresh: bool = False
    ) -> UpstreamResponse:
        """Send, and wait for the head of the reply. Raises one of the three failures.

        `url` is sent as it is, its escapes untouched. `fresh` asks for a connection that was never used before.
        """


async def fetch(
    upstream: Upstream,
    method: str,
    url: str,
    headers: Headers,
    body: Body = None,
    *,
    fresh: bool = False,
    limit: int = 16 * 1024 * 1024,
) -> tuple[int, bytes]:
    """Return a whole small reply, `(status, body)`. Raises one of the three failures, also for more than `limit` bytes."""
    with closing(await upstream.send(method, url, headers, body, fresh=fresh)) as response:
        content = bytearray()
        while chunk := await response.read():
            content += chunk
            if len(content) > limit:
                raise UpstreamBrokenError(f"the reply is longer than {limit} bytes")
        return response.status, bytes(content)


class AiohttpUpstream:
    """Connections to all workers, usable inside its `async with` block.

    aiohttp connects, keeps connections, and parses replies. Its `ClientSession` is not used: what that does for each request
    (URLs, cookies, redirects, timers, headers as text) takes longer than all the rest, and no worker needs it. So a request is
    written here, in the bytes in which it came.

    Nothing limits connections or durations: a generation may take hours, and the policy decides how much a worker gets.
    """

    def __init__(
        self,
        *,
        connect_timeout: float,
        permits: Callable[[str], bool] = lambda _: True,
        refusal: str = "workers may not be at {} (--worker-allow)",
        max_reply: float = math.inf,
    ) -> None:
        """`permits(address)`: whether a worker may be there. It is called for each connection: names change their addresses.

        `refusal`: what to say of an address where it may not be, with its place in braces.
        `max_reply` is in bytes, for a reply in one piece and for each event of a stream.
        """
        self._timeout = aiohttp.ClientTimeout(sock_connect=_AT_ONCE * connect_timeout)
        self._permits = permits
        self._refusal = refusal
        self._most = max_reply

    async def __aenter__(self) -> AiohttpUpstream:
        connector = partial(_Connector, limit=0, ttl_dns_cache=DNS_SECONDS, socket_factory=self._socket)
        self._pooled, self._fresh = connector(keepalive_timeout=IDLE_SECONDS), connector(force_close=True)
        self._origin = lru_cache(maxsize=1024)(_Origin)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(self._pooled.close(), self._fresh.close())

    async def send(
        self, method: str, url: str, headers: Headers, body: Body = None, *, fresh: bool = False
    ) -> UpstreamResponse:
        """Send on a pooled or on a new connection. aiohttp's errors become the three of this file."""
        begin = url.find("/", url.find("//") + 2)
        base, target = (url, "/") if begin < 0 else (url[:begin], url[begin:])
        _CONNECTION.set(use := _ConnectionUse())
        try:
            origin = self._origin(base)
            head = _request_head(method, target, origin.host, headers, body)
            connector = self._fresh if fresh else self._pooled
            connection = await connector.connect(origin.request, [], self._timeout)
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            raise ConnectFailedError(_describe(error)) from error
        try:
            return await _exchanged(connection, method, head, body, self._most)
        except HttpProcessingError as error:
            raise NotHttpError(f"not a valid HTTP reply: {_one_line(error.message)}") from error
        except UnpackingError as error:
            raise UpstreamBrokenError(str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ClosedBeforeReplyError(_describe(error), kept=use.kept) from error

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        host = str(address[4][0])
        if not self._permits(host):
            raise PermissionError(self._refusal.format(host))
        _CONNECTION.get().kept = False
        return _watched_socket(address)


class _Origin:
    """Where a worker is, in the form that aiohttp's connectors take: a request, of which they read the URL."""

    def __init__(self, base: str) -> None:
        self.request = aiohttp.ClientRequest("GET", URL(base, encoded=True))
        self.host = self.request.headers["Host"].encode("ascii")


def _request_head(method: str, target: str, host: bytes, headers: Headers, body: Body) -> bytes:
    """Return the first line and the headers of a request. A method that may have a body says that it has none."""
    lines = [f"{method} {target} HTTP/1.1".encode("latin-1"), b"Host: " + host, *map(b"%b: %b".__mod__, headers)]
    if body is not None or method not in _WITHOUT_BODY:
        lines.append(b"Content-Length: %d" % len(body or b""))
    if _CONTROL.search(b"\t".join(lines)):
        raise ValueError("a line break or a control character in the head of a request")
    return b"\r\n".join((*lines, b"", b""))


async def _exchanged(connection: Connection, method: str, head: bytes, body: Body, most: float) -> UpstreamResponse:
    """Send a request and return its reply, whose head has come. Raises aiohttp's errors, UnpackingError and NotHttpError.

    All of the request goes to the event loop at once, which writes as much at a time as the connection takes.
    """
    try:
        protocol, transport = connection.protocol, connection.transport
        if protocol is None or transport is None:
            raise aiohttp.ServerDisconnectedError
        protocol.set_response_params(
            skip_payload=method == "HEAD",
            read_until_eof=True,
            auto_decompress=False,  # see `_AiohttpResponse`
            read_bufsize=READ_BUFFER_BYTES,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
        )
        transport.writelines((head, body) if body else (head,))
        message, content = await protocol.read()
        while message.code in _INTERIM:
            message, content = await protocol.read()
        if not 200 <= message.code < 600 or _CONTROL.search(b"\t".join(map(_VALUE, message.raw_headers))):
            raise NotHttpError(f"not a valid HTTP reply: status {message.code}, or a header that no client may be sent")
        return _AiohttpResponse(connection, message, content, most)
    except BaseException:
        _drop(connection)
        raise


def _drop(connection: Connection) -> None:
    """Close a connection. What is not sent yet stays unsent, because a worker that reads no more may never read it."""
    transport = connection.transport
    if transport is not None and transport.get_write_buffer_size():
        transport.abort()
    connection.close()


_VALUE = itemgetter(1)
_CLOSED = "the connection was closed in the middle of the reply"

_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""Bytes that no value of a header may hold."""


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket with TCP keepalive.

    A machine that is gone sends nothing, and a generation may be silent for hours: only keepalive distinguishes them. The
    system of a worker that merely hangs still answers.
    """
    family, kind, protocol, _, _ = address
    made = socket.socket(family=family, type=kind, proto=protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


class _Connector(aiohttp.TCPConnector):
    """Does not use a kept connection again on which something came while it was idle.

    aiohttp would take that for the reply to the next request, which may be another tenant's. A proxy in front of a worker says
    so that it has waited long enough (408), and a worker that is broken may send a reply twice.

    A connection has most of its time limit at once, and the rest with `patience`: making one takes several turns of the event
    loop, and all of the limit may pass before a late loop has taken them.
    """

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        try:
            while True:
                connection = await super().connect(req, traces, timeout)
                if connection.protocol is not None and not connection.protocol.should_close:
                    return connection
                connection.close()
        except TimeoutError:
            if timeout.sock_connect is None:
                raise
            async with patience(timeout.sock_connect / _AT_ONCE * (1 - _AT_ONCE)):
                return await self.connect(req, traces, _UNLIMITED)


class _ConnectionUse:
    """Whether the connection of a request had served another one: it was kept, unless a socket was made for it."""

    kept = True


_CONNECTION: ContextVar[_ConnectionUse] = ContextVar("connection")
"""That of the request which the current task sends. aiohttp's own hooks would cost a quarter of the request."""


def is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a reply with these headers comes as server-sent events."""
    for name, value in headers:
        if name.lower() == b"content-type":
            return value.startswith(b"text/event-stream")
    return False


class ReplyTooLargeError(Exception):
    """A worker's reply is over `--max-reply-bytes`."""


class SizeLimit:
    """Bounds what has to be kept of a worker's reply until it can be read: all of it, or one event of a stream.

    An event of an engine is one line.
    """

    def __init__(self, most: float, *, stream: bool) -> None:
        self._most = most
        self._stream = stream
        self._size = 0

    def add(self, piece: bytes) -> None:
        """Count a piece of the body. Raises ReplyTooLargeError."""
        self._size = len(piece) if self._stream and b"\n" in piece else self._size + len(piece)
        if self._size > self._most:
            what = "an event" if self._stream else "the reply"
            raise ReplyTooLargeError(f"{what} is longer than {self._most} bytes (--max-reply-bytes)")


class _AiohttpResponse:
    """Unpacks a reply that is compressed although the router asked for none: its content-encoding is not passed on."""

    def __init__(self, connection: Connection, message: RawResponseMessage, content: StreamReader, most: float) -> None:
        encoding = message.headers.get("content-encoding", "identity").strip().lower()
        self.status = message.code
        self.headers: Headers = message.raw_headers
        self._unpacker = None if encoding in ("identity", "") else Unpacker(encoding)
        self.stream = is_event_stream(message.raw_headers)
        self._size = SizeLimit(most, stream=self.stream)
        self._connection = connection
        self._content = content
        handler, transport = connection.protocol, connection.transport
        self._tap: _Tap | None = None
        if handler is not None and transport is not None and not content.is_eof():
            self._tap = _Tap(handler, transport, content, self._size)
        content.on_eof(self._ended)

    async def read(self) -> bytes:
        try:
            piece = await (self._content.readany() if self._unpacker is None else self._unpacked(self._unpacker))
            self._size.add(piece)
            return piece
        except (aiohttp.ClientError, OSError, UnpackingError, ReplyTooLargeError) as error:
            raise UpstreamBrokenError(_describe(error)) from error

    async def flow(self, take: Take) -> None:
        if self._tap is None or self._unpacker is not None:
            return
        try:
            await self._tap.flow(take)
        except ReplyTooLargeError as error:
            raise UpstreamBrokenError(str(error)) from error

    async def _unpacked(self, unpacker: Unpacker) -> bytes:
        while not (piece := unpacker.take()):
            data = await self._content.readany()
            if not data:
                unpacker.end()
                return b""
            unpacker.feed(data)
        await asyncio.sleep(0)  # a few bytes may unpack to many pieces
        return piece

    def close(self) -> None:
        _drop(self._connection)  # nothing, after the end

    def _ended(self) -> None:
        """Give the connection back, unless the reply came before the worker had read all of the request."""
        if self._tap is not None:
            self._tap.remove()
            self._tap = None
        transport = self._connection.transport
        if transport is not None and transport.get_write_buffer_size():
            _drop(self._connection)
        else:
            self._connection.release()


_CHUNK = b"%x\r\n%b\r\n"


class _Tap(asyncio.Protocol):
    """Stands before aiohttp's protocol on a connection, from the head of a reply to its end.

    It hands on what aiohttp has read of the body in the call in which it came, while the reply flows. A token of a stream is a
    piece of its own, and to wake a task for each costs more than all that is done with it.

    Workers send each event of a stream as a chunk, and most chunks come alone. A chunk that is all of what comes, where a chunk
    has to begin, goes past aiohttp, whose thirteen functions for it cost a seventh of a token that is only passed on:

        1f CRLF data: {"text": ...  CRLF
        ^ here it is between two chunks: all that came before was taken, by aiohttp or past it

    aiohttp does not tell where it is, but the chunk before shows it: of that, aiohttp made exactly what is between its frame,
    which begins with another byte than the frame. Inside of a chunk the frame would be a part of the body.

    It also ends a reply whose connection is lost: not always does aiohttp (3.14) tell that to whoever reads.
    """

    def __init__(
        self, handler: asyncio.Protocol, transport: asyncio.Transport, content: StreamReader, size: SizeLimit
    ) -> None:
        self._handler = handler
        self._transport = transport
        self._content = content
        self._size = size
        self._flow: asyncio.Future[None] | None = None  # done when a piece cannot be handed on
        self._between = False  # whether a chunk has to begin with what comes next, and nothing is left to be read
        transport.set_protocol(self)

    async def flow(self, take: Take) -> None:
        """Hand each piece to `take`; see `UpstreamResponse.flow`. Raises ReplyTooLargeError."""
        self._take = take
        self._context = copy_context()  # a connection has that of the request for which it was made
        self._flow = flow = asyncio.get_running_loop().create_future()
        try:
            self._hand_on(flow)
            await flow
        finally:
            self._flow = None
            del self._take, self._context  # they know this reply
            if not flow.cancelled():
                flow.exception()  # seen, although this task may be cancelled

    def remove(self) -> None:
        """Have aiohttp's protocol stand alone again."""
        self._transport.set_protocol(self._handler)
        self._stop()

    def data_received(self, data: bytes) -> None:
        flow = self._flow
        if flow is None or flow.done():
            self._handler.data_received(data)
            return
        if self._between:
            begin = data.find(b"\r\n") + 2
            size = len(data) - begin - 2
            if size > 0 and data.startswith(b"%x\r\n" % size) and data.endswith(b"\r\n"):
                self._give(flow, data[begin:-2])
                return
        self._handler.data_received(data)
        self._hand_on(flow, data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        content = self._content
        self._handler.connection_lost(exc)
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError(_CLOSED))
        self._stop()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def _hand_on(self, flow: asyncio.Future[None], data: bytes = b"") -> None:
        """Hand on what aiohttp has made of `data`, and all that was here before, unless the flow has stopped."""
        self._between = False
        if flow.done():
            return
        if self._content.exception() is not None:
            flow.set_result(None)
        elif piece := self._content.read_nowait():
            self._between = data[:1] != piece[:1] and data == _CHUNK % (len(piece), piece)
            self._give(flow, piece)

    def _give(self, flow: asyncio.Future[None], piece: bytes) -> None:
        try:
            self._size.add(piece)
            if not self._context.run(self._take, piece):
                self._stop()
        except Exception as error:  # noqa: BLE001 - it is raised in the task that waits
            flow.set_exception(error)

    def _stop(self) -> None:
        if self._flow is not None and not self._flow.done():
            self._flow.set_result(None)


def _describe(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return str(error.os_error)
    if isinstance(error, aiohttp.ClientPayloadError):
        return _CLOSED  # aiohttp names what it missed, and a status that nobody sent
    if isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str):
        return "the connection was closed in the middle of the reply's head"  # aiohttp's message is what came of it
    return _one_line(str(error)) or type(error).__name__


def _one_line(text: str) -> str:
    """Return the text of an error without the lines in which aiohttp points at the wrong byte."""
    return " ".join(text.split()).removesuffix(" ^")
