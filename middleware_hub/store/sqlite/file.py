"""The file: its place, its tables, the set-up of a connection, and the meaning of SQLite's errors."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import apsw

from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError, StoreUnreachableError

FORMAT: Final = 2
_APPLICATION: Final = 0x7170_746F
_PAGE: Final = 4096
_BUSY_SECONDS: Final = 20.0
_NAME: Final = "store.sqlite3"
_OPEN: Final = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI
ERRORS: Final = (apsw.Error, UnicodeDecodeError)
"""The errors of SQLite; a damaged text cannot be decoded."""
_FRAME_HEAD: Final = 24
_WAL_HEAD: Final = 32

# `n` numbers the records of this file: parents before children. A place or a name points to the newest record last.
_TABLES: Final = (
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE records(n INTEGER PRIMARY KEY, id BLOB NOT NULL UNIQUE, root INTEGER NOT NULL, parent INTEGER, line INTEGER,
       body BLOB NOT NULL)""",
    "CREATE INDEX records_of_root ON records(root)",
    """CREATE TABLE places(key BLOB NOT NULL, length INTEGER NOT NULL, hash BLOB NOT NULL, kind INTEGER NOT NULL,
       record INTEGER NOT NULL, PRIMARY KEY(key, length, hash, kind, record)) WITHOUT ROWID""",
    """CREATE TABLE roots(root INTEGER PRIMARY KEY, tick INTEGER NOT NULL, stamp TEXT NOT NULL,
       retrieved INTEGER NOT NULL)""",
    """CREATE TABLE blobs(record INTEGER NOT NULL, name TEXT NOT NULL, body BLOB NOT NULL,
       PRIMARY KEY(record, name))""",
    """CREATE TABLE logs(log INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, last INTEGER NOT NULL,
       closed INTEGER NOT NULL)""",
    "CREATE TABLE events(log INTEGER NOT NULL, number INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY(log, number))",
)
# `first` is the number of the first event that was not forgotten. An announcement holds while `said` <= now < `until`, by
# the machine's monotonic clock: all processes share it, no user can set it, and after a restart of the machine it is earlier.
_SINCE_2: Final = (
    "ALTER TABLE logs ADD COLUMN first INTEGER NOT NULL DEFAULT 1",
    """CREATE TABLE announced(name TEXT PRIMARY KEY, data BLOB NOT NULL, said REAL NOT NULL, until REAL NOT NULL)
       WITHOUT ROWID""",
)
# See `others` and `media`. A router that does not know of these may use the file at the same time, so they are no other format:
# it writes no news, which is noticed, and no files. The triggers count what it forgets, and delete the files of that.
_BESIDE: Final = (
    "CREATE TABLE IF NOT EXISTS news(n INTEGER PRIMARY KEY, since INTEGER NOT NULL, writer BLOB NOT NULL, "
    "entered BLOB NOT NULL)",
    "INSERT OR IGNORE INTO meta VALUES ('forgotten', '0')",
    "CREATE TRIGGER IF NOT EXISTS forgotten AFTER DELETE ON records "
    "BEGIN UPDATE meta SET value = value + 1 WHERE key = 'forgotten'; END",
    # The bytes come last, so that the other columns are read without them.
    "CREATE TABLE IF NOT EXISTS media(key BLOB NOT NULL UNIQUE, size INTEGER NOT NULL, about BLOB NOT NULL, "
    "data BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS media_lengths(key BLOB NOT NULL, settings TEXT NOT NULL, length INTEGER NOT NULL, "
    "PRIMARY KEY(key, settings)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS media_named(root INTEGER NOT NULL, key BLOB NOT NULL, PRIMARY KEY(root, key)) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS media_sizes ON media(key, size)",
    "CREATE INDEX IF NOT EXISTS media_named_by ON media_named(key)",
    "CREATE TRIGGER IF NOT EXISTS media_of_root AFTER DELETE ON roots "
    "BEGIN DELETE FROM media_named WHERE root = OLD.root; END",
    "CREATE TRIGGER IF NOT EXISTS media_without_name AFTER DELETE ON media_named "
    "WHEN NOT EXISTS (SELECT 1 FROM media_named WHERE key = OLD.key) "
    "BEGIN DELETE FROM media WHERE key = OLD.key; DELETE FROM media_lengths WHERE key = OLD.key; END",
)
_NEWEST: Final = "media_without_name"
"""What of `_BESIDE` was added last."""


