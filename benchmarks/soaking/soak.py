"""Half an hour of load and trouble: do the router's memory, open files and latencies stay what they were?

`make soak` (`python -m benchmarks.soaking.soak --minutes 30`) starts a router and four workers with a small language model, as
processes of their own. Conversations of several turns go through the router as text, streamed and not. Clients leave, send
nonsense and abort. Agents of three dialects have sessions, which they finalize and delete, or leave alone. Generations are
paused, weights change every minute, workers are killed and restarted, removed and added. The token budget is so small that old
conversations are evicted. Every few seconds a sample is taken of the process and of /metrics. At the end of each conversation
its tokens are retrieved and compared with what was sampled, and those of a session's trajectory are counted.

`verdict.py` has the rules; if one is broken, the exit code is 1. The load is moderate, so that on a small machine the workers
and the clients leave the router a processor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import aiohttp

from benchmarks.pages import machine, put_between
from benchmarks.soaking.agents import Agents
from benchmarks.soaking.bystander import a_bystander
from benchmarks.soaking.clients import Clients
from benchmarks.soaking.graph import draw
from benchmarks.soaking.processes import Process, a_router, a_worker
from benchmarks.soaking.trouble import Trouble
from benchmarks.soaking.verdict import Finding, Rule, verdict
from benchmarks.soaking.watch import Sample, Watch, quantile

WORKERS = 4
SETTLE_SECONDS = 15.0
BROKEN_OFF = "reply broken off"
_SHOWN = 20  # complaints


class Soak:
    """One run, with its logs in `folder`."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        found = [a_worker(number, folder, args.pace) for number in range(WORKERS)]
        self.workers = [worker for worker, _ in found]
        self.router = a_router(folder, self.workers, args.radix_max_tokens, args.flags)
        styles = {worker.url: incremental for worker, incremental in found}
        self.clients = Clients(self.router.url, styles, args.seed)
        self.agents = Agents(self.router.url, args.seed)
        self.trouble = Trouble(self.router.url, self.workers, self.clients, args.seed)

    @contextlib.contextmanager
    def processes(self) -> Iterator[None]:
        """Run all processes for a block, and kill at its end those that are left."""
        started: list[Process] = []
        try:
            for process in (*self.workers, self.router):
                process.start()
                started.append(process)
            yield
        finally:
            for process in started:
                if process.alive:
                    process.kill()

    async def run(self) -> tuple[list[Sample], list[Rule]]:
        """Run load and trouble, take samples, wait for silence, and judge."""
        for process in (*self.workers, self.router):
            await process.up()
        async with aiohttp.ClientSession() as session:
            await self._all_routable(session)
            watch = Watch(self.router.url, self.router.seen)
            await watch.begin(session)
            fds, threads = self.router.seen.num_fds(), self.router.seen.num_threads()
            over = asyncio.Event()
            with a_bystander() as bystander:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.clients.run(self._args.conversations, self._args.bad_per_second, over))
                    group.create_task(self.agents.run(self._args.agents, over))
                    group.create_task(self.trouble.run(over))
                    await self._watch(watch, session)
                    over.set()
            samples = list(watch.samples)
            lag = {bound: count - watch.first.lag[bound] for bound, count in watch.scrape.lag.items()}
            idle = await self._idle(watch, session)
        after = self.router.seen.num_fds(), self.router.seen.num_threads()
        exit_code = await asyncio.to_thread(self.router.stop)
        log = self.router.log.read_text(errors="replace").splitlines()
        found = Finding(
            samples=samples,
            lag=(quantile(lag, 0.5), quantile(lag, 0.99)),
            machine=(bystander[0], bystander[1]),
            idle=idle,
            fds=(fds, after[0]),
            threads=(threads, after[1]),
            asked=self.clients.counts["asked"] + self.agents.counts["turns"],
            chats=self.agents.counts["chats"],
            last=watch.scrape,
            retrieved=self.clients.counts["retrieved"],
            finalized=self.agents.counts["sessions checked"],
            wrong=[*self.clients.wrong, *self.agents.wrong, *self.trouble.wrong],
            # Replies broken off by dying workers are expected.
            errors=[
                line for line in log if (" ERROR " in line and BROKEN_OFF not in line) or line.startswith("Traceback")
            ],
            exit_code=exit_code,
        )
        for line in (*found.wrong[:10], *found.errors[:10]):
            print(line)
        return samples, verdict(found)

    async def _watch(self, watch: Watch, session: aiohttp.ClientSession) -> None:
        shown = 0.0
        while asyncio.get_running_loop().time() - watch.begun < 60 * self._args.minutes - self._args.interval / 2:
            await asyncio.sleep(self._args.interval)
            sample = await watch.look(session)
            if sample.at - shown >= self._args.progress:
                shown = sample.at
                print(_line(sample), flush=True)

    async def _all_routable(self, session: aiohttp.ClientSession) -> None:
        while True:
            async with session.get(f"{self.router.url}/workers") as response:
                states = (await response.json())["workers"]
            if sum(worker["is_healthy"] for worker in states) == len(self.workers):
                return
            await asyncio.sleep(0.2)

    async def _idle(self, watch: Watch, session: aiohttp.ClientSession) -> dict[str, int]:
        """Return what is in flight after all clients have gone, allowing some seconds for the last requests."""
        deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
        while True:
            async with session.get(f"{self.router.url}/debug/requests") as response:
                requests = (await response.json())["total"]
            await watch.look(session)
            found = {
                "requests": requests,
                "workers": int(watch.scrape.total("tito_router_worker_inflight")),
                "queue": int(watch.scrape.total("tito_router_queue_length")),
            }
            if not any(found.values()) or asyncio.get_running_loop().time() > deadline:
                await asyncio.sleep(5)  # until idle connections to workers are closed
                return found
            await asyncio.sleep(0.5)


