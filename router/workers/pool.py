"""The pool of workers, and the choice of the target, one rank of a worker, that serves a request.

Everything here is synchronous, which makes it correct without a lock: there is no await between choosing a target and
counting the request, so concurrent requests see each other's counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from router.config.workers import MOST_RANKS, BreakerConfig, HealthConfig
from router.errors import BadRequestError, NotFoundError, NoWorkerError
from router.workers.breaker import Breaker, BreakerState
from router.workers.policy import Decision, ForgetsTargets, LearnsReplies, PinsKeys, Policy, RouteQuery
from router.workers.worker import (
    ROUTABLE,
    ProbeResult,
    Target,
    Worker,
    WorkerRole,
    WorkerState,
    normalize_url,
    worker_id,
)

logger = logging.getLogger(__name__)

_NAMED = 8
"""The most workers that an error message lists; GET /workers has the others."""


def _nothing(*_: object) -> None:
    pass


class FullError(Exception):
    """No target that may serve the request has room now."""


class PinnedTargetFullError(FullError):
    """The target that the policy keeps for the request, the `pinned_target`, is full; others may have room."""

    def __init__(self, pinned_target: Target) -> None:
        super().__init__(pinned_target.name)
        self.pinned_target = pinned_target


class Lease:
    """One request's hold on a target, from the choice to the end of the reply's body. A second release does nothing.

    Attributes:
        target: the target.
        worker: its worker.
        reason: see `WorkerPool.lease`.
        prefill: the lease of a prefill worker, where `worker` only decodes. It ends with this one, or before.
    """

    __slots__ = ("_held", "_pool", "_query", "_trial", "prefill", "reason", "target", "worker")

    def __init__(
        self, pool: WorkerPool, target: Target, query: RouteQuery, reason: str, *, trial: bool = False
    ) -> None:
        """`trial` says that the breaker waits for the release."""
        self.target = target
        self.worker = target.worker
        self._query = query
        self.reason = reason
        self.prefill: Lease | None = None
        self._pool = pool
        self._trial = trial
        self._held = True

    def replied(self, beginning: str | Sequence[int]) -> None:
        """Report the beginning of the reply to the policy: text for a text prompt, ids for ids."""
        listener = self._pool.listener
        if listener is not None:
            listener.replied(self.target, self._query, beginning)

    def served_by(self, ranks: Sequence[int]) -> None:
        """Note the ranks that the replies name. They should be the target's."""
        wrong = [rank for rank in ranks if rank != self.target.rank]
        if wrong:
            if not self.worker.rank_mismatches:
                logger.warning("%r was asked, and rank %d of it replied", self.target, wrong[0])
            self.worker.rank_mismatches += len(wrong)

    def release(self, *_: object) -> None:
        if self._held:
            self._held = False
            if self.prefill is not None:
                self.prefill.release()
            if self._trial:
                self.worker.breaker.trial_over()
            self._pool._returned(self.target, self._query)

    def __enter__(self) -> Lease:
        return self

    __exit__ = release

    def __repr__(self) -> str:
        return f"<Lease {'held' if self._held else 'released'} {self.target!r}>"


