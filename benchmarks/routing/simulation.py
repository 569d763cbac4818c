"""How each policy routes conversations under one system prompt: an event-driven simulation of a fleet.

`python -m benchmarks.routing.simulation [--requests N] [--page FILE]` prints a table. The policies and the worker objects are
the router's own; only time is simulated, so the results do not depend on the machine.

There are four workers. 80% of the conversations share one system prompt, the others have one of their own. Lengths are
log-normal, and a client thinks for one to three generations before its next turn. The number of conversations is such that a
given number of requests is in flight on average. `LOADS` lists the kinds of conversations.
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
from router.policies.power_of_two import PowerOfTwo
from router.policies.random_choice import RandomChoice
from router.prefix_tree.tree import TokenTree
from router.workers.policy import Decision, LearnsReplies, Policy, RouteQuery
from router.workers.worker import Target, Worker

SHARED = 0.8
PREFILL = 8_000.0  # tokens a second
DECODE = 0.02  # seconds a token of a worker that has nothing else to do
CROWD = 64  # requests that halve a worker's speed


@dataclass(frozen=True)
class ConversationKind:
    """A kind of conversations.

    Attributes:
        system: tokens of the system prompt.
        dropped: tokens at the end of each prompt that the next turn drops: a generation prompt.
        stripped: whether the next turn drops a token at both ends of each reply.
        group: conversations that start with the same prompt at the same time.
        levels: numbers of requests in flight.
    """

    system: int = 2_000
    dropped: int = 0
    stripped: bool = False
    group: int = 1
    levels: tuple[int, ...] = (64, 128, 512)


LOADS = {
    "conversations": ConversationKind(),
    "edited": ConversationKind(system=14_000, dropped=17, stripped=True, levels=(64,)),
    "groups": ConversationKind(group=16, levels=(256,)),
}


@dataclass
class SimulatedConversation:
    """A conversation: its history, and the worker of its last turn."""

    number: int
    group: int
    ids: array[int]
    shared: bool
    turns: int
    at: str | None = None
    done: int = 0


@dataclass
class SimulatedEngine:
    """A worker's cache, which evicts nothing, and the tokens it served."""

    worker: Target
    known: dict[int, int] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    warm: int = 0
    served: int = 0

    def cached(self, one: SimulatedConversation) -> int:
        """Return the tokens of this prompt that are in the cache."""
        return max(self.known.get(one.number, 0), self.groups.get(one.group, 0), self.warm if one.shared else 0)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    busiest: float  # served tokens of the busiest worker, by the mean
    kept: float  # later turns on the worker of the turn before
    hits: float  # prompt tokens that were cached
    seconds: float  # of simulated time for all of it
    reasons: Counter[str]


class PlainCacheAware:
    """The plain rule of the longest prefix, under which a run collapses onto one worker."""

    def __init__(self) -> None:
        self._tree = TokenTree()

    def select(self, workers: Sequence[Target], query: RouteQuery) -> Target:
        """Choose the longest cached prefix, unless the fleet is out of balance."""
        assert query.token_ids is not None
        loads = [worker.inflight for worker in workers]
        least, most = min(loads), max(loads)
        chosen = workers[loads.index(least)]
        if not (most - least > 64 and most > 1.5 * least):
            match = self._tree.match(query.token_ids)
            if match.matched > 0.3 * match.input:
                chosen = next(worker for worker in workers if worker.name == match.tenant)
        self._tree.insert(query.token_ids, chosen.name)
        return chosen


