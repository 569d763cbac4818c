"""Whether a file can be written, and how it can be read if it cannot.

SQLite reads a file that has a log (`-wal`) only with the index of the log (`-shm`), which it makes beside the file if there is
none. A file without a log is in no use, so it is read as one that does not change.
"""

from __future__ import annotations

import os
from pathlib import Path

import apsw

from middleware_hub.store.errors import StoreMismatchError, StoreUnreachableError
from middleware_hub.store.sqlite.file import FORMAT, check, connect, index_of, log_of, mapped, place_of


def cannot_write(path: str, error: StoreUnreachableError | None) -> bool:
    """Return whether a file may not be written, or could not be opened (`error`): its folder may not, or its disk is full."""
    if error is None:
        file = place_of(path)
        return file.is_file() and not os.access(file, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    code = getattr(error.__cause__, "extendedresult", 0) & 0xFF
    return code in (apsw.SQLITE_READONLY, apsw.SQLITE_CANTOPEN, apsw.SQLITE_FULL, apsw.SQLITE_IOERR)


def how_to_read(path: Path, fingerprint: str | None) -> str:
    """Return the options with which SQLite reads a file. Raises a StoreError if it cannot read all that was recorded in it."""
    log = log_of(path)
    has_log = log.exists() and log.stat().st_size > 0
    if has_log and not index_of(path).exists():
        raise StoreUnreachableError(
            f"the store {path} cannot be written, and what was recorded last is in {log}, which SQLite reads only where it can "
            "write: copy both files into a folder of your own, and name the copy"
        )
    how = "mode=ro" if has_log else "mode=ro&immutable=1"
    connection = connect(path, how=how)
    try:
        with mapped(path):
            check(connection, path, fingerprint)
            version = connection.execute("PRAGMA user_version").get
    finally:
        connection.close()
    if version < FORMAT:
        raise StoreMismatchError(
            f"{path} has format {version}, and cannot be brought to format {FORMAT} where it cannot be written: copy it into a "
            "folder of your own, and name the copy"
        )
    return how
