"""A connection: commands are packed as the client library packs them, without copies of what is long; a server that hangs."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from queue import Queue
from typing import Any

import hiredis
import pytest
import uvloop

from middleware_hub.store.redis.address import parse
from middleware_hub.store.redis.connection import Command, Connection, HungError, packed
from middleware_hub.store.redis.scripts import ALL
from middleware_hub.store.redis.server import dial

SHORT: Command = ("HGETALL", b"p:\0\r\n")
MANY: Command = ("EVALSHA", "0" * 40, 3, *(b"%d" % at for at in range(30)), -1, "ä", b"")
LARGE = b"x" * (24 << 20)
LONG: Command = (*MANY, b"x" * 5_000, 7, b"y" * 6_000, b"z" * 7_000, "end")


@pytest.mark.parametrize(
    "commands",
    [[SHORT], [MANY], [LONG], [("SET", b"key", b"v" * 9_000)], [SHORT, LONG, SHORT, MANY, SHORT], [LONG, LONG]],
    ids=["short", "many", "long", "few arguments", "all", "twice"],
)
def test_commands_are_packed_as_the_client_library_packs_them(commands: list[Command]) -> None:
    assert b"".join(packed(commands)) == b"".join(map(hiredis.pack_command, commands))  # type: ignore[arg-type]


def test_what_is_long_is_not_copied_and_what_is_short_goes_together() -> None:
    pieces = packed([SHORT, LONG, SHORT])
    bodies = [one for one in LONG if len(str(one)) > 1_000]
    assert [piece for piece in pieces if any(piece is body for body in bodies)] == bodies
    assert len(pieces) == 2 * len(bodies) + 1


@pytest.fixture
def server() -> Iterator[tuple[Queue[bytes], int]]:
    """Sends an answer for each request that it reads, as long as it has answers, and what it sends is no matter of our loop."""
    answers: Queue[bytes] = Queue()

    def serve() -> None:
        with suppress(OSError), listener.accept()[0] as connection:
            while connection.recv(1 << 16):
                connection.sendall(answers.get())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield answers, listener.getsockname()[1]
        answers.put(b"")
        thread.join()


async def connected(port: int, timeout: float) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(timeout, None), "127.0.0.1", port)
    return connection


def test_a_loop_that_is_late_is_no_server_that_hangs(server: tuple[Queue[bytes], int]) -> None:
    """The commands go out when the loop goes on, and so is the time limit over."""
    answers, port = server
    answers.put(b"+PONG\r\n")

    async def work() -> list[Any]:
        connection = await connected(port, 0.2)
        asked = connection.call([("PING",)])
        time.sleep(0.5)  # noqa: ASYNC251 - this is the lateness
        try:
            return await asked
        finally:
            connection.close()

    assert uvloop.run(work()) == [b"PONG"]


def test_a_server_that_hangs_is_found_out(server: tuple[Queue[bytes], int]) -> None:
    """Although the loop was late before."""
    _, port = server

    async def work() -> None:
        connection = await connected(port, 0.1)
        asked = connection.call([("PING",)])
        time.sleep(0.2)  # noqa: ASYNC251 - this is the lateness
        try:
            await asked
        finally:
            connection.close()

    with pytest.raises(HungError, match="no answer within"):
        uvloop.run(work())


@pytest.fixture
def slow_line() -> Iterator[tuple[threading.Event, int]]:
    """A server that takes its time to read a request, and answers at its end; from when it is `stuck`, it reads nothing."""
    stuck, over = threading.Event(), threading.Event()

    def serve() -> None:
        with suppress(OSError), listener.accept()[0] as connection:
            taken = 0
            while taken < len(LARGE) and not stuck.is_set() and (data := connection.recv(1 << 18)):
                taken += len(data)
                over.wait(0.01)
            if taken >= len(LARGE):
                connection.sendall(b"+OK\r\n")
            over.wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield stuck, listener.getsockname()[1]
        over.set()
        thread.join()


def set_large(port: int, stuck: threading.Event | None = None) -> list[Any]:
    """Send a large value over a connection whose time limit is shorter than that takes."""

    async def work() -> list[Any]:
        connection = await connected(port, 0.5)
        asked = connection.call([("SET", "key", LARGE)])
        try:
            if stuck is not None:
                await asyncio.sleep(0)
                stuck.set()
            others = [connection.call([("PING",)]) for _ in range(3)]
            while stuck is not None and not asked.done():  # later commands are no sign of life
                others.append(connection.call([("PING",)]))
                await asyncio.sleep(0.005)
            return await asked
        finally:
            connection.close()

    return uvloop.run(work())


def test_a_server_that_still_reads_does_not_hang(slow_line: tuple[threading.Event, int]) -> None:
    """Each attempt at a large record would be cut off at the same place, and all that waits behind it would wait for ever."""
    _, port = slow_line
    assert set_large(port) == [b"OK"]


def test_a_server_that_stops_reading_hangs(slow_line: tuple[threading.Event, int]) -> None:
    stuck, port = slow_line
    with pytest.raises(HungError, match="no answer within"):
        set_large(port, stuck)


def test_a_loop_that_is_late_can_connect(server: tuple[Queue[bytes], int]) -> None:
    answers, port = server
    answers.put(b"*0\r\n" + b"+sha\r\n" * len(ALL) + b"$5\r\nx:1\r\n\r\n")

    async def work() -> None:
        dialing = asyncio.create_task(
            dial(parse(f"redis://127.0.0.1:{port}/?socket_connect_timeout=0.2"), "127.0.0.1", port)
        )
        await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251 - this is the lateness
        (await dialing).close()

    uvloop.run(work())