class Simulation:
    """One policy under one load."""

    def __init__(
        self,
        policy: Policy,
        inflight: int,
        *,
        kind: ConversationKind = LOADS["conversations"],
        workers: int = 4,
        seed: int = 1,
    ) -> None:
        self._policy = policy
        self._kind = kind
        self._random = random.Random(seed)
        self._engines = {f"http://w{n}:1": SimulatedEngine(Target(Worker(f"http://w{n}:1"))) for n in range(workers)}
        self._workers = tuple(engine.worker for engine in self._engines.values())
        self._numbers = itertools.count()
        self._ticks = itertools.count()  # orders events of the same time
        self._groups = itertools.count()
        self._left: Counter[int] = Counter()  # unfinished conversations by group
        self._system = self._tokens(kind.system)
        self._generation = self._tokens(kind.dropped)
        self._later = self._kept = self._prompt = self._hits = 0
        self._reasons: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        for _ in range(max(1, 3 * inflight // kind.group)):  # one generates while two think
            self._begin(0.0)

    def run(self, requests: int) -> Outcome:
        """Simulate this many requests."""
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

    def _begin(self, when: float) -> None:
        """Start a conversation, or a group of them with the same first prompt."""
        shared, group = self._random.random() < SHARED, next(self._groups)
        begin = self._system[:] if shared else self._tokens(self._length(200))
        begin += self._tokens(self._length(150))
        self._left[group] = self._kind.group
        for _ in range(self._kind.group):
            one = SimulatedConversation(next(self._numbers), group, begin, shared, turns=min(40, self._length(5)))
            self._plan(when, self._asks(one))

    def _asks(self, one: SimulatedConversation) -> Callable[[float], None]:
        def ask(now: float) -> None:
            if one.done:
                one.ids = one.ids + self._tokens(self._length(150))
            prompt = one.ids + self._generation
            query = RouteQuery(token_ids=memoryview(prompt), routing_key=str(one.number))
            chosen = self._policy.select(self._workers, query)
            worker, reason = chosen if isinstance(chosen, Decision) else (chosen, "policy")
            self._reasons[reason] += 1
            if one.at is not None:
                self._later += 1
                self._kept += one.at == worker.name
            one.at = worker.name
            engine, reply = self._engines[worker.name], self._tokens(self._length(300))
            cached = engine.cached(one)
            self._prompt += len(prompt)
            self._hits += cached
            engine.served += len(prompt) + len(reply)
            worker.inflight += 1
            slow = DECODE * (1 + worker.inflight / CROWD)
            seconds = (len(prompt) - cached) / PREFILL + len(reply) * slow
            self._plan(now + seconds, self._answered(one, engine, query, reply, seconds))

        return ask

    def _answered(
        self, one: SimulatedConversation, engine: SimulatedEngine, query: RouteQuery, reply: array[int], seconds: float
    ) -> Callable[[float], None]:
        def answered(now: float) -> None:
            engine.worker.inflight -= 1
            if isinstance(self._policy, LearnsReplies):
                self._policy.replied(engine.worker, query, memoryview(reply))
            engine.groups.setdefault(one.group, len(one.ids))
            said = reply[1:-1] if self._kind.stripped else reply
            # The cache has what the next prompt starts with: less than was said, if the next turn drops some of it.
            engine.known[one.number] = len(one.ids) + (0 if self._kind.dropped else len(reply))
            one.ids = one.ids + said  # a new array: the old one was handed out
            if one.shared:
                engine.warm = self._kind.system
            one.done += 1
            when = now + seconds * self._random.uniform(1, 3)
            if one.done < one.turns:
                self._plan(when, self._asks(one))
                return
            self._left[one.group] -= 1
            if not self._left[one.group]:
                del self._left[one.group]
                self._begin(when)

        return answered


def candidates() -> dict[str, Callable[[], Policy]]:
    """Return the compared policies by name; random ones have a fixed seed."""
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
    options.add_argument("--load", nargs="+", choices=LOADS, default=list(LOADS))
    options.add_argument("--inflight", type=int, nargs="+", help="instead of those of each load")
    options.add_argument("--policy", nargs="+", choices=candidates(), default=list(candidates()))
    options.add_argument("--reasons", action="store_true")
    options.add_argument("--page", type=Path)
    args = options.parse_args()
    rows = [
        "| load | policy | in flight | busiest / mean | turns on their worker | prompt tokens cached |",
        "|---|---|---|---|---|---|",
    ]
    print(*rows, sep="\n")
    for load, name in itertools.product(args.load, args.policy):
        levels = args.inflight or LOADS[load].levels
        found = []
        for inflight in levels:
            one = Simulation(candidates()[name](), inflight, kind=LOADS[load], workers=args.workers).run(args.requests)
            found.append(one)
            if args.reasons:
                print(dict(one.reasons))
        cells = [
            f"`{name}`" if name in POLICIES else name,
            " / ".join(str(inflight) for inflight in levels),
            " / ".join(f"{one.busiest:.2f}" for one in found),
            " / ".join(f"{one.kept:.1%}" for one in found),
            " / ".join(f"{one.hits:.1%}" for one in found),
        ]
        rows.append(f"| {load} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    if args.page is not None:
        put_between(args.page, "skew", "\n" + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
