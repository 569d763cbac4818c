"""A group of engine doubles, and a router in front of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import psutil

from benchmarks import foreign_routers
from benchmarks.processes import get, python, running, started
from benchmarks.serving.client import RawClient
from benchmarks.serving.conversations import tokenizer_folder
from benchmarks.serving.targets import answers
from tests.support import templates
from tests.support.engine_server import free_port


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


@dataclass(frozen=True)
class Router:
    """A process that answers in front of a group: a router, or one of the engines itself if there is none."""

    name: str
    url: str
    process: psutil.Process

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    @property
    def keeps(self) -> bool:
        """Whether it keeps logprobs, so that clients need not ask for them."""
        return self.name in ("router", "huggingface")

    async def client(self) -> RawClient:
        return await RawClient.connect(self.url)


NAMES = {
    "none": "this router, `--middleware none`",
    "router": "this router",
    "huggingface": "this router, `--tokenizer-backend huggingface`",
    "smg": "smg, `round_robin`",
}


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
    template = str(templates.folder() / "qwen3.jinja")
    return [*ours, "--tokenizer-path", tokenizer_folder(), "--chat-template", template, *flags]


@contextlib.contextmanager
def router(name: str, group: Group, flags: Sequence[str] = ()) -> Iterator[Router]:
    """Run a router of `NAMES` in front of a group. `flags` are for this router with its middleware.

    Raises NotInstalledError, DidNotStartError.
    """
    if name in foreign_routers.POLICIES:
        foreign_routers.install(name)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with started(_command(name, group.urls, port, flags), partial(answers, url)) as process:
        yield Router(name, url, process)
