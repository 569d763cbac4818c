"""Lines of the queue that wait for the one worker that the policy keeps for them."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest

from router.config import QueueConfig
from router.errors import NoWorkerError
from router.policies.manual import Manual
from router.workers.policy import RouteQuery
from router.workers.pool import Lease, WorkerPool
from router.workers.queue import RequestQueue
from router.workers.worker import ProbeResult, Worker


class CountingPool(WorkerPool):
    leases = 0

    def lease(self, *args: Any, **options: Any) -> Lease:
        self.leases += 1
        return super().lease(*args, **options)


class Kept:
    """A queue in front of workers with little room, one request each, and keys that stay with their worker."""

    def __init__(self, workers: int = 2, room: int = 1, total: int | None = None) -> None:
        self.pool = CountingPool(Manual(), max_inflight=total, max_inflight_per_worker=room)
        self.queue = RequestQueue(self.pool, QueueConfig(size=10_000))
        self.workers = [self.pool.add(f"http://w{number}:1") for number in range(workers)]
        for worker in self.workers:
            self.pool.probed(worker, None)

    async def give(self, key: str, worker: Worker) -> None:
        """Make a worker the one that is kept for a key."""
        others = {other.id for other in self.workers if other is not worker}
        (await self.queue.lease(("", key), RouteQuery(routing_key=key), others)).release()

    async def ask(self, key: str, *exclude: Worker, again: bool = False) -> asyncio.Task[Lease]:
        ids = {worker.id for worker in exclude}
        task = asyncio.create_task(self.queue.lease(("", key), RouteQuery(routing_key=key), ids, again=again))
        await asyncio.sleep(0)
        return task


def test_thousands_of_lines_behind_one_worker_cost_the_others_nothing() -> None:
    """A request asks the pool once when it comes and once when it is served, however many others wait."""

    async def main() -> None:
        kept, many = Kept(), 1000
        one, two = kept.workers
        for number in range(many):
            await kept.give(f"one{number}", one)
        await kept.give("two", two)
        leases = [await kept.ask("one0"), await kept.ask("two")]
        before = kept.pool.leases
        waiting = [await kept.ask(f"one{number}") for number in range(1, many)]
        other = await kept.ask("two")
        assert kept.pool.leases - before <= 2 * many
        before = kept.pool.leases
        leases[1].result().release()
        assert (await other).worker is two
        for first, then in itertools.pairwise([leases[0], *waiting]):
            (await first).release()
            assert (await then).worker is one
        assert kept.pool.leases - before <= 3 * many
        assert len(kept.queue) == 0

    asyncio.run(main())


def test_lines_behind_one_worker_take_turns_with_those_that_may_go_anywhere() -> None:
    async def main() -> None:
        kept = Kept()
        one, two = kept.workers
        for key in ("a", "b"):
            await kept.give(key, one)
        await kept.give("hog", two)
        await kept.ask("hog")
        held = await kept.ask("a")
        tasks = {name: await kept.ask(name[0]) for name in ("a1", "a2", "b1", "new", "b2")}
        served = []
        while tasks:
            held.result().release()
            await asyncio.sleep(0)
            (name,) = [name for name, task in tasks.items() if task.done()]
            held = tasks.pop(name)
            served.append(name)
        assert served == ["a1", "b1", "new", "a2", "b2"]

    asyncio.run(main())


def test_what_waits_for_a_removed_worker_goes_elsewhere_at_once() -> None:
    async def main() -> None:
        kept = Kept()
        one, two = kept.workers
        await kept.give("a", one)
        await kept.ask("a")
        waiting = await kept.ask("a")
        assert not waiting.done()
        kept.pool.remove(one.id)
        assert (await waiting).worker is two

    asyncio.run(main())


def test_a_retry_waits_for_no_worker_that_it_may_not_have_when_the_request_before_it_leaves() -> None:
    """Both failed at workers: one may ask its pinned worker once more, the other may not."""

    async def main() -> None:
        kept = Kept()
        one, two = kept.workers
        await kept.give("a", one)
        await kept.ask("a")
        await kept.give("hog", two)
        hog = await kept.ask("hog")
        retry = await kept.ask("a", one, again=True)
        before_it = await kept.ask("a", again=True)
        before_it.cancel()
        await asyncio.wait([before_it])
        assert not retry.done()
        hog.result().release()
        assert (await retry).worker is two

    asyncio.run(main())


def test_all_that_waits_for_a_worker_is_served_when_it_comes_back() -> None:
    """Also behind a retry that may not have it."""

    async def main() -> None:
        kept = Kept(workers=3, room=3, total=7)
        one, two, gone = kept.workers
        for key, worker in zip(("a", "hog", "left"), kept.workers, strict=True):
            await kept.give(key, worker)
        held = [await kept.ask("a") for _ in range(3)]
        for _ in range(3):
            await kept.ask("hog")
        left = await kept.ask("left")
        kept.pool.remove(gone.id)
        waiting = [await kept.ask("a") for _ in range(2)]
        anywhere = await kept.ask("")
        retry = await kept.ask("retry", one, again=True)
        left.result().release()
        for _ in range(3):
            kept.pool.probed(one, "ill")
        for task in held:
            task.result().release()
        for _ in range(2):
            kept.pool.probed(one, None)
        await asyncio.sleep(0)
        assert [task.done() for task in (*waiting, anywhere, retry)] == [True, True, True, False]
        assert {task.result().worker for task in (*waiting, anywhere)} == {one}
        assert two.inflight == 3

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_no_request_waits_that_could_be_served(seed: int) -> None:
    """Keys, ranks, retries, workers that come and go: the first of each line finds all targets full that may take it."""
    draw = random.Random(seed)

    async def main() -> None:
        manual = Manual()
        pool = WorkerPool(manual, max_inflight_per_worker=2)
        queue = RequestQueue(pool, QueueConfig(size=10_000))
        for number in range(3):
            pool.probed(pool.add(f"http://w{number}:1"), None)
            pool.introduced(pool.list()[number], ProbeResult(ranks=1 + number % (1 + seed % 3)))
        tasks: dict[asyncio.Task[Lease], tuple[RouteQuery, frozenset[str]]] = {}
        held: list[Lease] = []

        async def settle() -> None:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for task in [task for task in tasks if task.done()]:
                del tasks[task]
                if not task.cancelled() and not isinstance(task.exception(), NoWorkerError):
                    held.append(task.result())

        for _ in range(400):
            step = draw.random()
            if step < 0.5:
                key = draw.choice("abcdef")
                exclude = frozenset([draw.choice(pool.list()).id] if draw.random() < 0.2 else [])
                rank = draw.randrange(3) if draw.random() < 0.2 else None
                query = RouteQuery(routing_key=key, rank=rank)
                tasks[asyncio.create_task(queue.lease(("", key), query, exclude, again=bool(exclude)))] = query, exclude
            elif step < 0.85 and held:
                held.pop(draw.randrange(len(held))).release()
            elif step < 0.9 and tasks:
                draw.choice(list(tasks)).cancel()
            elif step < 0.95:
                pool.probed(draw.choice(pool.list()), "ill")
            else:
                pool.probed(draw.choice(pool.list()), None)
            await settle()
            assert len(queue) == len(tasks)
            for line in queue._lines.values():
                first = next(iter(line.waiters))
                targets = [target for one in pool.routable if one.id not in first.exclude for target in one.targets]
                able = [one for one in targets if first.query.rank in (None, one.rank)]
                pinned = manual.pinned_target(first.query)
                assert all(one.inflight == 2 for one in ([pinned] if pinned in able else able))
        for worker in pool.list():
            pool.probed(worker, None)
            pool.probed(worker, None)
        while tasks or held:
            for lease in held:
                lease.release()
            held.clear()
            await settle()
        assert not queue._lines
        assert not queue._by_pinned

    asyncio.run(main())
