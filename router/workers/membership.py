"""The workers of the fleet, for all of its routers: calls to any router add and remove them.

The log of the routers decides (`router/peers`). A worker that was removed by a call stays removed until a call adds
it: a router that starts, with whatever command line, does not bring it back. All other workers of a command line are added
for all routers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from router.errors import BadRequestError, NotFoundError
from router.peers.events import WorkerAdded, WorkerRemoved
from router.peers.peers import Heard, Peers
from router.workers.pool import WorkerPool
from router.workers.worker import Finding, Worker, WorkerState, normalize_url

logger = logging.getLogger(__name__)


class Door(Protocol):
    """Where workers come in: `Admission`."""

    async def check(self, url: str, found: Finding | None = None) -> None:
        """Raise BadRequestError for a (normalized) URL at which no worker may be, or at which this was found."""

    async def examine(self, url: str) -> Finding:
        """Return what there is at a (normalized) URL. Raise BadRequestError if it is refused."""
        ...

    def take_in(self, url: str, found: Finding) -> Worker:
        """Register a worker of which this was found, and begin to probe it."""
        ...

    async def admit_all(self, urls: Iterable[str]) -> None:
        """Register several workers in this order. Refused ones are logged and left out."""


class Membership:
    """The pool of this router, kept equal to those of the others."""

    def __init__(self, pool: WorkerPool, door: Door, peers: Peers) -> None:
        self.peers = peers
        self._pool = pool
        self._door = door
        peers.log.hear(WorkerAdded, self._added)
        peers.log.hear(WorkerRemoved, self._removed)

    async def begin(self, urls: Sequence[str]) -> None:
        """Take in the workers of the command line (normalized), and those that calls to any router have added."""
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
        await self._door.admit_all(dict.fromkeys([*there, *(url for url in urls if told.get(url) is not False)]))
        for worker in self._pool.list():
            if self.peers.kind is not None and worker.url not in told:
                finding = _told(worker.url, worker)
                await self.peers.tell(finding, seconds=0.0)

    async def add(self, url: str) -> tuple[Worker, Heard]:
        """Register a worker at all routers. Raise BadRequestError for a bad URL, a router, or a worker that is refused."""
        url = normalize_url(url)
        if any(one.url == url for one in self.peers.presence.others.values()):
            raise BadRequestError(f"{url} is another router of this store: give the URL of a worker")
        found = await self._door.examine(url)
        if await self.peers.catch_up() and self.peers.log.state.workers.get(url):
            return self._door.take_in(url, found), await self.peers.settle()
        heard = await self.peers.tell(_told(url, found))
        return self._pool.get(url), heard

    async def remove(self, key: str) -> tuple[Worker, Heard]:
        """Let no router send more requests to a worker, named by URL or id. Raise NotFoundError if there is none."""
        await self.peers.catch_up()
        worker = self._pool.get(key)
        return worker, await self.peers.tell(WorkerRemoved(worker.url))

    async def _added(self, event: WorkerAdded, _: int, own: bool) -> None:
        url = normalize_url(event.url)
        found = Finding(
            event.complaint,
            version=event.version,
            absent=event.absent,
            engine=event.engine,
            abilities=frozenset(event.abilities),
        )
        if own:
            self._door.take_in(url, found)
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
            self._door.take_in(url, found)

    async def _is_refused(self, url: str, found: Finding | None = None) -> bool:
        """Return whether a worker that another router has added may not be here."""
        if url == self.peers.presence.url:
            logger.warning("another router has added %s as a worker, which is this router: it is left out", url)
            return True
        try:
            await self._door.check(url, found)
        except BadRequestError as error:
            logger.error("another router has added a worker that is refused here: %s", error)
            return True
        return False

    async def _removed(self, event: WorkerRemoved, _: int, own: bool) -> None:
        try:
            self._pool.remove(event.url)
        except NotFoundError:
            return
        if not own:
            logger.info("worker %s was removed at another router", event.url)


def _told(url: str, found: Finding | Worker) -> WorkerAdded:
    return WorkerAdded(
        url,
        found.complaint,
        found.version,
        isinstance(found, Finding) and found.absent,
        found.engine,
        tuple(sorted(found.abilities)),
    )
