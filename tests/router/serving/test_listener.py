"""Several processes accept from one socket. Here they are parts of one loop, which is all the same to the socket."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from router.serving.listener import ABSENT, ConnectionBoard, SharedListener


class Part:
    """One of the processes; its connections stay open."""

    def __init__(self, listener: socket.socket, descriptor: int, number: int, count: int) -> None:
        self.connections: list[asyncio.Transport] = []
        self.listener = SharedListener(listener.dup(), ConnectionBoard(descriptor, count), number)

    def connect(self) -> asyncio.Protocol:
        part = self

        class Connection(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                assert isinstance(transport, asyncio.Transport)
                part.connections.append(transport)
                part.listener.count(len(part.connections))

            def connection_lost(self, _: Exception | None) -> None:
                part.connections.pop()
                part.listener.count(len(part.connections))

        return Connection()


class Town:
    def __init__(self, count: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.descriptor = ConnectionBoard.create(count)
        self.board = ConnectionBoard(self.descriptor, count)
        self.parts = [Part(self.listener, self.descriptor, number, count) for number in range(1, count + 1)]
        self.clients: list[socket.socket] = []

    def begin(self, *numbers: int) -> None:
        for number in numbers:
            part = self.parts[number - 1]
            part.listener.begin(part.connect)

    async def connect(self, count: int) -> list[int]:
        """Open connections; return how many each part has when all are taken."""
        for _ in range(count):
            self.clients.append(socket.create_connection(self.listener.getsockname()))
        async with asyncio.timeout(30):
            while sum(self.spread()) < len(self.clients):  # noqa: ASYNC110 - what the kernel hands over has no event
                await asyncio.sleep(0.001)
        return self.spread()

    def spread(self) -> list[int]:
        return [len(part.connections) for part in self.parts]

    async def close(self) -> None:
        for part in self.parts:
            await part.listener.end()
            for connection in list(part.connections):
                connection.abort()
        for client in self.clients:
            client.close()
        self.listener.close()
        os.close(self.descriptor)


def test_a_crowd_is_spread_evenly() -> None:
    async def run() -> None:
        town = Town(3)
        town.begin(1, 2, 3)
        assert await town.connect(30) == [10, 10, 10]
        for _ in range(6):
            await town.connect(1)
        assert town.spread() == [12, 12, 12]
        await town.close()

    asyncio.run(run())


@pytest.mark.parametrize("count", [1, 3])
def test_a_crowd_waits_for_a_few_turns_of_a_busy_loop(count: int) -> None:
    """uvloop takes one connection in each turn, so the last one of a crowd would wait for as many turns as there are."""

    async def run() -> None:
        town, turns = Town(count), 0

        def turn() -> None:
            nonlocal turns
            turns += 1
            if sum(town.spread()) < 120:
                asyncio.get_running_loop().call_soon(turn)

        for _ in range(120):
            town.clients.append(socket.create_connection(town.listener.getsockname()))
        town.begin(*range(1, count + 1))
        turn()
        async with asyncio.timeout(30):
            while sum(town.spread()) < 120:  # noqa: ASYNC110 - see `Town.connect`
                await asyncio.sleep(0)
        assert town.spread() == [120 // count] * count
        assert turns < 20
        await town.close()

    asyncio.run(run())


def test_a_new_one_catches_up() -> None:
    """A process that was started again has none, and gets all until it has as many as the others."""

    async def run() -> None:
        town = Town(2)
        town.begin(1)
        assert await town.connect(4) == [4, 0]
        town.begin(2)
        assert await town.connect(4) == [4, 4]
        await town.close()

    asyncio.run(run())


def test_one_that_hangs_or_is_gone_holds_up_nobody() -> None:
    async def run() -> None:
        town = Town(2)
        town.begin(1)
        town.board.put(2, 0)  # it has fewer for ever
        assert await town.connect(100) == [100, 0]
        town.board.put(2, ABSENT)
        assert await town.connect(1) == [101, 0]
        await town.close()

    asyncio.run(run())


def test_who_ends_takes_what_waits_already() -> None:
    """Closing the socket would reset these connections, though their clients may have sent requests."""

    async def run() -> None:
        town = Town(1)
        town.begin(1)
        for _ in range(5):  # the loop has no turn in which to accept them
            town.clients.append(socket.create_connection(town.listener.getsockname()))
        await town.parts[0].listener.end()
        assert town.spread() == [5]
        await town.close()

    asyncio.run(run())


def test_who_ends_takes_nothing_more() -> None:
    async def run() -> None:
        town = Town(2)
        town.begin(1, 2)
        await town.connect(2)
        await town.parts[0].listener.end()
        before = town.spread()[0]
        await town.connect(4)
        assert town.spread()[0] == before
        await town.close()

    asyncio.run(run())
