"""The processes: a router and its workers, which are started, killed and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

from router.embedded.models.ngram import shipped_tokenizer
from tests.support.sglang_server import free_port

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0
STOP_SECONDS = 20.0


class Process:
    """`tito-router ARGUMENTS` on a port of its own, which stays the same over its lives.

    Attributes:
        url: where it listens.
        log: what it said, in all its lives.
    """

    def __init__(self, name: str, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{name}.log"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Return at once. In a session of its own: Ctrl-C is for whoever started all this."""
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
        """Return when it answers."""
        deadline = time.monotonic() + START_SECONDS
        while not await asyncio.to_thread(_answers, self.url):
            if not self.alive or time.monotonic() > deadline:
                raise SystemExit(f"{self.url} did not come up:\n{self.log.read_text(errors='replace')[-3000:]}")
            await asyncio.sleep(0.1)

    def kill(self) -> None:
        """At once."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int | None:
        """Politely first. The exit code; None if it had to be killed."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def seen(self) -> psutil.Process:
        """It, as the operating system sees it."""
        assert self._process is not None
        return psutil.Process(self._process.pid)


def a_worker(number: int, folder: Path, pace: float) -> tuple[Process, bool]:
    """A worker with the small language model, and whether its streams tell only what is new."""
    incremental = number % 2 == 1
    flags = ["--seed", str(number), "--tokens-per-second", str(pace), "--log-level", "warning"]
    flags += ["--incremental-streaming-output"] if incremental else []
    return Process(f"worker-{number}", folder, "demo-worker", *flags), incremental


def a_router(folder: Path, workers: list[Process], max_tokens: int) -> Process:
    """The router, with a memory so small that it has to forget."""
    return Process(
        "router",
        folder,
        *("--tokenizer-path", str(shipped_tokenizer()), "--log-level", "warning", "--shutdown-grace", "10"),
        *("--radix-max-tokens", str(max_tokens), "--abort-retry-wait", "0.2"),
        # Nobody asks for what came of clients that left. In half an hour that fills such a memory.
        *("--radix-unretrieved-versions", "5"),
        *("--worker-urls", *(worker.url for worker in workers)),
    )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ping", timeout=2) as reply:
            return bool(reply.status == 200)
    except urllib.error.HTTPError:
        return True  # a router has no worker yet to pass it on to
    except OSError:
        return False
