"""Latency at a constant arrival rate, whether or not earlier requests have been answered.

`python -m benchmarks.serving.open_loop` sends each request at its time, and counts its latency from that time: what waits
behind a slow answer counts as late too, as it does for users. The rate is half of what one core can do for this router, found
in a closed loop of some seconds, and the same for all targets, which take turns. Conversations begin at equal distances, and
each sends its four turns at equal distances, so that a request is due after every 1 / rate seconds.

A cell shows the median of the rounds, the least and the largest; p99.9 is of all rounds together.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import uvloop

from benchmarks.pages import spread, table
from benchmarks.processes import cpu_seconds
from benchmarks.serving.client import RawClient
from benchmarks.serving.conversations import NEW_TOKENS, TURNS, Conversation, Corpus
from benchmarks.serving.load import Cell, measure
from benchmarks.serving.targets import NAMES, Target, add_options, serving, versions, write

TARGETS = ("direct", "bare", "router", "none", "smg")
THINKING = 0.4  # seconds from a turn of a conversation to its next


def pace(rate: float, count: int, due: Callable[[int, float], None]) -> threading.Thread:
    """Call `due` in the event loop with the number and the time of each request.

    A thread does it, because uvloop's timers count in whole milliseconds.
    """
    loop = asyncio.get_running_loop()
    begun = time.perf_counter() + 0.1

    def run() -> None:
        for number in range(count):
            at = begun + number / rate
            time.sleep(max(0.0, at - time.perf_counter()))
            loop.call_soon_threadsafe(due, number, at)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


class OpenLoop:
    """One round of one target."""

    def __init__(self, target: Target, corpus: Corpus, reply_tokens: int) -> None:
        self._target = target
        self._corpus = corpus
        self._reply_tokens = reply_tokens
        self._idle: list[RawClient] = []
        self._talks: dict[int, asyncio.Future[Conversation]] = {}
        self.latencies: list[float] = []

    async def run(self, rate: float, count: int) -> None:
        # Request `number` is turn `number % TURNS` of a conversation whose first turn was so many requests before.
        distance = TURNS * max(1, round(THINKING * rate / TURNS)) + 1
        async with asyncio.TaskGroup() as group:
            sent = asyncio.Event()

            def due(number: int, at: float) -> None:
                turn = number % TURNS
                group.create_task(self._turn(number - turn * distance, last=turn == TURNS - 1, at=at))
                if number == count - 1:
                    sent.set()

            pace(rate, count, due)
            await sent.wait()
        for client in self._idle:
            await client.close()

    async def _turn(self, first: int, *, last: bool, at: float) -> None:
        """Send the next turn of the conversation that began with this request, or would have, had the load begun before."""
        before = self._talks.pop(first, None)
        talk = await before if before else Conversation(self._corpus, self._corpus.cut(NEW_TOKENS))
        after = asyncio.get_running_loop().create_future()
        if not last:
            self._talks[first] = after
        body = talk.request(self._reply_tokens, asks=not self._target.keeps)
        client = self._idle.pop() if self._idle else await RawClient.connect(self._target.url)
        answer = await self._target.ask(client, body)
        self.latencies.append(time.perf_counter() - at)
        self._idle.append(client)
        talk.heard(answer.body)
        after.set_result(talk)


@dataclass
class Rounds:
    """What all rounds of one target found: latencies in milliseconds, CPU in milliseconds a request."""

    latencies: list[list[float]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def quantile(self, share: float) -> list[float]:
        return [at(one, share) for one in self.latencies]

    def figures(self) -> list[str]:
        everything = [latency for one in self.latencies for latency in one]
        return [
            *(spread(self.quantile(share)) for share in (0.5, 0.99)),
            f"{at(everything, 0.999):.2f}",
            spread(self.cpu, 3),
        ]


def at(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return sorted(values)[int(share * (len(values) - 1))]


def run(reply_tokens: int, corpus: Corpus, args: argparse.Namespace) -> tuple[float, dict[str, Rounds]]:
    """Measure all targets with replies of this many tokens. Return the rate, per second, and what was found."""
    found: dict[str, Rounds] = {}
    with serving(args.targets, corpus.replies(reply_tokens)) as targets:
        rate = args.rate
        if not rate:
            cell = Cell(reply_tokens, 32)
            closed = [measure(targets["router"], cell, corpus, args.seconds / 3).cpu for _ in range(3)]
            rate = round(500 / statistics.median(closed[1:]))
        for number in range(args.rounds + 1):
            for name in args.targets:
                if name not in targets:
                    continue
                loop = OpenLoop(targets[name], corpus, reply_tokens)
                process = targets[name].process
                before = cpu_seconds(process)
                uvloop.run(loop.run(rate, int(rate * (args.seconds if number else 1))))
                if number:  # the first round warms up
                    rounds = found.setdefault(name, Rounds())
                    rounds.cpu.append(1000 * (cpu_seconds(process) - before) / len(loop.latencies))
                    rounds.latencies.append([1000 * one for one in loop.latencies])
    for name, rounds in found.items():
        print(f"{reply_tokens} tokens, {rate}/s  {name:<8} {' | '.join(rounds.figures())}", flush=True)
    return rate, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3, seconds=8)
    parser.add_argument("--reply-tokens", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--targets", nargs="+", choices=NAMES, default=TARGETS)
    parser.add_argument("--rate", type=float, default=0, help="requests a second, instead of the calibration")
    args = parser.parse_args()
    if not (args.rate or "router" in args.targets):
        parser.error("without the target router there is no calibration: give --rate")
    corpus = Corpus()
    found = {tokens: run(tokens, corpus, args) for tokens in args.reply_tokens}
    rows = [
        [f"{tokens:,}", f"{rate:.0f}", NAMES[name], *rounds.figures()]
        for tokens, (rate, targets) in found.items()
        for name, rounds in targets.items()
    ]
    head = ["reply tokens", "requests/s", "target", "p50, ms", "p99, ms", "p99.9, ms", "CPU a request, ms"]
    written = f"{versions(args.targets)}. The median of the rounds (least-largest).\n\n{table(head, rows, words=3)}"
    quantiles = [
        {
            "reply_tokens": tokens,
            "per_second": rate,
            "target": name,
            **{f"p{100 * share:g}": rounds.quantile(share) for share in (0.5, 0.99, 0.999)},
            "cpu": rounds.cpu,
        }
        for tokens, (rate, targets) in found.items()
        for name, rounds in targets.items()
    ]
    write(args, "open loop", written, quantiles)


if __name__ == "__main__":
    main()
