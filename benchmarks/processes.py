"""Processes that serve HTTP on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 180
"""A busy machine takes a minute."""
SETTLE_SECONDS = 60
QUIET_SECONDS = 3


class DidNotStartError(Exception):
    """A process did not come up; the message says why."""


@contextlib.contextmanager
def started(command: Sequence[str], ready: Callable[[], bool], stdin: bytes = b"") -> Iterator[psutil.Process]:
    """Run a command for a block, which starts when `ready` returns True.

    Raises DidNotStartError with the last line that the command printed if that does not happen in time.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log) as process,
    ):
        try:
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.close()
            deadline = time.monotonic() + START_SECONDS
            while not ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    lines = log.read().decode(errors="replace").strip().splitlines()
                    raise DidNotStartError(f"did not start: {lines[-1] if lines else 'its log is empty'}")
                time.sleep(0.1)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def python(*arguments: str) -> list[str]:
    """Return the command of `python -m ARGUMENTS` with this interpreter."""
    return [sys.executable, "-m", *arguments]


@contextlib.contextmanager
def running(*arguments: str, port: int, stdin: bytes = b"") -> Iterator[psutil.Process]:
    """Run `python -m ARGUMENTS` for a block, which starts when `GET /health` answers 200 at this port of localhost.

    Raises SystemExit if that does not happen in time.
    """
    command = python(*arguments)
    try:
        with started(command, lambda: get(f"http://127.0.0.1:{port}/health") is not None, stdin) as process:
            yield process
    except DidNotStartError as error:
        raise SystemExit(f"{' '.join(command)} {error}") from error


def get(url: str) -> bytes | None:
    """Return the body of a 200; None for any other answer, or for none."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bytes(reply.read()) if reply.status == 200 else None
    except OSError:
        return None


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process and its children, user and system."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def settle(process: psutil.Process) -> None:
    """Wait until a process has done what it does once after its start, such as building a faster encoder.

    It is quiet when it has taken little CPU in `QUIET_SECONDS` seconds one after the other: on a busy machine it may get none
    in one of them. Routers with a store look for news all the time, which takes some milliseconds in a second. Nothing is
    waited for longer than `SETTLE_SECONDS`.
    """
    used, quiet, deadline = cpu_seconds(process), 0, time.monotonic() + SETTLE_SECONDS
    while quiet < QUIET_SECONDS and time.monotonic() < deadline:
        time.sleep(1)
        now = cpu_seconds(process)
        quiet, used = quiet + 1 if now - used < 0.05 else 0, now
