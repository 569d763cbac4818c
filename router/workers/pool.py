"""The pool of workers, and the choice of the one that serves a request.

Everything here is synchronous, which makes it correct without a lock: there is no await between choosing a worker and
counting the request, so concurrent requests see each other's counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from router.config.workers import BreakerConfig, HealthConfig
from router.errors import NotFoundError, NoWorkerError
from router.workers.breaker import Breaker, BreakerState
from router.workers.policy import Decision, ForgetsWorkers, LearnsReplies, PinsKeys, Policy, RouteQuery
from router.workers.worker import ROUTABLE, ProbeResult, Worker, WorkerState, normalize_url, worker_id

logger = logging.getLogger(__name__)

_NAMED = 8
"""The most workers that an error message lists; GET /workers has the others."""


def _nothing(*_: object) -> None:
    pass


class FullError(Exception):
    """No worker that may serve the request has room now."""


class PinnedWorkerFullError(FullError):
    """The worker that the policy keeps for the request, the `pinned_worker`, is full; others may have room."""

    def __init__(self, pinned_worker: Worker) -> None:
        super().__init__(pinned_worker.url)
        self.pinned_worker = pinned_worker


class Lease:
    """One request's hold on a worker, from the choice to the end of the reply's body. A second release does nothing."""

    __slots__ = ("_held", "_pool", "_query", "_trial", "reason", "worker")

    def __init__(
        self, pool: WorkerPool, worker: Worker, query: RouteQuery, reason: str, *, trial: bool = False
    ) -> None:
        """`WorkerPool.lease` lists the possible `reason`; `trial` says that the breaker waits for the release."""
        self.worker = worker
        self._query = query
        self.reason = reason
        self._pool = pool
        self._trial = trial
        self._held = True

    def replied(self, beginning: str | Sequence[int]) -> None:
        """Report the beginning of the reply to the policy: text for a text prompt, ids for ids."""
        listener = self._pool.listener
        if listener is not None:
            listener.replied(self.worker, self._query, beginning)

    def release(self, *_: object) -> None:
        if self._held:
            self._held = False
            if self._trial:
                self.worker.breaker.trial_over()
            self._pool._returned(self.worker, self._query)

    def __enter__(self) -> Lease:
        return self

    __exit__ = release

    def __repr__(self) -> str:
        return f"<Lease {'held' if self._held else 'released'} {self.worker!r}>"


class WorkerPool:
    """The workers, in the order of their addition.

    Args:
        policy: chooses among the workers that can serve a request.
        health: thresholds for probes, and the gate that stops requests to workers at another weight version than `version`.
        breaker: parameters of the circuit breakers.
        max_inflight: most requests at all workers together, None for no limit.
        max_inflight_per_worker: most requests at each worker, None for no limit.
        clock: seconds, for the breakers.
        on_breaker: called with the worker and the new state of each circuit breaker that changes.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        health: HealthConfig | None = None,
        breaker: BreakerConfig | None = None,
        max_inflight: int | None = None,
        max_inflight_per_worker: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_breaker: Callable[[Worker, BreakerState], None] = _nothing,
    ) -> None:
        self._policy = policy
        self._pins = policy if isinstance(policy, PinsKeys) else None
        self.listener = policy if isinstance(policy, LearnsReplies) else None
        """The policy, if replies are reported to it."""
        self._health = health or HealthConfig()
        self._breaker = breaker or BreakerConfig()
        self._max_inflight = max_inflight
        self._max_per_worker = max_inflight_per_worker
        self._clock = clock
        self._workers: dict[str, Worker] = {}  # by id
        self._routable: tuple[Worker, ...] = ()
        self._resting: tuple[Worker, ...] = ()
        self._inflight = 0
        self.version: str | None = None
        """The weight version of the fleet, which a call through this router set last."""
        self.on_engine: Callable[[str], None] = _nothing
        """Called with the engine of each worker that has introduced itself. All have the same (`FleetEngine`)."""
        self.on_room: Callable[[], None] | None = None
        """Called when a full worker may have room again; None while no request waits for room."""
        self.on_breaker = on_breaker
        self.on_quarantine: Callable[[Worker], None] = _nothing
        """Called when a worker is quarantined, which is to end its requests in flight too."""

    def add(self, url: str) -> Worker:
        """Register a worker, or take a draining one back, and return it. Adding a worker again changes nothing.

        The worker is starting, and routable from its first good probe on.
        """
        candidate = Worker(normalize_url(url))
        worker = self._workers.setdefault(candidate.id, candidate)
        if worker is candidate:
            worker.breaker = Breaker(self._breaker, self._clock, lambda state: self._breaker_moved(worker, state))
        if worker.state is WorkerState.DRAINING:
            worker.move_to(WorkerState.STARTING)
        self._update_routable()
        self._room()
        return worker

    def remove(self, key: str) -> Worker:
        """Send no more requests to a worker, named by URL or id. It leaves the pool with its last request in flight."""
        worker = self.get(key)
        if worker.state is not WorkerState.DRAINING:
            worker.move_to(WorkerState.DRAINING)
            self._update_routable()
            self._room()  # what waits for this worker may go to another one now
        self._forget_if_drained(worker)
        return worker

    def get(self, key: str) -> Worker:
        """Return the worker with this id or URL. Raise NotFoundError if there is none."""
        worker = self._workers.get(key)
        if worker is None and "/" in key:
            worker = self._workers.get(worker_id(normalize_url(key)))
        if worker is None:
            raise NotFoundError(f"there is no worker {key!r}; GET /workers lists them")
        return worker

    def list(self) -> tuple[Worker, ...]:
        """Return all workers, draining ones included."""
        return tuple(self._workers.values())

    @property
    def routable(self) -> tuple[Worker, ...]:
        """The workers that get new requests."""
        return self._routable

    def introduced(self, worker: Worker, found: ProbeResult) -> None:
        """Note the engine of a worker, if it has introduced itself."""
        if found.engine is not None:
            worker.engine, worker.abilities = found.engine, found.abilities
            worker.stranger = False
            self.on_engine(found.engine)

    def probed(
        self, worker: Worker, complaint: str | None, version: str | None = None, *, absent: bool = False
    ) -> None:
        """Note the result of a probe: a `complaint` if it was bad, and `absent` if there was no connection."""
        if version is not None or absent:
            worker.version = version  # after an absence there may be a new process, with unknown weights
        if absent:
            worker.doubts += 1
        changed = worker.probed(complaint, self._health, absent=absent)
        if changed:
            level = logging.INFO if complaint is None else logging.WARNING
            logger.log(
                level, "worker %s is %s%s", worker.url, worker.state.value, f": {complaint}" if complaint else ""
            )
        # That looks at all workers, and each of a thousand is probed every second while it is away.
        if changed or worker.outdated is self._at_version(worker):
            self._update_routable()
        self._room()
        if changed and worker.state is WorkerState.QUARANTINED:
            self.on_quarantine(worker)

    def new_version(self, version: str, taken_by: AbstractSet[str], unsure: AbstractSet[str] = frozenset()) -> None:
        """Note that a call through this router set the weights of the workers with the ids `taken_by` to this version.

        The workers `unsure` were sent the call and did not answer: their version is unknown until a probe reports it.
        """
        if taken_by:
            self.version = version
        for worker in self._workers.values():
            if worker.id in taken_by:
                worker.version = version
            elif worker.id in unsure:
                worker.version = None
        self._update_routable()
        self._room()

    def does_not_generate(self, worker: Worker) -> None:
        """Note that the server there is no engine, or has no path to generate: the health checks ask it again what it is."""
        worker.stranger = True

    def may_have_restarted(self, worker: Worker) -> None:
        """Note that connections to the worker broke: a new process may be there, with unknown weights."""
        worker.version = None
        worker.doubts += 1
        if self._health.version_gate:
            self._update_routable()

    def lease(self, query: RouteQuery, exclude: AbstractSet[str] = frozenset(), *, limited: bool = True) -> Lease:
        """Choose a worker whose id is not in `exclude`, count the request there, and return the lease.

        The lease's `reason` is the policy's, or `policy` if it gives none; `only_one` if there was no choice; `trial` if the
        worker's breaker was open; `last_resort` if no worker is known to be well, and one that was absent or has not answered
        yet is tried.

        Args:
            query: the request as the policy knows it.
            exclude: ids of workers that must not get it.
            limited: whether the limits on requests in flight apply.

        Raises:
            NoWorkerError: no worker is left.
            FullError: all workers that are left are at their limit.
            PinnedWorkerFullError: the worker that the policy keeps for this request is at its limit.
        """
        workers, reason = self._routable, "policy"
        if exclude or self._resting or not workers:
            workers, reason = self._candidates(exclude)
        if not workers:
            raise self.no_worker_error()
        if limited and self._max_inflight is not None and self._inflight >= self._max_inflight:
            raise FullError
        if limited and self._max_per_worker is not None:
            pinned_worker = self._pins.pinned_worker(query) if self._pins is not None else None
            if pinned_worker in workers and pinned_worker.inflight >= self._max_per_worker:
                raise PinnedWorkerFullError(pinned_worker)
            workers = tuple(worker for worker in workers if worker.inflight < self._max_per_worker)
            if not workers:
                raise FullError
        chosen = self._policy.select(workers, query)
        worker, why = chosen if isinstance(chosen, Decision) else (chosen, "policy")
        trial = worker.breaker.state is not BreakerState.CLOSED and worker.breaker.begin()
        if trial:
            reason = "trial"
        elif reason == "policy":
            reason = why if len(workers) > 1 else "only_one"
        worker.inflight += 1
        self._inflight += 1
        return Lease(self, worker, query, reason, trial=trial)

    def may_take(self, pinned_worker: Worker) -> bool:
        """Return whether requests that wait for a pinned worker may be leased: it has room, or others serve its keys now."""
        return (
            not pinned_worker.routable or self._max_per_worker is None or pinned_worker.inflight < self._max_per_worker
        )

    def has_other(self, exclude: AbstractSet[str]) -> bool:
        """Return whether a worker outside `exclude` (ids) can be tried."""
        return bool(self._candidates(exclude)[0])

    def _candidates(self, exclude: AbstractSet[str]) -> tuple[tuple[Worker, ...], str]:
        workers = self._routable
        if self._resting:
            workers += tuple(worker for worker in self._resting if worker.breaker.allows)
        if exclude:
            workers = tuple(worker for worker in workers if worker.id not in exclude)
        if workers:
            return workers, "policy"
        left = (worker for worker in self._workers.values() if worker.worth_a_try and worker.id not in exclude)
        return tuple(w for w in left if w.breaker.allows and self._at_version(w)), "last_resort"

    def no_worker_error(self) -> NoWorkerError:
        """Return the error that says why no worker takes requests."""
        if not self._workers:
            return NoWorkerError("no worker is registered: add one with POST /add_worker?url=http://HOST:PORT")
        states = ", ".join(f"{worker.url} {self._why_not(worker)}" for worker in self.list()[:_NAMED])
        if len(self._workers) > _NAMED:
            states += f", and {len(self._workers) - _NAMED} more"
        waits = [worker.breaker.seconds_left for worker in self._resting]
        again = max(1, round(min(waits, default=self._health.interval)))
        return NoWorkerError(
            f"no worker takes requests ({states}): wait for one, or add another with POST /add_worker?url=http://HOST:PORT",
            headers=(("retry-after", str(again)),),
        )

    def _why_not(self, worker: Worker) -> str:
        if worker.state in ROUTABLE and worker.breaker.state is not BreakerState.CLOSED:
            return "has an open circuit breaker"
        if worker.state in ROUTABLE and not self._at_version(worker):
            return f"has weight version {worker.version!r}, not {self.version!r}"
        return f"is {worker.state.value}" + (f": {worker.complaint}" if worker.complaint else "")

    def _at_version(self, worker: Worker) -> bool:
        return not self._health.version_gate or self.version is None or worker.version == self.version

    def _returned(self, worker: Worker, query: RouteQuery) -> None:
        worker.inflight -= 1
        self._inflight -= 1
        if self._pins is not None:
            self._pins.released(query)
        assert worker.inflight >= 0, worker
        if worker.state is WorkerState.DRAINING:
            self._forget_if_drained(worker)
        if self.on_room is not None:
            self.on_room()

    def _forget_if_drained(self, worker: Worker) -> None:
        if worker.state is WorkerState.DRAINING and worker.inflight == 0:
            worker.move_to(WorkerState.GONE)
            del self._workers[worker.id]
            if isinstance(self._policy, ForgetsWorkers):
                self._policy.forget(worker)

    def _breaker_moved(self, worker: Worker, state: BreakerState) -> None:
        level = logging.WARNING if state is BreakerState.OPEN else logging.INFO
        logger.log(level, "the circuit breaker of worker %s is %s", worker.url, state.value)
        self.on_breaker(worker, state)
        self._update_routable()
        if state is BreakerState.CLOSED:
            self._room()

    def _room(self) -> None:
        if self.on_room is not None:
            self.on_room()

    def _update_routable(self) -> None:
        for worker in self._workers.values():
            worker.outdated = not self._at_version(worker)
        able = [w for w in self._workers.values() if w.state in ROUTABLE and not w.outdated]
        self._routable = tuple(worker for worker in able if worker.routable)
        self._resting = tuple(worker for worker in able if not worker.routable)

    def __repr__(self) -> str:
        return f"<WorkerPool {list(self._workers.values())!r}>"
