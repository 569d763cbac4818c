"""The writer. Appends of one turn of the event loop, or made while the last group is on its way, become a group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from middleware_hub.store.errors import ConflictingRecordError, StoreError, StoreUnreachableError
from middleware_hub.store.records import Mark
from middleware_hub.store.redis.preparing import Answers, SortedBatch

logger = logging.getLogger(__name__)

_MOST_BATCHES: Final = 256
_MOST_BYTES: Final = 1 << 22
"""Limits of one group: a larger group would keep others waiting."""
_MARKS_EVERY: Final = 1.0
"""Seconds after which marks are written at the latest."""

Commit = Callable[[Sequence[SortedBatch], Sequence[Mark]], Awaitable[Answers]]


class RedisWriter:
    """Gathers batches and marks, and passes them to `commit`, one group after the other."""

    def __init__(self, commit: Commit) -> None:
        self._commit = commit
        self._loop = asyncio.get_running_loop()
        self._jobs: list[tuple[SortedBatch, asyncio.Future[list[int]]]] = []
        self._marks: dict[bytes, Mark] = {}
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.groups = self.appends = self.conflicts = 0

    @property
    def waiting(self) -> int:
        """Return how many batches wait for an earlier group."""
        return len(self._jobs)

    def submit(self, batch: SortedBatch) -> asyncio.Future[list[int]]:
        """Queue a batch; the future has the numbers of its events when it is written."""
        future: asyncio.Future[list[int]] = self._loop.create_future()
        self._jobs.append((batch, future))
        self._start()
        return future

    def note(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            known = self._marks.get(mark.root)
            self._marks[mark.root] = mark if known is None else known.merged(mark)
        if self._marks and self._timer is None:
            self._timer = self._loop.call_later(_MARKS_EVERY / 2, self._write_marks)

    def _write_marks(self) -> None:
        self._timer = None
        self._start()

    def _start(self) -> None:
        if self._task is None:
            self._task = self._loop.create_task(self._run())

    async def flush(self) -> None:
        """Write everything that waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._marks:
            self._start()
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        # A task begins in the next turn of the loop: so the group has everything that is asked for in this turn.
        try:
            while self._jobs or (self._marks and self._timer is None):
                await self._write(self._taken())
        finally:
            self._task = None

    def _taken(self) -> list[tuple[SortedBatch, asyncio.Future[list[int]]]]:
        count = size = 0
        for batch, _ in self._jobs[:_MOST_BATCHES]:
            size += batch.size
            if count and size > _MOST_BYTES:
                break
            count += 1
        taken, self._jobs = self._jobs[:count], self._jobs[count:]
        return taken

    async def _write(self, jobs: list[tuple[SortedBatch, asyncio.Future[list[int]]]]) -> None:
        marks, self._marks = self._marks, {}
        try:
            answers: Sequence[Any] = await self._commit([batch for batch, _ in jobs], list(marks.values()))
        except StoreError as error:
            answers = [error] * len(jobs)
            self._keep(marks)
        except BaseException:
            answers = [StoreUnreachableError("the store was closed while it was written")] * len(jobs)
            raise
        else:
            self.groups += 1
            self.appends += len(jobs)
        finally:
            for (_, future), answer in zip(jobs, answers, strict=True):
                self._settle(future, answer)

    def _settle(self, future: asyncio.Future[list[int]], answer: list[int] | StoreError) -> None:
        if isinstance(answer, ConflictingRecordError):
            self.conflicts += 1
            logger.error("%s", answer)
        if future.done():
            return
        if isinstance(answer, StoreError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _keep(self, marks: dict[bytes, Mark]) -> None:
        """Write these marks later."""
        self._timer = self._timer or self._loop.call_later(_MARKS_EVERY, self._write_marks)
        for root, mark in marks.items():
            known = self._marks.get(root)
            self._marks[root] = mark if known is None else mark.merged(known)
