"""A real SGLang worker without a GPU, as a subprocess: the last word on what a worker says.

`tests/sglang_cpu/setup.sh` makes the engine; this module starts it, waits for it with a deadline, and ends it with all
of its children. A worker takes 20 to 40 s to come up and 2 GB of memory, so fixtures that use it are session-scoped.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SETUP = Path(__file__).resolve().parent.parent / "sglang_cpu" / "setup.sh"
RUN = SETUP.with_name("run.sh")

_TERM_GRACE = 10.0  # a paused worker ignores SIGTERM for about a minute
_LOG_TAIL = 60  # lines
_HANDED_OUT: set[int] = set()  # a port is given once: its owner may not have bound it yet


def sglang_dir() -> Path:
    """Where the GPU-less SGLang is, or would be: the same rule as in setup.sh."""
    given = os.environ.get("TITO_SGLANG_DIR")
    return Path(given) if given else Path.home() / ".cache" / "tito-router" / "sglang-0.5.23"


def is_installed() -> bool:
    """Is there a complete SGLang to start?"""
    return (sglang_dir() / "venv" / ".complete").is_file() and (sglang_dir() / "model" / "config.json").is_file()


def model_path() -> Path:
    """The folder of the tiny model, which is also the tokenizer's."""
    return sglang_dir() / "model"


def package_path() -> Path | None:
    """The folder of the installed `sglang` package, or None where there is none."""
    found = sorted(sglang_dir().glob("venv/lib/python3*/site-packages/sglang"))
    return found[0] if is_installed() and found else None


def engine_version() -> str | None:
    """The installed SGLang's version ("0.5.23"), read off its metadata: importing it takes ten seconds and a torch."""
    package = package_path()
    if package is None:
        return None
    for info in package.parent.glob("sglang-*.dist-info"):
        match = re.fullmatch(r"sglang-(.+)\.dist-info", info.name)
        if match:
            return match[1]
    return None


class SGLangStartError(RuntimeError):
    """The worker did not become ready; the message carries the end of its log."""


@dataclass(frozen=True)
class SGLangServer:
    """A running worker."""

    url: str
    log_path: Path
    process: subprocess.Popen[bytes]

    def alive(self) -> bool:
        """False once the launcher's process has ended, which is what the two deadly requests do to it."""
        return self.process.poll() is None

    def log_tail(self, lines: int = _LOG_TAIL) -> str:
        """The last lines of what the worker printed."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])


def free_port() -> int:
    """A port that nobody listens on, and that nobody will be given until the caller listens on it.

    SGLang cannot be given port 0 and binds 20 s after it was told where. A port of the kernel's ephemeral range is handed
    to somebody else in that time often enough to be met (a connection of the neighbour that starts beside it: uvicorn
    then ends with 3), so this one lies below that range and below 22,000 to 29,999, where SGLang takes its own.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 22_000)  # not hypothesis's seeded one: runs side by side differ
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _HANDED_OUT:
                _HANDED_OUT.add(port)
                return port


def start(*flags: str, log_path: Path) -> SGLangServer:
    """Start a worker in a process group of its own and return at once; follow up with `wait_until_ready` and `stop`."""
    if not is_installed():
        raise SGLangStartError(f"no SGLang in {sglang_dir()}: run {SETUP}")
    port = free_port()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [str(RUN), str(port), *flags],
            env={**os.environ, "TITO_SGLANG_DIR": str(sglang_dir())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return SGLangServer(f"http://127.0.0.1:{port}", log_path, process)


def wait_until_ready(server: SGLangServer, timeout: float = 240.0) -> None:
    """Poll `/health` until it answers 200.

    Raises:
        SGLangStartError: the process ended or the deadline passed.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not server.alive():
            raise SGLangStartError(f"SGLang ended with {server.process.returncode}:\n{server.log_tail()}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/health", timeout=30) as reply:
            if reply.status == 200:
                return
        time.sleep(0.25)  # a poll of another process: there is nothing to wait on
    raise SGLangStartError(f"SGLang was not ready after {timeout:.0f} s:\n{server.log_tail()}")


def stop(server: SGLangServer) -> None:
    """End the worker and all of its children, politely first. Returns when the whole process group is gone."""
    if server.alive():
        _signal_group(server, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(_TERM_GRACE)
    _signal_group(server, signal.SIGKILL)
    server.process.wait(30)


def _signal_group(server: SGLangServer, number: signal.Signals) -> None:
    # The group outlives its leader: children of a dead launcher still answer to it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, number)


@contextlib.contextmanager
def sglang_servers(
    flags: Sequence[Sequence[str]], *, log_dir: Path, timeout: float = 240.0
) -> Iterator[list[SGLangServer]]:
    """Several workers, started at the same time: one per list of flags."""
    servers: list[SGLangServer] = []
    try:
        for number, extra in enumerate(flags):
            servers.append(start(*extra, log_path=log_dir / f"sglang-{number}.log"))
        for server in servers:
            wait_until_ready(server, timeout)
        yield servers
    finally:
        for server in servers:
            _signal_group(server, signal.SIGTERM)  # so that they end side by side
        for server in servers:
            stop(server)


@contextlib.contextmanager
def sglang_server(*flags: str, log_dir: Path, timeout: float = 240.0) -> Iterator[SGLangServer]:
    """One worker: `with sglang_server("--incremental-streaming-output", log_dir=tmp_path) as server: ...`."""
    with sglang_servers([flags], log_dir=log_dir, timeout=timeout) as servers:
        yield servers[0]
