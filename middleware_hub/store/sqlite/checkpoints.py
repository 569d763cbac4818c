"""Keeps the log short.

SQLite appends to a log, which has to be put into the file now and then (a checkpoint), and that waits for the disk. A helper
thread moves most of the log while groups are written. Only what came in meanwhile is moved between two groups; then SQLite
begins the log again, so that it does not grow.

A log that was removed while it is in use is put into the file at once, all of it: no other process can read it any more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import apsw

from middleware_hub.store.errors import StoreError
from middleware_hub.store.sqlite.appending import EncodedBatch
from middleware_hub.store.sqlite.file import SameFile, connect, log_of, store_error

logger = logging.getLogger(__name__)

_CHECKPOINT_PAGES: Final = 8_000
"""Pages of the log after which a checkpoint begins: 32 MB."""
_PAGES_OF_A_GROUP: Final = 8
_BYTES_OF_A_PAGE: Final = 3_000
"""A page is not full, since a record begins in a page of its own where it does not fit in the last one."""


class Checkpoints:
    """Takes the steps of checkpoints, in the thread of the writer. `pages` is about how many the log has."""

    def __init__(self, path: Path, same: SameFile) -> None:
        self.pages = 0
        self._path = path
        self._same = same
        self._rescued = False
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="store-checkpoint")
        self._helping: Future[None] | None = None

    def wrote(self, group: Sequence[EncodedBatch]) -> None:
        """Count about as many pages as a group took (measured: 12, 63 and 94 for 1, 12 and 24 turns of 7 KB)."""
        records, size = sum(len(one.records) for one in group), sum(one.size for one in group)
        self.pages += _PAGES_OF_A_GROUP + 3 * records // 2 + size // _BYTES_OF_A_PAGE

    @property
    def due(self) -> bool:
        """Return whether there is a step to take."""
        return self.pages > _CHECKPOINT_PAGES if self._helping is None else self._helping.done()

    def go_on(self, connection: apsw.Connection) -> None:
        """Take the next step, if one is due. `connection` is the writer's, between two groups."""
        if self._same.lacks_log:
            self._rescue(connection)
            return
        if not self.due or not self._same:
            return
        if self._helping is None:
            self._helping = self._helper.submit(self._beside)
        else:
            self._helping = None
            self.pages = self._checkpoint(connection) or 0
            if not self.pages:
                self._begin_log(connection)

    def finish(self, connection: apsw.Connection) -> None:
        """Put all of the log into the file; of a log that lacks its beginning nothing, nor when the connection is closed."""
        self._helper.shutdown()
        if self._same or self._same.lacks_log:
            self._checkpoint(connection)
        else:
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)

    def _rescue(self, connection: apsw.Connection) -> None:
        """Put all of a removed log into the file; the rest, if any, is left for the next time."""
        if not self._rescued and self._checkpoint(connection) == 0:
            self._rescued = True
            logger.error(
                "%s was removed while it is in use: what it had is in the store's file now. Nothing more is written there "
                "before the routers that use it are stopped and started again",
                log_of(self._path),
            )

    def _beside(self) -> None:
        if not self._same:
            return  # the file was removed, and must not be made
        try:
            connection = connect(self._path)
        except StoreError as error:
            logger.warning("%s", error)
            return
        self._checkpoint(connection)
        connection.close()

    def _begin_log(self, connection: apsw.Connection) -> None:
        """Write something now, because SQLite waits for the disk at the first page of a log that begins again."""
        with suppress(apsw.Error):
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('log', '')")

    def _checkpoint(self, connection: apsw.Connection) -> int | None:
        """Put the log into the file, and return how many pages could not be; None if that failed."""
        try:
            busy, pages, moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").get
        except apsw.Error as error:
            logger.warning("%s", store_error(self._path, error))
            return None
        return None if busy else int(pages - moved)
