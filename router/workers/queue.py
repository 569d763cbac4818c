"""The queue of requests for which no worker has room.

No request waits while there is room. The limits (`--max-inflight`, `--max-inflight-per-worker`) are for fleets in which a
worker's own queue is a worse place to wait, because a request there can no longer go to another worker.

The queue is fair between keys (the routing key, or else the tenant): the requests of each key form a line, and the lines take
turns. So a client with a thousand requests does not make another client wait for all of them.

A policy may keep one target (a rank of a worker) for a key, whose line then waits for this target alone. Such lines stand
apart, by target: with thousands of them, the room at one target is given away without a look at all of them. Requests whose
client named a rank have lines of their own, too: they hold up no others of their key.
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
from router.errors import BadRequestError, NoWorkerError, QueueFullError, QueueTimeoutError
from router.http.time_limits import patience
from router.workers.policy import RouteQuery
from router.workers.pool import FullError, Lease, PinnedTargetFullError, WorkerPool
from router.workers.worker import Target

Key = tuple[str, str]
"""Tenant and routing key."""

_LineKey = tuple[Key, int | None]
"""The key of a line, and the rank that its clients named."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request in the queue. `future` gets its lease."""

    key: _LineKey
    query: RouteQuery
    exclude: AbstractSet[str]
    future: asyncio.Future[Lease]
    in_line: bool = True

    @property
    def is_choosy(self) -> bool:
        """Whether other requests may go where this one cannot."""
        return bool(self.exclude) or self.query.rank is not None


@dataclass(slots=True, eq=False)
class _Line:
    """The requests of one key, in order. They wait for their `pinned_target`, or for any target. The lowest `turn` is next."""

    key: _LineKey
    turn: int
    pinned_target: Target | None = None
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
        self._lines: dict[_LineKey, _Line] = {}
        self._by_pinned: dict[Target | None, OrderedDict[_LineKey, _Line]] = {}  # each in the order of turns
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
            exclude: ids of workers and of targets that must not get it.
            again: whether a worker had it before and failed: it goes to the head of its line, even if the queue is full.
            waiting: the caller that waits.

        Raises:
            BadRequestError: no worker has the rank that the client named.
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
        own = key, query.rank
        waiter = _Waiter(own, query, exclude, asyncio.get_running_loop().create_future())
        line = self._lines.get(own)
        if line is None:
            line = self._lines[own] = _Line(own, next(self._turns))
            self._by_pinned.setdefault(None, OrderedDict())[own] = line
        line.waiters[waiter] = None
        if first:
            line.waiters.move_to_end(waiter, last=False)
            if line.pinned_target is not None:
                self._to_the_end(line, None)  # its worker may be excluded for this request
        self._waiting += 1
        self._pool.on_room = self._serve
        return waiter

    def _serve(self) -> None:
        """Lease the free room to waiting requests, one line after the other. Called whenever there may be room."""
        full: set[Target | None] = set()
        passed_over = 0
        while self._waiting and (line := self._next(full)) is not None:
            waiter = next(iter(line.waiters))
            if waiter.future.done():
                self._leave(waiter)
                continue
            try:
                lease = self._pool.lease(waiter.query, waiter.exclude)
            except FullError as error:
                if isinstance(error, PinnedTargetFullError) and not waiter.exclude:
                    full.add(error.pinned_target)
                    self._to_the_end(line, error.pinned_target)
                elif waiter.is_choosy:
                    self._to_the_end(line, None)
                    passed_over += 1
                    if passed_over >= len(self._by_pinned[None]):
                        full.add(None)
                else:
                    return  # no worker has room for any request
                continue
            except (NoWorkerError, BadRequestError) as error:
                if not waiter.is_choosy:
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

    def _next(self, full: AbstractSet[Target | None]) -> _Line | None:
        """Return the line whose turn it is, of the lines that wait for a target with room. `full`: targets that were full."""
        found = None
        for pinned_target, lines in self._by_pinned.items():
            if pinned_target not in full and (pinned_target is None or self._pool.may_take(pinned_target)):
                first = next(iter(lines.values()))
                found = first if found is None else min(found, first, key=_turn_of)
        return found

    def _to_the_end(self, line: _Line, pinned_target: Target | None) -> None:
        """Give a line the last turn of the lines that wait for `pinned_target`."""
        self._take_out(line)
        line.pinned_target, line.turn = pinned_target, next(self._turns)
        self._by_pinned.setdefault(pinned_target, OrderedDict())[line.key] = line

    def _take_out(self, line: _Line) -> None:
        lines = self._by_pinned[line.pinned_target]
        del lines[line.key]
        if not lines:
            del self._by_pinned[line.pinned_target]

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
        elif line.pinned_target is not None and next(iter(line.waiters)).exclude:
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
