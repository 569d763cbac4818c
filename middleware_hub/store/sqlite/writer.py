"""The thread that writes. Whatever was asked for while the last group was written becomes the next one.

SQLite appends to a log, which has to be put into the file now and then (a checkpoint), and that waits for the disk. A helper
thread moves most of it while groups are written. Only what came in meanwhile is moved between two groups; then SQLite begins
the log anew, so that it does not grow.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final

from middleware_hub.store.errors import ConflictingRecordError, StoreError, StoreUnreachableError
from middleware_hub.store.protocol import Durability
from middleware_hub.store.records import Mark
from middleware_hub.store.sqlite.appending import Group, Prepared, Whereabouts, write_marks
from middleware_hub.store.sqlite.file import connect, mapped, store_error
from middleware_hub.store.sqlite.others import Others, newest

logger = logging.getLogger(__name__)

_MOST_JOBS: Final = 256
"""Batches of one group."""
_MARKS_EVERY: Final = 1.0
"""Seconds after which marks are written, with or without anything else."""
_CHECKPOINT_PAGES: Final = 4_000
"""Pages of the log after which a checkpoint begins: 16 MB."""
_PAGES_OF_A_BATCH: Final = 8

Step = Callable[[sqlite3.Connection], Any]
Answer = tuple[asyncio.Future[Any], Any, BaseException | None]


class Job:
    """A batch or a step, and who waits for it."""

    __slots__ = ("future", "work")

    def __init__(self, work: Prepared | Step, future: asyncio.Future[Any] | None) -> None:
        self.work = work
        self.future = future


class Writer:
    """The only one of this process who writes to the file."""

    def __init__(self, path: Path, durability: Durability) -> None:
        self._path = path
        self._connection = connect(path, synced=durability == "disk")
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._marks: dict[bytes, Mark] = {}
        self._marks_lock = threading.Lock()
        self._closed = False
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="store-checkpoint")
        self._helping: Future[None] | None = None
        self.groups = self.appends = self.conflicts = 0
        self._known = Whereabouts()
        self._version = -1
        with mapped(path):
            self.others = Others(newest(self._connection))
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Prepared | Step, *, wait: bool = True) -> asyncio.Future[Any]:
        """Queue a batch, or a step to be done between groups; the future is done when it is committed.

        With `wait=False` the future is done at once, and a fault is only logged.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if self._closed:
            future.set_exception(StoreUnreachableError(f"the store {self._path} is closed"))
            return future
        self._queue.put(Job(work, future if wait else None))
        if not wait:
            future.set_result([])
        return future

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def note(self, marks: Sequence[Mark]) -> None:
        """Keep marks until the next group."""
        with self._marks_lock:
            for mark in marks:
                known = self._marks.get(mark.root)
                self._marks[mark.root] = mark if known is None else known.merged(mark)

    async def close(self) -> None:
        """Write what is waiting, and end."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    # In the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pages, due, ended = 0, monotonic() + _MARKS_EVERY, False
        while not ended:
            jobs, ended = self._next_jobs(due)
            if monotonic() >= due or ended:
                due = monotonic() + _MARKS_EVERY
                self._write_marks()
            while jobs:
                batches = []
                while jobs and isinstance(jobs[0].work, Prepared):
                    batches.append(jobs.pop(0))
                answers = self._append(batches) if batches else []
                if jobs:
                    answers.append(self._step(jobs.pop(0)))
                _answer(answers)
                pages += _PAGES_OF_A_BATCH * len(batches)
            pages = self._shorten_log(pages)
        self._helper.shutdown()
        self._checkpoint(self._connection)
        self._connection.close()

    def _next_jobs(self, due: float) -> tuple[list[Job], bool]:
        """Wait for a job, and return it with all others that are there, and whether this is the end."""
        jobs: list[Job] = []
        try:
            job = self._queue.get(timeout=max(0.0, due - monotonic())) if self._marks else self._queue.get()
            while job is not None:
                jobs.append(job)
                if len(jobs) == _MOST_JOBS:
                    return jobs, False
                job = self._queue.get_nowait()
            return jobs, True
        except Empty:
            return jobs, False

    def _append(self, jobs: list[Job]) -> list[Answer | None]:
        """Write some batches in one transaction; if that fails, each of them in one of its own."""
        try:
            try:
                answers = self._transaction(jobs)
            except sqlite3.IntegrityError:  # something was there already
                self._roll_back()
                answers = self._transaction(jobs, careful=True)
        except sqlite3.Error as error:
            self._roll_back()
            if len(jobs) > 1 and not isinstance(error, sqlite3.OperationalError):
                return [answer for job in jobs for answer in self._append([job])]
            return [_result(job, None, store_error(self._path, error)) for job in jobs]
        except Exception as error:  # noqa: BLE001 - an error of ours goes to whoever waits; the thread has to live
            self._roll_back()
            if len(jobs) > 1:
                return [answer for job in jobs for answer in self._append([job])]
            return [_result(jobs[0], None, error)]
        self.groups += 1
        self.appends += len(jobs)
        return answers

    def _transaction(self, jobs: list[Job], *, careful: bool = False) -> list[Answer | None]:
        answers = []
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if version != self._version:  # another connection wrote, perhaps of another process
            self._version = version
            self._known.clear()
            self.others.locked(newest(connection))
        self._known.shorten()
        work = [job.work for job in jobs if isinstance(job.work, Prepared)]
        group = Group(connection, work, self.others.last, self._known, careful=careful)
        for job in jobs:
            assert isinstance(job.work, Prepared)
            try:
                answers.append(_result(job, group.take(job.work), None))
            except StoreError as error:
                self.conflicts += isinstance(error, ConflictingRecordError)
                if isinstance(error, ConflictingRecordError):
                    logger.error("%s", error)
                answers.append(_result(job, None, error))
        group.write()
        self.others.claim(group.last)
        connection.execute("COMMIT")
        self.others.committed()
        self.note(group.hits)
        return answers

    def _step(self, job: Job) -> Answer | None:
        assert not isinstance(job.work, Prepared)
        self._write_marks()
        self._known.clear()
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            found = job.work(self._connection)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            return _result(job, None, store_error(self._path, error))
        except Exception as error:  # noqa: BLE001 - see `_append`
            self._roll_back()
            return _result(job, None, error)
        return _result(job, found, None)

    def _write_marks(self) -> None:
        with self._marks_lock:
            marks, self._marks = self._marks, {}
        if not marks:
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            write_marks(self._connection, marks)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            logger.warning("marks of %d conversations were not written: %s", len(marks), store_error(self._path, error))

    def _roll_back(self) -> None:
        self._known.clear()
        self.others.rolled_back()
        if self._connection.in_transaction:
            try:
                self._connection.execute("ROLLBACK")
            except sqlite3.Error as error:
                logger.error("%s", store_error(self._path, error))

    def _shorten_log(self, pages: int) -> int:
        """Take the next step of a checkpoint, if one is due, and return how many pages the log has about."""
        if self._helping is None:
            if pages > _CHECKPOINT_PAGES:
                self._helping = self._helper.submit(self._checkpoint_beside)
        elif self._helping.done():
            self._helping = None
            return self._checkpoint(self._connection)
        return pages

    def _checkpoint_beside(self) -> None:
        try:
            connection = connect(self._path)
        except StoreError as error:
            logger.warning("%s", error)
            return
        self._checkpoint(connection)
        connection.close()

    def _checkpoint(self, connection: sqlite3.Connection) -> int:
        """Put the log into the file, and return how many pages could not be."""
        try:
            _, pages, moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as error:
            logger.warning("%s", store_error(self._path, error))
            return 0
        return int(pages - moved)


def _result(job: Job, value: Any, error: BaseException | None) -> Answer | None:
    if job.future is None:
        if error is not None:
            logger.error("an append that nobody waited for was lost: %s", error)
        return None
    return job.future, value, error


def _answer(answers: Sequence[Answer | None]) -> None:
    """Wake all who wait, by one call into each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
    for answer in answers:
        if answer is not None:
            loops.setdefault(answer[0].get_loop(), []).append(answer)
    for loop, some in loops.items():
        try:
            loop.call_soon_threadsafe(_settle, some)
        except RuntimeError:  # the loop is closed: nobody waits any more
            logger.debug("%d answers came too late", len(some))


def _settle(answers: Sequence[Answer]) -> None:
    for future, value, error in answers:
        if not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
