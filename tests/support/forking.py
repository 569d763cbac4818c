"""Programs that are forked from a process that has imported what they import: importing takes each a second or two.

A forked program runs a module from its first line on, as `python -m router` does, with arguments, environment and log of its
own, and is a child of the process of the tests, as one that was started. What it reads at its start it reads itself. Only
Linux has this. Benchmarks, the tests of the command line and those of the demos start programs as users do.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (
    "router.app",
    "worker.worker",
    "router.flags",
    "middleware_hub.completions_middleware",
    "middleware_hub.inspector.api",
    "middleware_hub.radix_tree_middleware",
    "middleware_hub.sessions_middleware",
    "middleware_hub.store.redis.store",
    "middleware_hub.store.sqlite.store",
    "transformers.utils.chat_template_utils",
    "uvloop",
)
SETTINGS = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
"""The environment of a program that tests start, besides their own."""

is_used = False
"""Whether programs are forked: `tests/conftest.py` says so."""

_PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """A forked program, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._asking = threading.Lock()

    def poll(self) -> int | None:
        with self._asking:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
            return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"the forked program {self.pid}", timeout)
            time.sleep(0.01)  # a poll of another process: there is nothing to wait on
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class _Source:
    """The process that is forked: one for each process of tests."""

    def __init__(self) -> None:
        # Its children's children are ours when their parent has ended.
        if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError("no programs can be forked: this process cannot take over the children of its children")
        self._asking = threading.Lock()
        # By its path: some packages (verl) install a `tests` of their own, which `-m` would find.
        program = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **SETTINGS},
        )
        atexit.register(self._end)

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def fork(self, order: Mapping[str, Any]) -> Forked:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._asking:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            return Forked(int(self._process.stdout.readline()))


source = cache(_Source)


def start(words: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
    """Start `python -m` with these words, the first of which is a module. The output goes to a file that is there."""
    return source().fork({"words": words, "environment": dict(environment), "log": str(log)})


def _serve() -> None:
    """Fork a program for each line that is read, and end with who writes them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and they end this
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin.buffer:
        read, write = os.pipe()
        if (between := os.fork()) == 0:
            _run_in_a_fork(json.loads(line), write)
            return
        os.close(write)
        pid = os.read(read, 20)
        os.close(read)
        os.waitpid(between, 0)  # only now has its child the process of the tests for a parent
        os.write(1, pid + b"\n")


def _run_in_a_fork(order: dict[str, Any], told: int) -> None:
    if (pid := os.fork()) != 0:
        os.write(told, str(pid).encode())
        os._exit(0)
    os.close(told)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(order["log"], os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = order["words"]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve()
