"""The writer. Appends made while the event loop is busy become a group, because a group of ten costs a third of ten appends.

The event loop writes a group itself if nothing has to be waited for: that takes less than waking a thread, which has to get
Python's lock often, and gets it late while the loop is busy (5 ms for each step of each group). A thread writes what may wait:
what has to be synced, what is large, what another process's lock has held up for long, and, for a while, everything if the disk
was slow. One lock decides which of the two writes; nothing overtakes what was handed to the thread before.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final

import apsw

from middleware_hub.store.errors import ConflictingRecordError, StoreError, StoreUnreachableError
from middleware_hub.store.gathering import Gathering
from middleware_hub.store.protocol import Durability
from middleware_hub.store.records import Mark
from middleware_hub.store.sqlite.appending import EncodedBatch, Group, Whereabouts, write_marks
from middleware_hub.store.sqlite.checkpoints import Checkpoints
from middleware_hub.store.sqlite.file import BusyError, SameFile, begin, connect, data_version, mapped, store_error
from middleware_hub.store.sqlite.others import NEWS_KEPT, Others, state, trim_news

logger = logging.getLogger(__name__)

OF_ALL: Final = (apsw.BusyError, apsw.CantOpenError, apsw.FullError, apsw.IOError, apsw.LockedError, apsw.ReadOnlyError)
"""Errors of the whole file: they do not come from one of the batches that are written together."""

Step = Callable[[apsw.Connection], Any]
Answer = tuple[asyncio.Future[Any], Any, BaseException | None]
_MOST_JOBS: Final = 256
"""Batches of one group."""
_MARKS_EVERY: Final = 1.0
"""Seconds after which marks are written at the latest: the thread writes them after half of it, a group after a quarter."""
_SMALL: Final = 1 << 18
"""Bytes of a group that the event loop writes itself."""
_PATIENCE: Final = 0.005
"""Seconds for which a group is gathered, until it has an eighth of `_SMALL`."""
_AGAIN: Final = 0.001
_HELD_UP: Final = 0.02
"""While another process writes, the event loop tries again each `_AGAIN` seconds, and the thread after `_HELD_UP`."""
_SLOW: Final = 0.1
_SLOW_FOR: Final = 5.0
"""After two groups within `_SLOW_FOR` took `_SLOW` each, the loop writes none for as long. One may have lacked a processor."""
_TRIM_EVERY: Final = 256
"""Groups after which old news is deleted."""
_LAST: Final = 2.0
"""Seconds for which a writer that is closed still waits for a process that holds the file, for all that waits together."""


class Job:
    """A batch or a step, and its waiting caller."""

    __slots__ = ("future", "work")

    def __init__(self, work: EncodedBatch | Step, future: asyncio.Future[Any] | None) -> None:
        self.work = work
        self.future = future


_LOOK: Final = Job(EncodedBatch([]), None)
"""Wakes the thread to check whether the log is too long."""


class SqliteWriter:
    """The only writer to the file in this process. It belongs to one event loop."""

    def __init__(self, path: Path, durability: Durability) -> None:
        self._path = path
        self._synced = durability == "disk"
        self._connection = connect(path, synced=self._synced)
        self._connection.set_busy_timeout(0)  # see `begin`
        self._turn = threading.Lock()
        self._gathered = Gathering(self._flush, _PATIENCE, _SMALL // 8)
        self._held_up: list[Job] = []
        self._held_up_since: float | None = None
        self._handed = self._done = 0
        self._patient_until = self._slow_until = self._marked = 0.0
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._marks: dict[bytes, Mark] = {}
        self._marks_lock = threading.Lock()
        self._ends: float | None = None  # set when it is closed
        self.groups = self.appends = self.conflicts = 0
        self._known = Whereabouts()
        self._version, self._heard = -1, False
        with mapped(path):
            self.others = Others(state(self._connection).newest)
        self.same = SameFile(path)
        self._checkpoints = Checkpoints(path, self.same)
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, work: EncodedBatch | Step, *, wait: bool = True, now: bool = False) -> asyncio.Future[Any]:
        """Queue a batch, or a step to be done between groups; the future is done when it is committed.

        With `wait=False` the future is done at once, and an error is only logged. `now`: a batch does not wait for others to be
        gathered with it.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._ends is not None:
            future.set_exception(StoreUnreachableError(f"the store {self._path} is closed"))
            return future
        job = Job(work, future if wait else None)
        if isinstance(work, EncodedBatch):
            if now:
                self._flush([*self._gathered.take(), job])
            else:
                self._gathered.add(job, work.size)
        else:
            self._hand_over([*self._take_waiting(), job])
        if not wait:
            future.set_result([])
        return future

    @property
    def waiting(self) -> int:
        """Return how many batches are not written."""
        return len(self._held_up) + len(self._gathered) + self._handed - self._done

    def hear(self) -> bool:
        """Read the writes of others; return whether that was possible at once.

        One look holds for everything that is ready in this turn of the event loop. A request that came in after the look is
        handled after `look_again`, because the loop calls in the order in which calls were scheduled.
        """
        if self._heard:
            return True
        if not self.same or not self._turn.acquire(blocking=False):
            return False
        try:
            version = data_version(self._connection)
            if version != self._version:
                self._connection.execute("BEGIN")
                try:
                    self._listen(version)
                finally:
                    self._connection.execute("COMMIT")
            self._heard = True
            asyncio.get_running_loop().call_soon(self.look_again)
            return True
        except (apsw.Error, UnicodeDecodeError):  # locked for a moment, or damaged, which a look-up reports
            return False
        finally:
            self._turn.release()

    def look_again(self) -> None:  # the turn of the event loop is over, or others were seen to have written in it
        self._heard = False

    def end_of(self, log: str, read: Callable[[str], int]) -> int:
        """Return the number of a log's last event when others were last heard; `read` returns the present one from the file."""
        return self._known.end_of(log, read)

    def _listen(self, version: int) -> None:
        """Read the writes of others, within a transaction that began at this version or later."""
        found = self.others.listen(self._connection)
        self.others.locked(found.newest)
        self._known.check(found.forgotten)
        self._version = version

    def _take_waiting(self) -> list[Job]:
        """Take everything that is not written, in order."""
        held_up, self._held_up = self._held_up, []
        return [*held_up, *self._gathered.take()]

    def _hand_over(self, jobs: list[Job]) -> None:
        self._held_up_since = None
        self._handed += len(jobs)
        for job in jobs:
            self._queue.put(job)

    def _flush(self, jobs: list[Job]) -> None:
        """Write all jobs that were held up or gathered, try again soon, or hand them to the thread."""
        jobs, self._held_up = [*self._held_up, *jobs], []
        if not jobs:
            return
        size = sum(job.work.size for job in jobs if isinstance(job.work, EncodedBatch))
        started = monotonic()
        here = not self._synced and size <= _SMALL and self._handed == self._done and started >= self._patient_until
        if not here or not self._turn.acquire(blocking=False):
            self._hand_over(jobs)
            return
        try:
            answers = self._append(jobs, patient=False)
            if self._marks and started > self._marked + _MARKS_EVERY / 4:
                self._write_marks(patient=False)
        except BusyError:
            self._hold_up(jobs, started)
            return
        finally:
            self._turn.release()
        self._held_up_since = None
        if monotonic() - started > _SLOW:
            self._patient_until = started + _SLOW_FOR if started < self._slow_until else 0.0
            self._slow_until = started + _SLOW_FOR
        if self._checkpoints.due:
            self._queue.put(_LOOK)
        settle(answers)

    def _hold_up(self, jobs: list[Job], now: float) -> None:
        if self._held_up_since is None:
            self._held_up_since = now
        if now - self._held_up_since < _HELD_UP:
            self._held_up = jobs
            asyncio.get_running_loop().call_later(_AGAIN, self._flush, [])
        else:
            self._hand_over(jobs)

    def note(self, marks: Sequence[Mark]) -> None:
        """Keep marks until the next group."""
        with self._marks_lock:
            for mark in marks:
                known = self._marks.get(mark.root)
                self._marks[mark.root] = mark if known is None else known.merged(mark)

    async def close(self) -> None:
        """Write all waiting jobs, and end."""
        if self._ends is None:
            self._ends = monotonic() + _LAST
            self._hand_over(self._take_waiting())
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    # In the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ended = False
        while not ended:
            jobs, ended = self._next_jobs()
            with self._turn:
                self._work(jobs)
                if ended or monotonic() >= self._marked + _MARKS_EVERY / 2:
                    self._write_marks()
                self._checkpoints.go_on(self._connection)
        if self._marks:
            logger.warning("marks of %d conversations could not be written", len(self._marks))
        self._checkpoints.finish(self._connection)
        self._connection.close()

    def _work(self, jobs: list[Job]) -> None:
        while jobs:
            batches = []
            while jobs and isinstance(jobs[0].work, EncodedBatch):
                batches.append(jobs.pop(0))
            answers = self._append(batches) if batches else []
            done = len(batches)
            if jobs:
                answers += self._step(jobs.pop(0))
                done += 1
            self._done += done
            answer(answers)

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
        """Write some batches in one transaction; if that fails, write each in a separate transaction."""
        try:
            self._begin(patient=patient)
            try:
                answers = self._transaction(jobs)
            except apsw.ConstraintError:  # some record was there already
                self._roll_back()
                self._begin(patient=patient)
                answers = self._transaction(jobs, careful=True)
        except BusyError:
            raise
        except Exception as error:  # noqa: BLE001 - an error of ours goes to whoever waits; the thread has to live
            self._roll_back()
            if len(jobs) > 1 and not isinstance(error, OF_ALL):
                return [answer for job in jobs for answer in self._append([job])]
            failure = store_error(self._path, error)
            return [answer for job in jobs for answer in result(job, None, failure)]
        self.groups += 1
        self.appends += len(jobs)
        self._checkpoints.wrote([job.work for job in jobs if isinstance(job.work, EncodedBatch)])
        return answers

    def _begin(self, *, patient: bool = True) -> None:
        """Begin a transaction. Raises StoreUnreachableError if the file is gone, else as `begin`."""
        self.same.check()
        begin(self._connection, lambda: self._ends, patient=patient)

    def _transaction(self, jobs: list[Job], *, careful: bool = False) -> list[Answer]:
        answers: list[Answer] = []
        version = data_version(self._connection)
        if version != self._version:
            self._listen(version)
        self._known.shorten()
        work = [job.work for job in jobs if isinstance(job.work, EncodedBatch)]
        group = Group(self._connection, work, self.others, self._known, careful=careful)
        for job, batch in zip(jobs, work, strict=True):
            try:
                answers += result(job, group.take(batch), None)
            except StoreError as error:
                if isinstance(error, ConflictingRecordError):
                    self.conflicts += 1
                    logger.error("%s", error)
                answers += result(job, None, error)
        group.write()
        if self.groups % _TRIM_EVERY == 0:
            trim_news(self._connection, NEWS_KEPT)
        self.others.claim(group.last)
        self._connection.execute("COMMIT")
        self.others.committed()
        self.same.check()  # the file may have been removed meanwhile
        self.note(group.hits)
        return answers

    def _step(self, job: Job) -> list[Answer]:
        assert not isinstance(job.work, EncodedBatch)
        self._write_marks()
        self._known.clear()
        try:
            self._begin()
            found = job.work(self._connection)
            self._connection.execute("COMMIT")
            self.same.check()
        except Exception as error:  # noqa: BLE001 - see `_append`
            self._roll_back()
            return result(job, None, store_error(self._path, error))
        return result(job, found, None)

    def _write_marks(self, *, patient: bool = True) -> None:
        """Write marks; keep them if they cannot be written now."""
        with self._marks_lock:
            marks, self._marks = self._marks, {}
        if not marks:
            return
        self._marked = monotonic()
        try:
            self._begin(patient=patient)
            write_marks(self._connection, marks)
            self._connection.execute("COMMIT")
        except (BusyError, StoreUnreachableError, apsw.Error):
            if self._connection.in_transaction:
                self._roll_back()
            self.note(list(marks.values()))

    def _roll_back(self) -> None:
        self._known.clear()
        self.others.rolled_back()
        if self._connection.in_transaction:
            try:
                self._connection.execute("ROLLBACK")
            except apsw.Error as error:
                logger.error("%s", store_error(self._path, error))


def result(job: Job, value: Any, error: BaseException | None) -> list[Answer]:
    """Return the result to deliver, if a caller waits for it."""
    if job.future is None:
        if error is not None:
            logger.error("a write that nobody waited for failed: %s", error)
        return []
    return [(job.future, value, error)]


def answer(answers: Sequence[Answer]) -> None:
    """Wake all waiting callers, with one call into each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
    for one in answers:
        loops.setdefault(one[0].get_loop(), []).append(one)
    for loop, some in loops.items():
        try:
            loop.call_soon_threadsafe(settle, some)
        except RuntimeError:  # the loop is closed: no caller waits any more
            logger.debug("%d answers came too late", len(some))


def settle(answers: Sequence[Answer]) -> None:
    """Wake all waiting callers, in their event loop."""
    for future, value, error in answers:
        if not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
