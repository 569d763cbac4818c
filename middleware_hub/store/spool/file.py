"""One SQLite file with the batches that wait for the store, in the order of recording.

    head       the store and the tokenizer to which the batches belong
    batches    number | replies | body: a packed batch, sealed          deleted when the store has the batch

A batch in the file survives SIGKILL once `put` has returned, and a power cut once the disk has SQLite's log (`-wal`), for which
nobody waits. A torn end of the log is cut off and counted. Damage to the file itself costs the batches that it hits.

A batch for which there is no room, on the disk or in the budget, stays in memory until there is: only the process that
recorded it can hand it over. Meanwhile the file counts as full, so that nothing new is begun.

A router holds a lock on its file (`flock`), which ends with the process, so a file without a lock was left behind. Only the
holder of the lock writes. Anyone may read: that takes SQLite's own locks, which have nothing to do with this one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec

from middleware_hub.store.errors import DamagedRecordError
from middleware_hub.store.records import seal, unseal
from middleware_hub.store.spool.earlier import EarlierFile
from middleware_hub.store.sqlite.file import index_of, log_of, read_options, torn_bytes

logger = logging.getLogger(__name__)

SUFFIX: Final = ".sqlite3"
"""Ends the name of each file of this format: a router of an earlier version takes a `.spool` for one of its own format."""
_APPLICATION: Final = 0x7170_7370
_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS head(store TEXT NOT NULL, fingerprint TEXT)",
    "CREATE TABLE IF NOT EXISTS batches(number INTEGER PRIMARY KEY, replies INTEGER NOT NULL, body BLOB NOT NULL)",
    f"PRAGMA application_id = {_APPLICATION}",
)
_INSERT: Final = "INSERT INTO batches(replies, body) VALUES (?, ?)"
_BATCHES_FROM: Final = "SELECT number, replies, body FROM batches WHERE number >= ? ORDER BY number"
_TRUNCATE_LOG: Final = "PRAGMA wal_checkpoint(TRUNCATE)"
_OPEN: Final = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI
_LONG_LOG: Final = 4 << 20
_SETTINGS: Final = ("journal_mode = WAL", "synchronous = NORMAL", "wal_autocheckpoint = 16384", "temp_store = MEMORY")
_BUSY_MILLISECONDS: Final = 100
_MAGIC: Final = b"SQLite format 3\0"
_KEPT_PAGES: Final = 256
"""Free pages that an empty file keeps."""
_RESERVES: Final = (4 << 20, 1 << 20, 256 << 10, 64 << 10, 16 << 10)
"""Bytes of the disk that are reserved, if there are so many: for the replies that are in flight when it is full."""
_OVERDRAFT: Final = 64 << 20
"""Bytes over the budget for replies that were in flight when it was used up."""


class SpoolHead(msgspec.Struct, frozen=True):
    """The owner of a spool file: the store, without secrets, and the fingerprint of the tokenizer."""

    store: str
    fingerprint: str | None


class Waiting(msgspec.Struct):
    """A batch in the file; `on_missing` and `on_done` are those of its recorder in this process (see `handover`)."""

    number: int
    """0 for a batch that was never in the file."""
    size: int
    replies: int = 0
    on_missing: Callable[..., Any] | None = None
    on_done: Callable[[bool], None] | None = None
    tried: int = -1
    """How many steps of the hand-over had been made when a record that this one builds on was missing."""
    held: bytes = b""
    """Its body, if it is in memory only."""


class SpoolFile:
    """See the top of this file. Its methods raise OSError if the disk fails.

    Attributes:
        waiting: the batches to hand over, in order.
        waiting_bytes: their bytes, in the file or in memory.
        held_bytes: those of batches that are in memory only.
        fault: why the last batch that is held could not be written.
        torn_bytes, damaged: unreadable bytes at its end when it was opened, and unreadable batches within.
    """

    def __init__(
        self, connection: apsw.Connection, path: Path | None, head: SpoolHead, *, lock: int = -1, max_bytes: int = 0
    ) -> None:
        self.path = path
        self.head = head
        self.waiting: deque[Waiting] = deque()
        self.waiting_bytes = self.held_bytes = self.torn_bytes = self.damaged = 0
        self.fault = ""
        self._connection = connection
        self._lock = lock
        self._max_bytes = max_bytes
        self._reserve: _Reserve | None = None
        self._gone: list[tuple[int]] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"<SpoolFile {self.path}: {len(self.waiting)} batches, {self.waiting_bytes} bytes>"

    @classmethod
    def anonymous(cls, max_bytes: int = 1 << 30) -> SpoolFile:
        """Return a file that ends with this process."""
        connection = apsw.Connection("")
        for statement in _TABLES:
            connection.execute(statement)
        return cls(connection, None, SpoolHead("", None), max_bytes=max_bytes)

    @classmethod
    def make(cls, path: Path, head: SpoolHead, max_bytes: int) -> SpoolFile:
        """Return a new file, locked."""
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_at(lock, path):
                break
            os.close(lock)  # another router took the file for a leftover before it was locked
        try:
            made = cls(_made(path, head), path, head, lock=lock, max_bytes=max_bytes)
            if hasattr(os, "posix_fallocate"):
                made._reserve = _Reserve(path.parent)
        except OSError:
            os.close(lock)
            raise
        return made

    @classmethod
    def adopt(cls, path: Path, head: SpoolHead | None, *, look: bool = False) -> SpoolFile | None:
        """Return a file that was left behind, locked; None if it is in use, gone, or belongs to another store or tokenizer.

        Without a `head`, return it for any owner, or None if it is no spool file. With `look` nothing is changed. The
        batches of a file of an earlier version are moved into a new file, or copied into memory for a `look`. Raises
        DamagedRecordError if nothing can be read.
        """
        try:
            lock = os.open(path, (os.O_RDONLY if look else os.O_RDWR) | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        found = None
        try:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(lock, path):
                    found = cls._left_behind(path, lock, head, look=look)
        finally:
            if found is None or found._lock != lock:
                os.close(lock)
        return found

    @classmethod
    def look_into(cls, path: Path) -> tuple[SpoolHead, list[Waiting]]:
        """Return the owner of a file and its batches, and change nothing: its router may be at work.

        Without such a file, nothing waits.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return SpoolHead("", None), []
        try:
            found = cls._left_behind(path, descriptor, None, look=True)
        finally:
            os.close(descriptor)
        if found is None:
            return SpoolHead("", None), []
        found._connection.close()
        return found.head, list(found.waiting)

    @property
    def full(self) -> bool:
        """Whether nothing new should be recorded: the budget is used up, or the disk."""
        cramped = self._reserve is not None and self._reserve.is_used and bool(self.waiting)
        return self.waiting_bytes >= self._max_bytes or cramped or bool(self.held_bytes)

    def put(
        self,
        data: bytes,
        replies: int = 1,
        on_missing: Callable[..., Any] | None = None,
        on_done: Callable[[bool], None] | None = None,
    ) -> bool:
        """Append a packed batch and its number of replies; return False if it is held in memory, see `fault`."""
        body = seal(data)
        waiting = Waiting(0, len(body), replies, on_missing, on_done, held=body)
        self._add(waiting)
        self.held_bytes += waiting.size
        return self._settle(waiting)

    def settle(self) -> bool:
        """Write all held batches, as far as there is room now; return whether none is held any more."""
        for waiting in self.waiting if self.held_bytes else ():
            if waiting.held and not self._settle(waiting):
                return False
        if self._reserve is not None:
            self._reserve.take_again()
        return True

    def read(self, waiting: Waiting) -> memoryview:
        """Return a batch that waits. Raises DamagedRecordError."""
        with _os_errors():
            return unseal(self._body(waiting))

    def done(self, count: int = 1) -> list[Waiting]:
        """Remove the first batches, and return them. They are not handed over again, except after a power cut."""
        taken = [self.waiting.popleft() for _ in range(count)]
        self.waiting_bytes -= sum(one.size for one in taken)
        self.held_bytes -= sum(len(one.held) for one in taken)
        self._gone += [(one.number,) for one in taken if one.number]
        with (
            suppress(OSError, DamagedRecordError),
            _os_errors(),
        ):  # on a full disk they may be handed over once more, which changes nothing
            with self._connection:
                self._connection.executemany("DELETE FROM batches WHERE number = ?", self._gone)
            self._gone.clear()
            if not self.waiting:
                self._shrink()
        if self._reserve is not None:
            self._reserve.take_again()
        return taken

    def move_back(self) -> None:
        """Move the first batch after all others."""
        self.waiting.rotate(-1)

    def refuse(self) -> Path | None:
        """Keep the first batch, which no store takes, in a file beside this one; return that file."""
        if self.path is None:
            return None
        again = self.path.suffix == ".refused"
        beside = self.path.with_suffix(".refused.again" if again else ".refused")
        os.close(os.open(beside, os.O_RDWR | os.O_CREAT, 0o600))
        first = self.waiting[0]
        with _os_errors(), closing(_made(beside, self.head)) as kept:
            kept.execute(_INSERT, (first.replies, self._body(first)))
        return beside

    def checkpoint(self) -> None:
        """Bring a long log of SQLite into the file, which takes as long as the disk does: for a thread, beside all other calls.

        Without this, `put` does it when the log is even longer.
        """
        with suppress(OSError, DamagedRecordError):  # it is tried again
            if self.path is not None and log_of(self.path).stat().st_size > _LONG_LOG:
                with _os_errors(), closing(_connected(self.path, "mode=rw")) as connection:
                    connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        """Release the file, and remove it if nothing waits in it. Damaged batches are kept in a file of another name."""
        if self._closed:
            return
        self._closed = True
        damaged = self.damaged > 0 and self._has_rows()
        self._connection.close()
        if self.path is not None and not self.waiting:
            if damaged:
                set_aside(self.path)
            for path in (self.path, log_of(self.path), index_of(self.path)):
                path.unlink(missing_ok=True)
        if self._reserve is not None:
            self._reserve.close()
        if self._lock >= 0:
            os.close(self._lock)

    def _add(self, waiting: Waiting) -> None:
        self.waiting.append(waiting)
        self.waiting_bytes += waiting.size

    def _body(self, waiting: Waiting) -> bytes:
        """Return the sealed batch. Raises apsw.Error."""
        if waiting.held:
            return waiting.held
        found = self._connection.execute("SELECT body FROM batches WHERE number = ?", (waiting.number,)).get
        return b"" if found is None else bytes(found)

    def _settle(self, waiting: Waiting) -> bool:
        """Write a batch that is held, if there is room; return whether there was."""
        try:
            if self.waiting_bytes - self.held_bytes + waiting.size > self._max_bytes + _OVERDRAFT:
                raise OSError(f"it has more than the {self._max_bytes} bytes of --store-spool-max-bytes")
            if self.path is not None and not _is_at(self._lock, self.path):
                self._restore(self.path)
            self._insert(waiting)
        except (OSError, DamagedRecordError) as error:
            self.fault = str(error)
            return False
        waiting.held = b""
        self.held_bytes -= waiting.size
        return True

    def _insert(self, waiting: Waiting) -> None:
        """Write a batch, if need be where the log was, or where room was reserved.

        The part of a batch that did not fit is removed.
        """
        for attempt in range(3):
            try:
                with _os_errors():
                    self._connection.execute(_INSERT, (waiting.replies, waiting.held))
                waiting.number = self._connection.last_insert_rowid()
                return
            except (OSError, DamagedRecordError):
                room = attempt == 0 or (attempt == 1 and self._reserve is not None and self._reserve.give_up())
                with suppress(apsw.Error):
                    self._connection.execute(_TRUNCATE_LOG)
                if not room:
                    if self._reserve is not None:
                        self._reserve.take_again()
                    raise

    def _restore(self, path: Path) -> None:
        """Write the file again: it was removed, and no later router would find what waits in it."""
        logger.error("the spool file %s was removed, and is written again", path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with _os_errors():
                self._connection.execute("VACUUM INTO ?", (str(path),))
        except (OSError, DamagedRecordError):
            path.unlink()
            os.close(lock)
            raise
        self._connection.close()  # before the new one is opened, because it removes a log of this name
        os.close(self._lock)
        self._lock, self._connection = lock, _made(path, self.head)

    def _shrink(self) -> None:
        """Give the room of an empty file back. Raises apsw.Error."""
        if not self.damaged and self._connection.execute("PRAGMA freelist_count").get > _KEPT_PAGES:
            self._connection.execute("VACUUM")
            self._connection.execute(_TRUNCATE_LOG)
        if self._reserve is not None:
            self._reserve.take()

    # Files of other processes -------------------------------------------------------------------------------------------

    @classmethod
    def _left_behind(cls, path: Path, descriptor: int, head: SpoolHead | None, *, look: bool) -> SpoolFile | None:
        begins = os.pread(descriptor, len(_MAGIC), 0)
        if begins == b"" and head is None:
            return None
        if begins not in (b"", _MAGIC):
            return cls._moved(path, EarlierFile(descriptor), head, look=look)
        found = cls(_connected(path, read_options(path) if look else ""), path, SpoolHead("", None), lock=descriptor)
        try:
            with _os_errors():
                ours = found._scan(head)
            if ours and not look:
                found.torn_bytes = torn_bytes(path)
        except BaseException:
            found._connection.close()
            raise
        if ours:
            return found
        found._connection.close()
        return None

    @classmethod
    def _moved(cls, path: Path, earlier: EarlierFile, head: SpoolHead | None, *, look: bool) -> SpoolFile | None:
        """Return a file with the batches of a file of an earlier version, which is removed; a damaged one is kept."""
        found = None if earlier.head is None else msgspec.json.decode(earlier.head, type=SpoolHead)
        if found is None and not earlier.batches and head is None:
            return None
        owner = found or head or SpoolHead("", None)
        if head not in (None, owner):
            return None
        moved = cls.anonymous() if look else cls.make(path.with_name(f"{path.name}{SUFFIX}"), owner, 0)
        try:
            with _os_errors(), moved._connection:
                rows = ((replies, seal(bytes(data))) for _, replies, data in earlier.batches)
                moved._connection.executemany(_INSERT, rows)
                moved._scan(None)
        except (OSError, DamagedRecordError):
            moved.close()
            raise
        moved.head, moved.torn_bytes, moved.damaged = owner, earlier.torn_bytes, earlier.damaged
        if not look and earlier.damaged:
            set_aside(path)
        elif not look:
            path.unlink()
        return moved

    def _scan(self, head: SpoolHead | None) -> bool:
        """Read which batches wait in the file; return whether it belongs to this store. Raises apsw.Error."""
        connection = self._connection
        if not connection.execute("SELECT count(*) FROM sqlite_master").get:
            return head is not None  # its router died while it made the file
        if connection.execute("PRAGMA application_id").get != _APPLICATION:
            return False
        for row in connection.execute("SELECT store, fingerprint FROM head"):
            self.head = SpoolHead(*row)
        if head is not None and self.head != head:
            return False
        next_one, last = 1, self._last()
        while True:
            try:
                for number, replies, body in connection.execute(_BATCHES_FROM, (next_one,)):
                    next_one = number + 1
                    try:
                        unseal(body)
                    except DamagedRecordError:
                        self.damaged += 1
                    else:
                        self._add(Waiting(number, len(body), replies))
            except apsw.CorruptError:
                self.damaged += 1
                next_one += 1
                if next_one <= last:
                    continue
            return True

    def _last(self) -> int:
        with suppress(apsw.CorruptError):
            return self._connection.execute("SELECT max(number) FROM batches").get or 0
        return 0

    def _has_rows(self) -> bool:
        with suppress(apsw.Error):
            return bool(self._connection.execute("SELECT EXISTS(SELECT 1 FROM batches)").get)
        return True


class _Reserve:
    """Room of a disk that is kept until it is needed. It ends with the process."""

    def __init__(self, folder: Path) -> None:
        self._file, name = tempfile.mkstemp(dir=folder)
        os.unlink(name)
        self._size = self._was = 0
        self.take()

    @property
    def is_used(self) -> bool:
        return not self._size

    def take(self, least: int = 0) -> None:
        """Reserve as many bytes as there are, unless these are fewer than `least`."""
        for size in _RESERVES:
            if self._size >= size or size < least:
                return
            try:
                os.posix_fallocate(self._file, 0, size)
            except OSError:
                os.ftruncate(self._file, self._size)
            else:
                self._size = self._was = size

    def take_again(self) -> None:
        """Reserve as many bytes as were given up, if there are so many."""
        if self.is_used:
            self.take(self._was)

    def give_up(self) -> bool:
        """Release the room; return whether there was any."""
        had, self._size = self._size, 0
        os.ftruncate(self._file, 0)
        return had > 0

    def close(self) -> None:
        os.close(self._file)


def _made(path: Path, head: SpoolHead) -> apsw.Connection:
    """Return a connection to a file that has its tables."""
    connection = _connected(path)
    try:
        with _os_errors(), connection:
            for statement in _TABLES:
                connection.execute(statement)
            connection.execute(
                "INSERT INTO head SELECT ?, ? WHERE NOT EXISTS (SELECT 1 FROM head)", (head.store, head.fingerprint)
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _connected(path: Path, how: str = "") -> apsw.Connection:
    """Return a connection; `how`: SQLite's options, as in a URI, for one that only reads."""
    with _os_errors():
        connection = apsw.Connection(f"{path.absolute().as_uri()}?{how}", _OPEN)
        connection.set_busy_timeout(_BUSY_MILLISECONDS)
        for setting in () if how else _SETTINGS:
            connection.execute(f"PRAGMA {setting}")
    return connection


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise SQLite's errors as errors of the disk, or as DamagedRecordError."""
    try:
        yield
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise DamagedRecordError(f"the spool file is damaged: {error}") from error
    except apsw.FullError as error:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
    except apsw.Error as error:
        raise OSError(str(error)) from error


def set_aside(path: Path) -> None:
    """Give a damaged file, and its log, another name."""
    kept = path.with_suffix(".damaged")
    with suppress(FileNotFoundError):
        log_of(path).replace(log_of(kept))
    path.replace(kept)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
