"""Who writes. Whatever was asked for in one turn of the event loop, or while the last group was written, becomes a group.

A group is written by the event loop itself if nothing has to be waited for: that takes less than to wake a thread, which
gets Python's lock late and often while the loop is busy (5 ms for each step of each group). A thread writes all that may
wait: what has to be synced, what is large, whatever comes while another process holds the file's lock, and, for a while,
everything if the disk was slow. One lock says whose turn it is; nothing overtakes what was handed to the thread before.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any, Final

from middleware_hub.store.errors import ConflictingRecordError, StoreError, StoreUnreachableError
from middleware_hub.store.protocol import Durability
from middleware_hub.store.records import Mark
from middleware_hub.store.sqlite.appending import Group, Prepared, Whereabouts, write_marks
from middleware_hub.store.sqlite.checkpoints import Checkpoints
from middleware_hub.store.sqlite.file import connect, mapped, store_error
from middleware_hub.store.sqlite.others import Others, newest

logger = logging.getLogger(__name__)

_MOST_JOBS: Final = 256
"""Batches of one group."""
_MARKS_EVERY: Final = 1.0
"""Seconds after which marks are written at the latest: by the thread after half of it, with a group after a quarter."""
_SMALL: Final = 1 << 18
"""Bytes of a group that the event loop writes itself."""
_SLOW: Final = 0.1
_SLOW_FOR: Final = 5.0
"""After a group took `_SLOW` seconds, the event loop writes none for `_SLOW_FOR` seconds."""
_BUSY_SECONDS: Final = 20.0
_PAGES_OF_A_BATCH: Final = 8

Step = Callable[[sqlite3.Connection], Any]
Answer = tuple[asyncio.Future[Any], Any, BaseException | None]


class _Busy(Exception):
    """Another process is writing."""


class Job:
    """A batch or a step, and who waits for it."""

    __slots__ = ("future", "work")

    def __init__(self, work: Prepared | Step, future: asyncio.Future[Any] | None) -> None:
        self.work = work
        self.future = future


_LOOK: Final = Job(Prepared([]), None)
"""Wakes the thread to look whether the log is too long."""


class Writer:
    """The only one of this process who writes to the file. It belongs to one event loop."""

    def __init__(self, path: Path, durability: Durability) -> None:
        self._path = path
        self._synced = durability == "disk"
        self._connection = connect(path, synced=self._synced)
        self._connection.execute("PRAGMA busy_timeout = 0")  # see `_begin`
        self._turn = threading.Lock()
        self._gathered: list[Job] = []
        self._handed = self._done = 0
        self._patient_until = self._marked = 0.0
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._marks: dict[bytes, Mark] = {}
        self._marks_lock = threading.Lock()
        self._closed = False
        self._checkpoints = Checkpoints(path)
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
        job = Job(work, future if wait else None)
        if isinstance(work, Prepared):
            if not self._gathered:
                loop.call_soon(self._flush)
            self._gathered.append(job)
        else:
            self._hand_over([*self._take_gathered(), job])
        if not wait:
            future.set_result([])
        return future

    @property
    def waiting(self) -> int:
        """Return how many batches are not written."""
        return len(self._gathered) + self._handed - self._done

    def _take_gathered(self) -> list[Job]:
        jobs, self._gathered = self._gathered, []
        return jobs

    def _hand_over(self, jobs: list[Job]) -> None:
        self._handed += len(jobs)
        for job in jobs:
            self._queue.put(job)

    def _flush(self) -> None:
        """Write what was gathered, or hand it over to the thread."""
        jobs = self._take_gathered()
        if not jobs:
            return
        size = sum(job.work.size for job in jobs if isinstance(job.work, Prepared))
        started = monotonic()
        here = not self._synced and size <= _SMALL and self._handed == self._done and started >= self._patient_until
        if not here or not self._turn.acquire(blocking=False):
            self._hand_over(jobs)
            return
        try:
            answers = self._append(jobs, patient=False)
            if self._marks and started > self._marked + _MARKS_EVERY / 4:
                self._write_marks()
        except _Busy:
            self._hand_over(jobs)
            return
        finally:
            self._turn.release()
        if monotonic() - started > _SLOW:
            self._patient_until = started + _SLOW_FOR
        if self._checkpoints.due:
            self._queue.put(_LOOK)
        _settle(answers)

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
            self._hand_over(self._take_gathered())
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    # In the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ended = False
        while not ended:
            jobs, ended = self._next_jobs()
            with self._turn:
                if ended or monotonic() >= self._marked + _MARKS_EVERY / 2:
                    self._write_marks()
                self._work(jobs)
                self._checkpoints.go_on(self._connection)
        self._checkpoints.finish(self._connection)
        self._connection.close()

    def _work(self, jobs: list[Job]) -> None:
        while jobs:
            batches = []
            while jobs and isinstance(jobs[0].work, Prepared):
                batches.append(jobs.pop(0))
            answers = self._append(batches) if batches else []
            done = len(batches)
            if jobs:
                answers += self._step(jobs.pop(0))
                done += 1
            self._done += done
            _answer(answers)

    def _next_jobs(self) -> tuple[list[Job], bool]:
        """Wait for a job, and return it with all others that are there, and whether this is the end."""
        jobs: list[Job] = []
        try:
            job = self._queue.get(timeout=_MARKS_EVERY / 2)
            while job is not None:
                if job is not _LOOK:
                    jobs.append(job)
                if len(jobs) == _MOST_JOBS:
                    return jobs, False
                job = self._queue.get_nowait()
            return jobs, True
        except Empty:
            return jobs, False

    def _append(self, jobs: list[Job], *, patient: bool = True) -> list[Answer]:
        """Write some batches in one transaction; if that fails, each of them in one of its own."""
        try:
            self._begin(patient=patient)
            try:
                answers = self._transaction(jobs)
            except sqlite3.IntegrityError:  # something was there already
                self._roll_back()
                self._begin(patient=patient)
                answers = self._transaction(jobs, careful=True)
        except _Busy:
            raise
        except sqlite3.Error as error:
            self._roll_back()
            if len(jobs) > 1 and not isinstance(error, sqlite3.OperationalError):
                return [answer for job in jobs for answer in self._append([job])]
            failure = store_error(self._path, error)
            return [answer for job in jobs for answer in _result(job, None, failure)]
        except Exception as error:  # noqa: BLE001 - an error of ours goes to whoever waits; the thread has to live
            self._roll_back()
            if len(jobs) > 1:
                return [answer for job in jobs for answer in self._append([job])]
            return _result(jobs[0], None, error)
        self.groups += 1
        self.appends += len(jobs)
        self._checkpoints.pages += _PAGES_OF_A_BATCH * len(jobs)
        return answers

    def _begin(self, *, patient: bool = True) -> None:
        """Begin a transaction, when no other process is in one. Raises _Busy, if that is not to be waited for."""
        deadline = monotonic() + _BUSY_SECONDS
        while True:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or (patient and monotonic() > deadline):
                    raise
                if not patient:
                    raise _Busy from error
            sleep(0.001)

    def _transaction(self, jobs: list[Job], *, careful: bool = False) -> list[Answer]:
        answers: list[Answer] = []
        connection = self._connection
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
                answers += _result(job, group.take(job.work), None)
            except StoreError as error:
                self.conflicts += isinstance(error, ConflictingRecordError)
                if isinstance(error, ConflictingRecordError):
                    logger.error("%s", error)
                answers += _result(job, None, error)
        group.write()
        self.others.claim(group.last)
        connection.execute("COMMIT")
        self.others.committed()
        self.note(group.hits)
        return answers

    def _step(self, job: Job) -> list[Answer]:
        assert not isinstance(job.work, Prepared)
        self._write_marks()
        self._known.clear()
        try:
            self._begin()
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
        self._marked = monotonic()
        try:
            self._begin()
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


def _result(job: Job, value: Any, error: BaseException | None) -> list[Answer]:
    """Return what is to be told, if anybody waits for it."""
    if job.future is None:
        if error is not None:
            logger.error("an append that nobody waited for was lost: %s", error)
        return []
    return [(job.future, value, error)]


def _answer(answers: Sequence[Answer]) -> None:
    """Wake all who wait, by one call into each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
    for answer in answers:
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
