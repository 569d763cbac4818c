"""Look-ups: a few short statements within one read transaction, so that they see one moment of the store.

Which lengths end under a block is asked of the index by skipping from one to the next. So a block under which 100,000 replies
end costs as many steps as there are lengths in it, 256 at most.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from middleware_hub.spans.chain import names_of
from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError
from middleware_hub.store.paths import BLOCK, END, END_ALONE, PASS, START, TextPath, name_key
from middleware_hub.store.protocol import MOST_CHAINS, MOST_VARIANTS, Found, LogInfo, Query
from middleware_hub.store.records import Blob, Event, Mark, SpanRecord, complete, decode, decode_blob, decode_event
from middleware_hub.store.sqlite.file import connect, mapped
from middleware_hub.store.sqlite.rows import locate, marks, padded

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MOST_BLOCKS: Final = 512
"""Keys of one statement."""
_SKIP: Final = """
WITH RECURSIVE keys(key) AS (VALUES {keys}), found(key, length) AS (
    SELECT key, (SELECT length FROM places p WHERE p.key = keys.key AND p.length >= 0 ORDER BY length LIMIT 1) FROM keys
    UNION ALL
    SELECT key, (SELECT length FROM places p WHERE p.key = found.key AND p.length > found.length ORDER BY length LIMIT 1)
    FROM found WHERE length IS NOT NULL)
SELECT key, length FROM found WHERE length IS NOT NULL"""
_HITS: Final = """
WITH wanted(key, length, hash) AS (VALUES {rows})
SELECT length, hash FROM wanted WHERE EXISTS (
    SELECT 1 FROM places p WHERE p.key = wanted.key AND p.length = wanted.length AND p.hash = wanted.hash)"""
_AT: Final = "SELECT record FROM places WHERE key=? AND length=? AND hash=? AND kind=? ORDER BY record DESC LIMIT ?"
_CLOSURE: Final = """
WITH RECURSIVE need(n) AS (
    VALUES {rows}
    UNION SELECT r.parent FROM need JOIN records r USING(n) WHERE r.parent IS NOT NULL AND NOT known(r.id)
    UNION SELECT r.line FROM need JOIN records r USING(n) WHERE r.line IS NOT NULL AND NOT known(r.id))
