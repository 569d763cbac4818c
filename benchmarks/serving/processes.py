"""What more processes bring: `python -m benchmarks.serving.processes`.

A router with `--store sqlite:` and one, two, ... processes takes turns with itself, under the load of `load.py` in front of an
engine that answers at once; and with as many routers that share nothing, each with a part of the load. These show what the
machine gives: with fewer requests at each, and caches that are shared, a request costs more. Three figures for each:

- requests a second, which are of use only where the machine has cores for all: processes, client and engine;
- requests for each second of CPU that all processes of the router took, the parent's included: what one process does, and how
  much of it is lost by sharing a store and a port;
- how even the processes were used: the CPU of the mean one in that of the busiest.

On a machine with few cores, `--share 0.25` (root, control groups of version 1) lets each process have no more than that part of
a core. Then client and engine are never the limit, and the ratio of requests a second is that of a machine with enough cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import uvloop

from benchmarks.pages import machine, spread, table
from benchmarks.processes import cpu_seconds, running, settle, started
from benchmarks.serving.conversations import Corpus
from benchmarks.serving.load import Cell, Load
from benchmarks.serving.targets import Target, add_options, answers, command, empty_store, write
from tests.support.engine_server import free_port

AIM = ">= 1.8 x"
GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD = 10_000
"""Microseconds: short, so that a process that has used up its share waits for milliseconds."""


@dataclass(frozen=True)
class Round:
    """One round. `even` is the CPU of the mean process in that of the busiest."""

    per_second: float
    per_cpu_second: float
    even: float


@contextlib.contextmanager
def limited(processes: list[psutil.Process], share: float | None) -> Iterator[None]:
    """Let each process have no more than this share of a core; None: as much as it gets."""
    groups = []
    try:
        for process in processes if share is not None else ():
            group = GROUPS / f"bench-{process.pid}"
            group.mkdir()
            groups.append(group)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD * (share or 0))))
            (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        for group in groups:
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (GROUPS / "cgroup.procs").write_text(pid)
            group.rmdir()


def routers_of(parent: psutil.Process) -> list[psutil.Process]:
    """Return the processes that serve."""
    return parent.children() or [parent]


async def together(loads: Sequence[Load], seconds: float) -> float:
    """Run loads at the same time, and return the seconds that they took on average."""
    return statistics.mean(await asyncio.gather(*(load.run(seconds) for load in loads)))


def measure(targets: Sequence[Target], cell: Cell, corpus: Corpus, seconds: float) -> Round:
    part = replace(cell, connections=cell.connections // len(targets))
    loads = [Load(target, part, corpus) for target in targets]
    routers = [router for target in targets for router in routers_of(target.process)]
    before = [cpu_seconds(one) for one in routers]
    all_before = sum(cpu_seconds(target.process) for target in targets)
    took = uvloop.run(together(loads, seconds))
    each = [cpu_seconds(one) - used for one, used in zip(routers, before, strict=True)]
    count = sum(len(load.latencies) for load in loads)
    used = sum(cpu_seconds(target.process) for target in targets) - all_before
    return Round(count / took, count / used, statistics.mean(each) / max(each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=5, seconds=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--reply-tokens", type=int, default=200)
    parser.add_argument("--share", type=float, help="of a core for each process (root)")
    args = parser.parse_args()
    corpus, cell = Corpus(), Cell(args.reply_tokens, args.connections)
    with contextlib.ExitStack() as stack:
        port = free_port()
        engine = running(
            "benchmarks.serving.instant_engine",
            *("--port", str(port)),
            port=port,
            stdin=corpus.replies(args.reply_tokens),
        )
        stack.enter_context(engine)

        def router(*flags: str) -> Target:
            own = free_port()
            here, store = f"http://127.0.0.1:{own}", stack.enter_context(empty_store("sqlite"))
            run = started(command("sqlite", f"http://127.0.0.1:{port}", own, flags, store), partial(answers, here))
            return Target("sqlite", here, stack.enter_context(run), keeps=True)

        kinds: dict[str, list[Target]] = {}
        for count in args.processes:
            kinds[f"`--processes {count}`"] = [router("--processes", str(count))]
            if count > 1:
                kinds[f"{count} routers apart"] = [router() for _ in range(count)]
        rounds: dict[str, list[Round]] = {name: [] for name in kinds}
        for targets in kinds.values():
            measure(targets, cell, corpus, 2)
            for target in targets:
                settle(target.process)
                stack.enter_context(limited(routers_of(target.process), args.share))
        for _ in range(args.rounds):
            for name, targets in kinds.items():
                rounds[name].append(measure(targets, cell, corpus, args.seconds))
            print({name: asdict(each[-1]) for name, each in rounds.items()}, flush=True)
    first = next(iter(rounds.values()))
    rows = []
    for name, each in rounds.items():
        ratios = [one.per_second / base.per_second for one, base in zip(each, first, strict=True)]
        costs = [one.per_cpu_second / base.per_cpu_second for one, base in zip(each, first, strict=True)]
        figures = [spread([one.per_second for one in each], 0), spread(ratios, 2)]
        rest = [
            spread([one.per_cpu_second for one in each], 0),
            spread(costs, 2),
            spread([one.even for one in each], 2),
        ]
        rows.append([name, *figures, *rest])
    share = "" if args.share is None else f", each process with {args.share:g} of a core"
    head = ["routers", "requests/s", f"ratio ({AIM} for 2)", "requests a CPU second", "ratio", "evenness"]
    text = f"{machine()}; {cell}{share}; the median of the rounds (least-largest).\n\n{table(head, rows)}"
    write(args, "processes", text, {name: [asdict(one) for one in each] for name, each in rounds.items()})


if __name__ == "__main__":
    main()
