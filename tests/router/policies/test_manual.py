"""The policy `manual`: a key stays on its first worker."""

from __future__ import annotations

import pytest

from router.policies import manual
from router.policies.manual import Manual, ManualParameters
from router.workers.policy import RouteQuery
from router.workers.pool import PinnedTargetFullError, WorkerPool
from router.workers.worker import ProbeResult, Target


def fleet(count: int, pool: WorkerPool | None = None) -> tuple[Target, ...]:
    pool = pool or WorkerPool(Manual())
    for number in range(count):
        pool.probed(pool.add(f"http://w{number}:1"), None)
    return tuple(worker.targets[0] for worker in pool.list())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def query(key: str | None, tenant: str = "") -> RouteQuery:
    return RouteQuery(routing_key=key, tenant=tenant)


def test_a_key_stays_with_its_first_worker_whatever_the_load() -> None:
    policy, workers = Manual(), fleet(4)
    first = policy.select(workers, query("k"))
    assert first.reason == "new_key"
    first.target.inflight = 10_000
    assert [policy.select(workers, query("k")) for _ in range(3)] == [(first.target, "key")] * 3


def test_a_new_key_goes_to_the_least_loaded() -> None:
    policy, workers = Manual(), fleet(3)
    workers[0].inflight = workers[2].inflight = 1
    assert policy.select(workers, query("k")) == (workers[1], "new_key")
    workers[1].inflight = 5
    assert policy.select(workers, query("another")).target is not workers[1]


@pytest.mark.parametrize("key", [None, ""])
def test_without_a_key_the_least_loaded_is_chosen_in_turn(key: str | None) -> None:
    policy, workers = Manual(), fleet(3)
    told = [policy.select(workers, query(key)) for _ in range(3)]
    assert {decision.target for decision in told} == set(workers)
    assert {decision.reason for decision in told} == {"no_key"}
    assert len(policy) == 0


def test_keys_of_a_lost_worker_move_once() -> None:
    pool = WorkerPool(Manual())
    workers = fleet(3, pool)
    first = pool.lease(query("k"))
    first.release()
    pool.remove(first.worker.url)
    second = pool.lease(query("k"))
    second.release()
    assert (second.reason, second.worker is first.worker) == ("moved", False)
    back = pool.add(first.worker.url)
    pool.probed(back, None)
    third = pool.lease(query("k"))
    assert (third.worker, third.reason) == (second.worker, "key")
    assert len(workers) == 3


def test_a_worker_that_is_not_offered_keeps_its_keys() -> None:
    """For example on a retry, after it had no room."""
    policy, workers = Manual(), fleet(3)
    first = policy.select(workers, query("k")).target
    others = tuple(worker for worker in workers if worker is not first)
    worker, reason = policy.select(others, query("k"))
    assert (worker in others, reason) == (True, "elsewhere")
    assert policy.select(workers, query("k")) == (first, "key")


def test_a_key_waits_for_its_full_worker_while_others_take_other_keys() -> None:
    pool = WorkerPool(Manual(), max_inflight_per_worker=1)
    fleet(2, pool)
    held = pool.lease(query("k"))
    with pytest.raises(PinnedTargetFullError):
        pool.lease(query("k"))
    other = pool.lease(query("another"))
    assert other.worker is not held.worker
    held.release()
    assert pool.lease(query("k")).worker is held.worker


def test_a_key_stays_on_its_rank_and_moves_when_the_worker_lost_it() -> None:
    pool = WorkerPool(Manual(), max_inflight_per_worker=1)
    (first,) = fleet(1, pool)
    pool.introduced(first.worker, ProbeResult(ranks=3))
    for key in "abc":
        pool.lease(query(key)).release()
    held = pool.lease(query("c"))
    assert (held.target.rank, held.reason) == (2, "key")
    with pytest.raises(PinnedTargetFullError):
        pool.lease(query("c"))
    pool.introduced(first.worker, ProbeResult(ranks=2))
    assert pool.may_take(held.target), "it is gone, so nothing waits for it"
    assert pool.lease(query("c")).reason == "moved"


def test_an_idle_key_is_forgotten() -> None:
    clock = Clock()
    policy, workers = Manual(ManualParameters(10.0), clock), fleet(2)
    for key in ("old", "new"):
        policy.select(workers, query(key))
        policy.released(query(key))
        clock.now += 6.0
    assert policy.select(workers, query("new")).reason == "key"
    assert len(policy) == 1
    assert policy.select(workers, query("old")).reason == "new_key"


def test_a_key_is_in_use_during_a_long_generation() -> None:
    clock = Clock()
    pool = WorkerPool(Manual(ManualParameters(10.0), clock))
    fleet(2, pool)
    long = pool.lease(query("k"))
    clock.now += 100.0
    assert pool.lease(query("other")).reason == "new_key"
    short = pool.lease(query("k"))
    assert short.reason == "key"
    short.release()
    clock.now += 100.0
    long.release()
    clock.now += 9.0
    assert pool.lease(query("k")).worker is long.worker


def test_a_key_is_in_use_while_another_worker_has_its_request() -> None:
    clock = Clock()
    pool = WorkerPool(Manual(ManualParameters(10.0), clock))
    fleet(3, pool)
    first = pool.lease(query("k"))
    first.release()
    assert pool.lease(query("k"), {first.worker.id}).reason == "elsewhere"
    clock.now += 100.0
    pool.lease(query("other")).release()
    again = pool.lease(query("k"))
    assert (again.worker, again.reason) == (first.worker, "key")


def test_tenants_do_not_share_keys() -> None:
    policy, workers = Manual(), fleet(2)
    first = policy.select(workers, query("k", "one"))
    assert policy.select(workers, query("k", "two")).reason == "new_key"
    assert policy.select(workers, query("k", "one")) == (first.target, "key")
    # A tenant's name cannot be extended into another tenant's key.
    policy.select(workers, query("bc", "a"))
    assert policy.select(workers, query("c", "ab")).reason == "new_key"


def test_the_number_of_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manual, "MOST_KEYS", 10)
    policy, workers = Manual(), fleet(2)
    for number in range(100):
        policy.select(workers, query(f"{number} " * 10_000))
    assert len(policy) == 10
    assert policy.select(workers, query("99 " * 10_000)).reason == "key"


def test_the_key_whose_request_ended_last_holds_up_no_other() -> None:
    """Keys are forgotten in the order of their last use, which may be an end."""
    clock = Clock()
    policy, workers = Manual(ManualParameters(50.0), clock), fleet(2)
    for key in "ab":
        policy.select(workers, query(key))
    for clock.now, key in (1.0, "b"), (40.0, "a"):
        policy.released(query(key))
    clock.now = 60.0
    assert policy.select(workers, query("b")).reason == "new_key"
    assert policy.select(workers, query("a")).reason == "key"
