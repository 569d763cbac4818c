"""What a request costs in a closed loop, next to other routers and to the barest proxy of the same stack.

`python -m benchmarks.serving.load` (or `make bench`) starts an engine that answers at once (`instant_engine.py`) and the
targets in front of it (`targets.py`). Each connection plays one conversation after the other, as text: 400 new tokens, the
reply, 400 new tokens, and so on, four turns in all. In a group, as GRPO samples it, 16 connections begin with the same prompt.
The targets take turns, round by round; a cell shows the median of its rounds, the least and the largest.

CPU is what the operating system counted for the target's process and threads, per request; it hardly depends on how busy the
machine is. Requests per second and latencies do, because client, target and engine share the same few cores. Memory depends on
how much was served.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import uvloop

from benchmarks.pages import spread, table
from benchmarks.processes import cpu_seconds
from benchmarks.serving.client import CLIENTS, Client
from benchmarks.serving.conversations import NEW_TOKENS, TURNS, Conversation, Corpus
from benchmarks.serving.targets import NAMES, Target, add_options, serving, versions, write

TARGETS = ("bare", "router", "none", "smg", "sglang-router")
GROUP = 16


@dataclass(frozen=True)
class Cell:
    """A kind of load. `samples` is how many connections begin with the same prompt."""

    reply_tokens: int
    connections: int
    samples: int = 1

    def __str__(self) -> str:
        group = f", groups of {self.samples}" if self.samples > 1 else ""
        return f"{self.reply_tokens:,} x {self.connections}{group}"


@dataclass(frozen=True)
class Sample:
    """One round of one target. Times in milliseconds, CPU per request, memory in MB."""

    requests: int
    per_second: float
    p50: float
    p99: float
    cpu: float
    rss: float


class Load:
    """A closed loop: one conversation per connection, each of which waits for its reply."""

    def __init__(self, target: Target, cell: Cell, corpus: Corpus, client: str = "raw") -> None:
        self._target = target
        self._cell = cell
        self._corpus = corpus
        self._client = CLIENTS[client]
        self.latencies: list[float] = []

    async def run(self, seconds: float) -> float:
        """Run for about this long, and each conversation to its end. Return the seconds it took."""
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(self._cell.connections):
                group.create_task(self._talk(number, begun, begun + seconds))
        return time.perf_counter() - begun

    async def _talk(self, number: int, begun: float, until: float) -> None:
        client = await self._client.connect(self._target.url)
        for count in itertools.count():
            if count and time.perf_counter() > until:
                break
            prompt = hash((begun, number // self._cell.samples, count))  # of all in a group
            talk = Conversation(self._corpus, self._corpus.piece(NEW_TOKENS, prompt))
            for _ in range(TURNS):
                await self._turn(client, talk)
        await client.close()

    async def _turn(self, client: Client, talk: Conversation) -> None:
        body = talk.request(self._cell.reply_tokens, asks=not self._target.keeps)
        begun = time.perf_counter()
        answer = await self._target.ask(client, body)
        self.latencies.append(time.perf_counter() - begun)
        talk.heard(answer.body)


def measure(target: Target, cell: Cell, corpus: Corpus, seconds: float, client: str = "raw") -> Sample:
    """Measure one round."""
    load = Load(target, cell, corpus, client)
    before = cpu_seconds(target.process)
    took = uvloop.run(load.run(seconds))
    used = cpu_seconds(target.process) - before
    count = len(load.latencies)
    cuts = statistics.quantiles(load.latencies, n=100)
    return Sample(
        requests=count,
        per_second=count / took,
        p50=1000 * cuts[49],
        p99=1000 * cuts[98],
        cpu=1000 * used / count,
        rss=target.process.memory_info().rss / 1e6,
    )


Rounds = dict[str, list[Sample]]


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    for tokens in args.reply_tokens:
        for connections in args.connections:
            yield Cell(tokens, connections)
        if max(args.connections) >= 2 * GROUP:
            yield Cell(tokens, 2 * GROUP, GROUP)


def run(cell: Cell, corpus: Corpus, args: argparse.Namespace) -> Rounds:
    """Measure all targets in one cell. Their processes are new: what one cell leaves in memory must not slow the next."""
    rounds: Rounds = {}
    with serving(args.targets, corpus.replies(cell.reply_tokens), router_flags=args.router_flags) as targets:
        measured = [targets[name] for name in args.targets if name in targets]
        for target in measured:
            measure(target, cell, corpus, args.seconds / 2, args.client)  # warm up: connections, caches, a tree
        for _ in range(args.rounds):
            for target in measured:
                found = measure(target, cell, corpus, args.seconds, args.client)
                rounds.setdefault(target.name, []).append(found)
        for name, samples in rounds.items():
            print(f"{cell!s:<24}{name:<14} {' | '.join(figures(samples))}", flush=True)
    return rounds


def figures(samples: Sequence[Sample]) -> list[str]:
    """Return CPU, requests per second, p50, p99 and memory, each of all rounds."""
    digits = {"cpu": 3, "per_second": 0, "p50": 1, "p99": 1, "rss": 0}
    return [spread([getattr(one, key) for one in samples], number) for key, number in digits.items()]


def tables(found: Mapping[Cell, Rounds], names: Sequence[str]) -> str:
    """Return a table of CPU alone, with a row for each target, and one of everything, with a row for each cell of it."""
    cpu = [
        [NAMES[name], *(figures(rounds[name])[0] if name in rounds else "" for rounds in found.values())]
        for name in names
    ]
    rest = [
        [str(cell), NAMES[name], *figures(samples)[1:]]
        for cell, rounds in found.items()
        for name, samples in rounds.items()
    ]
    return "\n\n".join(
        [
            f"{versions(names)}. Reply tokens x connections; the median of the rounds (least-largest).",
            table(["CPU a request, ms", *map(str, found)], cpu),
            table(
                ["reply tokens x connections", "target", "requests/s", "p50, ms", "p99, ms", "memory, MB"],
                rest,
                words=2,
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3, seconds=4)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--reply-tokens", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--targets", nargs="+", choices=NAMES, default=TARGETS)
    parser.add_argument("--client", choices=CLIENTS, default="raw", help="the library that sends the requests")
    parser.add_argument("--router-flags", nargs=argparse.REMAINDER, default=[], help="for this router (last)")
    args = parser.parse_args()
    corpus = Corpus()
    found = {cell: run(cell, corpus, args) for cell in cells(args)}
    rows = [
        {**asdict(cell), "target": name, "rounds": [asdict(one) for one in samples]}
        for cell, rounds in found.items()
        for name, samples in rounds.items()
    ]
    write(args, "load", tables(found, args.targets), rows)


if __name__ == "__main__":
    main()
