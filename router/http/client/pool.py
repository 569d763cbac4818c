"""The connections to all workers: made, kept while they may be of use, and closed."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable
from functools import lru_cache
from types import TracebackType
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohappyeyeballs import start_connection

from router.http.client.connection import WorkerConnection
from router.http.decompression import Unpacker, UnpackingError
from router.http.upstream import (
    Body,
    ClosedBeforeReplyError,
    ConnectFailedError,
    Headers,
    UpstreamBrokenError,
    UpstreamResponse,
)

# SGLang's server (uvicorn) closes a connection that was idle for 5 s.
IDLE_SECONDS = 4.0
DNS_SECONDS = 30
KEEPALIVE_SECONDS = 30
"""Seconds of silence after which a worker's machine is probed; after twice as many it counts as gone."""

_NEXT_ADDRESS_SECONDS = 0.25  # RFC 8305
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_SAFE_TWICE = frozenset({"GET", "HEAD"})
_NO_TARGET = re.compile(r"[^\x21-\x7e]")
_NO_HEADER = re.compile(rb"[\x00\r\n]")

_AddressInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[object, ...]]


class _Place(NamedTuple):
    """Where a worker is. `name`: the value of `host`."""

    host: str
    port: int
    tls: bool
    name: bytes


class PooledUpstream:
    """Connections to all workers, usable inside its `async with` block.

    There is no limit of connections, nor of the time of a reply: a generation may take hours, a pause may last, and the policy
    decides how much a worker gets.
    """

    def __init__(self, *, connect_timeout: float, permits: Callable[[str], bool] = lambda _: True) -> None:
        """`permits(address)`: whether a worker may be there. It is called for each connection: names change their addresses."""
        self._connect_timeout = connect_timeout
        self._permits = permits
        self._free: dict[_Place, list[WorkerConnection]] = {}
        self._addresses: dict[_Place, tuple[float, list[_AddressInfo]]] = {}
        self._sweep_due: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None
        self._all: set[WorkerConnection] = set()

    async def __aenter__(self) -> PooledUpstream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._sweep_due is not None:
            self._sweep_due.cancel()
        for connection in tuple(self._all):
            connection.transport.abort()
        await asyncio.sleep(0)  # the transports close in the next turn of the loop

    async def send(
        self, method: str, url: str, headers: Headers, body: Body = None, *, fresh: bool = False
    ) -> UpstreamResponse:
        """Send on a kept or on a new connection. Raises one of the three failures of `Upstream`."""
        place, target = _parsed(url)
        head = _head(method, target, place, headers, body, close=fresh)
        connection = None if fresh else self._kept(place)
        while True:
            try:
                used = connection or await self._connect(place, keep=not fresh)
                exchange = await used.send(head, body, bodiless=method == "HEAD")
                break
            except ClosedBeforeReplyError:
                # A worker that closes an idle connection in the moment of use is alive.
                if connection is None or method not in _SAFE_TWICE:
                    raise
                connection = None
        return _readable(exchange)

    def _kept(self, place: _Place) -> WorkerConnection | None:
        """Return a connection that is free."""
        free = self._free.get(place)
        while free:
            connection = free.pop()
            if connection.usable and connection.free_since > asyncio.get_running_loop().time() - IDLE_SECONDS:
                return connection
            connection.transport.abort()
        return None

    async def _connect(self, place: _Place, *, keep: bool) -> WorkerConnection:
        """Return a new connection. Raises ConnectFailedError."""
        loop = asyncio.get_running_loop()
        try:
            addresses = await self._resolved(place)
            async with asyncio.timeout(self._connect_timeout):
                sock = await start_connection(
                    addresses,
                    happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS,
                    interleave=1,
                    loop=loop,
                    socket_factory=self._socket,
                )
                try:
                    _, connection = await loop.create_connection(
                        lambda: _PooledConnection(self, place, keep=keep),
                        sock=sock,
                        ssl=self._tls_context() if place.tls else None,
                        server_hostname=place.host if place.tls else None,
                    )
                except BaseException:
                    sock.close()
                    raise
        except TimeoutError as error:
            self._addresses.pop(place, None)
            raise ConnectFailedError(f"no connection within {self._connect_timeout:g} s") from error
        except OSError as error:
            self._addresses.pop(place, None)
            raise ConnectFailedError(str(error) or type(error).__name__) from error
        return connection

    async def _resolved(self, place: _Place) -> list[_AddressInfo]:
        """Return a worker's addresses, which are asked for again after `DNS_SECONDS`."""
        loop = asyncio.get_running_loop()
        since, found = self._addresses.get(place, (0.0, []))
        if not found or since < loop.time() - DNS_SECONDS:
            found = list(
                await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
            )
            self._addresses[place] = loop.time(), found
        return found

    def _tls_context(self) -> ssl.SSLContext:
        self._tls = self._tls or ssl.create_default_context()
        return self._tls

    def _socket(self, address: _AddressInfo) -> socket.socket:
        host = str(address[4][0])
        if not self._permits(host):
            raise PermissionError(f"workers may not be at {host} (--worker-allow)")
        return _watched_socket(address)

    def made(self, connection: WorkerConnection) -> None:
        self._all.add(connection)

    def lost(self, connection: WorkerConnection) -> None:
        self._all.discard(connection)

    def freed(self, connection: WorkerConnection, place: _Place) -> None:
        """Keep a connection for the next request to that worker."""
        self._free.setdefault(place, []).append(connection)
        if self._sweep_due is None:
            self._sweep_due = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Close connections that were free for too long."""
        loop = asyncio.get_running_loop()
        self._sweep_due = None
        for place, free in tuple(self._free.items()):
            late = loop.time() - IDLE_SECONDS
            kept = [one for one in free if one.usable and one.free_since > late]
            for connection in set(free).difference(kept):
                connection.transport.abort()
            if kept:
                self._free[place] = kept
            else:
                del self._free[place]
        if self._free:
            self._sweep_due = loop.call_later(IDLE_SECONDS / 4, self._sweep)


class _PooledConnection(WorkerConnection):
    """A connection that its pool knows as long as it lasts."""

    def __init__(self, pool: PooledUpstream, place: _Place, *, keep: bool) -> None:
        super().__init__((lambda connection: pool.freed(connection, place)) if keep else None)
        self._pool = pool

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._pool.made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._pool.lost(self)


class _Unpacked:
    """A reply that is compressed although the router asked for none: its content-encoding is not passed on."""

    def __init__(self, reply: UpstreamResponse, encoding: str) -> None:
        """Raises UnpackingError."""
        self.status, self.headers = reply.status, reply.headers
        self._reply = reply
        self._unpacker = Unpacker(encoding)

    async def read(self) -> bytes:
        try:
            while not (piece := self._unpacker.take()):
                data = await self._reply.read()
                if not data:
                    self._unpacker.end()
                    return b""
                self._unpacker.feed(data)
        except UnpackingError as error:
            raise UpstreamBrokenError(str(error)) from error
        await asyncio.sleep(0)  # a few bytes may unpack to many pieces
        return piece

    def close(self) -> None:
        self._reply.close()


def _readable(reply: UpstreamResponse) -> UpstreamResponse:
    """Return a reply with a plain body. Raises UpstreamBrokenError for an encoding that cannot be read."""
    for name, value in reply.headers:
        if name.lower() == b"content-encoding":
            encoding = value.decode("latin-1").strip().lower()
            if encoding in ("identity", ""):
                continue
            try:
                return _Unpacked(reply, encoding)
            except UnpackingError as error:
                reply.close()
                raise UpstreamBrokenError(str(error)) from error
    return reply


@lru_cache(maxsize=1024)
def _parsed(url: str) -> tuple[_Place, bytes]:
    """Return where a request goes, and its target. Nearly all requests go to the same few URLs.

    Raises ConnectFailedError for what cannot be sent.
    """
    if _NO_TARGET.search(url):
        raise ConnectFailedError(f"{url!r} is no URL")
    scheme, _, rest = url.partition("://")
    authority, slash, target = rest.partition("/")
    parts = urlsplit(f"{scheme}://{authority}")
    tls = scheme == "https"
    place = _Place(parts.hostname or "", parts.port or (443 if tls else 80), tls, authority.encode())
    return place, f"{slash or '/'}{target.partition('#')[0]}".encode()


def _head(method: str, target: bytes, place: _Place, headers: Headers, body: Body, *, close: bool) -> bytes:
    """Return the head of a request. Raises ConnectFailedError for headers that cannot be sent."""
    parts = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method.encode("ascii"), target, place.name)]
    for name, value in headers:
        if _NO_HEADER.search(value) or _NO_HEADER.search(name):
            raise ConnectFailedError(f"{name!r} is a header that cannot be sent")
        parts.append(b"%b: %b\r\n" % (name, value))
    if body is not None or method not in _WITHOUT_BODY:
        parts.append(b"content-length: %d\r\n" % len(body or b""))
    parts.append(b"connection: close\r\n\r\n" if close else b"\r\n")
    return b"".join(parts)


def _watched_socket(address: _AddressInfo) -> socket.socket:
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
