"""Where a request was tried, where it may still be tried, and which worker is at fault if it was not answered.

A worker that gives no reply need not be at fault: a request that no worker answers, sent by twenty clients, must open no
breaker. So a failure that a request could have caused does not count against a worker until another worker has
answered the same request. If none does, the request was at fault. Only a connection that could not be made counts at once.

What may be sent again, and how often:

| what happened | who is at fault | the request |
|---|---|---|
| no connection | the worker | goes elsewhere, to each worker once |
| connection lost before a reply | the worker, if another one answers | goes elsewhere, three workers at most |
| no reply in time | the same | its copy is aborted, then the same; other ranks of that worker come last |
| 500, 502, 504 | the same | the same, and without another worker this is the reply |
| 404, 405, 501 | the worker: it has no `/generate` | goes elsewhere, to each worker once; else this is the reply |
| the same in an engine's own words | the worker, if another one answers | as with a 500 |
| an adapter that the worker has not loaded | no worker | goes elsewhere, to each worker once; else this is the reply |
| no reply, and the worker has another role by now | no worker | goes to any pair, three times at most |
| 429, 503 | no worker: its rank is full | waits, goes elsewhere if it can, as often as `--retry-max-retries` says |

A request whose client named a rank keeps to that rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Set
from typing import Literal

from router.config.workers import RetryConfig
from router.errors import EndedInQueueError, NoWorkerError, RouterError, UpstreamError, UpstreamTimeoutError
from router.workers.pool import WorkerPool
from router.workers.worker import Target, Worker

MAX_LOST = 3
"""When this many workers have lost a request, it is more likely at fault than they are."""

BUSY = frozenset({429, 503})
FAULTY = frozenset({500, 502, 504})

_JITTER = random.Random()
_NONE: frozenset[str] = frozenset()

Failure = Literal["connect", "lost", "timeout", "error", "busy", "no_engine", "no_adapter"]


class Attempts:
    """Decides about the attempts of one request; the proxy sends them.

    A worker may close a kept-alive connection at the moment of use, which looks as if the worker were gone. So after the first
    such loss all further attempts take new connections, and that worker is asked once more when no other one is left. A
    request that cannot be repeated takes a new connection at once.

    Attributes:
        exclude: ids of the workers, and of their targets, that must not be asked now.
        fresh: whether the next attempt needs a new connection.
        asked: ids of the workers that have seen the request.
        count: the number of attempts.
        engine: that of the worker in the last attempt, as far as it was known then.
        reason: how the last attempt failed.
    """

    def __init__(
        self,
        pool: WorkerPool,
        retry: RetryConfig,
        *,
        repeatable: bool,
        rank: int | None = None,
        draw: Callable[[float, float], float] = _JITTER.uniform,
    ) -> None:
        """`repeatable`: sending the request twice does no harm. `rank`: see `RouteQuery`. `draw(low, high)`: for the jitter."""
        self._pool = pool
        self._retry = retry
        self._repeatable = repeatable
        self._rank = rank
        self._draw = draw
        self._failures: list[str] = []
        self._suspects: list[Worker] = []
        self._tried: set[str] = set()
        self._avoided: set[str] = set()
        self._stale: str | None = None
        self._lost = 0
        self._busy = 0
        self._too_slow = False
        self.fresh = not repeatable
        self.asked: set[str] = set()
        self.count = 0
        self.engine: str | None = None
        self.reason: Failure | None = None

    @property
    def exclude(self) -> frozenset[str]:
        """The workers that failed; as long as there are others, also full targets, and workers with a rank that was late."""
        if not self._tried and not self._avoided:
            return _NONE
        both = self._tried | self._avoided
        return frozenset(both if self._avoided and self._has_other(both) else self._tried)

    def answered(self, worker: Worker) -> None:
        """Note a reply. The workers that gave none before were at fault."""
        worker.breaker.succeeded()
        for suspect in self._suspects:
            suspect.breaker.failed()

    def failed(
        self,
        target: Target,
        why: Failure,
        message: str,
        *,
        kept: bool = False,
        gone: bool = False,
        avoided: Target | None = None,
    ) -> None:
        """Note that a target gave no reply.

        Args:
            target: the target.
            why: how it failed.
            message: the same for people.
            kept: whether the connection had served an earlier request.
            gone: whether the worker is gone, so that no time limit is to blame.
            avoided: another target that may be at fault as well: it is asked again only where there is no other.
        """
        worker = target.worker
        if avoided is not None:
            self._avoided.add(avoided.worker.id)
        self._too_slow = why == "timeout" and not gone
        self._failures.append(f"{worker.url}: {message}")
        if self._too_slow and len(worker.targets) > 1:
            self._tried.add(target.id)
            self._avoided.add(worker.id)
        else:
            self._tried.add(worker.id)
        self.reason = why
        if why in ("connect", "no_engine"):
            worker.breaker.failed()
            return
        self._lost += 1
        self.fresh = self.fresh or why == "lost"
        if kept:
            self._stale = worker.id
        else:
            self._suspects.append(worker)

    def switched(self, worker: Worker) -> None:
        """Note that a worker was asked in a role that it did not have any more. It may get the request in its new one."""
        self._failures.append(f"{worker.url}: its role was switched")
        self._too_slow, self.reason = False, "lost"
        self._lost += 1

    def goes_on_after_error(self, target: Target, status: int) -> bool:
        """Note a worker's error. Return whether another worker is asked; otherwise the error is the reply."""
        tried = self._tried | {target.worker.id}
        if not self._repeatable or self._lost + 1 >= MAX_LOST or not self._has_other(tried):
            return False
        self.failed(target, "error", f"status {status}")
        return True

    def goes_on_without_adapter(self, target: Target) -> bool:
        """Note that a worker lacks the request's adapter. Return whether another one is asked; otherwise that is the reply."""
        self._tried.add(target.worker.id)
        self._failures.append(f"{target.worker.url}: it has not loaded the adapter")
        self.reason, self._too_slow = "no_adapter", False
        return self._repeatable and self._has_other(self._tried)

    def goes_on_without_engine(self, target: Target, status: int) -> bool:
        """Note that a worker does not generate at all. Return whether another one is asked; otherwise that is the reply.

        Raises NoWorkerError for a worker whose engine was not known: it was asked in the words of another one.
        """
        worker = target.worker
        goes_on = self._repeatable and self._has_other(self._tried | {worker.id})
        self.failed(target, "no_engine", f"status {status}: it does not generate")
        self._pool.does_not_generate(worker)
        if not goes_on and (self.engine is None or self.engine != worker.engine):
            raise NoWorkerError(
                f"it was not known which engine worker {worker.url} runs: try again", headers=(("retry-after", "1"),)
            )
        return goes_on

    def wait_after_busy(self, target: Target, status: int, retry_after: float | None) -> float | None:
        """Note that a target is full. Return the seconds until the next attempt; None if the refusal is the reply.

        `retry_after` is the worker's own wish. It does not count while another target can be asked.
        """
        self._busy += 1
        if not self._repeatable or self._busy >= self._retry.attempts:
            return None
        self._failures.append(f"{target.worker.url}: status {status}")
        self._avoided.add(target.id)
        self.reason, self._too_slow = "busy", False
        grown = min(self._retry.longest_wait, self._retry.first_wait * self._retry.multiplier ** (self._busy - 1))
        spread = grown * (1 + self._retry.jitter * self._draw(-1.0, 1.0))
        if retry_after is None or self._has_other(self._tried | self._avoided):
            return spread
        return max(spread, min(retry_after, self._retry.longest_wait))

    def check(self, *, unwanted: bool = False) -> None:
        """Raise UpstreamError or UpstreamTimeoutError after the last attempt.

        `unwanted`: no other attempt is wanted. Where no worker has failed, that is an EndedInQueueError.
        """
        if unwanted and self.reason in ("busy", "no_adapter"):
            raise EndedInQueueError("the generation was aborted before a worker took it")
        if unwanted and self._failures:
            raise self.exhausted()
        if self._lost >= (MAX_LOST if self._repeatable else 1):
            raise self.exhausted()

    def no_worker_left(self, error: NoWorkerError) -> None:
        """Note that no worker is left. Raise, unless one may be asked a second time.

        Raises:
            NoWorkerError: there was no worker at all.
            UpstreamError: all workers failed.
        """
        if not self._failures:
            raise error
        if self._stale is None:
            raise self.exhausted() from None
        self._tried.discard(self._stale)
        self._stale = None

    def exhausted(self) -> RouterError:
        """Return the error for a request that no worker answered."""
        kind = UpstreamTimeoutError if self._too_slow else UpstreamError
        hint = "" if self._lost or self._avoided else ": GET /workers says which are up"
        return kind(f"no worker gave a reply ({'; '.join(self._failures)}){hint}", tried=self._failures)

    def _has_other(self, exclude: Set[str]) -> bool:
        return self._pool.has_other(exclude, self._rank)
