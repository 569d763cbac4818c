"""The contract that every policy of `POLICIES` must satisfy.

A new policy is tested here without further work, except that `REASONS` lists its reasons if it gives any.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.flags import parser
from router.policies import POLICIES, create_policy
from router.policies.cache_aware import CacheAware, CacheAwareParameters
from router.policies.consistent_hashing import ConsistentHashing
from router.workers.policy import Decision, ForgetsTargets, Policy, ReadsPrompts, RouteQuery
from router.workers.pool import Lease, WorkerPool
from router.workers.worker import ProbeResult, Target, Worker
from tests.conftest import examples
from tests.router.prefix_tree.recount import check

PAGE = Path(__file__).parents[3] / "docs" / "routing.md"
EVERY = pytest.mark.parametrize("name", POLICIES)
REASONS = {
    "consistent_hashing": {"target", "key", "spilled", "no_key"},
    "manual": {"new_key", "key", "moved", "elsewhere", "no_key"},
    "cache_aware": {"continued", "cached", "spilled", "imbalance", "least_loaded", "no_prompt"},
}


def fleet(count: int) -> tuple[Target, ...]:
    return tuple(Target(Worker(f"http://w{number}:1")) for number in range(count))


def test_the_help_and_the_page_name_every_policy() -> None:
    assert ", ".join(POLICIES) in parser().format_help().replace("\n" + " " * 24, " ")
    table = PAGE.read_text().partition("| your requests | policy |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(POLICIES), "the table at the top of docs/routing.md"


def decide(policy: Policy, workers: Sequence[Target], query: RouteQuery) -> Decision:
    chosen = policy.select(workers, query)
    return chosen if isinstance(chosen, Decision) else Decision(chosen, "policy")


def queries(generator: random.Random, count: int) -> list[RouteQuery]:
    """Return queries with every combination of known and unknown fields, and prompts with a common prefix."""
    system = "You are helpful. " * 20
    found = []
    for _ in range(count):
        text = system + f"question {generator.randrange(20)} " * generator.randrange(1, 30)
        found.append(
            RouteQuery(
                text=generator.choice((None, "", text, "\ud800 alone")),
                token_ids=generator.choice((None, (), [ord(one) for one in text[:500]])),
                routing_key=generator.choice((None, "", f"key {generator.randrange(30)}", "\udcff")),
                target_worker=generator.choice((None, None, "http://w3:1", "http://nobody:1", "")),
            )
        )
    return found


@EVERY
@pytest.mark.parametrize("count", [1, 2, 3, 512])
def test_only_offered_workers_are_chosen(name: str, count: int) -> None:
    """With 1 to 512 workers, whatever is known of the request; lists and tuples, in any order."""
    generator, policy, workers = random.Random(count), create_policy(name), fleet(count)
    for query in queries(generator, 300):
        offered: Any = generator.sample(workers, generator.randrange(1, count + 1))
        offered = generator.choice((list, tuple))(offered)
        chosen, reason = decide(policy, offered, query)
        assert chosen in offered
        assert reason in REASONS.get(name, {"policy"}), f"list the reasons of {name} in REASONS"
        chosen.inflight += generator.randrange(2)


@EVERY
def test_no_worker_starves(name: str) -> None:
    """Different conversations under one system prompt reach every worker with a fair share."""
    policy, workers, served = create_policy(name), fleet(8), Counter[str]()
    for number in range(800):
        key = f"conversation {number}"
        text = "One system prompt for all. " * 40 + key
        chosen, _ = decide(policy, workers, RouteQuery(text, None, key))
        chosen.inflight += 1
        served[chosen.name] += 1
    assert all(served[worker.name] >= 60 for worker in workers), f"a worker gets too little: {served}"


@EVERY
@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_workers_come_and_go(name: str, seed: int) -> None:
    """In a pool with requests in flight, leased workers are routable, and departed workers and ranks leave nothing behind."""
    generator, policy = random.Random(seed), create_policy(name)
    pool, held = WorkerPool(policy), list[Lease]()
    urls = [f"http://w{number}:1" for number in range(6)]
    for query in queries(generator, 60):
        step = generator.randrange(5)
        if step == 0:
            worker = pool.add(generator.choice(urls))
            pool.introduced(worker, ProbeResult(ranks=generator.randint(1, 3)))
            pool.probed(worker, None)
        elif step == 1 and pool.list():
            pool.remove(generator.choice(pool.list()).url)
        elif step == 2 and held:
            held.pop(generator.randrange(len(held))).release()
        elif pool.routable:
            tried = {generator.choice(pool.list()).id} if len(pool.routable) > 1 and step == 3 else set[str]()
            lease = pool.lease(query, tried)
            assert lease.worker in pool.routable
            assert lease.worker.id not in tried
            held.append(lease)
        assert remembered(policy) <= {target.name for worker in pool.list() for target in worker.targets}


@EVERY
def test_decisions_are_reproducible(name: str) -> None:
    """Two policies with the same queries give the same decisions (random ones with the same generator)."""
    if name in ("random", "power_of_two"):
        make = type(create_policy(name))
        one, other = make(random.Random(1)), make(random.Random(1))  # type: ignore[call-arg]
    else:
        one, other = create_policy(name), create_policy(name)
    workers = fleet(5)
    for query in queries(random.Random(7), 200):
        assert decide(one, workers, query) == decide(other, workers, query)


@EVERY
def test_memory_does_not_grow_with_requests(name: str) -> None:
    """Repeated prompts add nothing, and other prompts are trimmed to the limit."""
    policy = (
        create_policy(name, CacheAwareParameters(max_tree_size=20_000))
        if name == "cache_aware"
        else create_policy(name)
    )
    workers = fleet(1)
    asked = queries(random.Random(3), 200)
    for query in asked:
        decide(policy, workers, query)
    before = weight(policy)
    for query in asked * 3:
        decide(policy, workers, query)
    assert weight(policy) == before
    if isinstance(policy, CacheAware):
        for number in range(500):
            decide(policy, workers, RouteQuery(f"{number} " * 100))
        steps = 1
        while policy.trim(1_000):
            steps += 1
        assert steps > 100, "it is not done at once"
        assert 19_000 < policy.texts.size <= 20_000


class WatchedQuery:
    """A query that records which of its fields are read."""

    def __init__(self, query: RouteQuery) -> None:
        self.query = query
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.query, name)


@EVERY
def test_a_policy_that_reads_prompts_says_so(name: str) -> None:
    """Otherwise it would get no prompts without a middleware; and nothing reads a prompt in vain."""
    policy, read = create_policy(name), set[str]()
    for query in queries(random.Random(11), 50):
        watched: Any = WatchedQuery(query)
        policy.select(fleet(3), watched)
        read |= watched.read
    assert isinstance(policy, ReadsPrompts) == bool(read & {"text", "token_ids"}), f"see ReadsPrompts about {name}"


@EVERY
def test_a_policy_forgets_its_workers(name: str) -> None:
    policy, workers = create_policy(name), fleet(4)
    for query in queries(random.Random(5), 100):
        decide(policy, workers, query)
    if isinstance(policy, ForgetsTargets):
        for worker in workers:
            policy.forget(worker)
            policy.forget(worker)  # repeating it is no error
    assert remembered(policy) == set()


def remembered(policy: Policy) -> set[str]:
    if isinstance(policy, CacheAware):
        check(policy.texts)
        check(policy.ids)
        return {*policy.texts.tenant_sizes(), *policy.ids.tenant_sizes(), *policy._recent._sums}
    return set(policy._known) if isinstance(policy, ConsistentHashing) else set()


def weight(policy: Policy) -> tuple[int, ...]:
    if isinstance(policy, CacheAware):
        return policy.texts.size, policy.ids.size, len(policy._recent)
    return (len(policy._places),) if isinstance(policy, ConsistentHashing) else ()
