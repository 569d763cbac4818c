"""What the count of many routers does to networks, disks and clocks: each hurts what it says, and heals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.many_routers.clock import Clock, NoClockError, sweep
from benchmarks.many_routers.disk import Disk, NoDiskError
from benchmarks.many_routers.network import LOSSES, Loss, Network, NoNetworkError
from worker.worker import LoopThread

SHORT = 0.3
"""Seconds after which a packet counts as lost."""
TELLS = "import sys, time\nfor line in sys.stdin: print(time.time(), time.monotonic(), flush=True)"


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network(2)
    except NoNetworkError as error:
        pytest.skip(f"no network namespace: {error}")
    yield made
    made.close()


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def links(network: Network) -> Iterator[list[Pair]]:
    """A connection over each link: its end here, and its end in the namespace."""
    thread = LoopThread("inside", asyncio.new_event_loop)
    network.enter(thread)

    async def listening(link: int) -> socket.socket:
        return socket.create_server((network.address(link), 0))  # it stays in the namespace, whoever uses it

    with contextlib.ExitStack() as stack:
        found: list[Pair] = []
        for link in range(2):
            server = stack.enter_context(thread.call(listening(link)))
            here = stack.enter_context(socket.create_connection(server.getsockname(), timeout=10))
            found.append((here, stack.enter_context(server.accept()[0])))
        thread.stop()
        yield found


def _arrives(pair: Pair, seconds: float) -> bool:
    """Send a byte from one end, and say whether it arrives at the other one in time."""
    one, other = pair
    one.sendall(b"x")
    other.settimeout(seconds)
    try:
        return other.recv(1) == b"x"
    except TimeoutError:
        return False


@pytest.mark.parametrize("loss", [one for one in LOSSES if one not in ("some", "delayed")])
def test_a_link_loses_what_it_says_and_no_other_link_does(network: Network, links: list[Pair], loss: Loss) -> None:
    """A connection outlives it: what was lost is sent again."""
    (here, there), whole = links
    network.set(0, loss)
    assert _arrives((here, there), SHORT) == (loss == "answers")
    if loss != "questions":  # or the acknowledgement of what the kernel sends again would come first
        assert not _arrives((there, here), SHORT)
    assert _arrives(whole, 10)
    assert _arrives(whole[::-1], 10)
    network.set(0, "none")
    assert _arrives((here, there), 30)
    assert _arrives((there, here), 30)


@pytest.mark.parametrize("loss", ["some", "delayed"])
def test_a_poor_link_delivers_all_of_it_later(network: Network, links: list[Pair], loss: Loss) -> None:
    """Eight kilobytes, piece by piece, wait for what was lost, or for their turn."""
    one, other = links[0]
    network.set(0, loss)
    begun = time.monotonic()
    for _ in range(16):
        one.sendall(bytes(500))
        assert other.recv(500, socket.MSG_WAITALL) == bytes(500)
    assert time.monotonic() - begun > 0.2
    network.set(0, "none")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        made = Disk(tmp_path / "store")
    except NoDiskError as error:
        pytest.skip(f"no disk: {error}")
    yield made
    made.close()


def _written(disk: Disk, size: int = 1) -> float:
    """Write and return how long it took, in seconds."""
    begun = time.monotonic()
    with (disk.folder / "file").open("wb") as file:
        file.write(bytes(size))
        file.flush()
        os.fsync(file.fileno())
    return time.monotonic() - begun


def test_a_full_disk_takes_nothing_until_it_has_room(disk: Disk) -> None:
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        _written(disk, 100_000)
    disk.empty()
    _written(disk, 100_000)


def test_a_hanging_disk_lets_a_write_wait(disk: Disk) -> None:
    if not disk.hangs:
        pytest.skip("this disk is a part of the memory")
    disk.hang()
    threading.Timer(SHORT, disk.go_on).start()
    assert _written(disk) > SHORT / 2
    slow = threading.Thread(target=disk.crawl, args=(threading.Event(), 1.0))
    slow.start()
    longest = 0.0
    while slow.is_alive():
        longest = max(longest, _written(disk))
    assert longest > 0.1


def test_a_clock_is_set_ahead_and_back_while_time_goes_on(tmp_path: Path) -> None:
    """A process that runs notices it. Its monotonic clock, and all other processes, have the time that they had."""
    try:
        clock = Clock(tmp_path / "clock")
    except NoClockError as error:
        pytest.skip(f"no clock: {error}")
    process = subprocess.Popen(
        [*clock.command, sys.executable, "-c", TELLS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def ahead() -> tuple[float, float]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        wall, monotonic = map(float, process.stdout.readline().split())
        return wall - time.time(), monotonic - time.monotonic()

    with process:
        for seconds in (600, -600, 0):
            clock.set(seconds)
            deadline = time.monotonic() + 30
            while abs((wall := ahead())[0] - seconds) > 30 and time.monotonic() < deadline:
                pass
            assert wall[0] == pytest.approx(seconds, abs=30)
            assert wall[1] == pytest.approx(0, abs=30)
        process.kill()
    sweep()
    assert not list(Path("/dev/shm").glob(f"*faketime*{process.pid}"))
