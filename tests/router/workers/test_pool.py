"""The pool: adding, draining, leasing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from router.config import BreakerConfig, HealthConfig
from router.errors import BadRequestError, NotFoundError, NoWorkerError
from router.policies.least_inflight import LeastInflight
from router.workers.breaker import BreakerState
from router.workers.policy import RouteQuery
from router.workers.pool import FullError, Lease, WorkerPool
from router.workers.worker import ProbeResult, WorkerState

QUERY = RouteQuery()


def make_pool(count: int = 0, **config: Any) -> WorkerPool:
    pool = WorkerPool(LeastInflight(), **config)
    for number in range(count):
        pool.probed(pool.add(f"http://w{number}:1"), None)
    return pool


def test_adding_again_changes_nothing() -> None:
    pool = make_pool()
    worker = pool.add("http://w:1")
    lease = pool.lease(QUERY)
    assert pool.add("http://W:1/") is worker
    assert len(pool.list()) == 1
    assert worker.inflight == 1
    lease.release()


def test_a_worker_that_may_be_another_process_knows_no_pictures() -> None:
    pool = make_pool(2)
    one, two = pool.list()
    for worker in (one, two):
        worker.images.note(["cat"])
    pool.probed(one, None)
    assert "cat" in one.images
    pool.probed(one, "no connection", absent=True)
    assert "cat" not in one.images
    assert "cat" in two.images
    pool.may_have_restarted(two)
    assert "cat" not in two.images


def test_idle_worker_is_gone_at_once() -> None:
    pool = make_pool(1)
    worker = pool.remove("http://w0:1")
    assert worker.state is WorkerState.GONE
    assert pool.list() == pool.routable == ()


def test_removal_drains() -> None:
    pool = make_pool(1)
    first, second = pool.lease(QUERY), pool.lease(QUERY)
    worker = pool.remove("http://w0:1")
    assert pool.remove("http://w0:1") is worker  # again is no error
    assert worker.state is WorkerState.DRAINING
    with pytest.raises(NoWorkerError, match="draining"):
        pool.lease(QUERY)
    first.release()
    assert pool.list() == (worker,)
    second.release()
    assert pool.list() == ()
    assert worker.state is WorkerState.GONE


def test_draining_worker_is_taken_back() -> None:
    pool = make_pool(1)
    lease = pool.lease(QUERY)
    worker = pool.remove("http://w0:1")
    assert pool.add("http://w0:1") is worker
    assert worker.state is WorkerState.STARTING
    lease.release()
    pool.probed(worker, None)
    assert pool.routable == (worker,)


def test_lease_is_released_once() -> None:
    pool = make_pool(1)
    lease = pool.lease(QUERY)
    other = pool.lease(QUERY)
    assert repr(lease) == "<Lease held <Target http://w0:1 healthy inflight=2>>"
    lease.release()
    lease.release()
    assert lease.worker.inflight == 1
    with other:
        pass
    assert repr(other) == "<Lease released <Target http://w0:1 healthy inflight=0>>"


def test_excluded_workers_are_not_leased() -> None:
    pool = make_pool(3)
    zero, one, two = pool.list()
    assert pool.lease(QUERY, exclude={zero.id, two.id}).worker is one
    with pytest.raises(NoWorkerError):
        pool.lease(QUERY, exclude={zero.id, one.id, two.id})


def test_workers_are_found_by_id_and_url() -> None:
    pool = make_pool(2)
    worker = pool.list()[1]
    assert pool.get(worker.id) is pool.get(worker.url) is pool.get(worker.url + "/") is worker
    with pytest.raises(NotFoundError):
        pool.get("nobody")
    with pytest.raises(NotFoundError):
        pool.remove("http://other:1")
    with pytest.raises(BadRequestError):
        pool.remove("ftp://w1:1")


def test_empty_pool_says_what_to_do() -> None:
    with pytest.raises(NoWorkerError, match=r"POST /add_worker\?url=") as caught:
        make_pool().lease(QUERY)
    assert caught.value.status == 503


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("seed", range(10))
def test_counts_stay_right_whatever_happens(seed: int, ranks: int) -> None:
    """A random walk over all operations, compared with plain bookkeeping after each step.

    Workers have up to this many ranks, and other numbers of them after a restart.
    """
    generator = random.Random(seed)
    pool = make_pool()
    held: list[Lease] = []
    urls = [f"http://w{number}:1" for number in range(5)]
    for _ in range(400):
        step = generator.randrange(5)
        targets = [target for worker in pool.routable for target in worker.targets]
        if step == 0:
            worker = pool.add(generator.choice(urls))
            pool.introduced(worker, ProbeResult(ranks=generator.randint(1, ranks)))
            pool.probed(worker, None)
        elif step == 1 and pool.list():
            pool.remove(generator.choice(pool.list()).url)
        elif step == 2 and pool.routable:
            loads = {target: target.inflight for target in targets}
            lease = pool.lease(QUERY)
            assert loads[lease.target] == min(loads.values())
            held.append(lease)
        elif step == 3 and pool.routable:
            rank = generator.randrange(ranks)
            if able := [target for target in targets if target.rank == rank]:
                lease = pool.lease(RouteQuery(rank=rank))
                assert lease.target in able
                held.append(lease)
            else:
                with pytest.raises((BadRequestError, NoWorkerError)):
                    pool.lease(RouteQuery(rank=rank))
        elif step == 4 and held:
            held.pop(generator.randrange(len(held))).release()
        for worker in pool.list():
            assert worker.inflight == sum(lease.worker is worker for lease in held)
            for target in worker.targets:
                assert target.inflight == sum(lease.target is target for lease in held)
            assert [(target.worker, target.rank) for target in worker.targets] == [
                (worker, rank) for rank in range(len(worker.targets))
            ]
            assert worker.state is not WorkerState.GONE
            assert worker.routable or worker.inflight > 0
        assert all(lease.worker in pool.list() for lease in held)
        assert pool.routable == tuple(worker for worker in pool.list() if worker.routable)


def make_ranks(*ranks: int, **config: Any) -> WorkerPool:
    pool = make_pool(len(ranks), **config)
    for worker, count in zip(pool.list(), ranks, strict=True):
        pool.introduced(worker, ProbeResult(engine="sglang", ranks=count))
    return pool


def test_a_worker_with_ranks_is_as_many_targets() -> None:
    pool = make_ranks(1, 3)
    names = [pool.lease(QUERY).target.name for _ in range(4)]
    assert names == ["http://w0:1", "http://w1:1", "http://w1:1@1", "http://w1:1@2"]
    assert [worker.inflight for worker in pool.list()] == [1, 3]


def test_only_workers_that_have_a_rank_get_requests_for_it() -> None:
    pool = make_ranks(1, 3, 2)
    assert {pool.lease(RouteQuery(rank=1)).target.name for _ in range(4)} == {"http://w1:1@1", "http://w2:1@1"}
    with pytest.raises(BadRequestError, match=r"no worker has the data-parallel rank 3: the ranks are 0 to 2"):
        pool.lease(RouteQuery(rank=3))
    pool.remove("http://w1:1")
    with pytest.raises(NoWorkerError):  # it is still there, and may come back
        pool.lease(RouteQuery(rank=2))


def test_a_worker_that_has_not_introduced_itself_may_have_any_rank() -> None:
    pool = make_pool()
    pool.add("http://w0:1")
    with pytest.raises(NoWorkerError):
        pool.lease(RouteQuery(rank=5))
    with pytest.raises(NoWorkerError, match="no worker is registered"):
        make_pool().lease(RouteQuery(rank=0))


def test_the_limit_holds_for_each_target() -> None:
    pool = make_ranks(1, 2, max_inflight_per_worker=2)
    for _ in range(6):
        pool.lease(QUERY)
    assert [[target.inflight for target in worker.targets] for worker in pool.list()] == [[2], [2, 2]]
    with pytest.raises(FullError):
        pool.lease(QUERY)


@pytest.mark.parametrize("ranks", [0, -3, 1 << 40])
def test_a_number_of_ranks_that_no_engine_has_counts_as_one(ranks: int) -> None:
    assert [target.name for target in make_ranks(ranks).list()[0].targets] == ["http://w0:1"]


def test_a_lease_of_a_rank_that_is_gone_still_counts_at_its_worker() -> None:
    pool = make_ranks(3)
    (worker,) = pool.list()
    leases = [pool.lease(QUERY) for _ in range(3)]
    pool.introduced(worker, ProbeResult(engine="sglang", ranks=1))
    assert [target.inflight for target in worker.targets] == [1]
    assert worker.inflight == 3
    assert not leases[2].target.routable
    pool.remove(worker.url)
    for lease in leases:
        assert worker.state is WorkerState.DRAINING
        lease.release()
    assert worker.state is WorkerState.GONE


def test_workers_that_never_answered_are_the_last_resort() -> None:
    pool = make_pool(1)
    starting = pool.add("http://late:1")
    assert pool.routable == (pool.list()[0],)
    for _ in range(3):
        assert pool.lease(QUERY).worker is not starting
    lease = pool.lease(QUERY, exclude={pool.list()[0].id})
    assert (lease.worker, lease.reason) == (starting, "last_resort")
    pool.probed(starting, None)
    assert starting in pool.routable


def test_quarantined_workers_get_no_requests_and_the_error_says_so() -> None:
    pool = make_pool(1)
    for _ in range(3):
        pool.probed(pool.list()[0], "connection refused")
    with pytest.raises(NoWorkerError, match="http://w0:1 is quarantined: connection refused") as caught:
        pool.lease(QUERY)
    assert dict(caught.value.headers)["retry-after"] == "10"


def test_a_last_resort_is_a_quarantined_worker_that_was_absent_but_not_one_that_hangs() -> None:
    pool = make_pool(2)
    gone, hung = pool.list()
    for _ in range(3):
        pool.probed(gone, "connection refused", absent=True)
        pool.probed(hung, "no answer within 5 s")
    lease = pool.lease(QUERY)
    assert (lease.worker, lease.reason) == (gone, "last_resort")
    with pytest.raises(NoWorkerError):
        pool.lease(QUERY, exclude={gone.id})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_open_breaker_rests_its_worker_then_lets_one_request_through_at_a_time() -> None:
    clock = Clock()
    pool = make_pool(2, breaker=BreakerConfig(failure_threshold=2, success_threshold=2, timeout=60), clock=clock)
    bad, good = pool.list()
    moved: list[tuple[str, str]] = []
    pool.on_breaker = lambda worker, state: moved.append((worker.url, state.value))
    bad.breaker.failed()
    assert pool.routable == (bad, good)
    bad.breaker.failed()
    assert pool.routable == (good,)
    with pytest.raises(NoWorkerError, match="has an open circuit breaker") as caught:
        pool.lease(QUERY, exclude={good.id})
    assert dict(caught.value.headers)["retry-after"] == "60"
    clock.now = 60.0
    trial = pool.lease(QUERY, exclude={good.id})
    assert (trial.worker, trial.reason) == (bad, "trial")
    with pytest.raises(NoWorkerError):
        pool.lease(QUERY, exclude={good.id})
    bad.breaker.succeeded()
    trial.release()
    assert bad.breaker.state is BreakerState.HALF_OPEN
    with pool.lease(QUERY, exclude={good.id}):
        bad.breaker.succeeded()
    assert pool.routable == (bad, good)
    assert moved == [(bad.url, "open"), (bad.url, "half_open"), (bad.url, "closed")]


def test_limits_hold_for_all_and_for_each() -> None:
    pool = make_pool(2, max_inflight=3, max_inflight_per_worker=2)
    leases = [pool.lease(QUERY) for _ in range(3)]
    with pytest.raises(FullError):
        pool.lease(QUERY)
    pool.lease(QUERY, limited=False).release()
    leases.pop().release()
    full = max(pool.list(), key=lambda worker: worker.inflight)
    leases += [pool.lease(QUERY, exclude={worker.id for worker in pool.list() if worker is not full})] * (
        full.inflight < 2
    )
    with pytest.raises(FullError):
        pool.lease(QUERY, exclude={worker.id for worker in pool.list() if worker.inflight < 2})


def test_room_is_reported() -> None:
    pool = make_pool(1)
    calls: list[int] = []
    pool.on_room = lambda: calls.append(1)
    lease = pool.lease(QUERY)
    assert not calls
    lease.release()
    assert len(calls) == 1
    pool.probed(pool.add("http://new:1"), None)
    assert len(calls) == 3


def test_a_probe_that_shows_nothing_new_looks_at_no_other_worker() -> None:
    pool = make_pool(3)
    before = pool.routable
    for worker in pool.list():
        pool.probed(worker, None)
    assert pool.routable is before, "each of a thousand workers is probed every second while it is away"


def test_the_version_gate_excludes_workers_of_unknown_weights_as_the_last_resort_too() -> None:
    pool = make_pool(1, health=HealthConfig(version_gate=True))
    (worker,) = pool.list()
    pool.new_version("2", {worker.id})
    pool.remove(worker.id)
    pool.add("http://new:1")
    with pytest.raises(NoWorkerError):
        pool.lease(QUERY)


def test_the_version_gate_excludes_workers_at_other_weights() -> None:
    pool = make_pool(3, health=HealthConfig(version_gate=True))
    one, two, three = pool.list()
    assert len(pool.routable) == 3, "no version was set"
    pool.new_version("7", {one.id, two.id})
    assert pool.routable == (one, two)
    with pytest.raises(NoWorkerError, match="has weight version None, not '7'"):
        pool.lease(QUERY, exclude={one.id, two.id})
    pool.probed(three, None, "7")
    assert pool.routable == (one, two, three)
    pool.may_have_restarted(two)
    assert pool.routable == (one, three)
    pool.probed(two, None, "default")
    assert pool.routable == (one, three), "it came back with the weights of its disk"
    pool.new_version("8", set())
    assert pool.version == "7", "no worker took it"


def test_an_absent_worker_may_come_back_with_other_weights() -> None:
    """One bad probe leaves it routable, but its weight version is unknown."""
    pool = make_pool(2, health=HealthConfig(version_gate=True))
    one, two = pool.list()
    pool.new_version("7", {one.id, two.id})
    pool.probed(two, "refused", absent=True)
    assert (two.state, two.version, two.routable) == (WorkerState.SUSPECT, None, False)
    assert pool.routable == (one,)
    pool.probed(two, "slow")
    pool.probed(two, None, "7")
    assert pool.routable == (one, two)


def test_without_the_gate_versions_are_only_informative() -> None:
    pool = make_pool(2)
    pool.new_version("7", {pool.list()[0].id})
    assert len(pool.routable) == 2
    assert [worker.version for worker in pool.list()] == ["7", None]
