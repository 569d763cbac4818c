"""The pool of workers that are apart: a lease holds one of both kinds, and nothing of a pair is left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest

from router.config import HealthConfig
from router.errors import NotFoundError, NoWorkerError
from router.policies.least_inflight import LeastInflight
from router.workers.paired_pool import PairedPool
from router.workers.policy import RouteQuery
from router.workers.pool import FullError, Lease
from router.workers.worker import ProbeResult, Worker, WorkerRole, WorkerState

QUERY = RouteQuery()
PREFILL, DECODE, REGULAR = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.REGULAR


def make_pool(prefills: int = 0, decodes: int = 0, **config: Any) -> PairedPool:
    pool = PairedPool(LeastInflight(), LeastInflight(), **config)
    for role, count in ((PREFILL, prefills), (DECODE, decodes)):
        for number in range(count):
            pool.probed(pool.add(f"http://{role.value}{number}:1", role), None)
    return pool


@pytest.mark.parametrize("seed", range(8))
def test_counts_stay_right_whatever_happens(seed: int) -> None:
    """A random walk over all operations, compared with plain bookkeeping after each step."""
    chance = random.Random(seed)
    pool = make_pool(max_inflight_per_worker=3, max_inflight=8)
    held: list[Lease] = []
    urls = [f"http://w{number}:1" for number in range(6)]
    for _ in range(500):
        step = chance.randrange(6)
        if step == 0:
            role = chance.choice((PREFILL, DECODE))
            pool.probed(pool.add(chance.choice(urls), role), None)
        elif step == 1 and pool.list():
            pool.remove(chance.choice(pool.list()).url)
        elif step == 2 and pool.list():
            worker = chance.choice(pool.list())
            if worker.state is not WorkerState.DRAINING:
                pool.introduced(worker, ProbeResult(role=chance.choice((PREFILL, DECODE))))
        elif step == 3 and held:
            held.pop(chance.randrange(len(held))).release()
        elif step == 4 and held:  # the prompt has been read
            lease = chance.choice(held)
            assert lease.prefill is not None
            lease.prefill.release()
        else:
            before = [(worker, worker.inflight) for worker in pool.list()]
            try:
                lease = pool.lease(QUERY)
            except (NoWorkerError, FullError):
                assert [(worker, worker.inflight) for worker in pool.list()] == before
            else:
                assert lease.prefill is not None
                assert (lease.prefill.worker.role, lease.worker.role) == (PREFILL, DECODE)
                held.append(lease)
        legs = [leg for lease in held for leg in (lease, lease.prefill) if leg is not None and leg._held]
        for worker in pool.list():
            assert worker.inflight == sum(leg.worker is worker for leg in legs)
            assert pool.get(worker.url) is worker
        assert pool._inflight == len(held) <= 8
        kinds = {worker.role for worker in pool.list() if worker.routable}
        assert bool(pool.routable) == (kinds == {PREFILL, DECODE})


def test_workers_that_do_all_are_leased_alone() -> None:
    pool = make_pool()
    pool.probed(pool.add("http://w:1"), None)
    assert not pool.apart
    lease = pool.lease(QUERY)
    assert lease.prefill is None
    lease.release()


def test_what_is_missing_is_named() -> None:
    pool = make_pool(apart=True)
    with pytest.raises(NoWorkerError, match="no prefill worker is registered"):
        pool.lease(QUERY)
    pool.probed(pool.add("http://p:1", PREFILL), None)
    with pytest.raises(NoWorkerError, match="no decode worker is registered"):
        pool.lease(QUERY)
    pool.probed(pool.add("http://d:1", DECODE), None)
    pool.lease(QUERY).release()
    pool.remove("http://p:1")
    with pytest.raises(NoWorkerError, match="no prefill worker is registered"):
        pool.lease(QUERY)
    with pytest.raises(NotFoundError):
        pool.get("http://other:1")


def test_who_waits_for_room_is_not_told_of_room_that_never_was() -> None:
    """A decode worker that is given back because no prefill worker has room wakes nobody: that would go on for ever."""
    pool = make_pool(1, 2, max_inflight_per_worker=1)
    first = pool.lease(QUERY)
    told: list[int] = []
    pool.on_room = lambda: told.append(1)
    with pytest.raises(FullError):
        pool.lease(QUERY)
    assert told == []
    assert first.prefill is not None
    first.prefill.release()
    assert told == [1]
    second = pool.lease(QUERY)
    assert second.worker is not first.worker


@pytest.mark.parametrize(("was", "becomes"), [(PREFILL, DECODE), (DECODE, PREFILL)])
@pytest.mark.parametrize("removed_first", [False, True])
def test_a_worker_that_drains_is_gone_after_its_last_request_whatever_its_role_was_then(
    was: WorkerRole, becomes: WorkerRole, removed_first: bool
) -> None:
    pool = make_pool(2, 2)
    leases = [pool.lease(QUERY) for _ in range(2)]
    worker = pool.get(f"http://{was.value}0:1")
    if removed_first:
        pool.remove(worker.id)
    pool.introduced(worker, ProbeResult(role=becomes))
    pool.remove(worker.id)
    assert worker in pool.list()
    for lease in leases:
        lease.release()
    assert worker not in pool.list()
    assert worker.state is WorkerState.GONE


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_ranks_that_a_worker_of_either_role_has_after_a_restart_are_targets(role: WorkerRole) -> None:
    pool = make_pool(1, 1)
    worker = pool.get(f"http://{role.value}0:1")
    for ranks in (3, 2):
        pool.introduced(worker, ProbeResult(ranks=ranks))
        leases = [pool.lease(QUERY) for _ in range(ranks)]
        legs = [leg for lease in leases for leg in (lease, lease.prefill) if leg is not None]
        assert sorted(leg.target.rank for leg in legs if leg.worker is worker) == list(range(ranks))
        for lease in leases:
            lease.release()


def test_the_gate_of_versions_holds_for_both() -> None:

    pool = make_pool(1, 1, health=HealthConfig(version_gate=True))
    pool.begin("2")
    workers: tuple[Worker, ...] = pool.list()
    for worker in workers:
        pool.probed(worker, None, "1")
    assert pool.routable == ()
    pool.new_version("3", {worker.id for worker in workers})
    assert len(pool.routable) == 2
    pool.may_have_restarted(workers[0])
    assert pool.routable == ()
