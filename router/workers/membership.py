"""The workers of the fleet, for all of its routers: calls to any router add and remove them.

The log of the routers decides (`router/peers`). A worker that was removed by a call stays removed until a call adds
it: a router that starts, with whatever command line, does not bring it back. All other workers of a command line are added
for all routers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress

from router.errors import BadRequestError, NotFoundError
from router.peers.events import WorkerAdded, WorkerRemoved
from router.peers.peers import Heard, Peers
from router.workers.admission import Admission
from router.workers.names import WorkerNames
from router.workers.pool import WorkerPool
from router.workers.roles import WorkerRoles
from router.workers.worker import ProbeResult, Worker, WorkerRole, WorkerState, normalize_url

logger = logging.getLogger(__name__)


class FleetMembership:
    """Keeps the pool of this router equal to the pools of the others."""

    def __init__(
        self,
        pool: WorkerPool,
        admission: Admission,
        peers: Peers,
        names: WorkerNames | None = None,
        roles: WorkerRoles | None = None,
    ) -> None:
        """Make a membership.

        Args:
            names: knows other names of a worker; by default each URL is another worker.
            roles: is told the roles of workers that a call names.
        """
        self.peers = peers
        self._roles = roles or WorkerRoles(pool, apart=False)
        self._names = names
        self._adding: list[str] = []
        """URLs that are being added now. Another name of one of them is that worker already."""
        self._called: set[str] = set()
        """URLs of workers that calls have added, as far as this router has heard since it started."""
        self._pool = pool
        self._admission = admission
        self._announcing: set[asyncio.Task[None]] = set()
        peers.presence.draining = self._draining
        pool.on_gone = self._gone
        pool.elsewhere = self._elsewhere
        peers.log.hear(WorkerAdded, self._added)
        peers.log.hear(WorkerRemoved, self._removed)

    async def begin(self, urls: Sequence[str]) -> None:
        """Take in the workers of the command line (normalized), and the workers that calls to any router have added."""
        told = self.peers.log.state.workers
        for url in urls:
            if told.get(url) is False:
                logger.warning(
                    "worker %s is not routed to: a call has removed it. To bring it back: POST /add_worker?url=%s",
                    url,
                    url,
                )
        there = [url for url, there in list(told.items()) if there and (url in urls or not await self._is_refused(url))]
        others = [url for url in there if url not in urls]
        if others:
            logger.info("%d workers are known from the store: %s", len(others), ", ".join(others))
        wanted = dict.fromkeys([*there, *(url for url in urls if told.get(url) is not False)])
        await self._admission.admit_all(await self._distinct(wanted))
        for worker in self._pool.list():
            if self.peers.kind is not None and worker.url not in told:
                finding = _told(worker.url, worker)
                await self.peers.tell(finding, seconds=0.0)

    async def add(
        self, url: str, role: WorkerRole | None = None, bootstrap_port: int | None = None
    ) -> tuple[Worker, Heard]:
        """Register a worker at all routers; one that is known by another URL is that worker.

        Args:
            url: the worker's.
            role: its part of a generation, if the caller names it.
            bootstrap_port: where decode workers find it, if the caller names that.

        Raise BadRequestError for a bad URL, a router, or a worker that is refused.
        """
        url = await self._known_as(normalize_url(url))
        if role is not None:
            self._roles.name(url, role, bootstrap_port)
        if any(one.url == url for one in self.peers.presence.others.values()):
            raise BadRequestError(f"{url} is another router of this store: give the URL of a worker")
        self._adding.append(url)
        try:
            found = await self._admission.examine(url)
            if await self.peers.catch_up() and self.peers.log.state.workers.get(url):
                return self._admission.take_in(url, found), await self.peers.settle()
            heard = await self.peers.tell(_told(url, found))
            return self._pool.get(url), heard
        finally:
            self._adding.remove(url)

    async def remove(self, key: str) -> tuple[Worker, Heard]:
        """Let no router send more requests to a worker, named by id or any URL of it. Raise NotFoundError if there is none."""
        await self.peers.catch_up()
        worker = await self.find(key)
        return worker, await self.peers.tell(WorkerRemoved(worker.url))

    async def here(self, url: str) -> str | None:
        """Return the URL under which the worker at a (normalized) URL is registered, and not draining; None if it is not."""
        known = await self._known_as(url)
        with suppress(NotFoundError):
            return None if self._pool.get(known).state is WorkerState.DRAINING else known
        return None

    async def found(self, url: str) -> str | None:
        """Register a worker that was found at a (normalized) URL, at this router only: the others find it themselves.

        Return why it is refused; None if it is not.
        """
        if url == self.peers.presence.url or any(one.url == url for one in self.peers.presence.others.values()):
            return "it is a router"
        return await self._admission.try_in(url)

    def lost(self, url: str) -> None:
        """Let this router send no more requests to a worker that it found."""
        with suppress(NotFoundError):
            self._pool.remove(url)

    def was_added(self, url: str) -> bool:
        """Return whether a call has added the worker at a (normalized) URL, at any router, and none has removed it since."""
        return url in self._called or bool(self.peers.log.state.workers.get(url))

    def was_removed(self, url: str) -> bool:
        """Return whether a call has removed this worker, at any router, and none has added it since."""
        return self.peers.log.state.workers.get(url) is False

    def _elsewhere(self) -> dict[str, Worker]:
        here = {worker.url for worker in self._pool.list()}
        told = (one for other in self.peers.presence.others.values() for one in other.draining)
        return {one.url: _draining_elsewhere(one) for one in told if one.url not in here}

    def _draining(self) -> tuple[WorkerAdded, ...]:
        return tuple(_told(one.url, one) for one in self._pool.list() if one.state is WorkerState.DRAINING)

    def _gone(self, _: Worker) -> None:
        """Announce at once that a worker is drained: it may be stopped now, and calls to it would fail."""
        if self.peers.kind is not None:
            self._announcing.add(task := asyncio.create_task(self.peers.announce()))
            task.add_done_callback(self._announcing.discard)

    async def find(self, key: str) -> Worker:
        """Return the worker with this id, or any URL of it. Raise NotFoundError if there is none."""
        try:
            return self._pool.get(key)
        except NotFoundError:
            if "/" not in key or (url := await self._known_as(normalize_url(key))) == normalize_url(key):
                raise
            return self._pool.get(url)

    async def _known_as(self, url: str) -> str:
        if self._names is None:
            return url
        there = [worker.url for worker in self._pool.list()]
        known = await self._names.known_as(url, [*there, *self._adding])
        if known != url:
            logger.info("worker %s is registered already, as %s", url, known)
        return known

    async def _distinct(self, urls: Iterable[str]) -> list[str]:
        if self._names is None:
            return list(urls)
        found = await self._names.distinct(urls)
        for url, known in found.items():
            if url != known:
                logger.warning("worker %s is %s under another name: it is registered once", url, known)
        return [url for url, known in found.items() if url == known]

    async def _added(self, event: WorkerAdded, _: int, own: bool) -> None:
        url = normalize_url(event.url)
        if not own:
            url = await self._known_as(url)
        self._called.add(url)
        found = ProbeResult(
            event.complaint,
            version=event.version,
            absent=event.absent,
            engine=event.engine,
            abilities=frozenset(event.abilities),
            ranks=event.ranks,
            role=None if event.role is None else WorkerRole(event.role),
            bootstrap_port=event.bootstrap_port,
        )
        if found.role is not None:
            note = self._roles.name if found.engine is None else self._roles.heard
            note(url, found.role, found.bootstrap_port)
        if own:
            self._admission.take_in(url, found)
            return
        try:
            known = self._pool.get(url)
        except NotFoundError:
            pass
        else:
            if known.state is not WorkerState.DRAINING:
                return
        if not await self._is_refused(url, found):
            logger.info("worker %s was added at another router", url)
            self._admission.take_in(url, found)

    async def _is_refused(self, url: str, found: ProbeResult | None = None) -> bool:
        """Return whether a worker that another router has added may not be here."""
        if url == self.peers.presence.url:
            logger.warning("another router has added %s as a worker, which is this router: it is left out", url)
            return True
        try:
            await self._admission.check(url, found)
        except BadRequestError as error:
            logger.error("another router has added a worker that is refused here: %s", error)
            return True
        return False

    async def _removed(self, event: WorkerRemoved, _: int, own: bool) -> None:
        self._called.discard(event.url)
        try:
            self._pool.remove((await self.find(event.url)).id)
        except NotFoundError:
            return
        if not own:
            logger.info("worker %s was removed at another router", event.url)


def _draining_elsewhere(told: WorkerAdded) -> Worker:
    worker = Worker(told.url)
    worker.engine, worker.abilities = told.engine, frozenset(told.abilities)
    worker.role = WorkerRole.REGULAR if told.role is None else WorkerRole(told.role)
    return worker


def _told(url: str, found: ProbeResult | Worker) -> WorkerAdded:
    return WorkerAdded(
        url,
        found.complaint,
        found.version,
        isinstance(found, ProbeResult) and found.absent,
        found.engine,
        tuple(sorted(found.abilities)),
        None if found.role is None or found.role is WorkerRole.REGULAR else found.role.value,
        found.bootstrap_port,
        found.ranks,
    )
