"""Look-ups: a few short statements in one read transaction, so that they see one moment of the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

import apsw

from middleware_hub.store.look_up import complete
from middleware_hub.store.media import MediaFile
from middleware_hub.store.protocol import Found, LogInfo, Query
from middleware_hub.store.records import Blob, Event, Mark, SpanRecord, decode_blob, decode_event
from middleware_hub.store.sqlite.file import SameFile, connect, mapped
from middleware_hub.store.sqlite.media import read_files
from middleware_hub.store.sqlite.rows import THERE, locate, marks, padded
from middleware_hub.store.sqlite.searching import SqliteSearch, Wanted, decode_all

T = TypeVar("T")

logger = logging.getLogger(__name__)

_CLOSURE: Final = f"""
WITH RECURSIVE need(n) AS (
    VALUES {{rows}}
    UNION SELECT r.parent FROM need JOIN records r USING(n) WHERE r.parent IS NOT NULL AND NOT known(r.id)
    UNION SELECT r.line FROM need JOIN records r USING(n) WHERE r.line IS NOT NULL AND NOT known(r.id))
SELECT n, r.root, r.body FROM need JOIN records r USING(n) WHERE NOT known(r.id) AND {THERE}"""


class Reader:
    """Reads through its own connection. Two threads must not use it at once."""

    def __init__(self, path: Path, same: SameFile, *, patient: bool = True, how: str = "") -> None:
        """`patient`: wait while another process repairs the log after a kill; else raise StoreUnreachableError at once.

        `how`: as in `connect`.
        """
        self.path = path
        self.connection = connect(path, how=how)
        self._same = same
        if not patient:
            self.connection.set_busy_timeout(0)
        self._known: Container[bytes] = ()
        self.connection.create_scalar_function("known", lambda *given: given[0] in self._known, 1)

    def newest(self) -> int:
        """Return the number of the last record, or 0."""
        with self._reading():
            found = self.connection.execute("SELECT max(n) FROM records").get
        return found or 0

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self._same.check()
        with mapped(self.path):
            yield

    @contextmanager
    def snapshot(self) -> Iterator[apsw.Connection]:
        """Read within one moment of the store."""
        with self._reading():
            self.connection.execute("BEGIN")
            try:
                yield self.connection
            finally:
                if self.connection.in_transaction:
                    self.connection.execute("COMMIT")

    def within(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do something that reads within one moment of the store."""
        with self.snapshot() as connection:
            return work(connection, *arguments)

    def find(
        self, query: Query, most: int | None = None, horizon: int | None = None
    ) -> tuple[Found | None, bytes | None]:
        """Return what a look-up finds; None if more than `most` records have to be read for it.

        With a `horizon`, return also the digest of a beginning of the text that no record up to that number continues; None if
        one does.
        """
        with self.snapshot():
            search = SqliteSearch(self.connection, query)
            wanted = search.wanted()
            alone = None if horizon is None else search.alone(horizon)
            return self._fetch(wanted, query.known, most), alone

    def get(self, ids: Sequence[bytes], known: Container[bytes]) -> Found:
        with self.snapshot():
            numbers = [at.n for at in locate(self.connection, ids).values()]
            found = self._fetch(Wanted(numbers, 0), known, None)
            assert found is not None
            return found

    def _fetch(self, wanted: Wanted, known: Container[bytes], most: int | None) -> Found | None:
        """Read records, and everything unknown on which they build."""
        if not wanted.numbers:
            return Found(cut_off=wanted.cut_off)
        self._known = known
        bodies: dict[int, tuple[int, bytes]] = {}
        try:
            for some in padded(wanted.numbers):
                rows = self.connection.execute(_CLOSURE.format(rows=",".join(["(?)"] * len(some))), some)
                for n, root, body in rows:
                    bodies[n] = root, body
                    if most is not None and len(bodies) > most:
                        rows.close()
                        return None
        finally:
            self._known = ()
        if not bodies:
            return Found(cut_off=wanted.cut_off)
        records, unreadable = decode_all(bodies[n][1] for n in sorted(bodies))
        whole, left_out = complete(records, known)
        damaged = unreadable + left_out
        if damaged:
            logger.error("%s: %d records cannot be used: run `tito-router store verify`", self.path, damaged)
        return Found(whole, self._marks(whole, {root for root, _ in bodies.values()}), wanted.cut_off, damaged)

    def _marks(self, records: Sequence[SpanRecord], roots: set[int]) -> dict[bytes, Mark]:
        found: dict[bytes, Mark] = {}
        ids = {record.root for record in records}
        for some in padded(sorted(roots)):
            sql = (
                "SELECT r.id, tick, stamp, retrieved FROM roots JOIN records r ON r.n = roots.root "
                f"WHERE roots.root IN ({marks(len(some))})"
            )
            rows = list(self.connection.execute(sql, some))
            found.update({i: Mark(i, tick, stamp, bool(seen)) for i, tick, stamp, seen in rows if i in ids})
        return found

    def blobs(self, record: bytes, names: Sequence[str] | None) -> list[Blob]:
        sql = "SELECT b.name, b.body FROM blobs b JOIN records r ON r.n = b.record WHERE r.id = ? ORDER BY b.name"
        with self._reading():
            rows = list(self.connection.execute(sql, (record,)))
        return [decode_blob(body) for name, body in rows if names is None or name in names]

    def media(self, tenant: str, digests: Sequence[str], *, data: bool) -> dict[str, MediaFile]:
        with self._reading():
            return read_files(self.connection, tenant, digests, data=data)

    def events(self, log: str, after: int, limit: int) -> list[Event]:
        sql = (
            "SELECT number, body FROM events WHERE log = (SELECT log FROM logs WHERE name = ?) AND number > ? "
            "ORDER BY number LIMIT ?"
        )
        with self._reading():
            rows = list(self.connection.execute(sql, (log, after, limit)))
        return [decode_event(log, number, body) for number, body in rows]

    def last(self, log: str) -> int:
        """Return the number of the last event of a log, or 0."""
        with self._reading():
            return int(self.connection.execute("SELECT last FROM logs WHERE name = ?", (log,)).get or 0)

    def announced(self, prefix: str) -> dict[str, bytes]:
        sql = "SELECT name, data, said, until FROM announced WHERE substr(name, 1, length(?1)) = ?1"
        with self._reading():
            rows = list(self.connection.execute(sql, (prefix,)))
        now = monotonic()  # after the read: what is announced again meanwhile is there
        return {name: data for name, data, said, until in rows if said <= now < until}

    def logs(self, prefix: str, after: str, limit: int) -> list[LogInfo]:
        sql = (
            "SELECT name, last, closed FROM logs WHERE name >= ?1 AND substr(name, 1, length(?1)) = ?1 AND name > ?2 "
            "ORDER BY name LIMIT ?3"
        )
        with self._reading():
            return [LogInfo(*row) for row in self.connection.execute(sql, (prefix, after, limit))]

    def page(self, after: int, limit: int) -> list[tuple[Any, ...]]:
        """Return (n, id, root, parent, line, body) of the next records."""
        sql = f"SELECT n, id, root, parent, line, body FROM records r WHERE n > ? AND {THERE} ORDER BY n LIMIT ?"
        with self._reading():
            return list(self.connection.execute(sql, (after, limit)))
