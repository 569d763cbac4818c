"""The ring of consistent_hashing: owners of keys, and what changes with the fleet."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from router.policies.consistent_hashing import BOUND, PLACES, ConsistentHashing
from router.workers.policy import RouteQuery
from router.workers.worker import Target, Worker

KEYS = [f"session {number}" for number in range(2000)]


def fleet(*inflight: int) -> tuple[Target, ...]:
    made = []
    for number, count in enumerate(inflight):
        made.append(Target(Worker(f"http://w{number}:1")))
        made[-1].inflight = count
    return tuple(made)


def owners(policy: ConsistentHashing, workers: tuple[Target, ...]) -> dict[str, str]:
    return {key: policy.select(workers, RouteQuery(routing_key=key)).target.name for key in KEYS}


def test_a_key_stays_on_its_worker_after_a_restart() -> None:
    workers = fleet(0, 0, 0, 0)
    policy = ConsistentHashing()
    assert owners(policy, workers) == owners(policy, workers) == owners(ConsistentHashing(), workers[::-1])


def test_keys_are_spread() -> None:
    counts = Counter(owners(ConsistentHashing(), fleet(0, 0, 0, 0)).values())
    assert all(350 < count < 650 for count in counts.values()), counts


def test_a_drained_worker_leaves_the_others_their_keys() -> None:
    """It is forgotten at the end of its last request, when the others have been offered alone for a while."""
    workers = fleet(0, 0, 0)
    policy = ConsistentHashing()
    owners(policy, workers)
    left = workers[:2]
    before = owners(policy, left)
    policy.forget(workers[2])
    assert owners(policy, left) == before


def test_a_new_worker_only_takes_keys_for_itself() -> None:
    workers = fleet(0, 0, 0, 0, 0)
    policy = ConsistentHashing()
    before, after = owners(policy, workers[:4]), owners(policy, workers)
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} == {workers[4].name}
    assert 250 < len(moved) < 550


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_departed_worker_only_gives_up_its_own_keys(forgotten: bool) -> None:
    """It is gone for good, or not offered because its breaker is open or it was tried already."""
    workers = fleet(0, 0, 0, 0)
    policy = ConsistentHashing()
    before = owners(policy, workers)
    if forgotten:
        policy.forget(workers[1])
    after = owners(policy, (workers[0], *workers[2:]))
    assert {before[key] for key in KEYS if before[key] != after[key]} == {workers[1].name}
    assert len(policy) == (3 if forgotten else 4)


def test_the_client_names_a_worker_by_url_or_id() -> None:
    workers = fleet(0, 99, 0)
    policy = ConsistentHashing()
    for name in (workers[1].name, f"{workers[1].name}/", workers[1].worker.id):
        assert policy.select(workers, RouteQuery(routing_key="k", target_worker=name)) == (workers[1], "target")


def test_the_client_names_a_rank_or_leaves_it_to_the_key() -> None:
    worker = Worker("http://w:1")
    worker.split(4)
    targets = (Target(Worker("http://other:1")), *worker.targets)
    policy = ConsistentHashing()
    for rank, target in enumerate(worker.targets):
        query = RouteQuery(routing_key="k", target_worker=f"http://w:1@{rank}")
        assert policy.select(targets, query) == (target, "target")
    ranks = {}
    for number in range(40):
        query = RouteQuery(routing_key=f"k{number}", target_worker="http://w:1")
        (ranks[number], _) = policy.select(targets, query)
        assert ConsistentHashing().select(targets, query) == (ranks[number], "target")
    assert set(ranks.values()) == set(worker.targets)
    worker.targets[0].inflight = 1
    assert policy.select(targets, RouteQuery(target_worker="http://w:1")) == (worker.targets[1], "target")


def test_a_missing_worker_is_no_target() -> None:
    workers = fleet(0, 0, 0)
    query = RouteQuery(routing_key="k", target_worker="http://elsewhere:1")
    assert ConsistentHashing().select(workers, query) == ConsistentHashing().select(
        workers, RouteQuery(routing_key="k")
    )


def test_without_a_key_the_least_loaded_is_chosen() -> None:
    workers = fleet(2, 1, 3)
    assert ConsistentHashing().select(workers, RouteQuery()) == (workers[1], "no_key")


def test_a_key_spills_to_the_same_neighbour_and_returns() -> None:
    workers = fleet(10, 10, 10, 10)
    policy, query = ConsistentHashing(), RouteQuery(routing_key="k")
    own, reason = policy.select(workers, query)
    assert reason == "key"
    own.inflight = 14  # with this request 45 are in flight, and 1.25 times the mean is 14.06
    assert policy.select(workers, query) == (own, "key")
    own.inflight = 15
    spilled = policy.select(workers, query)
    assert spilled.target is not own
    assert spilled.reason == "spilled"
    assert policy.select(workers, query) == spilled
    own.inflight = 10
    assert policy.select(workers, query) == (own, "key")


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.text(max_size=5))
@example([1, 1, 1, 0, 0], "at the bound")
def test_the_choice_follows_the_ring_with_bounded_loads(inflight: list[int], key: str) -> None:
    """Compare with an independent implementation of the definition."""
    workers = fleet(*inflight)
    places = sorted(
        (xxh3_64_intdigest(f"{worker.name}#{number}".encode()), worker.name, worker)
        for worker in workers
        for number in range(PLACES)
    )
    at = xxh3_64_intdigest(key.encode())
    behind = [worker for place, _, worker in places if place > at]
    most = BOUND * (sum(inflight) + 1) / len(workers)
    expected = next(worker for worker in (*behind, *(one for _, _, one in places)) if worker.inflight < most)
    assert ConsistentHashing().select(workers, RouteQuery(routing_key=key)).target is expected
