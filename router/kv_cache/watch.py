"""Discovers which workers publish KV cache events, and follows them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import MappingProxyType

from router.engines.sglang.kv_events import SGLANG_KV, KvReader
from router.kv_cache.index import KvIndex
from router.kv_cache.subscriptions import KvSubscriptions
from router.workers.pool import WorkerPool
from router.workers.probe import Prober
from router.workers.worker import ROUTABLE, Worker

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""The interval between two looks at the pool. Until a new worker is followed, the policy relies on its tree."""


class KvWatch:
    """A context for the lifetime of an application that follows the workers of a pool. Without an index it does nothing."""

    def __init__(
        self,
        pool: WorkerPool,
        prober: Prober,
        index: KvIndex | None,
        *,
        readers: Mapping[str, KvReader] = MappingProxyType({}),
    ) -> None:
        """`readers`: how workers tell where they publish, by the name of their engine; others do as SGLang's."""
        self._readers = readers
        self._pool = pool
        self._prober = prober
        self._index = index
        self._asked: set[str] = set()
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
        """Ask workers that are new, or were away and may have restarted; stop following workers that left the pool."""
        workers = {worker.url: worker for worker in self._pool.list()}
        well = {url for url, worker in workers.items() if worker.state in ROUTABLE}
        for url in subscriptions.urls - workers.keys():
            subscriptions.stop(url)
        new = well - self._asked
        self._asked = well
        await asyncio.gather(*(self._ask(subscriptions, workers[url]) for url in new))

    async def _ask(self, subscriptions: KvSubscriptions, worker: Worker) -> None:
        reader = self._readers.get(worker.engine or "", SGLANG_KV)
        info = await self._prober.description(worker.url, reader.paths)
        if worker.state not in ROUTABLE:
            self._asked.discard(worker.url)
            return
        source = None if info is None else reader.source(worker.url, info)
        if source is None:
            logger.info("worker %s does not publish KV events (--kv-events-config)", worker.url)
            subscriptions.stop(worker.url)
        else:
            logger.info("worker %s publishes KV events at %s", worker.url, source.endpoint(0))
            subscriptions.start(worker.url, source)
