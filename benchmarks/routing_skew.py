"""What each policy makes of conversations under one system prompt: a simulation of a fleet, event by event.

`python -m benchmarks.routing_skew [--requests N] [--page FILE]` prints a table. The policies are the router's own and
choose among the router's own workers; only the workers' time is made up. Nothing depends on the machine but how long it takes.

Four workers. 80% of the conversations share one system prompt, the others have one of their own. Lengths are log-normal, a
client thinks for one to three generations before its next turn, and as many conversations are held that so many requests
are in flight on average.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.pages import put_between
from router.policies import POLICIES, create_policy
from router.policies.base import Decision, Policy, RouteQuery
from router.policies.power_of_two import PowerOfTwo
from router.policies.prefix_tree import TokenTree
from router.policies.random_choice import RandomChoice
from router.workers.worker import Worker

SYSTEM_TOKENS = 2_000
SHARED = 0.8
PREFILL = 8_000.0  # tokens a second
DECODE = 0.02  # seconds a token of a worker that has nothing else to do
CROWD = 64  # requests that halve a worker's speed


@dataclass
class Conversation:
    """Who talks: what was said so far, and where it was said."""

    number: int
    ids: array[int]
    shared: bool
    turns: int
    at: str | None = None
    done: int = 0


@dataclass
class Engine:
    """A worker's cache, which never forgets, and what it served."""

    worker: Worker
    known: dict[int, int] = field(default_factory=dict)
    warm: bool = False
    served: int = 0

    def cached(self, one: Conversation) -> int:
        """Tokens of this prompt that are in the cache."""
        return max(self.known.get(one.number, 0), SYSTEM_TOKENS if one.shared and self.warm else 0)


@dataclass(frozen=True)
class Outcome:
    """One run."""

    busiest: float  # served tokens of the busiest worker, by the mean
    kept: float  # later turns on the worker of the turn before
    hits: float  # prompt tokens that were cached
    seconds: float  # of simulated time for all of it
    reasons: Counter[str]


class PlainCacheAware:
    """The rule of the table and nothing else: how a run collapses onto one worker."""

    def __init__(self) -> None:
        self._tree = TokenTree()

    def select(self, workers: Sequence[Worker], query: RouteQuery) -> Worker:
        """The longest cached prefix, unless the fleet is out of balance."""
        assert query.token_ids is not None
        loads = [worker.inflight for worker in workers]
        least, most = min(loads), max(loads)
        chosen = workers[loads.index(least)]
        if not (most - least > 64 and most > 1.5 * least):
            match = self._tree.prefix_match_with_counts(query.token_ids)
            if match.matched > 0.3 * match.input:
                chosen = next(worker for worker in workers if worker.url == match.tenant)
        self._tree.insert(query.token_ids, chosen.url)
        return chosen


class Simulation:
    """One policy under one load."""

    def __init__(self, policy: Policy, inflight: int, *, workers: int = 4, seed: int = 1) -> None:
        self._policy = policy
        self._random = random.Random(seed)
        self._engines = {f"http://w{n}:1": Engine(Worker(f"http://w{n}:1")) for n in range(workers)}
        self._workers = tuple(engine.worker for engine in self._engines.values())
        self._numbers = itertools.count()
        self._ticks = itertools.count()  # of equal times, the first planned
        self._system = self._tokens(SYSTEM_TOKENS)
        self._later = self._kept = self._prompt = self._hits = 0
        self._reasons: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        for _ in range(3 * inflight):  # one generates while two think
            self._plan(0.0, self._asks(self._newcomer()))

    def run(self, requests: int) -> Outcome:
        """So many requests."""
        now = 0.0
        while self._events and self._reasons.total() < requests:
            now, _, happens = heapq.heappop(self._events)
            happens(now)
        served = [engine.served for engine in self._engines.values()]
        return Outcome(
            max(served) / statistics.mean(served),
            self._kept / max(1, self._later),
            self._hits / self._prompt,
            now,
            self._reasons,
        )

    def _plan(self, when: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._ticks), happens))

    def _tokens(self, count: int) -> array[int]:
        return array("i", self._random.choices(range(150_000), k=count))

    def _length(self, median: float) -> int:
        return max(1, round(self._random.lognormvariate(0, 1) * median))

    def _newcomer(self) -> Conversation:
        shared = self._random.random() < SHARED
        begin = self._system[:] if shared else self._tokens(self._length(200))
        return Conversation(next(self._numbers), begin, shared, turns=min(40, self._length(5)))

    def _asks(self, one: Conversation) -> Callable[[float], None]:
        def ask(now: float) -> None:
            one.ids = one.ids + self._tokens(self._length(150))
            query = RouteQuery(token_ids=memoryview(one.ids), routing_key=str(one.number))
            chosen = self._policy.select(self._workers, query)
            worker, reason = chosen if isinstance(chosen, Decision) else (chosen, "policy")
            self._reasons[reason] += 1
            if one.at is not None:
                self._later += 1
                self._kept += one.at == worker.url
            one.at = worker.url
            engine, reply = self._engines[worker.url], self._tokens(self._length(300))
            cached = engine.cached(one)
            self._prompt += len(one.ids)
            self._hits += cached
            engine.served += len(one.ids) + len(reply)
            worker.inflight += 1
            slow = DECODE * (1 + worker.inflight / CROWD)
            seconds = (len(one.ids) - cached) / PREFILL + len(reply) * slow
            self._plan(now + seconds, self._answered(one, engine, reply, seconds))

        return ask

    def _answered(
        self, one: Conversation, engine: Engine, reply: array[int], seconds: float
    ) -> Callable[[float], None]:
        def answered(now: float) -> None:
            engine.worker.inflight -= 1
            one.ids = one.ids + reply  # a new one: nobody may change what was handed out
            engine.known[one.number] = len(one.ids)
            engine.warm = engine.warm or one.shared
            one.done += 1
            asker = one if one.done < one.turns else self._newcomer()
            self._plan(now + seconds * self._random.uniform(1, 3), self._asks(asker))

        return answered


def candidates() -> dict[str, Callable[[], Policy]]:
    """All that are compared, by name; those that draw, with the same luck each time."""
    found: dict[str, Callable[[], Policy]] = {name: partial(create_policy, name) for name in POLICIES}
    drawing: dict[str, Callable[[], Policy]] = {
        "random": lambda: RandomChoice(random.Random(1)),
        "power_of_two": lambda: PowerOfTwo(random.Random(1)),
    }
    return {**found, **drawing, "only the longest prefix": PlainCacheAware}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--requests", type=int, default=8_000)
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--inflight", type=int, nargs="+", default=[64, 128, 512])
    options.add_argument("--policy", nargs="+", choices=candidates(), default=list(candidates()))
    options.add_argument("--reasons", action="store_true")
    options.add_argument("--page", type=Path)
    args = options.parse_args()
    rows = [
        "| policy | in flight | busiest / mean | turns on their worker | prompt tokens cached |",
        "|---|---|---|---|---|",
    ]
    print(*rows, sep="\n")
    for name in args.policy:
        for inflight in args.inflight:
            one = Simulation(candidates()[name](), inflight, workers=args.workers).run(args.requests)
            shown = f"`{name}`" if name in POLICIES else name
            rows.append(f"| {shown} | {inflight} | {one.busiest:.2f} | {one.kept:.1%} | {one.hits:.1%} |")
            print(rows[-1], flush=True)
            if args.reasons:
                print(dict(one.reasons))
    if args.page is not None:
        put_between(args.page, "skew", "\n" + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
