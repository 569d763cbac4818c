"""Limits of clients' connections: their number, the length of a request's head, and the time that it takes to arrive.

uvicorn's protocol has no such limits: a head may grow and take time without end, and so may the trailers after a chunked body,
and the rest of a body whose request is answered already. A refusal from here never reaches the application, so it is written by
hand, as JSON of the same form. Only public names of uvicorn's class are used and overridden: the callbacks of asyncio and of
httptools, `on_response_complete`, and the attributes without an underscore.

A refusal is the last reply on its connection. The sending side is closed after it, and what still comes in is thrown away
for a moment: closed at once, with bytes unread, the connection would be reset, and often the client would see only that.

Replies to HTTP/1.0 clients are another matter, because these know no chunks: a reply without a content-length ends with its
connection.

    HTTP/1.1                          HTTP/1.0
    transfer-encoding: chunked        connection: close
    5 hello 0                         hello, and then the end

uvicorn writes chunks to every client. Only a connection that is reset shows an HTTP/1.0 client that a reply is not whole.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import socket
import struct
from asyncio import TimerHandle
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import httptools
import msgspec
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from router.errors import BadRequestError, RequestTimeoutError, RouterError
from router.http.disconnect import EXTENSION, ServedClient, served_client
from router.serving.body_pieces import LARGE, BodyPieces

logger = logging.getLogger(__name__)

LINGER_SECONDS = 2.0
"""How long a refused client may go on sending, and how long it may be silent before it is refused."""

LAST_CALL_SECONDS = 0.5
"""How long an idle connection stays open when the server stops: its client may have sent a request that is not read yet."""

AHEAD = 4
"""Requests of one connection that may wait for their turn before it is read no further."""

_JOINED = 1 << 16
"""Bytes of a body that are copied behind their head: more go in a write of their own."""

_FRAMES = frozenset((b"content-length", b"transfer-encoding"))
_NO_LINGER = struct.pack("ii", 1, 0)
"""Without it, a connection that is aborted ends like any other."""


class HeadersTooLargeError(RouterError):
    """The head of a request is over `--max-header-bytes`."""

    status = 431
    type = "headers_too_large"


class TooManyConnectionsError(RouterError):
    """There are `--max-connections` already."""

    status = 503
    type = "too_many_connections"


class Limits:
    """The limits of all connections of a server, and the set of open connections.

    Args:
        max_header_bytes: for a request's first line and headers together, and for its trailers.
        max_connections: how many connections may be open at once.
        header_seconds: how long a head may take from its first byte, how long that byte may take, and how long the rest of a
            body may take whose request is answered.
        write_seconds: how long a client may take not one byte of what is written to it.
        on_count: called with the number of open connections at each change.
    """

    def __init__(
        self,
        *,
        max_header_bytes: int,
        max_connections: int,
        header_seconds: float = 60.0,
        write_seconds: float = 600.0,
        on_count: Callable[[int], None] | None = None,
    ) -> None:
        self.max_header_bytes = max_header_bytes
        self.max_connections = max_connections
        self.header_seconds = header_seconds
        self.write_seconds = write_seconds
        self._connected: set[LimitedConnection] = set()
        self._full = False
        self._on_count = on_count

    def let_in(self, connection: LimitedConnection) -> bool:
        """Add a connection and return True, if there is room for it."""
        full = len(self._connected) >= self.max_connections
        if full and not self._full:
            logger.warning("there are %d connections (--max-connections): others are refused", self.max_connections)
        self._full = full
        if not full:
            self._connected.add(connection)
        self._counted()
        return not full

    def let_go(self, connection: LimitedConnection) -> None:
        self._connected.discard(connection)
        self._counted()

    def _counted(self) -> None:
        if self._on_count is not None:
            self._on_count(len(self._connected))


class _Parser(httptools.HttpRequestParser):
    """httptools' parser, for which no request offers to go on in another protocol.

    Java's HTTP client and `curl --http2` offer HTTP/2 with every request. No server has to take the offer, and this one takes
    none. But httptools would skip the body behind such a head, and take it for the next request. So a new parser gets such a
    head a second time, without the offer: this one reads nothing more if the client also asks to close.
    """

    def __init__(self, connection: LimitedConnection) -> None:
        super().__init__(connection)
        self._connection = connection
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # uvicorn has nothing but bytes
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            head = self._connection.head_without_offer
            if head is None:
                raise
            self._connection.parser = _Parser(self._connection)
            self._connection.parser.feed_data(head + data[offer.args[0] :])


class _Reading(enum.Enum):
    """How much of a request has come.

    begin ---> head ---> body ---> pieces ---> begin
                 |         |                     ^
                 |         +---------------------+  without a body
                 +--> body, or begin again: a head that is read a second time (`_Parser`)
    """

    BEGIN = "begin"  # nothing; a head comes next
    HEAD = "head"  # some of its head
    BODY = "body"  # its head
    PIECES = "pieces"  # a piece of its body


# Looked up once: in CPython 3.11, a look-up of a member is a call in Python.
_BEGIN, _HEAD, _BODY, _PIECES = _Reading.BEGIN, _Reading.HEAD, _Reading.BODY, _Reading.PIECES


class _ReplyTransport:
    """A connection's transport, as uvicorn writes replies to it: a head waits for the first piece of its body.

    So both take one system call, and one packet. A head that nothing follows goes by itself in the event loop's next round.

    Attributes:
        head: of the reply that begins; empty when it is written, None before there is one.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self.head: bytes | None = None

    def write(self, data: bytes) -> None:
        head = self.head
        if head is None:
            self.head = data
            self._loop.call_soon(self._flush)
        elif head:
            self.head = b""
            # Not by `writelines`: asyncio of Python 3.12 and 3.13 does not say then that the client is behind.
            if len(data) <= _JOINED:
                self._transport.write(head + data)
            else:
                self._transport.write(head)
                self._transport.write(data)
        else:
            self._transport.write(data)

    def end_reply(self) -> None:
        """Note that the next write begins another reply."""
        if self.head:
            self._flush()
        self.head = None

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self.head and not self._transport.is_closing():
            self._transport.write(self.head)
            self.head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _ResetByClose:
    """The transport of a connection that is reset when it is closed in the middle of a reply."""

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        self._transport = transport
        self._cycle = cycle

    def close(self) -> None:
        if self._cycle.response_complete:
            self._transport.close()
            return
        with suppress(OSError):  # the client is gone already
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _unframe(cycle: Any) -> None:
    """Have a reply written without chunks. `cycle` is uvicorn's `RequestResponseCycle`, before its application runs."""
    framed = cycle.send
    unframed = False

    async def send(message: Message) -> None:
        nonlocal unframed
        if message["type"] == "http.response.start":
            unframed = not any(name.lower() in _FRAMES for name, _ in message.get("headers", ()))
            if unframed:
                cycle.chunked_encoding = False
                cycle.transport = _ResetByClose(cycle.transport, cycle)
        elif unframed:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn would compare it with a header
        await framed(message)

    cycle.send = send


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits. `limited_by` makes a class of it."""

    limits: Limits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reading = _BEGIN
        self._bare = 0  # bytes that have come since the last piece of a body, or the end of a request
        self._timer: TimerHandle | None = None
        self._unread_timer: TimerHandle | None = None  # runs while more is written than the client has taken
        self._refused = False
        self._closing = False
        self._stopping = False  # the server is
        self._served: RequestResponseCycle | None = None
        self._client = ServedClient()  # of the request that comes in now
        self.head_without_offer: bytes | None = None  # of a request that offers another protocol
        self.parser = _Parser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give a new client some seconds for its request."""
        super().connection_made(transport)
        self._replies = _ReplyTransport(transport, self.loop)
        self._refused = not self.limits.let_in(self)
        self._await_head(LINGER_SECONDS if self._refused else self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.let_go(self)
        self._stop_timer()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        if self._served is not None and not self._served.response_complete:
            # uvicorn notifies only the last request, which may still be waiting for the end of this one.
            self._served.disconnected = True
            self._served.message_event.set()
            client = served_client(self._served.scope)
            assert client is not None
            client.write = None
            client.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and never more of a head than `max_header_bytes`."""
        limit = self.limits.max_header_bytes
        if self._refused:
            most = self.limits.max_connections
            self._end_with(
                TooManyConnectionsError(
                    f"this router serves {most} connections at most (--max-connections): try again later",
                    headers=(("retry-after", "1"),),
                )
            )
        if self._reading is _BEGIN:
            data = data.lstrip(b"\r\n")  # some clients send a line break after a body: no request begins with it
        while data and not self._closing:
            room = limit - self._bare if self._reading in (_BEGIN, _HEAD) else len(data)
            part, data = data[:room], data[room:]
            self._bare += len(part)
            super().data_received(part)
            if self._bare >= limit:
                self._end_with(HeadersTooLargeError(f"the head is longer than {limit} bytes (--max-header-bytes)"))
        if self._reading is _HEAD and self._timer is None and not self._closing:
            self._await_head(self.limits.header_seconds)

    def pause_writing(self) -> None:
        """Hold the reply back, and give the client some time to read: meanwhile it holds a place at a worker."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def shutdown(self) -> None:
        """End when the reply under way is sent. An idle client has a moment in which the request that it just sent is answered.

        Closed at once, with bytes unread, the connection would be reset, and no load balancer repeats a POST after that.
        """
        self._stopping = True
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(LAST_CALL_SECONDS, super().shutdown)
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        self._end_with(BadRequestError(msg))

    # Callbacks of the parser ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._reading = _HEAD
        if self.timeout_keep_alive_task is not None:
            self._stop_waiting()
        super().on_message_begin()
        self._client = ServedClient()
        self.scope["extensions"] = {EXTENSION: cast(Any, self._client)}  # an object, where the standard has a dict

    def on_header(self, name: bytes, value: bytes) -> None:
        # The parser leaves white space behind a value, which is no part of it: a session or a key would have another name.
        super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        """Note that the application gets the request now, or after the requests before it."""
        self.head_without_offer = self._without_offer() if self.parser.should_upgrade() else None
        if self.head_without_offer is not None:
            return
        self._reading = _BODY
        self._bare = 0
        if self._timer is not None:
            self._stop_timer()
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, self._replies)
        if self.scope["http_version"] == "1.0":
            _unframe(self.cycle)
        else:
            self._client.write = partial(self._write_chunk, self.cycle)
        if self._stopping:
            self.cycle.keep_alive = False
        if not self.pipeline:
            self._served = self.cycle

    def on_body(self, body: bytes) -> None:
        self._bare = 0
        self._reading = _PIECES
        if len(body) > LARGE and not self.cycle.body:
            self.cycle.body = cast(Any, BodyPieces())
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that a request is complete: a head comes next."""
        if self.head_without_offer is not None:
            return
        self._reading = _BEGIN
        self._bare = 0
        self._client.all_here = True
        super().on_message_complete()
        if len(self.pipeline) < AHEAD:
            # After a large body, or with a request in line, uvicorn stops reading, and would not notice that the client leaves.
            self.flow.resume_reading()
        if self.cycle.response_complete and not self._closing:
            # The reply was complete before the request. uvicorn begins to wait for the next request at the reply, and stops
            # when data comes in; so the wait begins again here.
            self._stop_timer()
            self._stop_waiting()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Let the next request in line have its turn, or throw the rest of a body away for a while."""
        self._replies.end_reply()
        if (served := self._served) is not None:
            client: Any = served.scope["extensions"][EXTENSION]
            client.write = None  # the two know each other
        if self.pipeline:
            self._served = self.pipeline[-1][0]
        super().on_response_complete()
        if (
            self._reading in (_BEGIN, _HEAD)
            or self._closing
            or not self.cycle.response_complete
            or self.transport.is_closing()
        ):
            return
        if self.expect_100_continue and self._reading is _BODY:
            self.transport.close()  # no 100 Continue was sent, so the client may send its body or not
        else:
            self._stop_timer()
            self._timer = self.loop.call_later(self.limits.header_seconds, self.transport.abort)

    def _write_chunk(self, cycle: RequestResponseCycle, piece: bytes) -> bool:
        """Write a piece of a body as uvicorn's `send` would, at once; see `DirectSend.write`."""
        if (
            not (piece and cycle.chunked_encoding)
            or self._replies.head != b""
            or self.flow.write_paused
            or cycle.disconnected
            or cycle.response_complete
        ):
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def _without_offer(self) -> bytes | None:
        """Return the head that has come as if it had no header `upgrade`; None for the method that means the same."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            return None
        first = b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode())
        kept = (b"%b: %b\r\n" % pair for pair in self.headers if pair[0] != b"upgrade")
        return b"".join((first, *kept, b"\r\n"))

    # Ends -------------------------------------------------------------------------------------------------------------

    def _await_head(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_waiting(self) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def _head_is_late(self) -> None:
        self._timer = None
        seconds = self.limits.header_seconds
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head(seconds)  # the client has begun another request while it waits for its reply
        elif self._reading is _HEAD:
            self._end_with(RequestTimeoutError(f"the head of the request did not come within {seconds:g} s"))
        else:
            self.transport.close()

    def _await_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self.limits.write_seconds, self._check_reader, left)

    def _check_reader(self, before: int) -> None:
        """End the connection if its client has taken nothing since there were this many bytes for it."""
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._await_reader()  # nothing is written meanwhile, so the client reads, if slowly
            return
        logger.warning(
            "a client has read nothing for %g s (--write-timeout-secs): its connection ends, with %d bytes unread",
            self.limits.write_seconds,
            left,
        )
        self.transport.abort()

    def _end_with(self, error: RouterError) -> None:
        """Refuse the client, unless it was refused already or another reply is being written."""
        if self._closing:
            return
        self._closing = True
        self._stop_timer()
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # in the middle of another reply there is no room for this one
            return
        body = msgspec.json.encode(error.body())
        head = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\nconnection: close\r\n",
            *(f"{name}: {value}\r\n".encode("latin-1") for name, value in error.headers),
            b"content-length: %d\r\n\r\n" % len(body),
        ]
        self.transport.write(b"".join((*head, body)))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)


def limited_by(limits: Limits) -> type[LimitedConnection]:
    """Return a protocol class for uvicorn, which makes an instance of it for each connection."""
    return type("LimitedConnection", (LimitedConnection,), {"limits": limits})
