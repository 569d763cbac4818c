"""A client that does not read what it asked for: it has some time, and then its connection ends, and the work for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from router.config.server import ServerConfig
from router.errors import ClientDisconnectedError
from router.http.disconnect import ClientConnection
from router.http.request_state import Requests
from router.observability.metrics import RouterMetrics
from router.serving import server
from router.serving.connection import LimitedConnection, Limits, limited_by
from router.serving.entrance import Entrance
from tests.router.conftest import EchoWorker
from tests.support.serving import serving

REQUEST = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
PIECE = bytes(1 << 16)
MORE_THAN_SOCKETS_HOLD = 1 << 25


def limits(seconds: float) -> Limits:
    return Limits(max_header_bytes=2048, max_connections=10, write_seconds=seconds)


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(REQUEST)
    return reader, writer


def test_a_client_that_reads_nothing_of_its_stream_is_let_go_and_the_work_for_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            async with ClientConnection(receive):
                await send({"type": "http.response.start", "status": 200, "headers": []})
                while True:
                    await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        except ClientDisconnectedError:
            ended.set()
            raise

    async def main() -> None:
        entrance = Entrance(app, (), RouterMetrics(CollectorRegistry()), Requests(), body_timeout=5.0)

        async def only_http(scope: Scope, receive: Receive, send: Send) -> None:
            await (entrance if scope["type"] == "http" else app)(scope, receive, send)

        async with asyncio.timeout(60), serving(only_http, protocol=limited_by(limits(0.05))) as url:
            _, writer = await connect(url)
            await ended.wait()
            writer.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "--write-timeout-secs" in caplog.text


def test_the_connection_ends_too_if_the_reply_was_written_as_a_whole() -> None:
    """Its request is over, and no place at a worker is held; the bytes are."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            length = (b"content-length", b"%d" % MORE_THAN_SOCKETS_HOLD)
            await send({"type": "http.response.start", "status": 200, "headers": [length]})
            await send({"type": "http.response.body", "body": bytes(MORE_THAN_SOCKETS_HOLD)})

    async def main() -> None:
        shared = limits(0.05)
        async with asyncio.timeout(60), serving(app, protocol=limited_by(shared)) as url:
            reader, writer = await connect(url)
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.pause_reading()
            while shared._connected:  # noqa: ASYNC110 - the end of a connection has no event
                await asyncio.sleep(0.001)
            writer.transport.resume_reading()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(MORE_THAN_SOCKETS_HOLD)
            writer.close()

    asyncio.run(main())


def test_the_flag_is_the_limit() -> None:
    assert server._limits(ServerConfig(write_timeout=7.0), None).write_seconds == 7


class Clock:
    """Stands for an event loop: a timer runs when the test says so."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, seconds: float, call: Callable[..., None], *args: Any) -> Timer:
        assert seconds == 600
        timer = Timer(self.timers, call, args)
        self.timers.append(timer)
        return timer

    def strike(self) -> None:
        (timer,) = self.timers
        self.timers.clear()
        timer.call(*timer.args)


class Timer:
    def __init__(self, timers: list[Timer], call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._timers = timers
        self.call = call
        self.args = args

    def cancel(self) -> None:
        if self in self._timers:
            self._timers.remove(self)


class Unread:
    """Stands for a transport with bytes that its client has not taken."""

    left = 0
    aborted = False

    def get_write_buffer_size(self) -> int:
        return self.left

    def abort(self) -> None:
        self.aborted = True


async def reading(steps: list[int | str]) -> tuple[bool, int]:
    """Return whether a connection ended, and how many timers run, after steps.

    A step is "pause", when there is too much to write; "resume", when there is little; or the bytes left when a timer ends.
    """
    shared, clock, transport = limits(600), Clock(), Unread()
    async with asyncio.timeout(60), serving(EchoWorker(), protocol=limited_by(shared)) as url:
        reader, writer = await connect(url)
        await reader.readuntil(b"\r\n\r\n")
        connection: LimitedConnection
        (connection,) = shared._connected
        own = connection.loop, connection.transport
        connection.loop, connection.transport = cast(Any, clock), cast(Any, transport)
        transport.left = 100
        for step in steps:
            if step == "pause":
                connection.pause_writing()
            elif step == "resume":
                connection.resume_writing()
            else:
                assert isinstance(step, int)
                transport.left = step
                clock.strike()
        connection.loop, connection.transport = own
        found = transport.aborted, len(clock.timers)
        clock.timers.clear()
        connection.resume_writing()
        writer.close()
    return found


@pytest.mark.parametrize(
    ("steps", "ends", "timers"),
    [
        (["pause"], False, 1),
        (["pause", 100], True, 0),
        (["pause", 99], False, 1),
        (["pause", 99, 98, 97], False, 1),
        (["pause", 99, 99], True, 0),
        (["pause", "resume"], False, 0),
        (["pause", "resume", "pause", 100], True, 0),
        (["pause", 50, "resume", "pause", 49], False, 1),
    ],
)
def test_a_client_that_reads_slowly_is_kept(steps: list[int | str], ends: bool, timers: int) -> None:
    """It is let go only if it took no byte from one look to the next, however much is left."""
    assert asyncio.run(reading(steps)) == (ends, timers)
