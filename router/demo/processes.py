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
def fleet(
    folder: Path,
    *,
    workers: int,
    port: int = 0,
    worker_flags: Sequence[str] = (),
    router_flags: Sequence[str] = (),
) -> Iterator[str]:
    """Run workers and a router in front of them for the length of the block; yield the router's URL.

    Args:
        folder: for their logs.
        workers: how many; the k-th has the seed k.
        port: the router's; 0 takes a free one.
        worker_flags: of each worker, besides port and seed.
        router_flags: of the router, besides port, tokenizer, policy and workers.

    Raises:
        StartError: one of them did not start.
    """
    with contextlib.ExitStack() as stack:
        starting = []
        for number in range(workers):
            flags = ["demo-worker", *worker_flags, "--port", "0", "--seed", str(number)]
            starting.append(stack.enter_context(_running(flags, folder / f"worker-{number}.log")))
        flags = [*router_flags, "--port", str(port), "--tokenizer-path", str(shipped_tokenizer())]
        flags += ["--policy", "round_robin", "--shutdown-grace", "5", "--worker-urls", *(url() for url in starting)]
        yield stack.enter_context(_running(flags, folder / "router.log"))()


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