def place_of(path: str) -> Path:
    """Return the file for the PATH of `sqlite:PATH`: a folder has the file `store.sqlite3` in it."""
    # Unlike those of Path, these functions take what this user may not see for missing: making or opening it says why.
    found = Path(os.path.expanduser(path))
    missing = not os.path.exists(found)  # asked before `isdir`: another process may make the folder in between
    if os.path.isdir(found) or (missing and (path.endswith("/") or not found.suffix)):
        return found / _NAME
    return found


def connect(path: Path, *, synced: bool = False, how: str = "") -> apsw.Connection:
    """Return a connection to a file, for any thread, but only one at a time.

    `synced`: whether a commit waits until it is on the disk. `how`: SQLite's options, as in a URI. Raises a StoreError.
    """
    name = f"{path.absolute().as_uri()}?{how}" if how else str(path)
    with mapped(path):
        connection = apsw.Connection(name, _OPEN, statementcachesize=256)
        try:
            connection.set_busy_timeout(round(1000 * _BUSY_SECONDS))
            for setting in (
                f"synchronous = {'FULL' if synced else 'NORMAL'}",
                "temp_store = MEMORY",
                "cache_size = -65536",
                "wal_autocheckpoint = 0",
                f"journal_size_limit = {64 << 20}",
            ):
                connection.execute(f"PRAGMA {setting}")
        except BaseException:
            connection.close()
            raise
    return connection


def prepare(path: Path, fingerprint: str | None) -> int:
    """Make the file or check it, and return how many bytes of its log were torn. Raises a StoreError.

    Without a fingerprint the file is not made, and may belong to any tokenizer.
    """
    if fingerprint is None and not path.is_file():
        raise StoreUnreachableError(f"there is no store at {path}: name the path that the router has in --store")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnreachableError(
            f"the store's folder {path.parent} cannot be made: {error.strerror}: name another path with --store"
        ) from error
    _check_log(path)
    torn = 0
    connection = connect(path)
    try:
        with mapped(path):
            connection.execute(f"PRAGMA page_size = {_PAGE}")  # before anything else, and of a new file only
            _patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
            try:
                count = connection.execute("SELECT count(*) FROM sqlite_master").get
                if not count and fingerprint is not None:
                    connection.execute("COMMIT")
                    _make(connection, fingerprint)
                else:
                    torn = torn_bytes(path)
                    connection.execute("COMMIT")
                check(connection, path, fingerprint)
                _grow(connection)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            return torn
    finally:
        connection.close()


def _make(connection: apsw.Connection, fingerprint: str) -> None:
    _patiently(lambda: connection.execute("PRAGMA journal_mode = WAL"))
    connection.execute("BEGIN IMMEDIATE")
    if connection.execute("SELECT count(*) FROM sqlite_master").get == 0:  # else another process was first
        for statement in (*_TABLES, *_SINCE_2, *_BESIDE):
            connection.execute(statement)
        connection.execute("INSERT INTO meta VALUES ('fingerprint', ?)", (fingerprint,))
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
    connection.execute("COMMIT")


def check(connection: apsw.Connection, path: Path, fingerprint: str | None) -> None:
    """Raise StoreMismatchError if a file is no store, or not one of this tokenizer or of a format that is known."""
    if connection.execute("PRAGMA application_id").get != _APPLICATION:
        raise StoreMismatchError(f"{path} is a database of something else: name another path with --store")
    version = connection.execute("PRAGMA user_version").get
    if not 1 <= version <= FORMAT:
        raise StoreMismatchError(f"{path} has format {version}, and this router knows {FORMAT}: update the router")
    found = connection.execute("SELECT value FROM meta WHERE key = 'fingerprint'").get
    if fingerprint is not None and found != fingerprint:
        raise StoreMismatchError(
            f"{path} was made with another tokenizer ({found}, and this one is {fingerprint}): "
            "its ids mean other words. Start with the tokenizer it was made with, or name another path with --store"
        )


