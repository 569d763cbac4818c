"""The death of a router, as its spool file sees it."""

from __future__ import annotations

import os

import apsw

from middleware_hub.store.spool.file import SpoolFile


def dies(spool: SpoolFile) -> None:
    """End the lock and the connection of a file as a SIGKILL does: what is in SQLite's log stays there."""
    spool._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    spool._connection.close()
    if spool._reserve is not None:
        spool._reserve.close()
    os.close(spool._lock)
    spool._closed = True
