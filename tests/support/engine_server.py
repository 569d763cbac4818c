"""Real workers without a GPU, as subprocesses: the last word on what a worker says.

A kit (`tests/sglang_cpu`, `tests/vllm_cpu`) makes an engine; this module starts its workers, waits for them with a deadline,
and ends each with all of its children. A worker takes 20 to 60 s to come up and 2 GB of memory, so fixtures that use one are
session-scoped.
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

_TERM_GRACE = 10.0  # a paused SGLang ignores SIGTERM for about a minute
_LOG_TAIL = 60  # lines
_HANDED_OUT: set[int] = set()  # a port is given once: its owner may not have bound it yet


class EngineStartError(RuntimeError):
    """The worker did not become ready; the message carries the end of its log."""


@dataclass(frozen=True)
class EngineServer:
    """A running worker."""

    url: str
    log_path: Path
    process: subprocess.Popen[bytes]

    def alive(self) -> bool:
        """False once the launcher's process has ended."""
        return self.process.poll() is None

    def log_tail(self, lines: int = _LOG_TAIL) -> str:
        """The last lines of what the worker printed."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])


@dataclass(frozen=True)
class Kit:
    """An engine that can be set up and run here.

    Attributes:
        name: as people write it, and in lower case the mark of its tests.
        folder: below tests, with setup.sh and run.sh.
        version: the engine's, which is part of the name of its folder in the cache.
        distribution: the name of its wheel, as metadata spell it.
        served: the folder of the model that its workers serve; None: the tiny one of text that comes with the engine.
        mark: the file in its environment that says that all that its workers need is there.
    """

    name: str
    folder: str
    version: str
    distribution: str
    served: Path | None = None
    mark: str = ".complete"

    @property
    def setup(self) -> Path:
        return Path(__file__).resolve().parent.parent / self.folder / "setup.sh"

    @property
    def directory(self) -> Path:
        """Where the engine is, or would be: the same rule as in setup.sh."""
        given = os.environ.get(self._variable)
        return Path(given) if given else Path.home() / ".cache" / "tito-router" / f"{self.name.lower()}-{self.version}"

    @property
    def _variable(self) -> str:
        return f"TITO_{self.name.upper()}_DIR"

    @property
    def model(self) -> Path:
        """The folder of the model, which is also the tokenizer's."""
        return self.served or self.directory / "model"

    @property
    def is_installed(self) -> bool:
        """Is there a complete engine to start?"""
        return (self.directory / "venv" / self.mark).is_file() and (self.model / "config.json").is_file()

    @property
    def package(self) -> Path | None:
        """The folder of the installed package, or None where there is none."""
        found = sorted(self.directory.glob(f"venv/lib/python3*/site-packages/{self.name.lower()}"))
        return found[0] if self.is_installed and found else None

    @property
    def installed_version(self) -> str | None:
        """The version that is installed, read off its metadata: importing it takes ten seconds and a torch."""
        package = self.package
        if package is None:
            return None
        for info in package.parent.glob(f"{self.distribution}-*.dist-info"):
            match = re.fullmatch(rf"{self.distribution}-(.+)\.dist-info", info.name)
            if match:
                return match[1]
        return None

    def start(self, *flags: str, log_path: Path) -> EngineServer:
        """Start a worker in a process group of its own and return at once; follow up with `wait_until_ready` and `stop`."""
        if not self.is_installed:
            raise EngineStartError(f"no {self.name} in {self.directory}: run {self.setup}")
        port = free_port()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [str(self.setup.with_name("run.sh")), str(port), *flags],
                env={**os.environ, self._variable: str(self.directory), "TITO_MODEL": str(self.model)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return EngineServer(f"http://127.0.0.1:{port}", log_path, process)

    @contextlib.contextmanager
    def servers(
        self, flags: Sequence[Sequence[str]], *, log_dir: Path, timeout: float = 480.0
    ) -> Iterator[list[EngineServer]]:
        """Several workers, started at the same time: one per list of flags."""
        servers: list[EngineServer] = []
        try:
            for number, extra in enumerate(flags):
                servers.append(self.start(*extra, log_path=log_dir / f"{self.name.lower()}-{number}.log"))
            for server in servers:
                wait_until_ready(server, timeout)
            yield servers
        finally:
            for server in servers:
                _signal_group(server, signal.SIGTERM)  # so that they end side by side
            for server in servers:
                stop(server)

    @contextlib.contextmanager
    def server(self, *flags: str, log_dir: Path, timeout: float = 480.0) -> Iterator[EngineServer]:
        """One worker: `with SGLANG.server("--incremental-streaming-output", log_dir=tmp_path) as server: ...`."""
        with self.servers([flags], log_dir=log_dir, timeout=timeout) as servers:
            yield servers[0]


def free_port() -> int:
    """A port that nobody listens on, and that nobody will be given until the caller listens on it.

    An engine cannot be given port 0 and binds 20 s after it was told where. A port of the kernel's ephemeral range is handed
    to another process in that time often enough to be met (a connection of the neighbour that starts beside it: uvicorn
    then ends with 3), so this one lies below that range and below 22,000 to 29,999, where SGLang takes its own. The
    processes of one run of tests (`-n 4`) share these ports out, because each knows only the ports that it gave itself.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    shared_by = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = range(10_000 + number % shared_by, 22_000, shared_by)
    while True:
        port = random.SystemRandom().choice(own)  # not hypothesis's seeded one: runs side by side differ
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _HANDED_OUT:
                _HANDED_OUT.add(port)
                return port


def wait_until_ready(server: EngineServer, timeout: float = 480.0) -> None:
    """Poll `/health` until it answers 200.

    Raises:
        EngineStartError: the process ended or the deadline passed.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not server.alive():
            raise EngineStartError(f"the worker ended with {server.process.returncode}:\n{server.log_tail()}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/health", timeout=30) as reply:
            if reply.status == 200:
                return
        time.sleep(0.25)  # a poll of another process: there is nothing to wait on
    raise EngineStartError(f"the worker was not ready after {timeout:.0f} s:\n{server.log_tail()}")


def stop(server: EngineServer) -> None:
    """End the worker and all of its children, politely first. Returns when the whole process group is gone."""
    if server.alive():
        _signal_group(server, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(_TERM_GRACE)
    _signal_group(server, signal.SIGKILL)
    server.process.wait(30)


def _signal_group(server: EngineServer, number: signal.Signals) -> None:
    # The group outlives its leader: children of a dead launcher still answer to it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, number)
