"""Checks a file, page by page: SQLite's own structure, every record, its links, and its places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final

from middleware_hub.store.errors import DamagedRecordError, StoreError, StoreMismatchError
from middleware_hub.store.protocol import Finding
from middleware_hub.store.records import SpanRecord, decode
from middleware_hub.store.retracing import Retracer
from middleware_hub.store.sqlite.file import ERRORS, mapped
from middleware_hub.store.sqlite.media import check_media, missing_media, there
from middleware_hub.store.sqlite.reader import Reader
from middleware_hub.store.sqlite.rows import THERE, Located, locate
from middleware_hub.store.verifying import check_blob, check_chain, check_event, check_links, check_record, not_entered

Page = tuple[list[Finding], bool]
InThread = Callable[[Callable[[], Page]], Awaitable[Page]]

_PAGE: Final = 200
_FILES: Final = 16
"""Files of media that are read at once: each may have 20 MB."""
_LOG: Final = "SELECT name FROM logs l WHERE l.log = events.log"
_PLACE: Final = "SELECT 1 FROM places WHERE key = ? AND length = ? AND hash = ? AND kind = ? AND record = ?"


class SqliteVerifier:
    """Checks everything in a file. A conversation that is forgotten meanwhile is no finding."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._connection = reader.connection
        self._retracer = Retracer(self._load)
        self._pages = self._checks()
        self.records = 0
        """How many were checked."""

    async def run(self, in_thread: InThread, checked: Callable[[int], None] | None) -> AsyncIterator[Finding]:
        """Yield findings, as `Store.verify`. `in_thread` does something in the thread to which the reader belongs."""
        more = True
        while more:
            before = self.records
            try:
                findings, more = await in_thread(self.page)
            except asyncio.CancelledError:
                self._connection.interrupt()  # the check of a large file takes minutes
                raise
            if checked is not None:
                checked(self.records - before)
            for finding in findings:
                yield finding

    def page(self) -> Page:
        """Check the next page; return the findings, and whether there is more to check."""
        try:
            return next(self._pages), True
        except StopIteration:
            return [], False
        except ERRORS as error:
            return [Finding("file", f"the file cannot be read on: {error}")], False
        except StoreError as error:
            return [Finding("file", f"the file cannot be read on: {error.message}")], False

    def _checks(self) -> Iterator[list[Finding]]:
        with mapped(self._reader.path):
            rows = list(self._connection.execute("PRAGMA quick_check(20)"))
        yield [Finding("file", str(row[0])) for row in rows if row[0] != "ok"]
        after = 0
        while rows := self._reader.page(after, _PAGE):
            after = rows[-1][0]
            self.records += len(rows)
            with self._reader.snapshot():
                found = [finding for row in rows if self._there(row[0]) for finding in self._record(row)]
            yield found  # between two pages no transaction is open
        yield self._strays()
        yield from self._sealed("blobs", "rowid, name, body", check_blob)
        yield from self._media()
        yield from self._sealed("events", f"rowid, ({_LOG}), number, body", check_event)
        yield self._gaps()
        yield from self._sealed("roots", "root, stamp", lambda _: ())  # reads the stamps: a damaged text cannot be read

    def _there(self, n: int) -> bool:
        return self._connection.execute(f"SELECT 1 FROM records r WHERE n = ? AND {THERE}", (n,)).get is not None

    def _load(self, record: bytes) -> SpanRecord | None:
        body = self._connection.execute("SELECT body FROM records WHERE id = ?", (record,)).get
        try:
            return None if body is None else decode(body)
        except (DamagedRecordError, StoreMismatchError):
            return None

    def _record(self, row: tuple[Any, ...]) -> Iterator[Finding]:
        n, key, root, parent, line, body = row
        record, wrong = check_record(key, body)
        yield from wrong
        if record is None:
            return
        name = f"record {record.id.hex()}"
        if record.id != key:
            yield Finding("record", f"{name} is stored as {key.hex()}", key)
        at = locate(self._connection, {*record.links, record.root})
        if missing := check_links(record, key, at):
            yield from missing
            return
        linked = (at[record.root].n, _number(at, record.parent), _number(at, record.line))
        if linked != (root, parent, line) or any(at[link].n >= n or at[link].root != root for link in record.links):
            yield Finding("link", f"{name}: its row links to other records than it does itself", key)
        places, wrong = check_chain(record, record.id, self._retracer)
        yield from wrong
        for place in places:
            if self._connection.execute(_PLACE, (*place, n)).get is None:
                yield not_entered(record.id, place)

    def _strays(self) -> list[Finding]:
        found = []
        for table in ("places", "blobs"):
            sql = f"SELECT count(*) FROM {table} WHERE record NOT IN (SELECT n FROM records)"
            with self._reader.snapshot() as connection:
                count = connection.execute(sql).get
            if count:
                found.append(Finding("index", f"{count} entries of {table} point to records that are not there"))
        return found

    def _media(self) -> Iterator[list[Finding]]:
        """Check the files of media, and whether records name files that are not there."""
        with self._reader.snapshot() as connection:
            known = there(connection)
        at: int | None = 0 if known else None
        while at is not None:
            with self._reader.snapshot() as connection:
                found, at = check_media(connection, at, _FILES)
            yield found
        if known:
            with self._reader.snapshot() as connection:
                missing = missing_media(connection)
            yield [
                Finding("media", f"the conversation {root.hex()} names a picture whose file is not there", root)
                for root in missing
            ]

    def _sealed(self, table: str, columns: str, check: Any) -> Iterator[list[Finding]]:
        after = 0
        while True:
            with mapped(self._reader.path):
                sql = f"SELECT {columns} FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT ?"
                rows = list(self._connection.execute(sql, (after, _PAGE)))
            if not rows:
                return
            after = rows[-1][0]
            yield [finding for row in rows for finding in check(*row[1:])]

    def _gaps(self) -> list[Finding]:
        """Return the logs that lack events other than forgotten ones: those of deleted logs, or before `first`."""
        sql = (
            "SELECT name, last - first + 1 AS whole, (SELECT count(*) FROM events e WHERE e.log = l.log) AS count, "
            "(SELECT max(number) FROM events e WHERE e.log = l.log) AS newest FROM logs l "
            "WHERE (newest IS NOT last AND whole > 0) OR (count != whole AND closed < 2)"
        )
        with self._reader.snapshot() as connection:
            rows = list(connection.execute(sql))
        return [Finding("event", f"the log {name!r} has {count} of {whole} events") for name, whole, count, _ in rows]


def _number(at: dict[bytes, Located], record: bytes | None) -> int | None:
    return None if record is None else at[record].n
