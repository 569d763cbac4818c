"""The pool: adding, draining, leasing."""

from __future__ import annotations

import random

import pytest

from router.errors import BadRequestError, NotFoundError, NoWorkerError
from router.policies.base import RouteQuery
from router.policies.least_inflight import LeastInflight
from router.workers.pool import Lease, WorkerPool
from router.workers.worker import WorkerState

QUERY = RouteQuery()


def make_pool(count: int = 0) -> WorkerPool:
    pool = WorkerPool(LeastInflight())
    for number in range(count):
        pool.add(f"http://w{number}:1")
    return pool


def test_adding_again_changes_nothing() -> None:
    pool = make_pool()
    worker = pool.add("http://w:1")
    lease = pool.lease(QUERY)
    assert pool.add("http://W:1/") is worker
    assert len(pool.list()) == 1
    assert worker.inflight == 1
    lease.release()


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
    assert worker.state is WorkerState.HEALTHY
    lease.release()
    assert pool.routable == (worker,)


def test_lease_is_released_once() -> None:
    pool = make_pool(1)
    lease = pool.lease(QUERY)
    other = pool.lease(QUERY)
    assert repr(lease) == "<Lease held <Worker http://w0:1 healthy inflight=2>>"
    lease.release()
    lease.release()
    assert lease.worker.inflight == 1
    with other:
        pass
    assert repr(other) == "<Lease released <Worker http://w0:1 healthy inflight=0>>"


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


@pytest.mark.parametrize("seed", range(20))
def test_counts_stay_right_whatever_happens(seed: int) -> None:
    """A random walk over all operations, compared with plain bookkeeping after each step."""
    generator = random.Random(seed)
    pool = make_pool()
    held: list[Lease] = []
    urls = [f"http://w{number}:1" for number in range(5)]
    for _ in range(400):
        step = generator.randrange(4)
        if step == 0:
            pool.add(generator.choice(urls))
        elif step == 1 and pool.list():
            pool.remove(generator.choice(pool.list()).url)
        elif step == 2 and pool.routable:
            lease = pool.lease(QUERY)
            least = (
                min(worker.inflight for worker in pool.routable if worker is not lease.worker)
                if len(pool.routable) > 1
                else 0
            )
            assert len(pool.routable) == 1 or lease.worker.inflight - 1 <= least
            held.append(lease)
        elif step == 3 and held:
            held.pop(generator.randrange(len(held))).release()
        for worker in pool.list():
            assert worker.inflight == sum(lease.worker is worker for lease in held)
            assert worker.state is not WorkerState.GONE
            assert worker.routable or worker.inflight > 0
        assert all(lease.worker in pool.list() for lease in held)
        assert pool.routable == tuple(worker for worker in pool.list() if worker.routable)
