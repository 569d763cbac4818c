"""The router and worker processes, which are started, killed and restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.processes import ROOT
from tests.support.engine_server import free_port
from worker.models.ngram import shipped_tokenizer

START_SECONDS = 60.0
STOP_SECONDS = 20.0


class Process:
    """`tito-router ARGUMENTS` on a port of its own, which stays the same over restarts.

    Attributes:
        url: the URL at which it listens.
        log: the log file of all its starts.
    """

    def __init__(self, name: str, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{name}.log"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Start the process and return at once. Its own session keeps Ctrl-C away from it."""
        command = [sys.executable, "-m", "router", *self._arguments, *more, "--port", str(self.port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def up(self) -> None:
        """Wait until the process answers."""
        deadline = time.monotonic() + START_SECONDS
        while not await asyncio.to_thread(_answers, self.url):
            if not self.alive or time.monotonic() > deadline:
                raise SystemExit(f"{self.url} did not come up:\n{self.log.read_text(errors='replace')[-3000:]}")
            await asyncio.sleep(0.1)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int | None:
        """Send SIGTERM and wait. Return the exit code; None if the process had to be killed."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def seen(self) -> psutil.Process:
        """The process as the operating system sees it."""
        assert self._process is not None
        return psutil.Process(self._process.pid)


def a_worker(number: int, folder: Path, pace: float) -> tuple[Process, bool]:
    """Return a worker with the small language model, and whether its streams are incremental."""
    incremental = number % 2 == 1
    flags = ["--seed", str(number), "--tokens-per-second", str(pace), "--log-level", "warning"]
    flags += ["--incremental-streaming-output"] if incremental else []
    return Process(f"worker-{number}", folder, "demo-worker", *flags), incremental


def a_router(folder: Path, workers: list[Process], max_tokens: int, flags: Sequence[str] = ()) -> Process:
    """Return the router, with a token budget so small that it has to evict, and these flags after the others."""
    return Process(
        "router",
        folder,
        *("--tokenizer-path", str(shipped_tokenizer()), "--log-level", "warning", "--shutdown-grace", "10"),
        *("--radix-max-tokens", str(max_tokens), "--abort-retry-wait", "0.2"),
        # Replies to clients that left are never retrieved. In half an hour they would fill the budget, as would
        # the sessions of agents that left.
        *("--radix-unretrieved-versions", "5", "--session-ttl-secs", "120", "--session-max-tokens", str(max_tokens)),
        *("--worker-urls", *(worker.url for worker in workers)),
        *flags,
    )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ping", timeout=2) as reply:
            return bool(reply.status == 200)
    except urllib.error.HTTPError:
        return True  # it answers, though the router may have no worker yet
    except OSError:
        return False
