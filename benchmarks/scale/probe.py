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
        """Return the seconds that each answer took since the last call."""
        self._pipe.send(None)
        found: list[float] = self._pipe.recv()
        return found


def _watch(url: str, pipe: Connection, every: float) -> None:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found: list[float] = []
        due = time.perf_counter()
        while True:
            begun = time.perf_counter()
            connection.sendall(_REQUEST)
            if not connection.recv(65536):
                raise SystemExit(f"{url} closed the connection of its probe")
            found.append(time.perf_counter() - begun)
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