def _grow(connection: apsw.Connection) -> None:
    """Migrate a file of an earlier version to this one. Routers that have it open can still use it."""
    beside = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (_NEWEST,)).get
    if beside and connection.execute("PRAGMA user_version").get == FORMAT:
        return
    _patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
    if connection.execute("PRAGMA user_version").get == 1:  # else another process was first
        for change in _SINCE_2:
            connection.execute(change)
        connection.execute(f"PRAGMA user_version = {FORMAT}")
    for statement in _BESIDE:
        connection.execute(statement)
    connection.execute("COMMIT")


def _patiently(statement: Callable[[], object]) -> None:
    """Repeat a statement for which SQLite does not wait by itself while another process opens the same file."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            statement()
            return
        except apsw.BusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def torn_bytes(path: Path) -> int:
    """Return how many bytes of the log SQLite ignores: an append that was never acknowledged, or damage.

    Call this while another connection holds the write lock; otherwise another process may append meanwhile.
    """
    log = _log_bytes(path)
    if not log:
        return 0
    connection = connect(path)
    try:
        busy, frames, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").get
        page = connection.execute("PRAGMA page_size").get
    finally:
        connection.close()
    return 0 if busy else max(0, log - max(0, int(frames)) * (_FRAME_HEAD + int(page)))


def _log_bytes(path: Path) -> int:
    """Return the length of the write-ahead log's present round, whole or not: 0 without one.

    https://sqlite.org/fileformat2.html#the_write_ahead_log: a header with two salts, and frames with the same salts.
    """
    try:
        descriptor = os.open(log_of(path), os.O_RDONLY)
    except OSError:
        return 0
    try:
        head = os.read(descriptor, _WAL_HEAD)
        size = os.fstat(descriptor).st_size
        if len(head) < _WAL_HEAD:
            return len(head)
        frame = _FRAME_HEAD + int.from_bytes(head[8:12], "big")
        at = _WAL_HEAD
        while at + frame <= size and os.pread(descriptor, 8, at + 8) == head[16:24]:
            at += frame
        partial = os.pread(descriptor, 8, at + 8) == head[16:24]
        return size - _WAL_HEAD if partial else at - _WAL_HEAD
    finally:
        os.close(descriptor)


class BusyError(Exception):
    """Another process is writing."""


def begin(connection: apsw.Connection, ends: Callable[[], float | None], *, patient: bool = True) -> None:
    """Begin to write when no other process writes. Raises BusyError if it shall not wait for that, and apsw.Error.

    It waits until `ends` at most. The connection does not wait by itself (`busy_timeout` is 0): it would try too seldom.
    """
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE")
            return
        except apsw.BusyError as error:
            late = time.monotonic() > min(deadline, ends() or deadline)
            if not patient:
                raise BusyError from error
            if late:
                raise
        time.sleep(0.001)


def data_version(connection: apsw.Connection) -> int:
    """Return a number that changes when another connection writes."""
    return int(connection.execute("PRAGMA data_version").get)


class SameFile:
    """The file at a path and its log, as they were when this was made. Make it after a connection has read from the file.

    SQLite goes on writing into files that were removed, moved away or emptied, and no process can read that afterwards. It
    empties no log itself. In a log that was emptied it writes where the log had ended: then the log is not empty, but
    begins with zeros.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._log = str(log_of(path))
        self._found, self._found_log = _which(self._path), _which(self._log)
        self._log_begun = False
        self._log_file: int | None = None
        if self._found_log is not None:
            with suppress(OSError):
                self._log_file = os.open(self._log, os.O_RDONLY | os.O_CLOEXEC)
        if self._log_file is not None:
            # SQLite has no locks on a log, so that nothing is unlocked when this is closed.
            weakref.finalize(self, os.close, self._log_file)

    def __bool__(self) -> bool:
        begun = self._log_begun  # before the log is read: another thread may begin it right after that, and note it
        if self._log_file is not None and os.pread(self._log_file, 1, 0) == _LOG_MAGIC:
            self._log_begun = True
        elif begun:
            return False
        return _which(self._log) == self._found_log and _which(self._path, empty=False) == self._found

    @property
    def lacks_log(self) -> bool:
        """Return whether only the log is gone: its content can still be put into the file."""
        return _which(self._path, empty=False) == self._found and _which(self._log) != self._found_log

    def check(self) -> None:
        """Raise StoreUnreachableError if they are gone."""
        if not self:
            what = self._log if self.lacks_log else f"the store {self._path} or its log"
            why = f"{what} was removed, emptied or replaced while it was in use"
            raise StoreUnreachableError(f"{why}: put it back, or stop all routers that use it, and start them again")


