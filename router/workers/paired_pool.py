"""The pool of a fleet whose workers may be apart: some prefill the prompt, others decode the reply.

It is the pool of the workers that decode, or do all, with a second pool inside for those that prefill. Each has a policy of its
own. Where workers are apart, a lease holds one of both: that of a decode worker, whose reply the client gets, has that of a
prefill worker in it. A fleet of regular workers has nothing to do with any of this.
"""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet
from typing import Any

from router.errors import NotFoundError, NoWorkerError
from router.workers.policy import Policy, RouteQuery
from router.workers.pool import Lease, WorkerPool
from router.workers.worker import ProbeResult, Worker, WorkerRole

logger = logging.getLogger(__name__)


class PairedPool(WorkerPool):
    """See the top of this file.

    Attributes:
        prefills: the pool of the prefill workers.
    """

    def __init__(self, policy: Policy, prefill_policy: Policy, *, apart: bool = False, **options: Any) -> None:
        """Make a pool.

        Args:
            policy: chooses among the workers that decode, or do all.
            prefill_policy: chooses among those that prefill.
            apart: whether all workers are to be one or the other. Otherwise the workers that come decide it.
            options: of `WorkerPool`.
        """
        super().__init__(policy, **options)
        self.prefills = WorkerPool(prefill_policy, **{**options, "max_inflight": None})
        self.prefills.on_room = self._room
        self.prefills.on_drained = self._forget_if_drained
        self.prefills.on_engine = lambda name: self.on_engine(name)
        self.prefills.on_gone = lambda worker: self.on_gone(worker)
        self.prefills.on_quarantine = lambda worker: self.on_quarantine(worker)
        self._always_apart = apart
        self._look_at_roles()

    @property
    def apart(self) -> bool:
        """Whether a request needs two workers."""
        return self.joined is not None

    def add(self, url: str, role: WorkerRole = WorkerRole.REGULAR) -> Worker:
        """Register a worker; see `WorkerPool`. One that is there keeps its role until it says otherwise."""
        try:
            side = self._side(self.get(url))
        except NotFoundError:
            side = self.prefills if role is WorkerRole.PREFILL else self
        worker = super().add(url, role) if side is self else side.add(url, role)
        self._look_at_roles()
        return worker

    def remove(self, key: str) -> Worker:
        worker = self.get(key)
        worker = self.prefills.remove(worker.id) if self._side(worker) is self.prefills else super().remove(worker.id)
        self._look_at_roles()
        return worker

    def get(self, key: str) -> Worker:
        try:
            return self.prefills.get(key)
        except NotFoundError:
            return super().get(key)

    def list(self) -> tuple[Worker, ...]:
        """Return all workers, those that prefill first."""
        return (*self.prefills.list(), *super().list())

    @property
    def routable(self) -> tuple[Worker, ...]:
        """The workers that get new requests: none while there is only one kind of two."""
        if not self.apart:
            return self._routable
        both = self.prefills.routable, self._routable
        return (*both[0], *both[1]) if all(both) else ()

    def introduced(self, worker: Worker, found: ProbeResult) -> None:
        """Note the engine of a worker, and its role, which an operator may have switched."""
        if found.role is not None and found.role is not worker.role:
            self._move(worker, found.role)
        if found.bootstrap_port is not None:
            worker.bootstrap_port = found.bootstrap_port
        if self._side(worker) is self.prefills:
            self.prefills.introduced(worker, found)
        else:
            super().introduced(worker, found)

    def probed(
        self, worker: Worker, complaint: str | None, version: str | None = None, *, absent: bool = False
    ) -> None:
        if self._side(worker) is self.prefills:
            self.prefills.probed(worker, complaint, version, absent=absent)
        else:
            super().probed(worker, complaint, version, absent=absent)

    def begin(self, version: str | None) -> None:
        super().begin(version)
        self.prefills.begin(version)

    def new_version(self, version: str, taken_by: AbstractSet[str], unsure: AbstractSet[str] = frozenset()) -> None:
        super().new_version(version, taken_by, unsure)
        self.prefills.new_version(version, taken_by, unsure)

    def may_have_restarted(self, worker: Worker) -> None:
        if self._side(worker) is self.prefills:
            self.prefills.may_have_restarted(worker)
        else:
            super().may_have_restarted(worker)

    def has_other(self, exclude: AbstractSet[str], rank: int | None = None) -> bool:
        return super().has_other(exclude, rank) and (not self.apart or self.prefills.has_other(exclude, rank))

    def no_worker_error(self) -> NoWorkerError:
        """Return the error that says why no worker takes requests, or which kind of workers is missing."""
        if not self.apart:
            return super().no_worker_error()
        for side, kind in ((self.prefills, "prefill"), (self, "decode")):
            if not side._workers:
                return NoWorkerError(
                    f"no {kind} worker is registered, and a request needs a prefill and a decode worker: add one with"
                    " POST /add_worker?url=http://HOST:PORT"
                )
        return self.prefills.no_worker_error() if not self.prefills.routable else super().no_worker_error()

    def _pair(self, lease: Lease, query: RouteQuery, exclude: AbstractSet[str], limited: bool) -> Lease:
        """Add the lease of a prefill worker. Raises what `lease` raises; the first lease is over then."""
        try:
            lease.prefill = self.prefills.lease(query, exclude, limited=limited)
        except BaseException as error:
            on_room, self.on_room = self.on_room, None  # nothing has changed for those who wait
            lease.release()
            self.on_room = on_room
            if isinstance(error, NoWorkerError) and not self.prefills._workers:
                raise self.no_worker_error() from None  # the prefill workers' pool does not know that it is of one kind
            raise
        return lease

    def _forget_if_drained(self, worker: Worker) -> None:
        """Forget a worker wherever it is now: its role may have been switched since its last request began."""
        if self._side(worker) is self.prefills:
            self.prefills._forget_if_drained(worker)
        else:
            super()._forget_if_drained(worker)

    def _side(self, worker: Worker) -> WorkerPool:
        return self.prefills if worker.id in self.prefills._workers else self

    def _move(self, worker: Worker, role: WorkerRole) -> None:
        """Give a worker another role. Requests that it has are counted where they began."""
        logger.info("worker %s is a %s worker, not a %s one", worker.url, role.value, worker.role.value)
        old, new = self._side(worker), self.prefills if role is WorkerRole.PREFILL else self
        worker.role = role
        if old is not new:
            del old._workers[worker.id]
            new._workers[worker.id] = worker
            old._forget(worker.targets)
            old._update_routable()
            new._update_routable()
        self._look_at_roles()
        self._room()
        self.on_switched(worker)

    def _look_at_roles(self) -> None:
        """Lease pairs if, and only if, there are workers that need it."""
        apart = self._always_apart or any(worker.role is not WorkerRole.REGULAR for worker in self.list())
        self.joined = self._pair if apart else None
