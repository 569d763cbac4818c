"""One client's connection, within limits: how many there are, how long a head is, and how long it takes to come.

uvicorn's protocol has no such limits: a head may grow for ever, and may take for ever, and so may the trailers behind a chunked
body, and the rest of a body whose request has its answer already. Whatever is answered here never reaches the application, so
it is written by hand, as JSON of the same form. Only public names of uvicorn's class are used and overridden: the callbacks of
asyncio and of httptools, `on_response_complete`, and the attributes without an underscore.

Such an answer is the last one of its connection. The sending side is closed behind it and what still comes is thrown away for a
moment: closed at once, with bytes unread, the connection would be reset, and the client would often see only that.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import TimerHandle
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from router.errors import BadRequestError, RequestTimeoutError, RouterError

logger = logging.getLogger(__name__)

LINGER_SECONDS = 2.0
"""How long a client may go on sending after an answer that ends its connection; and be silent before it."""


class HeadersTooLargeError(RouterError):
    """The head of a request is over `--max-header-bytes`."""

    status = 431
    type = "headers_too_large"


class TooManyConnectionsError(RouterError):
    """There are `--max-connections` already."""

    status = 503
    type = "too_many_connections"


class Limits:
    """What all connections of a server share: the limits, and who is connected.

    Args:
        max_header_bytes: of a request's first line and headers, as they come; of its trailers, too.
        max_connections: how many there may be at once.
        header_seconds: what a head may take, from its first byte; and until that comes. The same for what is left of a body
            when its request has been answered.
    """

    def __init__(self, *, max_header_bytes: int, max_connections: int, header_seconds: float = 60.0) -> None:
        self.max_header_bytes = max_header_bytes
        self.max_connections = max_connections
        self.header_seconds = header_seconds
        self._connected: set[Connection] = set()
        self._full = False

    def let_in(self, connection: Connection) -> bool:
        """Whether there is room for one more."""
        full = len(self._connected) >= self.max_connections
        if full and not self._full:
            logger.warning("there are %d connections (--max-connections): others are refused", self.max_connections)
        self._full = full
        if not full:
            self._connected.add(connection)
        return not full

    def let_go(self, connection: Connection) -> None:
        """It is gone."""
        self._connected.discard(connection)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with the limits of its class: `limited_by` makes one."""

    limits: Limits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._heading = True  # what comes now is the head of a request
        self._begun = False  # some of it has come
        self._bare = 0  # bytes that have come since the last piece of a body, or the end of a request
        self._piece = False  # a piece of the body has come
        self._timer: TimerHandle | None = None
        self._refused = False
        self._closing = False
        self._served: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there; it has some seconds to say what it wants."""
        super().connection_made(transport)
        self._refused = not self.limits.let_in(self)
        self._await_head(LINGER_SECONDS if self._refused else self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self.limits.let_go(self)
        self._stop_timer()
        if self._served is not None and not self._served.response_complete:
            # uvicorn tells the last request only, which may still be waiting for this one's end.
            self._served.disconnected = True
            self._served.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The parser is never fed more of a head than a head may have."""
        limit = self.limits.max_header_bytes
        if self._refused:
            most = self.limits.max_connections
            self._end_with(
                TooManyConnectionsError(
                    f"this router serves {most} connections at most (--max-connections): try again later",
                    headers=(("retry-after", "1"),),
                )
            )
        if self._heading and not self._begun:
            data = data.lstrip(b"\r\n")  # some clients put a line break behind a body, which begins nothing
        while data and not self._closing:
            room = limit - self._bare if self._heading else len(data)
            part, data = data[:room], data[room:]
            self._bare += len(part)
            super().data_received(part)
            if self._bare >= limit:
                self._end_with(HeadersTooLargeError(f"the head is longer than {limit} bytes (--max-header-bytes)"))
        if self._begun and self._timer is None and not self._closing:
            self._await_head(self.limits.header_seconds)

    def send_400_response(self, msg: str) -> None:
        """What uvicorn answers by itself."""
        self._end_with(BadRequestError(msg))

    # What the parser tells --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A head."""
        self._begun = True
        self._piece = False
        self._stop_waiting()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A request: the application has it, or will have it after those before it."""
        self._heading = self._begun = False
        self._bare = 0
        self._stop_timer()
        super().on_headers_complete()
        if not self.pipeline:
            self._served = self.cycle

    def on_body(self, body: bytes) -> None:
        """A piece of it."""
        self._bare = 0
        self._piece = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it has come; what comes next is a head."""
        self._heading = True
        self._bare = 0
        super().on_message_complete()
        if self.cycle.response_complete and not self._closing:
            # Its answer was there first. uvicorn waits for the next request only from an answer on, and data ends that.
            self._stop_timer()
            self._stop_waiting()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """A request has its answer: the next one in line has its turn, or the rest of a body is thrown away, for a while."""
        if self.pipeline:
            self._served = self.pipeline[-1][0]
        super().on_response_complete()
        if self._heading or self._closing or not self.cycle.response_complete or self.transport.is_closing():
            return
        if self.expect_100_continue and not self._piece:
            self.transport.close()  # the client was never told to send its body: whether it will, nobody can know
        else:
            self._stop_timer()
            self._timer = self.loop.call_later(self.limits.header_seconds, self.transport.abort)

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
            self._await_head(seconds)  # it has merely begun to ask again while it waits for its answer
        elif self._begun:
            self._end_with(RequestTimeoutError(f"the head of the request did not come within {seconds:g} s"))
        else:
            self.transport.close()

    def _end_with(self, error: RouterError) -> None:
        """The last answer of this connection, unless there was one, or another one is being written."""
        if self._closing:
            return
        self._closing = True
        self._stop_timer()
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # in the middle of another answer there is no room for this one
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


def limited_by(limits: Limits) -> type[Connection]:
    """A protocol for uvicorn, which makes one of each connection by itself."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
