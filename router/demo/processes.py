"""The demonstration's processes: workers and a router, as anybody would start them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_LISTENING = re.compile(r"listening on (http://\S+?)[,\s]")
START_SECONDS = 60.0
STOP_SECONDS = 10.0


class StartError(RuntimeError):
    """A process did not come up; the message has the end of its log."""


@contextlib.contextmanager
def running(arguments: Sequence[str], log: Path) -> Iterator[str]:
    """`tito-router ARGUMENTS` from when it listens to the end of the block. Gives its URL. Raises StartError."""
    # Unbuffered, and in a session of its own: Ctrl-C is for the demonstration, which then ends this in its turn.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "router", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    try:
        yield _url(process, arguments, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[bytes], arguments: Sequence[str], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while True:
        said = log.read_text(errors="replace")
        found = _LISTENING.search(said)
        if found:
            return found[1]
        if process.poll() is not None or time.monotonic() > deadline:
            raise StartError(f"tito-router {' '.join(arguments)} did not come up:\n{said[-3000:]}")
        time.sleep(0.05)


@contextlib.contextmanager
def everything(folder: Path, *, workers: int, port: int, tokenizer: Path) -> Iterator[str]:
    """Workers and a router in front of them. Gives the router's URL. Raises StartError."""
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(
                running(["demo-worker", "--port", "0", "--seed", str(number)], folder / f"worker-{number}.log")
            )
            for number in range(workers)
        ]
        router = ["--port", str(port), "--tokenizer-path", str(tokenizer), "--policy", "round_robin"]
        router += ["--shutdown-grace", "5", "--worker-urls", *urls]
        yield stack.enter_context(running(router, folder / "router.log"))
