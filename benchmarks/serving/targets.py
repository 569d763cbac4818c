"""What is measured: this router, with its middleware and without; other routers; the barest proxy; the engine alone.

A trainer needs the logprobs of what was sampled. This router asks for them and keeps them; at any other target the client has
to ask for them, and gets them in each reply.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import foreign_routers
from benchmarks.pages import machine, put_between
from benchmarks.processes import DidNotStartError, python, running, started
from benchmarks.serving.client import Answer, Client
from benchmarks.serving.conversations import tokenizer_folder
from tests.support.engine_server import free_port
from tests.support.redis_server import redis_server

NAMES = {
    "direct": "the engine itself",
    "bare": "bare proxy (uvicorn, aiohttp)",
    "floor": "bare proxy of streams (uvloop, httptools)",
    "none": "this router, `--middleware none`",
    "router": "this router",
    "sqlite": "this router, `--store sqlite:`",
    "redis": "this router, `--store redis:`",
    "smg": "smg, `cache_aware`",
    "sglang-router": "sglang-router, `cache_aware`",
}


@dataclass(frozen=True)
class Target:
    """A process that answers `/generate`. `keeps` is whether it keeps logprobs, so that clients need not ask for them."""

    name: str
    url: str
    process: psutil.Process
    keeps: bool

    async def ask(self, client: Client, body: bytes) -> Answer:
        """Return the answer to a request. Raises SystemExit if it is an error: what failed must not count as fast."""
        answer = await client.post("/generate", body)
        if answer.status != 200:
            raise SystemExit(f"{self.name} answered {answer.status}: {answer.body[:500]!r}")
        return answer


STORES = ("sqlite", "redis")
KEEPING = ("router", *STORES)


@contextlib.contextmanager
def empty_store(name: str) -> Iterator[str]:
    """Make an empty store of a kind of `STORES`, and yield its address."""
    with tempfile.TemporaryDirectory() as folder:
        if name == "sqlite":
            yield f"sqlite:{folder}/"
        else:
            with redis_server(Path(folder)) as server:
                yield server.address


def command(name: str, engine: str, port: int, router_flags: Sequence[str], store: str | None) -> list[str]:
    """Return the command that starts a target in front of an engine. `store` is an address."""
    ours = python("router", "--worker-urls", engine, "--log-level", "warning", "--port", str(port))
    if name == "bare":
        return python("benchmarks.serving.bare_proxy", "--worker-url", engine, "--port", str(port))
    if name == "floor":
        return python("benchmarks.serving.bare_stream", "--worker-url", engine, "--port", str(port))
    if name in KEEPING:
        kept = ["--store", store] if store else []
        return [*ours, "--tokenizer-path", tokenizer_folder(), *kept, *router_flags]
    if name == "none":
        return [*ours, "--middleware", "none"]
    return foreign_routers.command(name, "cache_aware", [engine], port, free_port())


def answers(url: str, key: str = "") -> bool:
    """Return whether a target answers `/generate`: some routers listen before they know their workers."""
    body = json.dumps({"text": "Hello", "sampling_params": {"max_new_tokens": 1}}).encode()
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url}/generate", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def serving(
    names: Sequence[str], replies: bytes, engine_flags: Sequence[str] = (), router_flags: Sequence[str] = ()
) -> Iterator[dict[str, Target]]:
    """Run an engine and targets in front of it. Yield `direct` and those that could be installed and started, by name."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        flags = ("--port", str(port), *engine_flags)
        engine = stack.enter_context(running("benchmarks.serving.instant_engine", *flags, port=port, stdin=replies))
        url = f"http://127.0.0.1:{port}"
        found = {"direct": Target("direct", url, engine, keeps=False)}
        for name in names:
            if name == "direct":
                continue
            own = free_port()
            here = f"http://127.0.0.1:{own}"
            store = stack.enter_context(empty_store(name)) if name in STORES else None
            try:
                if name in foreign_routers.POLICIES:
                    foreign_routers.install(name)
                run = started(command(name, url, own, router_flags, store), partial(answers, here))
                found[name] = Target(name, here, stack.enter_context(run), keeps=name in KEEPING)
            except (foreign_routers.NotInstalledError, DidNotStartError) as error:
                print(f"{name}: {error}", flush=True)
        yield found


def add_options(parser: argparse.ArgumentParser, *, rounds: int, seconds: float | None = None) -> None:
    """Add the options that each measurement has."""
    parser.add_argument("--rounds", type=int, default=rounds, help="of each target, which take turns (%(default)s)")
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help="of a round (%(default)g)")
    parser.add_argument("--out", type=Path, help="where to write what was measured as JSON")
    parser.add_argument("--page", type=Path, help="a page with the marks between which the tables go")


def versions(names: Sequence[str]) -> str:
    """Return the line over a table: the machine, and the versions of other routers."""
    found = []
    for name in names:
        if name in foreign_routers.POLICIES:
            with contextlib.suppress(foreign_routers.NotInstalledError):
                found.append(f"{name} {foreign_routers.install(name)}")
    return ", ".join([machine(), *found])


def write(args: argparse.Namespace, mark: str, table: str, found: Any) -> None:
    """Write a table and what was measured to where the options of `add_options` say."""
    if args.out:
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(json.dumps({"machine": machine(), mark: found}, indent=1) + "\n")
    if args.page:
        put_between(args.page, mark, table)
    if not (args.out or args.page):
        print(f"\n{table}")
