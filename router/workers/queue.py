"""The queue in front of the workers: requests for which none has room now.

Nothing is held back while there is room: the limits (`--max-inflight`, `--max-inflight-per-worker`) are for fleets in which a
worker's own queue is the worse place to wait in, because what waits there cannot go to another worker any more.

It is fair between keys (the routing key, else the tenant): each key's requests wait in a line of their own, and the lines take
turns. So one client with a thousand requests does not keep another one waiting for all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from router.config import QueueConfig
from router.errors import NoWorkerError, QueueFullError, QueueTimeoutError
from router.policies.base import RouteQuery
from router.workers.pool import FullError, KeeperFullError, Lease, WorkerPool

Key = tuple[str, str]
"""Tenant and routing key."""


class _Waiter:
    """One request in the queue."""

    __slots__ = ("exclude", "future", "in_line", "key", "query")

    def __init__(self, key: Key, query: RouteQuery, exclude: AbstractSet[str]) -> None:
        self.key = key
        self.query = query
        self.exclude = exclude
        self.in_line = True
        self.future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()


class RequestQueue:
    """Leases workers, and lets requests wait for one."""

    def __init__(
        self, pool: WorkerPool, config: QueueConfig, on_waited: Callable[[float, str], None] | None = None
    ) -> None:
        """`on_waited` is told the seconds that a request stood here, and what came of it: served, full, timeout, left."""
        self._pool = pool
        self._config = config
        self._on_waited = on_waited
        self._lines: OrderedDict[Key, deque[_Waiter]] = OrderedDict()
        self._waiting = 0
        pool.on_room = self._serve

    def __len__(self) -> int:
        return self._waiting

    async def lease(
        self, key: Key, query: RouteQuery, exclude: AbstractSet[str] = frozenset(), *, again: bool = False
    ) -> Lease:
        """A worker, at once or when there is room.

        Args:
            key: whose request it is.
            query: what is known of it, for the policy.
            exclude: ids of workers that are not to have it.
            again: it was served before, by a worker that failed: it goes to the head of its line, and past a full queue.

        Raises:
            NoWorkerError: no worker is left for it.
            QueueFullError: so many are waiting already.
            QueueTimeoutError: there was no room in time.
        """
        if not self._waiting:
            try:
                return self._pool.lease(query, exclude)
            except FullError:
                pass
        if self._waiting >= self._config.size and not again:
            self._tell(0.0, "full")
            raise QueueFullError(
                f"all workers are busy and {self._waiting} requests wait (--queue-size {self._config.size}): try again",
                headers=(("retry-after", "1"),),
            )
        waiter = self._line_up(key, query, exclude, first=again)
        begun, outcome = time.monotonic(), "left"
        try:
            self._serve()
            async with asyncio.timeout(self._config.timeout):
                lease = await waiter.future
            outcome = "served"
            return lease
        except TimeoutError:
            outcome = "timeout"
            raise QueueTimeoutError(
                f"no worker had room for this request within {self._config.timeout:g} s (--queue-timeout-secs)",
                headers=(("retry-after", "1"),),
            ) from None
        finally:
            if outcome != "served":
                self._give_up(waiter)
            self._tell(time.monotonic() - begun, outcome)

    def _line_up(self, key: Key, query: RouteQuery, exclude: AbstractSet[str], *, first: bool) -> _Waiter:
        waiter = _Waiter(key, query, exclude)
        line = self._lines.setdefault(key, deque())
        if first:
            line.appendleft(waiter)
        else:
            line.append(waiter)
        self._waiting += 1
        return waiter

    def _serve(self) -> None:
        """Give to those who wait what room there is, a line at a time. Called whenever there may be some."""
        passed_over = 0
        while self._waiting and passed_over < len(self._lines):
            key, line = next(iter(self._lines.items()))
            waiter = line[0]
            if waiter.future.cancelled():
                self._leave(waiter)  # its task will find out
                continue
            try:
                lease = self._pool.lease(waiter.query, waiter.exclude)
            except FullError as error:
                if not waiter.exclude and not isinstance(error, KeeperFullError):
                    return  # so there is room for nobody
                passed_over += 1  # there may be, at the workers that it has tried or does not want
                self._lines.move_to_end(key)
                continue
            except NoWorkerError as error:
                if not waiter.exclude:
                    return  # all are down: one may come back before its time is over
                self._leave(waiter)
                waiter.future.set_exception(error)
            else:
                self._leave(waiter)
                waiter.future.set_result(lease)
            if key in self._lines:
                self._lines.move_to_end(key)

    def _leave(self, waiter: _Waiter) -> None:
        waiter.in_line = False
        line = self._lines[waiter.key]
        line.remove(waiter)
        self._waiting -= 1
        if not line:
            del self._lines[waiter.key]

    def _give_up(self, waiter: _Waiter) -> None:
        """It waits no longer. What it was given in the same moment goes to the next one."""
        if waiter.in_line:
            self._leave(waiter)
        elif not waiter.future.cancelled() and waiter.future.exception() is None:
            waiter.future.result().release()

    def _tell(self, seconds: float, outcome: str) -> None:
        if self._on_waited is not None:
            self._on_waited(seconds, outcome)

    def __repr__(self) -> str:
        return f"<RequestQueue {self._waiting} waiting in {len(self._lines)} lines>"
