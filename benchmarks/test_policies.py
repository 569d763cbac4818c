"""The cost of a decision. Aim: 20 us at 512 workers for every policy; with prefix trees, linear in the prompt."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterator

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from router.config import BreakerConfig
from router.policies import POLICIES, create_policy
from router.policies.cache_aware import CacheAware
from router.policies.consistent_hashing import ConsistentHashing
from router.workers.policy import Policy, RouteQuery
from router.workers.pool import WorkerPool
from router.workers.worker import Target, Worker

FLEETS = pytest.mark.parametrize("count", [4, 64, 512])


def fleet(count: int, seed: int = 1) -> tuple[Target, ...]:
    generator = random.Random(seed)
    made = tuple(Target(Worker(f"http://10.0.{number // 250}.{number % 250}:30001")) for number in range(count))
    for worker in made:
        worker.inflight = generator.randrange(8)
    return made


def conversations(characters: int, kind: str, count: int = 64) -> Iterator[RouteQuery]:
    """Yield turn after turn of some conversations under one system prompt, each 400 characters (or 100 ids) longer."""
    generator = random.Random(2)
    system = generator.choices(range(32, 127), k=characters // 2)
    said = [system + generator.choices(range(32, 127), k=characters // 2) for _ in range(count)]
    for number in itertools.count():
        one = said[number % count]
        ids = array("i", one)
        one += generator.choices(range(32, 127), k=100 if kind == "ids" else 400)
        if len(one) > 2 * characters:
            del one[characters:]
        key = f"session {number % count}"
        if kind == "ids":
            yield RouteQuery(token_ids=memoryview(ids), routing_key=key)
        else:
            yield RouteQuery(text="".join(map(chr, ids)), routing_key=key)


def decide(
    benchmark: BenchmarkFixture, policy: Policy, workers: tuple[Target, ...], asked: Iterator[RouteQuery]
) -> None:
    for query in itertools.islice(asked, 1000):
        policy.select(workers, query)
    rounds = [next(asked) for _ in range(2000)]
    turns = iter(rounds)
    benchmark.pedantic(policy.select, setup=lambda: ((workers, next(turns)), {}), rounds=len(rounds))


@FLEETS
@pytest.mark.parametrize("name", POLICIES)
def test_decision(benchmark: BenchmarkFixture, name: str, count: int) -> None:
    """Prompts of 1,000 to 2,000 ids, with a routing key."""
    decide(benchmark, create_policy(name), fleet(count), conversations(1_000, "ids"))


@pytest.mark.parametrize("name", POLICIES)
def test_decision_among_ranks(benchmark: BenchmarkFixture, name: str) -> None:
    """64 workers with 8 ranks each. Aim: 30 us."""
    workers = [target.worker for target in fleet(64)]
    for worker in workers:
        worker.split(8)
    targets = tuple(target for worker in workers for target in worker.targets)
    decide(benchmark, create_policy(name), targets, conversations(1_000, "ids"))


@pytest.mark.parametrize("characters", [4_000, 16_000, 64_000])
@pytest.mark.parametrize("kind", ["text", "ids"])
def test_decision_by_the_prompt(benchmark: BenchmarkFixture, kind: str, characters: int) -> None:
    """cache_aware among 64 workers: prompts of this many characters, or a quarter as many ids."""
    decide(
        benchmark,
        create_policy("cache_aware"),
        fleet(64),
        conversations(characters // (4 if kind == "ids" else 1), kind, 16),
    )


def test_a_reply_is_learnt(benchmark: BenchmarkFixture) -> None:
    """A reply of 500 ids after a prompt of 1,000 to 2,000; cache_aware learns one per request."""
    policy, workers, asked = CacheAware(), fleet(512), conversations(1_000, "ids")
    said = memoryview(array("i", range(500)))
    for query in itertools.islice(asked, 1000):
        policy.select(workers, query)
    benchmark.pedantic(policy.replied, setup=lambda: ((workers[0], next(asked), said), {}), rounds=1000)


def test_a_worker_joins_512_with_keys(benchmark: BenchmarkFixture) -> None:
    """The ring gets 150 more places."""
    workers = fleet(513)

    def known() -> tuple[tuple[Policy], dict[str, object]]:
        policy = create_policy("consistent_hashing")
        policy.select(workers[:512], RouteQuery(routing_key="k"))
        return (policy,), {}

    benchmark.pedantic(lambda policy: policy.select(workers, RouteQuery(routing_key="k")), setup=known, rounds=10)


@pytest.mark.parametrize("name", ["least_inflight", "cache_aware"])
def test_lease(benchmark: BenchmarkFixture, name: str) -> None:
    """The whole cost of a request: a worker chosen among 512, counted, and released."""
    pool = WorkerPool(create_policy(name), breaker=BreakerConfig())
    for worker in fleet(512):
        pool.probed(pool.add(worker.name), None)
    asked = itertools.cycle(itertools.islice(conversations(1_000, "ids"), 500))
    benchmark(lambda: pool.lease(next(asked)).release())


def test_a_worker_leaves_512_with_keys(benchmark: BenchmarkFixture) -> None:
    workers = fleet(512)

    def known() -> tuple[tuple[ConsistentHashing], dict[str, object]]:
        policy = ConsistentHashing()
        policy.select(workers, RouteQuery(routing_key="k"))
        return (policy,), {}

    benchmark.pedantic(lambda policy: policy.forget(workers[100]), setup=known, rounds=10)
