"""The demonstration's processes: workers and a router, started as a user starts them."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from worker.models.ngram import shipped_image_tokenizer, shipped_tokenizer

_LISTENING = re.compile(r"listening on (http://\S+?)[,\s]")
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0


class StartError(RuntimeError):
    """A process did not start; the message contains the end of its log."""


class Program:
    """`tito-router` with some flags, as a process of its own."""

    def __init__(self, flags: Sequence[str], log: Path) -> None:
        # Unbuffered, so that its log can be read. In a session of its own: Ctrl-C reaches the demonstration only.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self._log = log
        self._command = [sys.executable, "-m", "router", *flags]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    def url(self) -> str:
        """Wait until the process listens, and return its URL. Raises StartError."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            logged = self._log.read_text(errors="replace")
            found = _LISTENING.search(logged)
            if found:
                return found[1]
            status = self._process.poll()
            if status is not None or time.monotonic() > deadline:
                what = (
                    f"did not start within {_START_SECONDS:.0f} s" if status is None else f"ended with status {status}"
                )
                log = logged[-3000:] or "it has logged nothing"
                raise StartError(f"{shlex.join(self._command)} {what}:\n{log}")
            time.sleep(0.05)

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill the process with SIGKILL. It is gone when this returns."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End the process with SIGTERM as its operator would, and with SIGKILL if it does not end."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


@contextlib.contextmanager
def workers(folder: Path, count: int, *, images: bool = False) -> Iterator[list[str]]:
    """Run `tito-router demo-worker` `count` times for the length of the block; yield the URLs.

    `folder` is for their logs; with `images` they take images. Raises StartError.
    """
    with contextlib.ExitStack() as stack:
        starting = []
        for number in range(count):
            flags = ["demo-worker", "--port", "0", "--seed", str(number), *(["--images"] if images else [])]
            starting.append(Program(flags, folder / f"worker-{number}.log"))
            stack.callback(starting[-1].stop)
        yield [worker.url() for worker in starting]


class Router:
    """A router in front of these workers, for the length of a `with` block; it can be killed and started again.

    Attributes:
        url: where it listens.
    """

    def __init__(
        self,
        folder: Path,
        worker_urls: Sequence[str],
        *,
        port: int = 0,
        flags: Sequence[str] = (),
        images: bool = False,
    ) -> None:
        """`folder` is for its logs, and port 0 takes a free one. `images`: the workers take images."""
        self._folder = folder
        tokenizer = shipped_image_tokenizer() if images else shipped_tokenizer()
        self._flags = [*flags, "--tokenizer-path", str(tokenizer), "--policy", "round_robin"]
        self._flags += ["--shutdown-grace", "5", "--worker-urls", *worker_urls]
        self._port = port
        self._programs: list[Program] = []
        self.url = ""

    def __enter__(self) -> Router:
        """Start the router. Raises StartError."""
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._programs[-1:]:
            program.stop()

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while the router runs."""
        return self._programs[-1].status

    @property
    def pid(self) -> int:
        """That of the router that runs now."""
        return self._programs[-1].pid

    def restart(self) -> None:
        """Kill the router with SIGKILL, whatever it is doing, and start another at the same URL. Raises StartError."""
        self._programs[-1].kill()
        self._start()

    def _start(self) -> None:
        log = self._folder / f"router-{len(self._programs)}.log"
        self._programs.append(Program(["--port", str(self._port), *self._flags], log))
        self.url = self._programs[-1].url()
        self._port = urlsplit(self.url).port or self._port
