"""Health checks: a series of probes for each worker.

A worker is probed every `interval` seconds; more often while it is starting or quarantined, so that it gets requests soon
after it can serve them; and at once when a request to it fails. `router/workers/worker.py` has the table that says what a
probe means.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import random
from collections.abc import Callable, Sequence

from router.config.workers import HealthConfig
from router.workers.pool import WorkerPool
from router.workers.probe import Prober, for_now
from router.workers.worker import ProbeResult, Worker, WorkerCheck, WorkerRole, WorkerState

logger = logging.getLogger(__name__)

DOWN_INTERVAL = 1.0
"""Seconds between two probes of a worker that gets no requests."""


class HealthChecks:
    """Probes the workers of a pool for as long as they are in it."""

    def __init__(
        self,
        pool: WorkerPool,
        prober: Prober,
        config: HealthConfig,
        on_probe: Callable[[bool], None] | None = None,
        worker_checks: Sequence[WorkerCheck] = (),
    ) -> None:
        """`on_probe` is called after each probe, with whether it was good. `worker_checks` may still grow."""
        self._pool = pool
        self._prober = prober
        self._config = config
        self._on_probe = on_probe
        self._worker_checks = worker_checks
        self._jitter = random.Random()
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._wake: dict[Worker, asyncio.Event] = {}

    def watch(self, worker: Worker) -> None:
        """Begin to probe a worker, unless it is probed already."""
        if worker not in self._tasks:
            self._wake[worker] = asyncio.Event()
            # A new context: probes must not be logged with the id of the request that added the worker.
            self._tasks[worker] = asyncio.create_task(
                self._watch(worker), name=f"probes of {worker.url}", context=contextvars.Context()
            )

    def trouble(self, worker: Worker) -> None:
        """Note that a connection to the worker broke: probe it now, and forget its weight version."""
        self._pool.may_have_restarted(worker)
        if worker in self._wake:
            self._wake[worker].set()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, worker: Worker) -> None:
        checked: int | None = None
        try:
            while True:
                try:
                    if checked != worker.doubts and worker.state is WorkerState.HEALTHY:
                        checked = worker.doubts
                        await self._check(worker)
                    await self._until_due(worker)
                    if worker.state is WorkerState.GONE:
                        return
                    await self._look_at(worker)
                except Exception:
                    logger.exception("worker %s could not be probed", worker.url)
        finally:
            del self._tasks[worker], self._wake[worker]

    async def _look_at(self, worker: Worker) -> None:
        if worker.state is WorkerState.STARTING or worker.was_away:
            found = for_now(await self._prober.introduction(worker.url))
        elif worker.stranger or (worker.engine is not None and not worker.told_ranks):
            found = for_now(await self._prober.introduction(worker.url))
            if found.refusal is not None:  # for a moment, another server may answer at its URL
                found = ProbeResult(complaint=found.refusal)
        else:
            found = await self._prober.probe(
                worker.url,
                wants_version=self._config.version_gate
                or worker.version is None
                or worker.role is not WorkerRole.REGULAR,
            )
            if found.role not in (None, worker.role):  # it may be no part of this fleet any more
                found = for_now(await self._prober.introduction(worker.url))
        if self._on_probe is not None:
            self._on_probe(found.complaint is None and found.refusal is None)
        if worker.state is WorkerState.GONE:
            return
        if found.refusal is not None:
            logger.error("no longer routed to: %s", found.refusal)
            self._pool.remove(worker.id)
        else:
            self._pool.introduced(worker, found)
            if found.stranger:
                if found.complaint != worker.complaint:
                    logger.warning("worker %s gets no requests: %s", worker.url, found.complaint)
                self._pool.does_not_generate(worker)
            self._pool.probed(worker, found.complaint, found.version, absent=found.absent)

    async def _check(self, worker: Worker) -> None:
        """Ask a worker the questions of the middlewares, and log the faults that they find."""
        warnings = [await self._warning(worker, check) for check in self._worker_checks]
        before, worker.warning = worker.warning, "; ".join(filter(None, warnings)) or None
        if worker.warning not in (None, before):
            logger.warning("worker %s: %s", worker.url, worker.warning)

    async def _warning(self, worker: Worker, check: WorkerCheck) -> str | None:
        answer = await self._prober.answer(worker.url, check.call)
        return None if answer is None else check.judge(answer)

    async def _until_due(self, worker: Worker) -> None:
        """Wait for the time of the next probe, which varies by a tenth so that 512 workers are not probed in one moment."""
        interval, wake = self._config.interval, self._wake[worker]
        if worker.state in (WorkerState.STARTING, WorkerState.QUARANTINED):
            interval = min(DOWN_INTERVAL, interval)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval * self._jitter.uniform(0.9, 1.1)):
                await wake.wait()
        wake.clear()
