"""The pool: which workers there are, and which of them serves the next request.

Everything here is synchronous. That is what makes it correct without a lock: between the choice of a worker and the
counting of the request there is no await, so any number of requests at once see each other's counts.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from types import TracebackType

from router.errors import NotFoundError, NoWorkerError
from router.policies.base import Policy, RouteQuery
from router.workers.worker import Worker, WorkerState, normalize_url


class Lease:
    """One request's hold on a worker, from the choice to the end of the reply's body. Ending it twice does no harm."""

    __slots__ = ("_held", "_pool", "worker")

    def __init__(self, pool: WorkerPool, worker: Worker) -> None:
        self.worker = worker
        self._pool = pool
        self._held = True

    def release(self) -> None:
        """The worker is done with this request."""
        if self._held:
            self._held = False
            self._pool._returned(self.worker)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease {'held' if self._held else 'released'} {self.worker!r}>"


class WorkerPool:
    """The workers in the order in which they were added."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._workers: dict[str, Worker] = {}  # by id
        self._routable: tuple[Worker, ...] = ()

    def add(self, url: str) -> Worker:
        """Register a worker, or take one back that was draining. Adding one again changes nothing."""
        candidate = Worker(normalize_url(url))
        worker = self._workers.setdefault(candidate.id, candidate)
        if worker.state is WorkerState.DRAINING:
            worker.move_to(WorkerState.HEALTHY)
        self._update_routable()
        return worker

    def remove(self, key: str) -> Worker:
        """Send nothing more to a worker (by URL or id). It leaves the pool with its last request in flight."""
        worker = self.get(key)
        if worker.state is not WorkerState.DRAINING:
            worker.move_to(WorkerState.DRAINING)
            self._update_routable()
        self._forget_if_drained(worker)
        return worker

    def get(self, key: str) -> Worker:
        """The worker with this id or URL. NotFoundError if there is none."""
        worker = self._workers.get(key)
        if worker is None and "/" in key:
            worker = self._workers.get(Worker(normalize_url(key)).id)
        if worker is None:
            raise NotFoundError(f"there is no worker {key!r}; GET /workers lists them")
        return worker

    def list(self) -> tuple[Worker, ...]:
        """All workers, draining ones too."""
        return tuple(self._workers.values())

    @property
    def routable(self) -> tuple[Worker, ...]:
        """The workers that new requests are sent to."""
        return self._routable

    def lease(self, query: RouteQuery, exclude: AbstractSet[str] = frozenset()) -> Lease:
        """Choose a worker whose id is not in `exclude` and count the request there. NoWorkerError if none is left."""
        workers = self._routable
        if exclude:
            workers = tuple(worker for worker in workers if worker.id not in exclude)
        if not workers:
            raise self._nobody()
        worker = self._policy.select(workers, query)
        worker.inflight += 1
        return Lease(self, worker)

    def _nobody(self) -> NoWorkerError:
        if self._workers:
            states = ", ".join(f"{worker.url} is {worker.state.value}" for worker in self._workers.values())
            return NoWorkerError(
                f"no worker takes requests ({states}): add one with POST /add_worker?url=http://HOST:PORT"
            )
        return NoWorkerError("no worker is registered: add one with POST /add_worker?url=http://HOST:PORT")

    def _returned(self, worker: Worker) -> None:
        worker.inflight -= 1
        assert worker.inflight >= 0, worker
        self._forget_if_drained(worker)

    def _forget_if_drained(self, worker: Worker) -> None:
        if worker.state is WorkerState.DRAINING and worker.inflight == 0:
            worker.move_to(WorkerState.GONE)
            del self._workers[worker.id]

    def _update_routable(self) -> None:
        self._routable = tuple(worker for worker in self._workers.values() if worker.routable)

    def __repr__(self) -> str:
        return f"<WorkerPool {list(self._workers.values())!r}>"
