"""Appends to the store that a reply waits for, and those that have to wait for the store.

A batch that the store cannot take now (its disk is full, it is read-only) is kept in memory, up to `MOST_WAITING_BYTES`, and
handed over in order when the store takes writes again. Meanwhile all that follows waits behind it, because it may build on it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from middleware_hub.store.errors import MissingRecordError, StoreError, StoreUnreachableError
from middleware_hub.store.protocol import Batch, Store

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 256 << 20
RETRY_SECONDS = 1.0
_LOG_EVERY = 60.0

Mend = Callable[[MissingRecordError], Batch | None]
"""Returns the batch with what the store lacks, which has forgotten it; None if that is not here either."""


class Saving:
    """Appends batches in the background.

    Attributes:
        saved, unsaved: batches that were acknowledged, and that were not when their reply was sent.
        lost: batches that were given up, because too much was waiting or the store refused them.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running: set[asyncio.Task[bool]] = set()
        self._waiting: deque[tuple[Batch, Mend | None, Callable[[], None] | None]] = deque()
        self._waiting_bytes = 0
        self._handing_over: asyncio.Task[None] | None = None
        self._logged: dict[str, float] = {}
        self.saved = self.unsaved = self.lost = 0
        self.seconds = 0.0

    @property
    def waiting(self) -> int:
        """Return how many batches wait for the store to take writes again."""
        return len(self._waiting)

    def append(
        self, batch: Batch, *, mend: Mend | None = None, over: Callable[[], None] | None = None
    ) -> asyncio.Task[bool]:
        """Append a batch; the task is done when it is acknowledged (True), or is known not to be saved now (False).

        Args:
            mend: for a batch whose conversation the store has forgotten.
            over: called when the batch is in the store, or given up.
        """
        task = asyncio.get_running_loop().create_task(self._append(batch, mend, over))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        """Wait until everything is appended; what the store still does not take is lost, and said so."""
        while self._running:
            await asyncio.wait(self._running)
        if self._handing_over is not None:
            self._handing_over.cancel()
            await asyncio.wait([self._handing_over])
        if self._waiting and not await self._hand_over():
            logger.error(
                "%d replies could not be written to the store before the end, and are lost", len(self._waiting)
            )
            self.lost += len(self._waiting)
            self._waiting.clear()

    def complain(self, message: str, error: BaseException) -> None:
        """Log that something is wrong with the store, each message once a minute."""
        now = time.monotonic()
        if now - self._logged.get(message, -_LOG_EVERY) >= _LOG_EVERY:
            self._logged[message] = now
            logger.error(message, error)

    async def _append(self, batch: Batch, mend: Mend | None, over: Callable[[], None] | None) -> bool:
        begun = time.perf_counter()
        try:
            if self._waiting:
                raise StoreUnreachableError("what was recorded before is still waiting for the store")
            await self._appended(batch, mend)
        except StoreUnreachableError as error:
            self._postpone(batch, mend, over, error)
            return False
        except (StoreError, ValueError) as error:
            self.unsaved += 1
            self._give_up(over, "a reply was refused by the store: %s", error)
            return False
        self.saved += 1
        self.seconds += time.perf_counter() - begun
        if over is not None:
            over()
        return True

    async def _appended(self, batch: Batch, mend: Mend | None) -> None:
        try:
            await self._store.append(batch)
        except MissingRecordError as error:
            mended = None if mend is None else mend(error)
            if mended is None:
                raise
            await self._store.append(mended)

    def _postpone(
        self, batch: Batch, mend: Mend | None, over: Callable[[], None] | None, error: StoreUnreachableError
    ) -> None:
        self.unsaved += 1
        self.complain("replies are answered without being saved, and kept until the store takes writes: %s", error)
        size = _size(batch)
        if self._waiting_bytes + size > MOST_WAITING_BYTES:
            self._give_up(over, "too much is waiting for the store: %s", error)
            return
        self._waiting.append((batch, mend, over))
        self._waiting_bytes += size
        if self._handing_over is None or self._handing_over.done():
            self._handing_over = asyncio.get_running_loop().create_task(self._keep_trying())

    def _give_up(self, over: Callable[[], None] | None, message: str, error: BaseException) -> None:
        self.lost += 1
        self.complain(message, error)
        if over is not None:
            over()

    async def _keep_trying(self) -> None:
        while self._waiting:
            await asyncio.sleep(RETRY_SECONDS)
            if await self._hand_over():
                logger.warning("the store takes writes again: all replies that were waiting are in it")

    async def _hand_over(self) -> bool:
        """Append what is waiting, in order; return whether all of it is."""
        while self._waiting:
            batch, mend, over = self._waiting[0]
            try:
                await self._appended(batch, mend)
            except StoreUnreachableError:
                return False
            except (StoreError, ValueError) as error:
                self._give_up(None, "a reply was refused by the store: %s", error)
            self._waiting.popleft()
            self._waiting_bytes -= _size(batch)
            if over is not None:
                over()
        return True


def _size(batch: Batch) -> int:
    records = sum(len(one.ids) + len(one.logprobs or b"") + len(one.text) for one in batch.records)
    return records + sum(len(blob.data) for blob in batch.blobs) + sum(len(event.data) for event in batch.events)