def log_of(path: Path) -> Path:
    """Return SQLite's write-ahead log of a file."""
    return path.with_name(f"{path.name}-wal")


def index_of(path: Path) -> Path:
    """Return the index of the log of a file."""
    return path.with_name(f"{path.name}-shm")


def read_options(path: Path) -> str:
    """Return the options with which SQLite only reads a file; without a log it is in no use, and does not change."""
    log = log_of(path)
    return "mode=ro" if log.exists() and log.stat().st_size > 0 else "mode=ro&immutable=1"


def _check_log(path: Path) -> None:
    """Raise StoreUnreachableError if only the log was removed.

    SQLite removes the index of the log (`-shm`) before the log, and makes it after the log. So if there is an index and no log,
    the log was removed by other means. Perhaps a process still writes to it: a second log beside it would damage the file.
    """
    log, index = log_of(path), index_of(path)
    if not os.path.exists(log) and os.path.exists(index) and not os.path.exists(log):
        raise StoreUnreachableError(
            f"{log} was removed, and what was recorded last may be nowhere else. If a router still uses this store, stop it: "
            f"it puts all it has into the file. Else put the log back; or remove {index} as well, to go on without what is lost"
        )


_LOG_MAGIC: Final = b"\x37"
"""The first byte of a log: https://sqlite.org/fileformat2.html#the_write_ahead_log"""


def _which(path: str, *, empty: bool = True) -> tuple[int, int] | None:
    """Return what tells a file from any other; None if there is none, or (not `empty`) nothing in it."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if empty or found.st_size else None


@contextmanager
def mapped(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as errors of the store."""
    try:
        yield
    except ERRORS as error:
        raise store_error(path, error) from error


def store_error(path: Path, error: Exception) -> Exception:
    """Return the StoreError that an error of SQLite means, with what to do; any other error as it is."""
    if not isinstance(error, ERRORS):
        return error
    code = getattr(error, "extendedresult", 0)
    # A disk without room for the index of the log is full, which SQLite calls an I/O error.
    code = apsw.SQLITE_FULL if code == apsw.SQLITE_IOERR_SHMSIZE else code & 0xFF
    if code == apsw.SQLITE_NOTADB:
        return StoreMismatchError(
            f"{path} is no SQLite file, or its first page is damaged: name another path with --store"
        )
    if code == apsw.SQLITE_CORRUPT or isinstance(error, UnicodeDecodeError):
        return DamagedRecordError(f"{path} is damaged ({error}): run `tito-router store verify`, and restore a backup")
    advice = {
        apsw.SQLITE_FULL: "the disk is full: make room, or lower --store-max-bytes",
        apsw.SQLITE_READONLY: "it is read-only: give this user the right to write the file and its folder",
        apsw.SQLITE_CANTOPEN: "it cannot be opened: is the folder there, and may this user write in it?",
        apsw.SQLITE_BUSY: f"another process has held its lock for {_BUSY_SECONDS:.0f} s: is one of them stopped?",
        apsw.SQLITE_IOERR: "the disk failed: look at the system's log",
    }.get(code, "look at the router's log")
    return StoreUnreachableError(f"the store {path}: {error}; {advice}")
