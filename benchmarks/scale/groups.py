"""A group of engine doubles, and what answers in front of it: a router, or several over one store."""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks import foreign_routers
from benchmarks.processes import cpu_seconds, get, python, running, settle, started
from benchmarks.serving.client import RawClient
from benchmarks.serving.conversations import tokenizer_folder
from benchmarks.serving.targets import answers
from tests.support import templates
from tests.support.engine_server import free_port
from tests.support.redis_server import RedisServer, redis_server


@dataclass(frozen=True)
class Counts:
    """What the engines report: events sent, streams that are open, and by how many seconds the latest step was late."""

    events: int
    open: int
    late: float


@dataclass(frozen=True)
class Group:
    """Engine doubles, all in one process."""

    urls: list[str]
    process: psutil.Process

    def counts(self) -> Counts:
        """Return the counts. `late` is that of the steps since the last call. Raises SystemExit if there is no answer."""
        found = get(f"{self.urls[0]}/counts")
        if found is None:
            raise SystemExit("the engines do not answer")
        return Counts(**json.loads(found))


def free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


@contextlib.contextmanager
def engines(replies: bytes, ports: Sequence[int], pause: float) -> Iterator[Group]:
    """Run an engine at each of these ports, all of which step every `pause` seconds."""
    flags = ("--pause", str(pause), "--ports", *map(str, ports))
    with running("benchmarks.scale.engine", *flags, port=ports[0], stdin=replies) as process:
        yield Group([f"http://127.0.0.1:{port}" for port in ports], process)


class Member:
    """A router at a port of its own: one process, or the parent of several. It can be ended, and started again."""

    def __init__(
        self, url: str, process: psutil.Process | None = None, command: Sequence[str] = (), key: str = ""
    ) -> None:
        """`process`: one that runs already. `command`: starts it; then `key` is that of a tenant, if there are some."""
        self.url = url
        self._command = command
        self._key = key
        self._runs = contextlib.ExitStack()
        self._process = process

    @property
    def process(self) -> psutil.Process:
        assert self._process is not None
        return self._process

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    def start(self) -> None:
        """It answers when this returns. Raises DidNotStartError."""
        self._process = self._runs.enter_context(started(self._command, partial(answers, self.url, self._key)))

    def kill(self) -> None:
        """Kill the process; of several, the one that has run the longest. Their parent starts it again.

        None of several is killed while another one has only begun: then none would serve.
        """
        if "--processes" not in self._command:
            self.end(signal.SIGKILL)
            return
        served = sorted(self.process.children(), key=psutil.Process.create_time)
        if len(served) > 1 and time.time() - served[-1].create_time() > BEGUN_SECONDS:
            served[0].kill()

    def end(self, number: signal.Signals = signal.SIGTERM) -> float:
        """Send a signal to the process, and return the seconds until it is gone."""
        begun = time.perf_counter()
        self.process.send_signal(number)
        self.process.wait(END_SECONDS)
        took = time.perf_counter() - begun
        self._runs.close()
        return took

    def close(self) -> None:
        self._runs.close()


@dataclass(frozen=True)
class Router:
    """What answers in front of a group: a router, several over one store, or one of the engines itself if there is none.

    Clients have numbers: each goes to one of the members, with the key of one of the tenants.
    """

    name: str
    members: Sequence[Member]
    keys: Sequence[str] = ("",)
    store: RedisServer | None = None

    @property
    def keeps(self) -> bool:
        """Whether it keeps logprobs, so that clients need not ask for them."""
        return self.name in (*KEEPING, "huggingface")

    def member(self, number: int) -> Member:
        return self.members[number % len(self.members)]

    def key(self, number: int) -> str:
        return self.keys[number % len(self.keys)]

    async def client(self, number: int = 0) -> RawClient:
        return await RawClient.connect(self.member(number).url, self.key(number))

    def cpu(self) -> float:
        """Return the CPU seconds of all processes."""
        return sum(map(cpu_seconds, {one.process for one in self.members}))

    def memory(self) -> int:
        """Return the bytes of all processes."""
        return sum(one.memory_info().rss for one in self._processes())

    def waited(self) -> float:
        """Return the seconds for which a process was ready to run and had no core: of all main threads, the most (Linux)."""
        return max(map(waited, self._processes()))

    def settle(self) -> None:
        for one in self.members:
            settle(one.process)

    def _processes(self) -> list[psutil.Process]:
        parents = {member.process for member in self.members}
        return [one for parent in parents for one in (parent, *parent.children(recursive=True))]


def waited(process: psutil.Process) -> float:
    """Return the seconds for which the main thread of a process was ready to run and had no core (Linux)."""
    try:
        return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


NAMES = {
    "none": "this router, `--middleware none`",
    "router": "this router",
    "huggingface": "this router, `--tokenizer-backend huggingface`",
    "processes": "`--processes 2`, one SQLite file",
    "sqlite": "2 routers, one SQLite file",
    "redis": "2 routers, one Redis",
    "smg": "smg, `round_robin`",
}
KEEPING = ("router", "processes", "sqlite", "redis")
BEGUN_SECONDS = 4
END_SECONDS = 200
"""A router has 180 to finish what it has."""


def _command(name: str, urls: Sequence[str], port: int, flags: Sequence[str]) -> list[str]:
    if name == "smg":
        # By default it takes 4,096 requests at a time, and refuses others.
        own = foreign_routers.command(name, "round_robin", urls, port, free_port())
        return [*own, "--max-concurrent-requests", "16384"]
    ours = python("router", "--worker-urls", *urls, "--log-level", "warning", "--port", str(port))
    if name == "none":
        return [*ours, "--middleware", "none", "--policy", "round_robin"]
    if name == "huggingface":
        flags = [*flags, "--tokenizer-backend", "huggingface"]
    if name == "processes":
        flags = [*flags, "--processes", "2"]
    template = str(templates.folder() / "qwen3.jinja")
    return [*ours, "--tokenizer-path", tokenizer_folder(), "--chat-template", template, *flags]


@contextlib.contextmanager
def router(name: str, group: Group, flags: Sequence[str] = (), tenants: int = 0) -> Iterator[Router]:
    """Run a router of `NAMES` in front of a group. `flags` and tenants are for this router with its middleware.

    Raises NotInstalledError, DidNotStartError.
    """
    if name in foreign_routers.POLICIES:
        foreign_routers.install(name)
    keys = [f"key-of-{number}" for number in range(tenants if name in KEEPING else 0)]
    flags = [*flags, *(part for number, key in enumerate(keys) for part in ("--api-key", f"tenant{number}:{key}"))]
    server = None
    with contextlib.ExitStack() as stack:
        if name in KEEPING and name != "router":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            if name == "redis":
                server = stack.enter_context(redis_server(Path(folder)))
            flags = [*flags, "--store", server.address if server else f"sqlite:{folder}/"]
        members = []
        for _ in range(2 if name in ("sqlite", "redis") else 1):
            port = free_port()
            command = _command(name, group.urls, port, flags)
            members.append(Member(f"http://127.0.0.1:{port}", None, command, keys[0] if keys else ""))
            stack.callback(members[-1].close)
            members[-1].start()
        yield Router(name, members, keys or [""], server)
