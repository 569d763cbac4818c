"""The queue of requests for which no worker has room."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from router.config import BreakerConfig, QueueConfig
from router.errors import BadRequestError, NoWorkerError, QueueFullError, QueueTimeoutError
from router.policies.least_inflight import LeastInflight
from router.workers.policy import RouteQuery
from router.workers.pool import Lease, WorkerPool
from router.workers.queue import Key, RequestQueue
from router.workers.worker import ProbeResult

QUERY = RouteQuery()


def make(workers: int = 1, *, per_worker: int | None = 1, total: int | None = None, **queue: Any) -> RequestQueue:
    pool = WorkerPool(LeastInflight(), max_inflight=total, max_inflight_per_worker=per_worker)
    made = RequestQueue(pool, QueueConfig(**queue))
    for number in range(workers):
        pool.probed(pool.add(f"http://w{number}:1"), None)
    return made


async def lined_up(queue: RequestQueue, key: Key, **options: Any) -> asyncio.Task[Lease]:
    task = asyncio.create_task(queue.lease(key, QUERY, **options))
    await asyncio.sleep(0)
    return task


def test_no_request_waits_while_there_is_room() -> None:
    async def main() -> None:
        queue = make(2)
        assert {(await queue.lease(("", ""), QUERY)).worker.url for _ in range(2)} == {"http://w0:1", "http://w1:1"}
        assert len(queue) == 0

    asyncio.run(main())


def test_requests_for_a_full_rank_hold_up_no_others() -> None:
    """Though they have the same key, and came first. A rank that no worker has any more is refused."""

    async def main() -> None:
        queue = make(2)
        pool = queue._pool
        for worker, ranks in zip(pool.list(), (1, 3), strict=True):
            pool.introduced(worker, ProbeResult(engine="sglang", ranks=ranks))
        leases = {lease.target.name: lease for lease in [await queue.lease(("", ""), QUERY) for _ in range(4)]}

        async def ask(rank: int | None) -> asyncio.Task[Lease]:
            task = asyncio.create_task(queue.lease(("", ""), RouteQuery(rank=rank)))
            await asyncio.sleep(0)
            return task

        asked = [await ask(rank) for rank in (2, 2, None, 1)]
        leases["http://w0:1"].release()
        assert (await asked[2]).target.name == "http://w0:1"
        leases["http://w1:1@2"].release()
        assert (await asked[0]).target.name == "http://w1:1@2"
        await asyncio.sleep(0)
        assert [task.done() for task in asked] == [True, False, True, False]
        leases["http://w1:1"].release()
        await asyncio.sleep(0)
        assert len(queue) == 2, "nobody asked for rank 0"
        pool.introduced(pool.list()[1], ProbeResult(engine="sglang", ranks=2))
        with pytest.raises(BadRequestError, match="rank 2"):
            await asked[1]
        leases["http://w1:1@1"].release()
        assert (await asked[3]).target.name == "http://w1:1@1"

    asyncio.run(main())


def test_lines_take_turns_and_each_is_in_order() -> None:
    """A client with many requests does not make another client wait for all of them."""

    async def main() -> None:
        queue = make(size=10)
        lease = await queue.lease(("", "greedy"), QUERY)
        order = ["greedy"] * 4 + ["modest"] * 2
        tasks = [await lined_up(queue, ("", key)) for key in order]
        served = []
        for _ in tasks:
            lease.release()
            await asyncio.sleep(0)
            (number,) = [n for n, task in enumerate(tasks) if task.done() and n not in served]
            served.append(number)
            lease = tasks[number].result()
        assert served == [0, 4, 1, 5, 2, 3]
        lease.release()
        assert len(queue) == 0

    asyncio.run(main())


def test_a_later_request_does_not_overtake_waiting_ones() -> None:
    async def main() -> None:
        queue = make(size=10)
        lease = await queue.lease(("", ""), QUERY)
        first = await lined_up(queue, ("", ""))
        lease.release()
        second = await lined_up(queue, ("", ""))
        assert first.done()
        assert not second.done()
        first.result().release()
        (await second).release()

    asyncio.run(main())


def test_a_full_queue_says_when_to_come_back() -> None:
    async def main() -> None:
        queue = make(size=1)
        lease = await queue.lease(("", ""), QUERY)
        waiting = await lined_up(queue, ("", ""))
        with pytest.raises(QueueFullError, match="--queue-size 1") as caught:
            await queue.lease(("", ""), QUERY)
        assert (caught.value.status, dict(caught.value.headers)["retry-after"]) == (429, "1")
        again = await lined_up(queue, ("", ""), again=True)
        lease.release()
        await asyncio.sleep(0)
        assert again.done(), "it was served before, and goes first"
        again.result().release()
        (await waiting).release()

    asyncio.run(main())


def test_a_request_that_waits_too_long_gets_an_error() -> None:
    async def main() -> None:
        queue = make(timeout=0.01)
        lease = await queue.lease(("", ""), QUERY)
        with pytest.raises(QueueTimeoutError, match="--queue-timeout-secs") as caught:
            await queue.lease(("", ""), QUERY)
        assert caught.value.status == 408
        assert len(queue) == 0
        lease.release()
        (await queue.lease(("", ""), QUERY)).release()

    asyncio.run(main())


def test_a_request_is_passed_over_if_room_is_only_at_workers_it_has_tried() -> None:
    """Requests behind it get that room."""

    async def main() -> None:
        queue = make(2)
        pool = queue._pool
        one, two = pool.list()
        held = {lease.worker: lease for lease in [await queue.lease(("", ""), QUERY) for _ in range(2)]}
        picky = await lined_up(queue, ("", "a"), exclude={one.id})
        other = await lined_up(queue, ("", "b"))
        held[one].release()
        await asyncio.sleep(0)
        assert other.done()
        assert not picky.done()
        held[two].release()
        assert (await picky).worker is two
        for task in (picky, other):
            task.result().release()
        with pytest.raises(NoWorkerError):
            await queue.lease(("", ""), QUERY, exclude={one.id, two.id})

    asyncio.run(main())


def test_a_request_that_gives_up_holds_up_none_behind_it_that_may_go_anywhere() -> None:
    async def main() -> None:
        queue = make(2)
        one, _ = queue._pool.list()
        held = {lease.worker: lease for lease in [await queue.lease(("", ""), QUERY) for _ in range(2)]}
        picky = await lined_up(queue, ("", "a"), exclude={one.id})
        behind = await lined_up(queue, ("", "a"))
        held[one].release()
        assert not behind.done()
        picky.cancel()
        await asyncio.wait([picky])
        await asyncio.sleep(0)
        assert behind.done()
        assert behind.result().worker is one

    asyncio.run(main())


def test_a_worker_whose_breaker_closes_makes_room() -> None:
    """Its last trial may be a stream that goes on for an hour."""

    async def main() -> None:
        breaker = BreakerConfig(failure_threshold=1, success_threshold=1, timeout=1e-9)
        pool = WorkerPool(LeastInflight(), breaker=breaker, max_inflight_per_worker=2)
        queue = RequestQueue(pool, QueueConfig())
        pool.probed(worker := pool.add("http://w:1"), None)
        pool.probed(full := pool.add("http://full:1"), None)
        for _ in range(2):
            await queue.lease(("", ""), QUERY, {worker.id})
        worker.breaker.failed()
        trial = await queue.lease(("", ""), QUERY, {full.id})
        assert trial.reason == "trial"
        waiting = await lined_up(queue, ("", ""))
        assert not waiting.done()
        worker.breaker.succeeded()
        await asyncio.sleep(0)
        assert waiting.done()

    asyncio.run(main())


def test_a_new_worker_makes_room() -> None:
    async def main() -> None:
        queue = make(1)
        await queue.lease(("", ""), QUERY)
        waiting = await lined_up(queue, ("", ""))
        queue._pool.probed(queue._pool.add("http://new:1"), None)
        assert (await waiting).worker.url == "http://new:1"

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(30))
def test_no_lease_is_lost_when_requests_leave(seed: int) -> None:
    """Requests arrive, are cancelled at any moment, and release; at the end nothing is held and none waits."""
    draw = random.Random(seed)

    async def main() -> None:
        outcomes: Counter[str] = Counter()
        pool = WorkerPool(LeastInflight(), max_inflight=4, max_inflight_per_worker=2)
        queue = RequestQueue(pool, QueueConfig(size=8), lambda _, outcome: outcomes.update([outcome]))
        for number in range(3):
            pool.probed(pool.add(f"http://w{number}:1"), None)
        tasks: list[asyncio.Task[Lease]] = []
        held: list[Lease] = []
        for _ in range(300):
            step = draw.randrange(4)
            if step == 0:
                key = ("", str(draw.randrange(3)))
                exclude = {draw.choice(pool.list()).id} if draw.random() < 0.2 else frozenset[str]()
                tasks.append(asyncio.create_task(queue.lease(key, QUERY, exclude, again=draw.random() < 0.1)))
            elif step == 1 and held:
                held.pop(draw.randrange(len(held))).release()
            elif step == 2 and tasks:
                draw.choice(tasks).cancel()
            if draw.random() < 0.7:
                await asyncio.sleep(0)
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                if not task.cancelled() and task.exception() is None:
                    held.append(task.result())
                elif not task.cancelled():
                    assert isinstance(task.exception(), QueueFullError)
            assert sum(worker.inflight for worker in pool.list()) <= 4
            assert all(worker.inflight <= 2 for worker in pool.list())
        while tasks or held:
            for lease in held:
                lease.release()
            held.clear()
            await asyncio.sleep(0)
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                if not task.cancelled() and task.exception() is None:
                    held.append(task.result())
        assert len(queue) == 0
        assert not queue._lines
        assert [worker.inflight for worker in pool.list()] == [0, 0, 0]
        assert set(outcomes) <= {"served", "full", "left"}

    asyncio.run(main())
