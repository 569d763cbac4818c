"""Processes of this machine's interpreter that serve HTTP."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 60


@contextlib.contextmanager
def running(*arguments: str, port: int, stdin: bytes = b"") -> Iterator[psutil.Process]:
    """Run `python -m ARGUMENTS` for a block, which starts when `GET /health` answers 200 at this port of localhost.

    Raises SystemExit if that does not happen in time.
    """
    command = [sys.executable, "-m", *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.close()
            deadline = time.monotonic() + START_SECONDS
            while get(f"http://127.0.0.1:{port}/health") is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{' '.join(command)} did not come up")
                time.sleep(0.1)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()


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
