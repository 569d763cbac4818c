"""What each policy makes of real requests to four timed workers: ours, and those of `sglang-router` and `smg` beside them.

`python -m benchmarks.routing_load [--out FILE] [--page FILE]`. The loads are those of `benchmarks.routing_skew`, over
HTTP: as many conversations as keep so many requests in flight, as text, to `/generate`. Only policies that go by the key of
a conversation are given it, in `x-smg-routing-key`; and `smg` once more, which goes by it whatever the policy. The workers
(`benchmarks.routing_fleet`) are as much faster than those of the simulation as makes about `--rate` requests a second, whatever
is in flight. Every run has a router and workers of its own, and counts from its first request to when its last one is asked.

CPU is what the operating system counted for the router's process, by request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import msgspec
import psutil

from benchmarks import foreign_routers
from benchmarks.pages import machine
from benchmarks.routing_conversations import VOCABULARY, Load, Words
from benchmarks.routing_skew import CROWD, DECODE, LOADS
from benchmarks.routing_table import Result, Row, write
from router.policies import POLICIES
from tests.support.sglang_server import free_port
from tests.support.vocabularies import vocabulary

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 4
KEYED = {"consistent_hashing", "manual"}  # nothing but the key of a conversation tells them where it goes
BLIND = {"least_inflight", "random", "round_robin", "power_of_two", "least_load"}  # know conversations in no load
WITH_KEY = ", with a key"
MEAN_REPLY = 495  # tokens, of a log-normal length around 300


class DidNotStartError(Exception):
    """A router is not there; the message says why."""


@dataclass(frozen=True)
class Target:
    """A router and its policy."""

    router: str
    policy: str

    @property
    def keyed(self) -> bool:
        """Is it told whose request it gets?"""
        return self.policy in KEYED or self.router.endswith(WITH_KEY)

    def command(self, worker_urls: Sequence[str], port: int) -> list[str]:
        """How it is started."""
        name = self.router.removesuffix(WITH_KEY)
        if name in foreign_routers.POLICIES:
            return foreign_routers.command(name, self.policy, worker_urls, port, free_port())
        ours = [sys.executable, "-m", "router", "--policy", self.policy, "--port", str(port), "--log-level", "warning"]
        ours += ["--worker-urls", *worker_urls]
        if self.router == "ours":
            return [*ours, "--middleware", "none"]
        return [*ours, "--tokenizer-path", str(vocabulary(VOCABULARY))]


@contextlib.contextmanager
def fleet(words: Words, speed: float) -> Iterator[list[str]]:
    """Workers with empty caches; their URLs."""
    ports = [free_port() for _ in range(WORKERS)]
    command = [sys.executable, "-m", "benchmarks.routing_fleet", "--speed", str(speed)]
    command += ["--ports", *map(str, ports)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(words.said)
        process.stdin.close()
        try:
            _wait(process, lambda: all(_get(f"http://127.0.0.1:{port}/health") is not None for port in ports))
            yield [f"http://127.0.0.1:{port}" for port in ports]
        finally:
            process.terminate()


@contextlib.contextmanager
def router(target: Target, worker_urls: Sequence[str]) -> Iterator[tuple[str, psutil.Process]]:
    """A router that knows all of the workers. DidNotStartError with the end of its log."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def complete() -> bool:
        told = msgspec.json.decode(_get(f"{url}/workers") or b"{}").get("workers", [])
        return len(told) == WORKERS and _get(f"{url}/health") is not None

    with tempfile.TemporaryFile() as log:
        command = target.command(worker_urls, port)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) as process:
            try:
                try:
                    _wait(process, complete)
                except DidNotStartError as error:
                    log.seek(0)
                    lines = log.read().decode(errors="replace").strip().splitlines()
                    raise DidNotStartError(f"{error}: {lines[-1] if lines else 'it says nothing'}") from None
                yield url, psutil.Process(process.pid)
            finally:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()


def _wait(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not ready():
        if process.poll() is not None:
            raise DidNotStartError(f"ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise DidNotStartError("did not know its workers after 40 s")
        time.sleep(0.1)


def _get(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bytes(reply.read())
    except OSError:
        return None


def _cpu(process: psutil.Process) -> float:
    """Seconds, user and system, with what it started."""
    every = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in every))


def measure(target: Target, words: Words, load: str, inflight: int, args: argparse.Namespace, seed: int) -> Result:
    """One run."""
    kind = LOADS[load]
    slow = MEAN_REPLY * DECODE * (1 + inflight / WORKERS / CROWD)  # seconds of a generation at the simulation's speed
    generation = inflight / args.rate * max(1, kind.system / 4_000)  # long prompts: fewer of them a second
    with fleet(words, slow / generation) as worker_urls, router(target, worker_urls) as (url, process):
        one = Load(url, words, kind, inflight, max(args.requests, 12 * inflight), seed, keyed=target.keyed)
        took, used = asyncio.run(one.run(generation, partial(_cpu, process)))
    if not one.latencies:
        raise DidNotStartError(f"answered nothing but {dict(one.failures)}")
    return Result(
        busiest=max(one.served.values()) / (one.served.total() / WORKERS),
        kept=one.kept / max(1, one.later),
        cached=one.cached / one.prompt,
        cpu=1000 * used / len(one.latencies),
        p50=1000 * statistics.median(one.latencies),
        seconds=took,
        inflight=sum(one.latencies) / took,
        failures=one.failures.total(),
    )


def targets(names: Sequence[str]) -> tuple[list[Target], dict[str, str]]:
    """What is compared, and the version of each, or why it is not there."""
    found = [Target("ours", policy) for policy in POLICIES]
    found.append(Target("ours, with the middleware", "cache_aware"))
    versions: dict[str, str] = {}
    for name, policies in foreign_routers.POLICIES.items():
        if names and not any(one.startswith(name) for one in names):
            continue  # nobody asked for it: it need not be installed
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing_load", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=4_000, help="of a run, and at least 12 for each in flight")
    parser.add_argument("--rate", type=float, default=300, help="requests a second that the load is made for")
    parser.add_argument("--load", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--inflight", type=int, nargs="+", help="instead of those of each load")
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
                write(rows, versions, out=args.out, page=args.page)  # what there is, should the rest be cut short


if __name__ == "__main__":
    main()