class WorkerPool:
    """The workers, in the order of their addition.

    Args:
        policy: chooses among the targets that can serve a request.
        health: thresholds for probes, and the gate that stops requests to workers at another weight version than `version`.
        breaker: parameters of the circuit breakers.
        max_inflight: most requests at all workers together, None for no limit.
        max_inflight_per_worker: most requests at each target, None for no limit.
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
        self._targets: tuple[Target, ...] = ()  # of the routable workers
        self._resting: tuple[Worker, ...] = ()
        self._inflight = 0
        self.version: str | None = None
        """The weight version of the fleet, which a call through this router set last."""
        self.on_engine: Callable[[str], None] = _nothing
        """Called with the engine of each worker that has introduced itself. All have the same (`FleetEngine`)."""
        self.on_room: Callable[[], None] | None = None
        """Called when a full worker may have room again; None while no request waits for room."""
        self.joined: Callable[[Lease, RouteQuery, AbstractSet[str], bool], Lease] | None = None
        """Completes a lease, called with the arguments of `lease`; None while no request needs a second worker."""
        self.on_breaker = on_breaker
        self.on_drained: Callable[[Worker], None] = self._forget_if_drained
        """Called when a request of a draining worker is over."""
        self.on_gone: Callable[[Worker], None] = _nothing
        """Called when a removed worker has left the pool."""
        self.elsewhere: Callable[[], Mapping[str, Worker]] = dict
        """Returns, by URL, the removed workers that only other routers still drain."""
        self.on_quarantine: Callable[[Worker], None] = _nothing
        """Called when a worker is quarantined, which is to end its requests in flight too."""
        self.on_switched: Callable[[Worker], None] = _nothing
        """Called when a worker has another role, in which it does not answer what it was sent in its old one."""

    def add(self, url: str, role: WorkerRole = WorkerRole.REGULAR) -> Worker:
        """Register a worker, or take a draining one back, and return it. Adding a worker again changes nothing.

        The worker is starting, and routable from its first good probe on.
        """
        candidate = Worker(normalize_url(url))
        worker = self._workers.setdefault(candidate.id, candidate)
        if worker is candidate:
            worker.role = role
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
        """Note the engine of a worker, and its ranks, if it has introduced itself."""
        if found.engine is not None:
            worker.engine, worker.abilities = found.engine, found.abilities
            worker.stranger = False
            self.on_engine(found.engine)
        if found.ranks is None:
            return
        worker.told_ranks = True
        ranks = found.ranks if 0 < found.ranks <= MOST_RANKS else 1
        if ranks != len(worker.targets):
            logger.info("worker %s has %d data-parallel ranks", worker.url, ranks)
            self._forget(worker.split(ranks))
            self._update_routable()
            self._room()

    def probed(
        self, worker: Worker, complaint: str | None, version: str | None = None, *, absent: bool = False
    ) -> None:
        """Note the result of a probe: a `complaint` if it was bad, and `absent` if there was no connection."""
        if version is not None or absent:
            worker.note_version(version)  # after an absence there may be a new process, with unknown weights
        if absent:
            worker.doubts += 1
            worker.images.forget()
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

    def begin(self, version: str | None) -> None:
        """Note the weight version that the fleet has when this router starts."""
        self.version = version

    def new_version(self, version: str, taken_by: AbstractSet[str], unsure: AbstractSet[str] = frozenset()) -> None:
        """Note that a call through this router set the weights of the workers with the ids `taken_by` to this version.

        The workers `unsure` were sent the call and did not answer: their version is unknown until a probe reports it.
        """
        if taken_by:
            self.version = version
        for worker in self._workers.values():
            if worker.id in taken_by:
                worker.note_version(version)
            elif worker.id in unsure:
                worker.note_version(None)
        self._update_routable()
        self._room()

    def does_not_generate(self, worker: Worker) -> None:
        """Note that the server there is no engine, or has no path to generate: the health checks ask it again what it is."""
        worker.stranger = True

    def may_have_restarted(self, worker: Worker) -> None:
        """Note that connections to the worker broke: a new process may be there, with unknown weights."""
        worker.note_version(None)
        worker.doubts += 1
        worker.told_ranks = False
        worker.images.forget()
        if self._health.version_gate:
            self._update_routable()

    def lease(self, query: RouteQuery, exclude: AbstractSet[str] = frozenset(), *, limited: bool = True) -> Lease:
        """Choose a target that is not in `exclude`, count the request there, and return the lease.

        The lease's `reason` is the policy's, or `policy` if it gives none; `only_one` if there was no choice; `trial` if the
        worker's breaker was open; `last_resort` if no worker is known to be well, and one that was absent or has not answered
        yet is tried.

        Args:
            query: the request as the policy knows it.
            exclude: ids of workers and of targets that must not get it.
            limited: whether the limits on requests in flight apply.

        Raises:
            BadRequestError: no worker has the rank that the client named.
            NoWorkerError: no worker is left.
            FullError: all targets that are left are at their limit.
            PinnedTargetFullError: the target that the policy keeps for this request is at its limit.
        """
        targets, reason = self._targets, "policy"
        if exclude or self._resting or not targets or query.rank is not None:
            targets, reason = self._candidates(exclude, query.rank)
        if not targets:
            self._check_rank(query.rank)
            raise self.no_worker_error()
        if limited and self._max_inflight is not None and self._inflight >= self._max_inflight:
            raise FullError
        if limited and self._max_per_worker is not None:
            pinned_target = self._pins.pinned_target(query) if self._pins is not None else None
            if pinned_target in targets and pinned_target.inflight >= self._max_per_worker:
                raise PinnedTargetFullError(pinned_target)
            targets = tuple(target for target in targets if target.inflight < self._max_per_worker)
            if not targets:
                raise FullError
        chosen = self._policy.select(targets, query)
        target, why = chosen if isinstance(chosen, Decision) else (chosen, "policy")
        worker = target.worker
        trial = worker.breaker.state is not BreakerState.CLOSED and worker.breaker.begin()
        if trial:
            reason = "trial"
        elif reason == "policy":
            reason = why if len(targets) > 1 else "only_one"
        target.inflight += 1
        worker.inflight += 1
        self._inflight += 1
        lease = Lease(self, target, query, reason, trial=trial)
        return lease if self.joined is None else self.joined(lease, query, exclude, limited)

    def may_take(self, pinned_target: Target) -> bool:
        """Return whether requests that wait for a pinned target may be leased: it has room, or others serve its keys now."""
        return (
            not pinned_target.routable or self._max_per_worker is None or pinned_target.inflight < self._max_per_worker
        )

    def has_other(self, exclude: AbstractSet[str], rank: int | None = None) -> bool:
        """Return whether a target outside `exclude` (ids of workers and targets) can be tried, and has this rank."""
        return bool(self._candidates(exclude, rank)[0])

    def _candidates(self, exclude: AbstractSet[str], rank: int | None) -> tuple[tuple[Target, ...], str]:
        workers = self._routable
        if self._resting:
            workers += tuple(worker for worker in self._resting if worker.breaker.allows)
        if targets := _targets(workers, exclude, rank):
            return targets, "policy"
        left = (worker for worker in self._workers.values() if worker.worth_a_try)
        able = (worker for worker in left if worker.breaker.allows and self._at_version(worker))
        return _targets(able, exclude, rank), "last_resort"

    def _check_rank(self, rank: int | None) -> None:
        """Raise BadRequestError if no worker has this rank. One that has not introduced itself may have it."""
        if rank is None or any(w.engine is None or rank < len(w.targets) for w in self._workers.values()):
            return
        most = max((len(worker.targets) for worker in self._workers.values()), default=0)
        if most:
            raise BadRequestError(
                f"no worker has the data-parallel rank {rank}: the ranks are 0 to {most - 1}; leave it out, and the router"
                " chooses one"
            )

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

    def _returned(self, target: Target, query: RouteQuery) -> None:
        worker = target.worker
        target.inflight -= 1
        worker.inflight -= 1
        self._inflight -= 1
        if self._pins is not None:
            self._pins.released(query)
        assert target.inflight >= 0, target
        if worker.state is WorkerState.DRAINING:
            self.on_drained(worker)
        if self.on_room is not None:
            self.on_room()

    def _forget_if_drained(self, worker: Worker) -> None:
        if worker.state is WorkerState.DRAINING and worker.inflight == 0 and worker.id in self._workers:
            worker.move_to(WorkerState.GONE)
            del self._workers[worker.id]
            self._forget(worker.targets)
            self.on_gone(worker)

    def _forget(self, targets: Iterable[Target]) -> None:
        if isinstance(self._policy, ForgetsTargets):
            for target in targets:
                self._policy.forget(target)

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
        self._targets = tuple(target for worker in self._routable for target in worker.targets)
        self._resting = tuple(worker for worker in able if not worker.routable)

    def __repr__(self) -> str:
        return f"<WorkerPool {list(self._workers.values())!r}>"


def _targets(workers: Iterable[Worker], exclude: AbstractSet[str], rank: int | None) -> tuple[Target, ...]:
    """Return the targets of workers outside of `exclude` (ids of workers and targets), all or those of a rank."""
    return tuple(
        target
        for worker in workers
        if worker.id not in exclude
        for target in (worker.targets if rank is None else worker.targets[rank : rank + 1])
        if target.id not in exclude
    )
