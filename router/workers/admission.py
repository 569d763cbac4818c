"""The admission of workers to the pool.

A worker that reports that it cannot serve text is refused. A silent one is admitted: it counts as starting, and gets requests
after its first answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from msgspec.structs import replace

from router.errors import BadRequestError
from router.http.time_limits import patience
from router.workers.allowed import AllowedWorkers
from router.workers.health import HealthChecks
from router.workers.pool import WorkerPool
from router.workers.probe import Prober, for_now
from router.workers.worker import ProbeResult, Worker, WorkerRole, normalize_url

logger = logging.getLogger(__name__)

STARTUP_PATIENCE = 1.0
"""Seconds that the start of the router waits for answers. Slower workers are admitted as silent."""

_SILENT = ProbeResult("it has not answered yet")


class Admission:
    """Introduces new workers to the pool and to the health checks."""

    def __init__(
        self,
        pool: WorkerPool,
        prober: Prober,
        checks: HealthChecks,
        *,
        allowed: AllowedWorkers | None = None,
        patience: float = 2.0,
        startup_patience: float = STARTUP_PATIENCE,
    ) -> None:
        """`allowed` limits the addresses of workers; `patience` is how many seconds `admit` waits for an answer."""
        self._pool = pool
        self._prober = prober
        self._checks = checks
        self._allowed = allowed or AllowedWorkers(())
        self._patience = patience
        self._startup_patience = startup_patience

    async def admit(self, url: str) -> Worker:
        """Register a worker and return it. Raise BadRequestError for a bad URL or a worker that is refused."""
        url = normalize_url(url)
        return self.take_in(url, await self.examine(url))

    async def check(self, url: str, found: ProbeResult | None = None) -> None:
        """Raise BadRequestError for a (normalized) URL at which no worker may be, or at which this was found."""
        await self._allowed.check(url)
        refused = None if found is None else self._prober.checked(url, found).refusal
        if refused is not None:
            raise BadRequestError(refused)

    async def examine(self, url: str) -> ProbeResult:
        """Ask the server at a (normalized) URL what it is. Raise BadRequestError if it is refused."""
        await self.check(url)
        try:
            async with patience(self._patience):
                found = await self._prober.introduction(url)
        except TimeoutError:
            found = _SILENT
        if found.refusal is not None:
            raise BadRequestError(found.refusal)
        return found

    async def try_in(self, url: str) -> str | None:
        """Register the worker at a (normalized) URL that nobody named; return why it is refused, None if it is not.

        Where something answers that is no engine, there may be one later: that worker is starting.
        """
        try:
            await self.check(url)
        except BadRequestError as error:
            return error.message
        try:
            async with patience(self._patience):
                found = for_now(await self._prober.introduction(url))
        except TimeoutError:
            found = _SILENT
        if found.refusal is None:
            self.take_in(url, found)
        return found.refusal

    async def admit_all(self, urls: Iterable[str]) -> None:
        """Register several workers in this order. Refused ones are logged and left out.

        Where something answers that is no engine, there may be one later, as behind a proxy: that worker is starting.
        """
        asked = {url: asyncio.create_task(self._prober.introduction(url)) for url in map(normalize_url, urls)}
        if not asked:
            return
        await asyncio.wait(asked.values(), timeout=self._startup_patience)
        for url, answer in asked.items():
            if not answer.done():
                answer.cancel()  # the health checks ask again
                self.take_in(url, _SILENT)
            # All were asked before the first of them was in, and a fleet has the engine of that one.
            elif (found := self._prober.checked(url, for_now(answer.result()))).refusal is not None:
                logger.error("not routed to: %s", found.refusal)
            else:
                self.take_in(url, found)

    def take_in(self, url: str, found: ProbeResult) -> Worker:
        """Register a worker that gave this answer, and begin to probe it."""
        # Another engine may have come in since the question. The health checks ask again, and then it is refused.
        checked = self._prober.checked(url, found)
        worker = self._pool.add(url, checked.role or WorkerRole.REGULAR)
        told = worker.complaint  # a worker of --worker-urls comes again from the log of the store
        worker.bootstrap_port = checked.bootstrap_port or worker.bootstrap_port
        given = self._prober.given_ranks(url)  # another router, which found this, may be told otherwise
        found = replace(
            checked,
            complaint=checked.refusal or checked.complaint,
            refusal=None,
            ranks=checked.ranks if given is None else given,
        )
        if found.complaint is None:
            self._pool.introduced(worker, found)
        if found.stranger:
            self._pool.does_not_generate(worker)
        self._pool.probed(worker, found.complaint, found.version, absent=found.absent)
        if found.complaint is not None and found.complaint != told:
            logger.warning(
                "worker %s is starting, and is asked again until it answers as an engine: %s", url, found.complaint
            )
        self._checks.watch(worker)
        return worker
