"""What is loaded is moved into large pages."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from router.serving import large_pages
from router.serving.large_pages import places

SIZE = 2 << 20


def mapping(where: str, rights: str, file: str, shared: int = 0) -> str:
    return f"""{where} {rights} 00000000 {file}
Size:               8192 kB
Shared_Clean:          0 kB
Shared_Dirty:     {shared:6} kB
Private_Dirty:      8000 kB
THPeligible:           1
VmFlags: rd wr mr mw me ac
"""


SMAPS = "".join(
    [
        mapping("00400000-00a00000", "r-xp", "fe:00 17                  /usr/bin/python3.11"),
        mapping("00a00000-01200000", "rw-p", "fe:00 17                  /usr/bin/python3.11"),
        mapping("01300000-01900000", "rw-p", "00:00 0                   [heap]"),
        mapping("7f0000100000-7f0000500000", "rw-p", "00:00 0 "),
        mapping("7f0000700000-7f0000800000", "rw-p", "00:00 0 "),
        mapping("7f0000a00000-7f0000e00000", "---p", "00:00 0 "),
        mapping("7f0001000000-7f0001400000", "rw-s", "00:01 9                   /dev/zero (deleted)"),
        mapping("7f0002000000-7f0002400000", "rw-p", "00:00 0 ", shared=4),
    ]
)

MOVED = """
import re, threading
from pathlib import Path
from router.serving import large_pages
large = lambda: int(re.search(r"AnonHugePages: +([0-9]+) kB", Path("/proc/self/smaps_rollup").read_text()).group(1))
kept = [bytes(1000) for _ in range(50_000)]
before, large_pages.DELAY_SECONDS = large(), 0
large_pages.use_later()
for thread in threading.enumerate():
    if thread.name == "large pages":
        thread.join()
print(large() - before)
"""

STOPPED = """
import os, signal, socket, threading
from router.config import ServerConfig
from router.serving import large_pages
from router.serving.server import serve

class App:
    fault = None
    def start_draining(self):
        pass
    async def __call__(self, scope, receive, send):
        for stage in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{stage}.complete"})

moving = []
def use_later(begin=large_pages.use_later):
    ended = begin()
    moving.extend(one for one in threading.enumerate() if one.name == "large pages")
    os.kill(os.getpid(), signal.SIGTERM)
    return ended

large_pages.DELAY_SECONDS, large_pages.use_later = 3600, use_later
with socket.create_server(("127.0.0.1", 0)) as listener:
    serve(App(), ServerConfig(), listener)
(thread,) = moving
thread.join(20)
print(thread.is_alive())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems decide by themselves")
def test_a_server_that_stops_ends_the_moving() -> None:
    ran = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split() == ["False"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems decide by themselves")
@pytest.mark.parametrize("begun", [False, True], ids=["before the first page", "after the first page"])
def test_the_moving_ends_at_once(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No page of the many is waited for."""
    ended = threading.Event()
    if begun:
        ended.set()
        pages = iter([0] * 10)
        large_pages.move(pages, 1, ended)
        assert len(list(pages)) == 9
        return
    monkeypatch.setattr(large_pages, "DELAY_SECONDS", 3600)
    large_pages.use_later().set()
    for thread in threading.enumerate():
        if thread.name == "large pages":
            thread.join(60)
            assert not thread.is_alive()


def test_only_whole_pages_of_its_own_memory_are_moved() -> None:
    assert [hex(place) for place in places(SMAPS, SIZE)] == ["0x1400000", "0x1600000", "0x7f0000200000"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems decide by themselves")
def test_memory_is_moved() -> None:
    """In a process of its own, of which fifty megabytes are objects."""
    done = subprocess.run([sys.executable, "-c", MOVED], capture_output=True, text=True, check=True, timeout=60)
    moved = int(done.stdout)
    if not moved:
        pytest.skip("this kernel has no large pages")
    assert moved >= 40_000


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems decide by themselves")
def test_a_server_moves_its_memory() -> None:
    """Some seconds after its start, and the log says what came of it."""
    command = [sys.executable, "-m", "router", "--middleware", "none", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        patience = threading.Timer(60, process.kill)
        patience.start()
        found = next((line for line in process.stderr if "large pages" in line or "small pages" in line), "")
        patience.cancel()
        process.terminate()
    assert found
