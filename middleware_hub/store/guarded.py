"""A store that blocks no caller: each gets an answer, or in time an error that the store does not answer.

    answering --- a look-up fails, or takes too long ---> away: everything fails at once, and probes go on asking
              <----------- a probe is answered ------------

A write that fails does not change this state, because a store with a full disk can still be read. An append has no time limit
here either: it cannot be taken back, so its caller decides how long to wait (`persistence.saving`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Coroutine, Mapping, Sequence
from contextlib import closing
from typing import Any, Final, TypeVar

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.media import MediaFile
from middleware_hub.store.protocol import Batch, Finding, Forgotten, Found, LogInfo, Loss, Query, Store, StoreStats
from middleware_hub.store.records import Blob, Event, Mark, SpanRecord
from router.http.time_limits import patience

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_SECONDS: Final = 2.0
"""How long a look-up or an append may take before the store counts as away."""
FETCH_SECONDS: Final = 10.0
"""How long it may take to get the records that a look-up has named, or to trim a log: they may be many."""
PROBE_SECONDS: Final = 0.5
_LOG_EVERY: Final = 5.0


class GuardedStore:
    """A `Store` in front of another one; see the top of this file.

    Args:
        patience: how many seconds `open` waits for a store that cannot be reached.

    Attributes:
        away_seconds: how long look-ups were not answered, summed without the present outage.
    """

    def __init__(self, store: Store, *, patience: float = 0.0) -> None:
        self._store = store
        self._patience = patience
        self._since: float | None = None
        self._why = ""
        self._probing: asyncio.Task[None] | None = None
        self._away_seconds = 0.0

    def __repr__(self) -> str:
        return f"<GuardedStore {self._store!r}, {'away' if self.away else 'there'}>"

    @property
    def away(self) -> bool:
        """Whether look-ups are not answered."""
        return self._since is not None

    @property
    def away_seconds(self) -> float:
        return self._away_seconds + (0.0 if self._since is None else time.monotonic() - self._since)

    async def open(self, fingerprint: str | None) -> None:
        """Open the store; if it cannot be reached, wait for it as long as `patience` says."""
        deadline, told = time.monotonic() + self._patience, 0.0
        while True:
            try:
                await self._store.open(fingerprint)
                return
            except StoreUnreachableError as error:
                now = time.monotonic()
                if now >= deadline:
                    raise
                if now - told >= _LOG_EVERY:
                    told = now
                    logger.warning(
                        "waiting for the store, %.0f s at most, before anything is served: %s", deadline - now, error
                    )
            await asyncio.sleep(PROBE_SECONDS)

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait([self._probing])
            self._probing = None
        await self._store.close()

    # Changes -----------------------------------------------------------------------------------------------------------

    async def append(self, batch: Batch) -> list[int]:
        self._require()
        return await self._store.append(batch)

    async def trim(self, log: str, before: int) -> None:
        await self._timely(self._store.trim(log, before), FETCH_SECONDS)

    async def forget_logs(self, logs: Sequence[str]) -> int:
        self._require()
        return await self._store.forget_logs(logs)

    async def announce(self, name: str, data: bytes, seconds: float) -> None:
        await self._timely(self._store.announce(name, data, seconds), ANSWER_SECONDS)

    async def _timely(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        """Make a change that may come late, but not hold up its caller."""
        with closing(work):
            self._require()
            try:
                async with patience(seconds):
                    await work
            except TimeoutError:
                raise StoreUnreachableError(f"the store has not answered for {seconds:.0f} s") from None

    def _require(self) -> None:
        if self.away:
            raise StoreUnreachableError(f"the store does not answer: {self._why}")

    # Look-ups ----------------------------------------------------------------------------------------------------------

    def spared(self, query: Query) -> Found | None:
        return None if self.away else self._store.spared(query)

    async def find(self, query: Query) -> Found:
        return await self._asked(lambda: self._store.find(query), ANSWER_SECONDS)

    async def get(
        self, ids: Sequence[bytes], *, known: Container[bytes] = (), roots: Mapping[bytes, bytes] | None = None
    ) -> Found:
        return await self._asked(lambda: self._store.get(ids, known=known, roots=roots), FETCH_SECONDS)

    async def blobs(
        self, record: bytes, names: Sequence[str] | None = None, *, root: bytes | None = None
    ) -> list[Blob]:
        return await self._asked(lambda: self._store.blobs(record, names, root=root), FETCH_SECONDS)

    async def media(self, tenant: str, digests: Sequence[str], *, data: bool = True) -> Mapping[str, MediaFile]:
        return await self._asked(lambda: self._store.media(tenant, digests, data=data), FETCH_SECONDS)

    async def media_unnamed(self) -> int:
        return await self._store.media_unnamed()

    async def sweep_media(self) -> int:
        return await self._store.sweep_media()

    async def read(self, log: str, *, after: int = 0, limit: int = 1_000) -> list[Event]:
        return await self._asked(lambda: self._store.read(log, after=after, limit=limit), ANSWER_SECONDS)

    async def logs(self, prefix: str = "", *, after: str = "", limit: int = 1_000) -> list[LogInfo]:
        return await self._asked(lambda: self._store.logs(prefix, after=after, limit=limit), ANSWER_SECONDS)

    async def announced(self, prefix: str = "") -> Mapping[str, bytes]:
        return await self._asked(lambda: self._store.announced(prefix), ANSWER_SECONDS)

    def now(self) -> float:
        return self._store.now()

    async def wait(self, log: str, after: int, seconds: float) -> int:
        return await self._asked(lambda: self._store.wait(log, after, seconds), seconds + ANSWER_SECONDS)

    async def _asked(self, work: Callable[[], Awaitable[T]], seconds: float) -> T:
        self._require()
        try:
            async with patience(seconds):  # a late loop would miss an answer that is there
                return await work()
        except TimeoutError:
            error = StoreUnreachableError(f"the store has not answered for {seconds:.0f} s")
            self._lost(error)
            raise error from None
        except StoreUnreachableError as error:
            self._lost(error)
            raise

    def _lost(self, error: StoreUnreachableError) -> None:
        if self._since is None:
            self._since, self._why = time.monotonic(), error.message
            logger.error("the store does not answer, and is asked again each %g s: %s", PROBE_SECONDS, error)
            self._probing = asyncio.get_running_loop().create_task(self._probe())

    async def _probe(self) -> None:
        assert self._since is not None
        while True:
            try:
                async with patience(ANSWER_SECONDS):
                    await self._store.read("probe", limit=1)
                break
            except (TimeoutError, StoreUnreachableError):
                await asyncio.sleep(PROBE_SECONDS)
            except Exception:
                logger.exception("the store failed")
                await asyncio.sleep(PROBE_SECONDS)
        seconds = time.monotonic() - self._since
        self._away_seconds += seconds
        self._since = None
        logger.warning("the store answers again, after %.1f s", seconds)

    # Beside requests ------------------------------------------------------------------------------

    def on_loss(self, refill: Loss) -> None:
        self._store.on_loss(refill)

    def note(self, marks: Sequence[Mark]) -> None:
        self._store.note(marks)

    def others(self) -> int:
        return self._store.others()

    def scan(self) -> AsyncIterator[SpanRecord]:
        return self._store.scan()

    def verify(self, checked: Callable[[int], None] | None = None) -> AsyncIterator[Finding]:
        return self._store.verify(checked)

    async def forget(self, max_bytes: int) -> Forgotten:
        return await self._store.forget(max_bytes)

    async def forget_roots(self, roots: Sequence[bytes]) -> Forgotten:
        return await self._store.forget_roots(roots)

    async def stats(self) -> StoreStats:
        self._require()
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                return await self._store.stats()
        except TimeoutError:  # the store may only be large
            raise StoreUnreachableError("the store takes long to count what is in it") from None
