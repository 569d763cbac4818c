"""Asks for `/liveness` at equal distances, in a process of its own, and takes the time of each answer.

An answer needs one turn of the event loop, so its time shows how long the loop was busy with other things.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

EVERY = 0.05  # seconds
_REQUEST = b"GET /liveness HTTP/1.1\r\nhost: x\r\n\r\n"


class Probe:
    """The process, seen from the one that measures."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def latencies(self) -> list[float]:
        """Return the seconds that each answer took since the last call. While no one listens, there are none."""
        self._pipe.send(None)
        found: list[float] = self._pipe.recv()
        return found


def _connected(url: str) -> socket.socket | None:
    parts = urlsplit(url)
    try:
        connection = socket.create_connection((parts.hostname or "", parts.port or 0))
    except OSError:
        return None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _answered(connection: socket.socket) -> bool:
    try:
        connection.sendall(_REQUEST)
        return bool(connection.recv(65536))
    except OSError:
        return False


def _watch(url: str, pipe: Connection, every: float) -> None:
    connection: socket.socket | None = None
    found: list[float] = []
    due = time.perf_counter()
    while True:
        connection = connection or _connected(url)
        begun = time.perf_counter()
        if connection and _answered(connection):
            found.append(time.perf_counter() - begun)
        elif connection:  # a benchmark ends routers, and starts them again
            connection.close()
            connection = None
        # A slow answer is not followed by several at once: each would see the same delay.
        due = max(due + every, time.perf_counter())
        while (left := due - time.perf_counter()) > 0:
            if pipe.poll(left):
                try:
                    pipe.recv()
                except EOFError:  # the process that measures has died
                    return
                pipe.send(found)
                found = []


@contextlib.contextmanager
def probing(url: str, every: float = EVERY) -> Iterator[Probe]:
    """Probe a router every so many seconds, for the time of a block."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_watch, args=(url, there, every), daemon=True)
    process.start()
    try:
        yield Probe(here)
    finally:
        process.terminate()
        process.join()
