"""`tito-router` and its demo workers as processes of their own: frozen, killed, and started again on the same port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support import forking
from tests.support.engine_server import free_port

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240.0
STOP_SECONDS = 120.0


class Process:
    """One process of a command at a time, which may be frozen, killed and started again."""

    def __init__(self, name: str, *command: str, folder: Path, up: str) -> None:
        """`name` is what its logs are called; it has come up when `up` is in its log."""
        self._name = name
        self._command = command
        self._up = up
        self._folder = folder
        self._starts = 0
        self._process: subprocess.Popen[bytes] | forking.Forked | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Return at once."""
        self._starts += 1
        environment = {**os.environ, **forking.SETTINGS}
        with self._log.open("wb") as log:
            if forking.is_used and self._command[:2] == (sys.executable, "-m"):
                self._process = forking.start(self._command[2:], environment, self._log)
                return
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def wait_until_up(self) -> None:
        """Return when it listens. RuntimeError, with its log, if it does not."""
        deadline = time.monotonic() + START_SECONDS
        while self._up not in self.log:
            if not self.alive or time.monotonic() > deadline:
                raise RuntimeError(f"{self!r} did not come up:\n{self.log[-3000:]}")
            time.sleep(0.02)  # a poll of another process: there is nothing to wait on

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has written since it was started last."""
        return self._log.read_text(errors="replace")

    @property
    def _log(self) -> Path:
        return self._folder / f"{self._name}-{self._starts}.log"

    def freeze(self) -> None:
        """It hangs when this returns: its connections stay, and nobody answers."""
        self._signal(signal.SIGSTOP)
        # On a busy machine some of its threads go on until another one has taken the signal.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """It is gone when this returns."""
        self._signal(signal.SIGKILL)
        self.exit_code()

    def exit_code(self) -> int:
        """Wait for its end."""
        assert self._process is not None
        return self._process.wait(STOP_SECONDS)

    def stop(self) -> None:
        """End it in whatever state it is."""
        if self.alive:
            self.thaw()
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name} {'alive' if self.alive else 'ended'}>"


class Program(Process):
    """`tito-router`, always at the same URL."""

    def __init__(self, name: str, *arguments: str, folder: Path, starter: Sequence[str] = ()) -> None:
        """`name` is what its logs are called; `arguments` are those of `tito-router`; `starter` is a command that runs it."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = *starter, sys.executable, "-m", "router", *arguments, "--port", str(self.port)
        super().__init__(name, *command, folder=folder, up="listening on")
