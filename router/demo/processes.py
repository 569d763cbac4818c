"""The demonstration's processes: workers and a router, started as anybody would start them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from router.embedded.models.ngram import shipped_tokenizer

_LISTENING = re.compile(r"listening on (http://\S+?)[,\s]")
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0


class StartError(RuntimeError):
    """A process did not start; the message has the end of its log."""


@contextlib.contextmanager
def workers(folder: Path, count: int) -> Iterator[list[str]]:
    """Run `tito-router demo-worker` `count` times for the length of the block; yield the URLs.

    `folder` is for their logs. Raises StartError.
    """
    with contextlib.ExitStack() as stack:
        starting = [
            stack.enter_context(
                _running(["demo-worker", "--port", "0", "--seed", str(number)], folder / f"worker-{number}.log")
            )
            for number in range(count)
        ]
        yield [url() for url in starting]


@contextlib.contextmanager
def router(folder: Path, worker_urls: Sequence[str], *, port: int = 0, flags: Sequence[str] = ()) -> Iterator[str]:
    """Run a router in front of these workers for the length of the block; yield its URL.

    `folder` is for its log, and port 0 takes a free one. Raises StartError.
    """
    flags = [*flags, "--port", str(port), "--tokenizer-path", str(shipped_tokenizer()), "--policy", "round_robin"]
    with _running([*flags, "--shutdown-grace", "5", "--worker-urls", *worker_urls], folder / "router.log") as url:
        yield url()


@contextlib.contextmanager
def _running(flags: Sequence[str], log: Path) -> Iterator[Callable[[], str]]:
    """Run `tito-router` for the length of the block; yield a function that waits until it listens and returns its URL."""
    # Unbuffered, so that its log can be read. In a session of its own: Ctrl-C reaches the demonstration only, which ends it.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "router", *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    try:
        yield lambda: _url(process, log)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        logged = log.read_text(errors="replace")
        found = _LISTENING.search(logged)
        if found:
            return found[1]
        if process.poll() is not None or time.monotonic() > deadline:
            raise StartError(f"{process.args!r} did not start:\n{logged[-3000:]}")
        time.sleep(0.05)