def _line(sample: Sample) -> str:
    return (
        f"{sample.at / 60:6.1f} min  {sample.rss:7.1f} MB  {sample.cpu:5.1f}% cpu  {sample.tree_tokens:>8} tokens"
        f"  {sample.evicted:>6} forgotten  {sample.inflight:>3} in flight  {sample.fds:>4} files  {sample.threads:>3} threads"
        f"  lag p50 {sample.lag_p50:5.2f} p99 {sample.lag_p99:6.2f} ms  {sample.per_second:6.1f} requests/s"
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soaking.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two looks (%(default)s)")
    parser.add_argument("--progress", type=float, default=30.0, help="seconds between two lines (%(default)s)")
    parser.add_argument("--conversations", type=int, default=24, help="at a time (%(default)s)")
    parser.add_argument("--agents", type=int, default=8, help="with sessions, at a time (%(default)s)")
    parser.add_argument("--pace", type=float, default=40.0, help="tokens a second of each reply (%(default)s)")
    parser.add_argument("--bad-per-second", type=float, default=2.0, help="nonsense requests (%(default)s)")
    parser.add_argument(
        "--radix-max-tokens", type=int, default=150_000, help="so few that the router evicts (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for all samples, as JSON")
    parser.add_argument("--page", type=Path, help="a page with the marks between which the verdict goes")
    parser.add_argument("--picture", type=Path, help="an SVG of the samples")
    parser.add_argument(
        "flags", nargs="*", help="further flags of the router, behind `--`: -- --store sqlite:/tmp/soak"
    )
    return parser


def main() -> None:
    args = parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the router and the workers would outlive it
    load = f"{args.conversations} conversations and {args.agents} agents at a time"
    print(f"{machine()}; {load} on {WORKERS} workers, {args.minutes:g} minutes")
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(args, Path(folder))
        with soak.processes():
            samples, rules = asyncio.run(soak.run())
    counts = {**soak.clients.counts, **soak.agents.counts, **soak.trouble.counts}
    wrong = [*soak.clients.wrong, *soak.agents.wrong, *soak.trouble.wrong]
    print("\n".join([*map(str, rules), *wrong[:_SHOWN]]))
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    result = {
        "machine": machine(),
        "command": f"python -m benchmarks.soaking.soak --minutes {args.minutes:g}",
        "rules": [asdict(rule) for rule in rules],
        "counts": counts,
        "wrong": wrong,
        "samples": [asdict(sample) for sample in samples],
    }
    if args.out:
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.page:
        table = ["| what must hold | found |", "|---|---|", *(f"| {rule.name} | {rule.value} |" for rule in rules)]
        put_between(args.page, "soak", "\n".join([f"{machine()}, {args.minutes:g} minutes.", "", *table]))
    if args.picture:
        draw(samples, args.picture, f"A router under load for {args.minutes:g} minutes")
    if any(rule.held is False for rule in rules):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