SELECT {columns} FROM need JOIN records r USING(n) WHERE NOT known(r.id)"""


class Wanted(NamedTuple):
    """Records that a look-up asks for, by their numbers in the file, and how often a bound kept some out."""

    numbers: list[int]
    cut_off: int


class Reader:
    """Reads by a connection of its own. Not to be used by two threads at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection = connect(path)
        self._known: Container[bytes] = ()
        self.connection.create_function("known", 1, lambda i: i in self._known)

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Read within one moment of the store."""
        with mapped(self.path):
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

    def find(self, query: Query, most: int | None = None) -> Found | None:
        """Return what a look-up finds; None if more than `most` records have to be read for it."""
        with self.snapshot():
            wanted = _Search(self.connection, query).wanted()
            return self._fetch(wanted, query.known, most)

    def get(self, ids: Sequence[bytes], known: Container[bytes]) -> Found:
        with self.snapshot():
            numbers = [at.n for at in locate(self.connection, ids).values()]
            found = self._fetch(Wanted(numbers, 0), known, None)
            assert found is not None
            return found

    def _fetch(self, wanted: Wanted, known: Container[bytes], most: int | None) -> Found | None:
        """Read records, and all they build on that is not known."""
        if not wanted.numbers:
            return Found(cut_off=wanted.cut_off)
        self._known = known
        bodies: dict[int, tuple[int, bytes]] = {}
        try:
            for some in padded(wanted.numbers):
                rows = ",".join(["(?)"] * len(some))
                if most is not None:
                    count = _CLOSURE.format(rows=rows, columns="1") + f" LIMIT {most + 1}"
                    if len(self.connection.execute(count, some).fetchall()) > most:
                        return None
                sql = _CLOSURE.format(rows=rows, columns="n, r.root, r.body")
                bodies.update({n: (root, body) for n, root, body in self.connection.execute(sql, some)})
        finally:
            self._known = ()
        records, unreadable = _decode_all(bodies[n][1] for n in sorted(bodies))
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
            rows = self.connection.execute(sql, some).fetchall()
            found.update({i: Mark(i, tick, stamp, bool(seen)) for i, tick, stamp, seen in rows if i in ids})
        return found

    def blobs(self, record: bytes, names: Sequence[str] | None) -> list[Blob]:
        sql = "SELECT b.name, b.body FROM blobs b JOIN records r ON r.n = b.record WHERE r.id = ? ORDER BY b.name"
        with mapped(self.path):
            rows = self.connection.execute(sql, (record,)).fetchall()
        return [decode_blob(body) for name, body in rows if names is None or name in names]

    def events(self, log: str, after: int, limit: int) -> list[Event]:
        sql = (
            "SELECT number, body FROM events WHERE log = (SELECT log FROM logs WHERE name = ?) AND number > ? "
            "ORDER BY number LIMIT ?"
        )
        with mapped(self.path):
            rows = self.connection.execute(sql, (log, after, limit)).fetchall()
        return [decode_event(log, number, body) for number, body in rows]

    def logs(self, prefix: str, after: str, limit: int) -> list[LogInfo]:
        sql = (
            "SELECT name, last, closed FROM logs WHERE name >= ?1 AND substr(name, 1, length(?1)) = ?1 AND name > ?2 "
            "ORDER BY name LIMIT ?3"
        )
        with mapped(self.path):
            return [LogInfo(*row) for row in self.connection.execute(sql, (prefix, after, limit))]

    def page(self, after: int, limit: int) -> list[tuple[Any, ...]]:
        """Return (n, id, root, parent, line, body) of the next records."""
        sql = "SELECT n, id, root, parent, line, body FROM records WHERE n > ? ORDER BY n LIMIT ?"
        with mapped(self.path):
            return self.connection.execute(sql, (after, limit)).fetchall()


class _Search:
    """Which records one look-up wants."""

    def __init__(self, connection: sqlite3.Connection, query: Query) -> None:
        self._connection = connection
        self._query = query
        self._path: TextPath = query.path
        self._size = len(query.path.text)
        self._numbers: dict[int, None] = {}
        self._chains: set[int] = set()
        self._cut_off = 0

    def wanted(self) -> Wanted:
        query = self._query
        first = max(self._path.first, query.known_from // BLOCK)
        lengths = self._lengths(range(first, self._path.last + 1))
        hits = {block: self._hits(block, some) for block, some in lengths.items()}
        deepest = query.known_from
        for block, some in hits.items():
            for length, digest in some:
                if length >= query.known_from:
                    if self._take(block, length, digest, END, MOST_VARIANTS):
                        deepest = max(deepest, length)
                    self._take(block, length, digest, END_ALONE, MOST_VARIANTS)
        floor = max(query.known_from, min(deepest, self._take_named(deepest)))
        self._take_chains(lengths, hits, first, floor // BLOCK)
        return Wanted(list(self._numbers), self._cut_off)

    def _lengths(self, blocks: range) -> dict[int, list[int]]:
        """Return for each block the lengths that are entered under its key, rising; 0 stands for PASS."""
        of_key = {self._path.key(block): block for block in blocks}
        found: dict[int, list[int]] = {}
        for some in padded(list(of_key), _MOST_BLOCKS):
            keys = ",".join(["(?)"] * len(some))
            rows = self._connection.execute(_SKIP.format(keys=keys), some).fetchall()
            for key, length in rows:
                found.setdefault(of_key[key], []).append(length)
        return {block: sorted(lengths) for block, lengths in sorted(found.items())}

    def _hits(self, block: int, lengths: list[int]) -> list[tuple[int, bytes]]:
        """Return the lengths, of those entered under a block, at which our text is that of an entry; with its hash."""
        key = self._path.key(block)
        fitting = [length for length in lengths if (length or not block) and length <= self._size]
        found: list[tuple[int, bytes]] = []
        hashes = zip(fitting, self._path.hashes(block, fitting), strict=True)
        for some in padded([(key, length, digest) for length, digest in hashes], 64):
            values = ",".join(["(?,?,?)"] * len(some))
            row = [value for entry in some for value in (entry or (None, None, None))]
            found += self._connection.execute(_HITS.format(rows=values), row).fetchall()
        return sorted(found)

    def _at(self, block: int, length: int, digest: bytes, kind: int, most: int) -> list[int]:
        """Return the newest records of a place, and count what is beyond `most`."""
        row = (self._path.key(block), length, digest, kind, most + 1)
        found = [n for (n,) in self._connection.execute(_AT, row).fetchall()]
        self._cut_off += len(found) > most
        return found[:most]

    def _take(self, block: int, length: int, digest: bytes, kind: int, most: int) -> int:
        found = self._at(block, length, digest, kind, most)
        self._numbers.update(dict.fromkeys(found))
        return len(found)

    def _take_named(self, end: int) -> int:
        """Take the named parents, and return where the first of them ends, if that is before `end`."""
        for parent in self._query.parents:
            for name in names_of(parent):
                row = self._connection.execute(
                    "SELECT n, body FROM names JOIN records ON n = record WHERE key = ? ORDER BY n DESC LIMIT 1",
                    (name_key(self._path.namespace, name),),
                ).fetchone()
                if row is not None:
                    self._numbers[row[0]] = None
                    end = min([end, *(record.text_end for record in _decode_all([row[1]])[0])])
                    break
        return end

    def _take_chains(
        self, lengths: dict[int, list[int]], hits: dict[int, list[tuple[int, bytes]]], first: int, last: int
    ) -> None:
        """Take chains that the text leaves midway, from the deepest block to the one of the floor."""
        for block in sorted(lengths, reverse=True):
            if block < max(first, last):
                break
            if len(self._chains) >= MOST_CHAINS:
                self._cut_off += 1
                break
            if lengths[block][0] == 0 and block:
                self._take_more(block, 0, b"", PASS)
            for length, digest in reversed(hits[block]):
                if length == self._size:
                    self._take_prompts(block, length, digest)
                else:
                    self._take_more(block, length, digest, START)

    def _take_more(self, block: int, length: int, digest: bytes, kind: int) -> None:
        """Take the newest chains of a place, but no more than `MOST_CHAINS` in all."""
        for n in self._at(block, length, digest, kind, MOST_CHAINS + len(self._chains)):
            if n not in self._chains:
                if len(self._chains) == MOST_CHAINS:
                    self._cut_off += 1
                    break
                self._chains.add(n)
                self._numbers[n] = None

    def _take_prompts(self, block: int, length: int, digest: bytes) -> None:
        """Take one reply for each tokenization of a prompt that is the whole text."""
        replies = self._at(block, length, digest, START, MOST_CHAINS)
        sql = f"SELECT parent, max(n) FROM records WHERE n IN ({marks(len(replies))}) GROUP BY parent"
        for _, rows in groupby(self._connection.execute(sql, replies).fetchall() if replies else ()):
            self._numbers.update(dict.fromkeys(n for _, n in rows))


def _decode_all(bodies: Any) -> tuple[list[SpanRecord], int]:
    """Return the records that can be read, and how many cannot."""
    found, damaged = [], 0
    for body in bodies:
        try:
            found.append(decode(body))
        except (DamagedRecordError, StoreMismatchError) as error:
            damaged += 1
            logger.error("%s", error)
    return found, damaged
