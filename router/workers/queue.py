"""The queue of requests for which no worker has room.

No request waits while there is room. The limits (`--max-inflight`, `--max-inflight-per-worker`) are for fleets in which a
worker's own queue is a worse place to wait, because a request there can no longer go to another worker.

The queue is fair between keys (the routing key, or else the tenant): the requests of each key form a line, and the lines take
turns. So a client with a thousand requests does not make another client wait for all of them.

A policy may keep one worker for a key, whose line then waits for this worker alone. Such lines stand apart, by worker: with
thousands of them, the room at one worker is given away without a look at all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from router.config.workers import QueueConfig
from router.errors import NoWorkerError, QueueFullError, QueueTimeoutError
from router.http.time_limits import patience
from router.workers.policy import RouteQuery
from router.workers.pool import FullError, Lease, PinnedWorkerFullError, WorkerPool
from router.workers.worker import Worker

Key = tuple[str, str]
"""Tenant and routing key."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request in the queue. `future` gets its lease."""

    key: Key
    query: RouteQuery
    exclude: AbstractSet[str]
    future: asyncio.Future[Lease]
    in_line: bool = True


@dataclass(slots=True, eq=False)
class _Line:
    """The requests of one key, in order. They wait for their `pinned_worker`, or for any worker. The lowest `turn` is next."""

    key: Key
    turn: int
    pinned_worker: Worker | None = None
    waiters: OrderedDict[_Waiter, None] = field(default_factory=OrderedDict)


_turn_of = attrgetter("turn")


class WaitingCaller(Protocol):
    """The caller that waits. It may end the waiting by an error in its `line`."""

    line: asyncio.Future[Lease] | None


class RequestQueue:
    """Leases workers, and lets requests wait for one."""

    def __init__(
        self, pool: WorkerPool, config: QueueConfig, on_waited: Callable[[float, str], object] = lambda *_: None
    ) -> None:
        """`on_waited` gets the seconds that a request waited, and the outcome: served, full, timeout or left."""
        self._pool = pool
        self._config = config
        self._on_waited = on_waited
        self._lines: dict[Key, _Line] = {}
        self._by_pinned: dict[Worker | None, OrderedDict[Key, _Line]] = {}  # each in the order of turns
        self._turns = itertools.count()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def at_once(self, query: RouteQuery, exclude: AbstractSet[str] = frozenset()) -> Lease | None:
        """Return a lease if there is room and no request waits for it; else None. Raises NoWorkerError."""
        if self._waiting:
            return None
        try:
            return self._pool.lease(query, exclude)
        except FullError:
            return None

    async def lease(
        self,
        key: Key,
        query: RouteQuery,
        exclude: AbstractSet[str] = frozenset(),
        *,
        again: bool = False,
        waiting: WaitingCaller | None = None,
    ) -> Lease:
        """Return a lease, at once or when there is room.

        Args:
            key: the line to wait in.
            query: the request as the policy knows it.
            exclude: ids of workers that must not get it.
            again: whether a worker had it before and failed: it goes to the head of its line, even if the queue is full.
            waiting: the caller that waits.

        Raises:
            NoWorkerError: no worker is left for the request.
            QueueFullError: the queue is full.
            QueueTimeoutError: no worker had room in time.
            EndedInQueueError, or any other error with which `waiting` ended it.
        """
        found = self.at_once(query, exclude)
        if found is not None:
            return found
        if self._waiting >= self._config.size and not again:
            self._on_waited(0.0, "full")
            raise QueueFullError(
                f"all workers are busy and {self._waiting} requests wait (--queue-size {self._config.size}): try again",
                headers=(("retry-after", "1"),),
            )
        waiter = self._line_up(key, query, exclude, first=again)
        if waiting is not None:
            waiting.line = waiter.future
        begun, outcome = time.monotonic(), "left"
        try:
            self._serve()
            async with patience(self._config.timeout):
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
            self._on_waited(time.monotonic() - begun, outcome)

    def _line_up(self, key: Key, query: RouteQuery, exclude: AbstractSet[str], *, first: bool) -> _Waiter:
        waiter = _Waiter(key, query, exclude, asyncio.get_running_loop().create_future())
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(key, next(self._turns))
            self._by_pinned.setdefault(None, OrderedDict())[key] = line
        line.waiters[waiter] = None
        if first:
            line.waiters.move_to_end(waiter, last=False)
            if line.pinned_worker is not None:
                self._to_the_end(line, None)  # its worker may be excluded for this request
        self._waiting += 1
        self._pool.on_room = self._serve
        return waiter

    def _serve(self) -> None:
        """Lease the free room to waiting requests, one line after the other. Called whenever there may be room."""
        full: set[Worker | None] = set()
        passed_over = 0
        while self._waiting and (line := self._next(full)) is not None:
            waiter = next(iter(line.waiters))
            if waiter.future.done():
                self._leave(waiter)
                continue
            try:
                lease = self._pool.lease(waiter.query, waiter.exclude)
            except FullError as error:
                if waiter.exclude:
                    self._to_the_end(line, None)  # other requests may go to the workers that this one cannot
                    passed_over += 1
                    if passed_over >= len(self._by_pinned[None]):
                        full.add(None)
                elif isinstance(error, PinnedWorkerFullError):
                    full.add(error.pinned_worker)
                    self._to_the_end(line, error.pinned_worker)
                else:
                    return  # no worker has room for any request
                continue
            except NoWorkerError as error:
                if not waiter.exclude:
                    return  # all are down, and one may come back in time
                self._leave(waiter)
                waiter.future.set_exception(error)
                continue
            self._leave(waiter)
            waiter.future.set_result(lease)
            full.discard(None)
            passed_over = 0
            if line.waiters:
                self._to_the_end(line, None)

    def _next(self, full: AbstractSet[Worker | None]) -> _Line | None:
        """Return the line whose turn it is, of the lines that wait for a worker with room. `full`: workers that were full."""
        found = None
        for pinned_worker, lines in self._by_pinned.items():
            if pinned_worker not in full and (pinned_worker is None or self._pool.may_take(pinned_worker)):
                first = next(iter(lines.values()))
                found = first if found is None else min(found, first, key=_turn_of)
        return found

    def _to_the_end(self, line: _Line, pinned_worker: Worker | None) -> None:
        """Give a line the last turn of the lines that wait for `pinned_worker`."""
        self._take_out(line)
        line.pinned_worker, line.turn = pinned_worker, next(self._turns)
        self._by_pinned.setdefault(pinned_worker, OrderedDict())[line.key] = line

    def _take_out(self, line: _Line) -> None:
        lines = self._by_pinned[line.pinned_worker]
        del lines[line.key]
        if not lines:
            del self._by_pinned[line.pinned_worker]

    def _leave(self, waiter: _Waiter) -> None:
        waiter.in_line = False
        line = self._lines[waiter.key]
        del line.waiters[waiter]
        self._waiting -= 1
        if not self._waiting:
            self._pool.on_room = None
        if not line.waiters:
            self._take_out(line)
            del self._lines[waiter.key]
        elif line.pinned_worker is not None and next(iter(line.waiters)).exclude:
            self._to_the_end(line, None)

    def _give_up(self, waiter: _Waiter) -> None:
        """Take a request out of the queue, and release a lease that it got at the same moment."""
        if waiter.in_line:
            self._leave(waiter)
            self._serve()  # the next one in its line may have fewer workers excluded
        elif not waiter.future.cancelled() and waiter.future.exception() is None:
            waiter.future.result().release()

    def __repr__(self) -> str:
        return f"<RequestQueue {self._waiting} waiting in {len(self._lines)} lines>"
