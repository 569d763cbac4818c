"""Discovers which workers publish KV cache events, and follows them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from router.config.workers import MOST_RANKS
from router.engines.engine import Engine
from router.engines.sglang.engine import SGLANG
from router.kv_cache.index import KvIndex
from router.kv_cache.subscriptions import KvSubscriptions
from router.workers.pool import WorkerPool
from router.workers.probe import Prober
from router.workers.worker import ROUTABLE, KvFollowing, KvState, ProbeResult, Worker

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""The interval between two looks at the pool. Until a new worker is followed, the policy relies on its tree."""

LONGEST_WAIT_SECONDS = 60.0
"""A worker that did not answer is asked again: after one look, and then after twice as long each time, up to this."""


class KvWatch:
    """A context for the lifetime of an application that follows the workers of a pool. Without an index it does nothing."""

    def __init__(
        self,
        pool: WorkerPool,
        prober: Prober,
        index: KvIndex | None,
        *,
        engines: Mapping[str, Engine] = MappingProxyType({}),
    ) -> None:
        """`engines`: by name; their workers tell where they publish. Workers of an unknown engine are asked as SGLang's are."""
        self._engines = engines
        self._pool = pool
        self._prober = prober
        self._index = index
        self._asked: set[str] = set()
        self._again: dict[str, _Again] = {}
        self._known: dict[str, tuple[int, int]] = {}
        """How many targets each worker was that was asked, and how often it may have been restarted until then."""
        self._none: set[str] = set()
        """The workers that publish nothing."""
        self._task: asyncio.Task[None] | None = None
        self.subscriptions: KvSubscriptions | None = None if index is None else KvSubscriptions(index)

    async def __aenter__(self) -> KvWatch:
        if self.subscriptions is not None:
            self._task = asyncio.create_task(self._watch(self.subscriptions))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None and self.subscriptions is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            await self.subscriptions.close()

    async def _watch(self, subscriptions: KvSubscriptions) -> None:
        while True:
            try:
                await self.look(subscriptions)
            except Exception:
                logger.exception("looking for workers that publish KV events failed")
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self, subscriptions: KvSubscriptions) -> None:
        """Ask workers that are new, have other ranks, or were away and may have restarted; stop following those that left."""
        workers = {worker.url: worker for worker in self._pool.list()}
        well = {url for url, worker in workers.items() if worker.state in ROUTABLE}
        for url in subscriptions.urls - workers.keys():
            subscriptions.stop(url)
        self._again = {url: again for url, again in self._again.items() if url in well}
        now = asyncio.get_running_loop().time()
        new = (well - self._asked) | {url for url, again in self._again.items() if again.at <= now}
        known = {url: (len(workers[url].targets), workers[url].doubts) for url in well}
        new |= {url for url in well & self._known.keys() if self._known[url] != known[url]}
        self._known = known
        self._asked = well
        await asyncio.gather(*(self._ask(subscriptions, workers[url]) for url in new))
        for url, worker in workers.items():
            worker.kv_events = self._following(subscriptions, url)

    def _following(self, subscriptions: KvSubscriptions, url: str) -> KvFollowing:
        found = subscriptions.following(url)
        if found is not None and found.state is KvState.CONNECTED:
            return found
        if (again := self._again.get(url)) is not None:
            return KvFollowing(KvState.UNKNOWN, again.error)
        if found is not None:
            return found
        return KvFollowing(KvState.NONE if url in self._none else KvState.UNKNOWN)

    async def _ask(self, subscriptions: KvSubscriptions, worker: Worker) -> None:
        url = worker.url
        reader = self._engines.get(worker.engine or "", SGLANG).kv_reader
        info = await self._prober.description(url, reader.paths)
        if worker.state not in ROUTABLE:
            self._asked.discard(url)
            return
        if isinstance(info, ProbeResult):
            self._ask_again(url, info.complaint or info.refusal or "it does not answer this router")
            return
        self._again.pop(url, None)
        source = None if info is None else reader.source(url, info)
        if source is not None and source.ranks > MOST_RANKS:
            logger.warning("worker %s has %d ranks, whose KV events are not followed", url, source.ranks)
            source = None
        if source is None:
            logger.info("worker %s does not publish KV events (--kv-events-config)", url)
            subscriptions.stop(url)
            self._none.add(url)
        else:
            logger.info("worker %s publishes KV events at %s", url, source.endpoint(0))
            self._none.discard(url)
            subscriptions.start(url, source, len(worker.targets))

    def _ask_again(self, url: str, why: str) -> None:
        before = self._again.get(url)
        wait = LOOK_SECONDS if before is None else min(2 * before.wait, LONGEST_WAIT_SECONDS)
        self._again[url] = _Again(asyncio.get_running_loop().time() + wait, wait, why)
        logger.warning(
            "worker %s has not said whether it publishes KV events, and is asked again in %g s: %s", url, wait, why
        )


class _Again(NamedTuple):
    """When to ask a worker again, how long that is after the last question, and the error of that question."""

    at: float
    wait: float
    error: str
