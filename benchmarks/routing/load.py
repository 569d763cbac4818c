"""How each policy routes real requests to four timed workers: our policies, and those of `sglang-router` and `smg`.

`python -m benchmarks.routing.load [--out FILE] [--page FILE]`. The loads are those of `benchmarks.routing.simulation`, sent
over HTTP as text to `/generate`, with enough conversations to keep a given number of requests in flight. Only policies that
use the key of a conversation get it, in `x-smg-routing-key`; `smg` runs a second time with keys, because it uses them under
any policy. With `--workers 2 --ranks 4` the workers have data-parallel ranks, and what is said of workers is measured of ranks.
The workers (`benchmarks.routing.fleet`) run faster than those of the simulation, so that about `--rate` requests a
second are served at any level. Every run has its own router and workers, and lasts from its first request until its last one
is sent.

CPU is what the operating system counted for the router's process, per request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import msgspec
import psutil

from benchmarks import foreign_routers
from benchmarks.pages import machine
from benchmarks.processes import DidNotStartError, cpu_seconds, get, python, running, started
from benchmarks.routing.conversations import VOCABULARY, ConversationLoad, Words
from benchmarks.routing.simulation import CROWD, DECODE, LOADS
from benchmarks.routing.table import Result, Row, write
from router.policies import POLICIES
from tests.support.engine_server import free_port
from tests.support.vocabularies import vocabulary

KEYED = {"consistent_hashing", "manual"}  # route by the key of a conversation only
BLIND = {"least_inflight", "random", "round_robin", "power_of_two", "least_load"}  # do not recognise conversations
WITH_KEY = ", with a key"
MEAN_REPLY = 495  # tokens, of a log-normal length around 300


@dataclass(frozen=True)
class Target:
    """A router and its policy."""

    router: str
    policy: str

    @property
    def keyed(self) -> bool:
        """Whether requests carry the key of their conversation."""
        return self.policy in KEYED or self.router.endswith(WITH_KEY)

    def command(self, worker_urls: Sequence[str], port: int) -> list[str]:
        name = self.router.removesuffix(WITH_KEY)
        if name in foreign_routers.POLICIES:
            return foreign_routers.command(name, self.policy, worker_urls, port, free_port())
        ours = python("router", "--policy", self.policy, "--port", str(port), "--log-level", "warning")
        ours += ["--worker-urls", *worker_urls]
        if self.router == "ours":
            return [*ours, "--middleware", "none"]
        return [*ours, "--tokenizer-path", str(vocabulary(VOCABULARY))]


@contextlib.contextmanager
def fleet(words: Words, speed: float, workers: int, ranks: int) -> Iterator[list[str]]:
    """Run workers with empty caches. Yield their URLs."""
    ports = [free_port() for _ in range(workers)]
    options = ("--speed", str(speed), "--ranks", str(ranks))
    command = ("benchmarks.routing.fleet", *options, "--ports", *map(str, ports))
    with running(*command, port=ports[-1], stdin=words.said):
        yield [f"http://127.0.0.1:{port}" for port in ports]


@contextlib.contextmanager
def router(target: Target, worker_urls: Sequence[str]) -> Iterator[tuple[str, psutil.Process]]:
    """Run a router until it knows all workers. Yield its URL and process. Raise DidNotStartError with its last log line."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def complete() -> bool:
        known = msgspec.json.decode(get(f"{url}/workers") or b"{}").get("workers", [])
        return len(known) == len(worker_urls) and get(f"{url}/health") is not None

    with started(target.command(worker_urls, port), complete) as process:
        yield url, process


def measure(target: Target, words: Words, load: str, inflight: int, args: argparse.Namespace, seed: int) -> Result:
    """Run one target under one load."""
    kind = LOADS[load]
    places = args.workers * args.ranks
    slow = MEAN_REPLY * DECODE * (1 + inflight / places / CROWD)  # seconds of a generation at the simulation's speed
    generation = inflight / args.rate * max(1, kind.system / 4_000)  # fewer requests a second if prompts are long
    with (
        fleet(words, slow / generation, args.workers, args.ranks) as worker_urls,
        router(target, worker_urls) as (url, process),
    ):
        one = ConversationLoad(url, words, kind, inflight, max(args.requests, 12 * inflight), seed, keyed=target.keyed)
        took, used = asyncio.run(one.run(generation, partial(cpu_seconds, process)))
    if not one.latencies:
        raise DidNotStartError(f"answered nothing but {dict(one.failures)}")
    return Result(
        busiest=max(one.served.values()) / (one.served.total() / places),
        kept=one.kept / max(1, one.later),
        cached=one.cached / one.prompt,
        cpu=1000 * used / len(one.latencies),
        p50=1000 * statistics.median(one.latencies),
        seconds=took,
        inflight=sum(one.latencies) / took,
        failures=one.failures.total(),
    )


def targets(names: Sequence[str]) -> tuple[list[Target], dict[str, str]]:
    """Return what is compared, and for each foreign router its version or why it is missing."""
    found = [Target("ours", policy) for policy in POLICIES]
    found.append(Target("ours, with the middleware", "cache_aware"))
    versions: dict[str, str] = {}
    for name, policies in foreign_routers.POLICIES.items():
        if names and not any(one.startswith(name) for one in names):
            continue  # not selected, so it need not be installed
        try:
            versions[name] = foreign_routers.install(name)
        except foreign_routers.NotInstalledError as error:
            versions[name] = f"not installed: {error}"
        else:
            found += [Target(name, policy) for policy in policies]
            if name == "smg":
                found += [Target(name + WITH_KEY, policy) for policy in ("prefix_hash", "cache_aware")]
    return [one for one in found if not names or f"{one.router}:{one.policy}" in names], versions


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing.load", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=4_000, help="of a run, and at least 12 for each in flight")
    parser.add_argument("--rate", type=float, default=300, help="requests a second that the load is made for")
    parser.add_argument("--load", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--inflight", type=int, nargs="+", help="instead of those of each load")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of each worker")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], metavar="ROUTER:POLICY")
    parser.add_argument("--out", type=Path, help="where to write the rows as JSON")
    parser.add_argument("--page", type=Path, help="a page with the marks between which the table goes")
    args = parser.parse_args()
    words = Words()
    compared, versions = targets(args.only)
    rows = [Row(one.router, one.policy) for one in compared]
    cells = [(load, inflight) for load in args.load for inflight in args.inflight or LOADS[load].levels]
    print(machine(), json.dumps(versions), flush=True)
    for seed in range(args.rounds):
        for load, inflight in cells:
            for one, row in zip(compared, rows, strict=True):
                if row.missing or (one.policy in BLIND and load != "conversations"):
                    continue
                try:
                    result = measure(one, words, load, inflight, args, seed)
                except DidNotStartError as error:
                    row.missing = str(error)
                    print(f"{row.router} {row.policy}: {row.missing}", flush=True)
                    continue
                row.results.setdefault(f"{load} {inflight}", []).append(result)
                shown = " ".join(f"{key} {value:.3f}" for key, value in asdict(result).items())
                print(f"{load} {inflight}: {row.router} {row.policy}: {shown}", flush=True)
                write(rows, versions, out=args.out, page=args.page)  # at once, in case the rest is interrupted


if __name__ == "__main__":
    main()
