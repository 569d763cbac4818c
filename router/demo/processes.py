"""The demonstration's processes: workers and a router, as anybody would start them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_LISTENING = re.compile(r"listening on (http://\S+?)[,\s]")
START_SECONDS = 60.0
STOP_SECONDS = 10.0


class StartError(RuntimeError):
    """A process did not come up; the message has the end of its log."""


@contextlib.contextmanager
def running(arguments: Sequence[str], log: Path) -> Iterator[str]:
    """`tito-router ARGUMENTS` from when it listens to the end of the block. Gives its URL. Raises StartError."""
    with starting(arguments, log) as url:
        yield url()


@contextlib.contextmanager
def starting(arguments: Sequence[str], log: Path, module: str = "router") -> Iterator[Callable[[], str]]:
    """A program from its start to the end of the block.

    Args:
        arguments: of its command line.
        log: the file for what it says.
        module: `tito-router`, or another program.

    Yields:
        What waits until it listens, and gives its URL. That raises StartError.
    """
    # Unbuffered, and in a session of its own: Ctrl-C is for the demonstration, which then ends this in its turn.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    try:
        yield lambda: _url(process, arguments, log)
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
    flags = [["demo-worker", "--port", "0", "--seed", str(number)] for number in range(workers)]
    with _fleet(folder, flags, "router", ["--port", str(port), "--tokenizer-path", str(tokenizer)]) as url:
        yield url


@contextlib.contextmanager
def witnessed(folder: Path, *, workers: int, tokenizer: Path, weight_version: str) -> Iterator[str]:
    """The same, with workers that write down what they do into `folder`, when the block is over."""
    flags = [
        ["--seed", str(number), "--weight-version", weight_version, "--out", str(folder / f"{number}.jsonl")]
        for number in range(workers)
    ]
    router = ["--port", "0", "--tokenizer-path", str(tokenizer), "--verify-rate", "1"]
    with _fleet(folder, flags, "router.demo.agent_witness", router) as url:
        yield url


@contextlib.contextmanager
def _fleet(folder: Path, workers: Sequence[Sequence[str]], module: str, router: Sequence[str]) -> Iterator[str]:
    """Workers, all started at once, and a router in front of them. Gives its URL."""
    with contextlib.ExitStack() as stack:
        starts = [
            stack.enter_context(starting(flags, folder / f"worker-{number}.log", module))
            for number, flags in enumerate(workers)
        ]
        urls = [url() for url in starts]
        flags = [*router, "--policy", "round_robin", "--shutdown-grace", "5", "--worker-urls", *urls]
        yield stack.enter_context(running(flags, folder / "router.log"))
