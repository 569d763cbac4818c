"""The HTTP client towards the workers: aiohttp behind a small protocol, and the only file that imports it.

Three things can go wrong with a worker. They differ in how far the request got, because that decides what may be done
about it: `ConnectFailedError` (nothing was sent: try anywhere), `ClosedBeforeReplyError` (sent, but not a byte came
back: may be tried again if doing it twice does no harm) and `UpstreamBrokenError` (the reply had begun).
"""

from __future__ import annotations

import asyncio
import io
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from contextvars import ContextVar
from email.utils import parsedate_to_datetime
from functools import lru_cache
from operator import itemgetter
from types import TracebackType
from typing import Protocol

import aiohttp
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from router.http.decompression import Unpacker, UnpackingError

Headers = Sequence[tuple[bytes, bytes]]
Body = bytes | None

# SGLang's server (uvicorn) closes a connection that was idle for 5 s.
IDLE_SECONDS = 4.0
DNS_SECONDS = 30
KEEPALIVE_SECONDS = 30
"""Seconds of silence after which a worker's machine is probed; after twice as many it counts as gone."""
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 1000
READ_BUFFER_BYTES = 1024 * 1024
# A larger body is written in pieces, with other requests in between.
PIECEWISE_BYTES = 1024 * 1024

# What aiohttp would add to a request by itself.
_AUTO_HEADERS = ("accept", "accept-encoding", "content-type", "user-agent")


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

    async def read(self) -> bytes:
        """Return the next piece of the body, empty at the end. Raises UpstreamBrokenError."""

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


def retry_after(response: UpstreamResponse) -> float | None:
    """Return the seconds after which a worker wants the next request; they may be written as a date (RFC 9110, 10.2.3)."""
    for name, value in response.headers:
        if name.lower() == b"retry-after":
            text = value.decode("latin-1").strip()
            if text.isascii() and text.isdigit():
                return float(text)
            with suppress(ValueError, OverflowError):
                return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return None


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

    None of aiohttp's own limits (100 connections, 300 s a request) is in force: a generation may take hours, a pause may last,
    and the policy decides how much a worker gets.
    """

    def __init__(self, *, connect_timeout: float, permits: Callable[[str], bool] = lambda _: True) -> None:
        """`permits(address)`: whether a worker may be there. It is called for each connection: names change their addresses."""
        self._connect_timeout = connect_timeout
        self._permits = permits

    async def __aenter__(self) -> AiohttpUpstream:
        self._pooled = self._session(
            _QuietConnector(
                limit=0, keepalive_timeout=IDLE_SECONDS, ttl_dns_cache=DNS_SECONDS, socket_factory=self._socket
            )
        )
        self._fresh = self._session(
            aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=DNS_SECONDS, socket_factory=self._socket)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.gather(self._pooled.close(), self._fresh.close())

    async def send(
        self, method: str, url: str, headers: Headers, body: Body = None, *, fresh: bool = False
    ) -> UpstreamResponse:
        """Send on a pooled or on a new connection. aiohttp's errors become the three of this file."""
        session = self._fresh if fresh else self._pooled
        data = io.BytesIO(body) if isinstance(body, bytes) and len(body) > PIECEWISE_BYTES else body
        connection = _ConnectionUse()
        _CONNECTION.set(connection)
        try:
            response = await session.request(
                method,
                _parsed(url),
                headers=_decoded(headers),
                data=data,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise ConnectFailedError(_describe(error)) from error
        except aiohttp.ClientResponseError as error:
            raise NotHttpError(f"not a valid HTTP reply: {_one_line(error.message)}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ClosedBeforeReplyError(_describe(error), kept=connection.kept) from error
        if not 200 <= response.status < 600 or _CONTROL.search(b"\t".join(map(_value_of, response.raw_headers))):
            response.close()
            raise NotHttpError(
                f"not a valid HTTP reply: status {response.status}, or a header that no client may be sent"
            )
        try:
            return _AiohttpResponse(response)
        except UnpackingError as error:
            response.close()
            raise UpstreamBrokenError(str(error)) from error

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        host = str(address[4][0])
        if not self._permits(host):
            raise PermissionError(f"workers may not be at {host} (--worker-allow)")
        _CONNECTION.get().kept = False
        return _watched_socket(address)

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout, sock_read=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,  # see `_AiohttpResponse`
            skip_auto_headers=_AUTO_HEADERS,
            read_bufsize=READ_BUFFER_BYTES,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
        )


_value_of = itemgetter(1)
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
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_SECONDS // 3),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


class _QuietConnector(aiohttp.TCPConnector):
    """Does not use a kept connection again on which something came while it was idle.

    aiohttp would take that for the reply to the next request, which may be another tenant's. A proxy in front of a worker says
    so that it has waited long enough (408), and a worker that is broken may send a reply twice.
    """

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        while True:
            connection = await super().connect(req, traces, timeout)
            assert connection.protocol is not None
            if not connection.protocol.should_close:
                return connection
            connection.close()


class _ConnectionUse:
    """Whether the connection of a request had served another one: it was kept, unless a socket was made for it."""

    kept = True


_CONNECTION: ContextVar[_ConnectionUse] = ContextVar("connection")
"""That of the request which the current task sends. aiohttp's own hooks would cost a quarter of the request."""


class _AiohttpResponse:
    """Unpacks a reply that is compressed although the router asked for none: its content-encoding is not passed on."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        self._response = response
        self.status = response.status
        self.headers: Headers = response.raw_headers
        self._unpacker = None if encoding in ("identity", "") else Unpacker(encoding)

    async def read(self) -> bytes:
        try:
            if self._unpacker is None:
                return await self._response.content.readany()
            return await self._unpacked(self._unpacker)
        except (aiohttp.ClientError, OSError, UnpackingError) as error:
            raise UpstreamBrokenError(_describe(error)) from error

    async def _unpacked(self, unpacker: Unpacker) -> bytes:
        while not (piece := unpacker.take()):
            data = await self._response.content.readany()
            if not data:
                unpacker.end()
                return b""
            unpacker.feed(data)
        await asyncio.sleep(0)  # a few bytes may unpack to many pieces
        return piece

    def close(self) -> None:
        self._response.close()


@lru_cache(maxsize=1024)
def _parsed(url: str) -> URL:
    """Return the parsed URL, cached: nearly all requests go to the same few URLs."""
    return URL(url, encoded=True)


def _decoded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return headers as text for aiohttp, which encodes it in UTF-8: bytes that are UTF-8 arrive unchanged."""
    decoded = []
    for name, value in headers:
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = value.decode("latin-1")
        decoded.append((name.decode("latin-1"), text))
    return decoded


def _describe(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return str(error.os_error)
    if isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str):
        return "the connection was closed in the middle of the reply's head"  # aiohttp's message is what came of it
    return _one_line(str(error)) or type(error).__name__


def _one_line(text: str) -> str:
    """Return the text of an error without the lines in which aiohttp points at the wrong byte."""
    return " ".join(text.split()).removesuffix(" ^")
