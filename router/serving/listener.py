"""The listening socket, from which one or several processes accept: many connections at once, and evenly.

uvloop accepts one connection in each iteration of the event loop. A busy loop has some dozen iterations a second, so the last
of 256 simultaneous connections waited for 7 s. Here an iteration accepts all waiting connections.

Left to themselves, several processes race for each connection, and the one that happens to be awake wins: of 256 connections
that came two milliseconds apart, one of two processes got 98%. A socket of its own for each (SO_REUSEPORT) spreads by a hash:
fair on average only, and connections that wait at a process are lost if it dies, and wait if it hangs. So here all accept from
one queue, and each first reads the numbers of all in shared memory: it accepts as many connections as keep the numbers equal,
and leaves the rest to the others. If the rest still waits a moment later, because the others are busy or hang, it accepts them
too.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from router.config.server import ServerConfig
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

BACKLOG = 2048
"""How many connections wait at most until they are accepted."""

ABSENT = -1
"""The number of connections of a process that does not serve."""

MANNERS_SECONDS = 0.05
"""How long a process with more connections leaves a new one to the others."""

MOST_AT_ONCE = 64
"""How many connections a process takes in one turn of its event loop. Of those that others have left it takes one at first, and
twice as many each time that the others have still not moved. So clients hardly notice a process that hangs, and one that was
busy for a moment gets its part of a crowd."""

TROUBLE_SECONDS = 0.5
"""How long not to accept after an error, such as too many open files."""

_INT = 4
_UNACKED = slice(24, 28)


def reserve(config: ServerConfig) -> socket.socket:
    """Return a socket that has the address and does not listen yet. Raise BadRequestError if the address is not available."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        found = socket.socket(family, proto=socket.IPPROTO_TCP)
        try:
            if os.name == "posix":  # elsewhere it would let two processes have one address
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            found.bind((config.host, config.port))
        except BaseException:
            found.close()
            raise
    except OSError as error:
        raise _unavailable(config, error) from error
    return found


def listen(reserved: socket.socket, config: ServerConfig) -> None:
    """Let clients connect. Raise BadRequestError if another process has begun to listen there in the meantime."""
    try:
        reserved.listen(BACKLOG)
    except OSError as error:
        reserved.close()
        raise _unavailable(config, error) from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _unavailable(config: ServerConfig, error: OSError) -> BadRequestError:
    return BadRequestError(
        f"cannot listen on {config.host}:{config.port}: {error.strerror or error} (--host, --port; port 0 takes a free one)"
    )


class ConnectionBoard:
    """How many connections each process has, in memory that all of them share."""

    def __init__(self, descriptor: int, count: int) -> None:
        """`descriptor` is that of a file of `size(count)` bytes, which the parent made and the processes inherit."""
        self._memory = mmap.mmap(descriptor, _INT * count)
        self._counts = memoryview(self._memory).cast("i")

    @staticmethod
    def create(count: int) -> int:
        """Return the descriptor of a new board without any process."""
        with tempfile.TemporaryFile() as file:
            file.write(ABSENT.to_bytes(_INT, "little", signed=True) * count)
            file.flush()
            return os.dup(file.fileno())

    def put(self, number: int, connections: int) -> None:
        """Write the connections of a process, numbered from 1; `ABSENT` if it does not serve."""
        self._counts[number - 1] = connections

    def others(self, number: int) -> list[int]:
        """Return the connections of all processes but this one."""
        return [count for each, count in enumerate(self._counts, 1) if each != number]

    def part(self, number: int, waiting: int) -> int:
        """Return how many of the waiting connections a process has to take so that all have the same number, or one more."""
        serving = [count for count in self._counts if count != ABSENT]
        return max(0, -(-(sum(serving) + waiting) // len(serving)) - self._counts[number - 1])

    def add(self, number: int) -> None:
        """Count one more connection of a process."""
        self._counts[number - 1] += 1


class SharedListener:
    """The part of one process in accepting connections."""

    def __init__(self, listener: socket.socket, board: ConnectionBoard, number: int) -> None:
        self._listener = listener
        self._board = board
        self._number = number
        self._connect: Callable[[], asyncio.Protocol] | None = None
        self._at_once = 1
        self._later: asyncio.TimerHandle | None = None
        self._connecting: set[asyncio.Task[object]] = set()
        listener.setblocking(False)

    @classmethod
    def alone(cls, listener: socket.socket) -> SharedListener:
        """Return that of a process which shares the socket with no other."""
        return cls(listener, ConnectionBoard(ConnectionBoard.create(1), 1), 1)

    def count(self, connections: int) -> None:
        """Note how many connections this process has."""
        if self._connect is not None:
            self._board.put(self._number, connections)

    def begin(self, connect: Callable[[], asyncio.Protocol]) -> None:
        """Accept from now on, in the running loop; `connect` makes the protocol of a connection."""
        self._connect = connect
        self._board.put(self._number, 0)
        self._resume()

    async def end(self) -> None:
        """Accept the connections that wait already, and then no more: close the socket.

        Closing it resets what waits, though these clients are connected and may have sent their requests.
        """
        if self._connect is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._accept_some(_waiting(self._listener))
        if self._later is not None:
            self._later.cancel()
        self._listener.close()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        if self._connect is not None:
            self._connect = None
            self._board.put(self._number, ABSENT)

    def _resume(self) -> None:
        self._later = None
        asyncio.get_running_loop().add_reader(self._listener, self._on_connection)

    def _pause(self, seconds: float, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._later = loop.call_later(seconds, then)

    def _on_connection(self) -> None:
        part = self._board.part(self._number, _waiting(self._listener))
        if part:
            self._accept_some(min(part, MOST_AT_ONCE))
        else:
            self._pause(MANNERS_SECONDS, partial(self._take_what_is_left, self._board.others(self._number)))

    def _take_what_is_left(self, before: list[int]) -> None:
        self._resume()
        if self._board.others(self._number) != before:
            self._at_once = 1
            return
        if self._accept_some(self._at_once):
            self._at_once = min(2 * self._at_once, MOST_AT_ONCE)

    def _accept_some(self, count: int) -> bool:
        """Accept so many connections. Return False if there are fewer, or they cannot be accepted now."""
        return all(self._accept() for _ in range(count))

    def _accept(self) -> bool:
        """Accept one connection. Return False if there is none, or it cannot be accepted now."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another process was faster, or the client left
        except OSError as error:
            logger.error("no connection can be accepted: %s", error)
            self._pause(TROUBLE_SECONDS, self._resume)
            return False
        connection.setblocking(False)
        if connection.family != getattr(socket, "AF_UNIX", None):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert self._connect is not None
        self._board.add(self._number)  # before the protocol is made, which counts the connection itself
        loop = asyncio.get_running_loop()
        task: asyncio.Task[object] = loop.create_task(loop.connect_accepted_socket(self._connect, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connected)
        return True

    def _connected(self, task: asyncio.Task[object]) -> None:
        self._connecting.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.info("a connection was lost at once: %s", task.exception())


def _waiting(listener: socket.socket) -> int:
    """Return how many connections wait to be accepted, at least 1, which is all that is known where the system does not tell.

    Linux has the number in `tcpi_unacked` of a listening socket (`struct tcp_info`, linux/tcp.h).
    """
    found = 0
    if sys.platform == "linux":
        with suppress(OSError):
            info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED.stop)
            found = int.from_bytes(info[_UNACKED], sys.byteorder)
    return max(1, found)
