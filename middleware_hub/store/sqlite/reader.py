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

import msgspec

from middleware_hub.spans.chain import names_of
from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError
from middleware_hub.store.paths import BLOCK, END, END_ALONE, PASS, START, TextPath, name_key
from middleware_hub.store.protocol import MOST_CHAINS, MOST_VARIANTS, Found, LogInfo, Query
from middleware_hub.store.records import Blob, Event, Mark, SpanRecord, complete, decode, decode_blob, decode_event
from middleware_hub.store.sqlite.file import connect, mapped
from middleware_hub.store.sqlite.rows import locate, marks, padded

T = TypeVar("T")

_numbers = msgspec.json.Decoder(list[int])

logger = logging.getLogger(__name__)

_MOST_BLOCKS: Final = 512
"""Keys of one statement."""
_NEWEST: Final = (
    "(SELECT json_group_array(record) FROM (SELECT record FROM places p WHERE p.key = f.key AND p.length = f.length "
    "AND p.hash = f.hash AND p.kind = {kind} ORDER BY record DESC LIMIT {most}))"
)
_SEARCH: Final = f"""
WITH RECURSIVE keys(key) AS (VALUES {{keys}}), lengths(key, length) AS (
    SELECT key, (SELECT length FROM places p WHERE p.key = keys.key ORDER BY length LIMIT 1) FROM keys
    UNION ALL
    SELECT key, (SELECT length FROM places p WHERE p.key = lengths.key AND p.length > lengths.length ORDER BY length LIMIT 1)
    FROM lengths WHERE length IS NOT NULL
), f(key, length, hash) AS MATERIALIZED (
    SELECT key, length, digest(key, length) FROM lengths WHERE length IS NOT NULL
    UNION ALL SELECT key, 0, x'' FROM lengths WHERE length = 0)
SELECT key, length, {_NEWEST.format(kind=START, most=MOST_CHAINS + 1)}, {_NEWEST.format(kind=PASS, most=2 * MOST_CHAINS + 1)},
    {_NEWEST.format(kind=END, most=MOST_VARIANTS + 1)}, {_NEWEST.format(kind=END_ALONE, most=MOST_VARIANTS + 1)}
FROM f WHERE EXISTS (SELECT 1 FROM places p WHERE p.key = f.key AND p.length = f.length AND p.hash = f.hash)"""
_CLOSURE: Final = """
WITH RECURSIVE need(n) AS (
    VALUES {rows}
    UNION SELECT r.parent FROM need JOIN records r USING(n) WHERE r.parent IS NOT NULL AND NOT known(r.id)
    UNION SELECT r.line FROM need JOIN records r USING(n) WHERE r.line IS NOT NULL AND NOT known(r.id))
SELECT n, r.root, r.body FROM need JOIN records r USING(n) WHERE NOT known(r.id)"""


class Wanted(NamedTuple):
    """Records that a look-up asks for, by their numbers in the file, and how often a bound kept some out."""

    numbers: list[int]
    cut_off: int


class Reader:
    """Reads by a connection of its own. Not to be used by two threads at once."""

    def __init__(self, path: Path, *, patient: bool = True) -> None:
        """`patient`: wait while another process mends the log after one was killed; else StoreUnreachableError at once."""
        self.path = path
        self.connection = connect(path)
        if not patient:
            self.connection.execute("PRAGMA busy_timeout = 0")
        self._known: Container[bytes] = ()
        self.connection.create_function("known", 1, lambda i: i in self._known)
        self._search: _Search | None = None
        self.connection.create_function("digest", 2, self._digest)

    def _digest(self, key: bytes, length: int) -> bytes | None:
        return None if self._search is None else self._search.digest(key, length)

    def newest(self) -> int:
        """Return the number of the last record, or 0."""
        with mapped(self.path):
            (found,) = self.connection.execute("SELECT max(n) FROM records").fetchone()
        return found or 0

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
            self._search = _Search(self.connection, query)
            wanted = self._search.wanted()
            self._search = None
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


class _Hit(NamedTuple):
    """A place under which our text, or its first `length` characters, is entered; with the newest records of each kind."""

    block: int
    length: int
    starts: list[int]
    passes: list[int]
    ends: list[int]
    alone: list[int]


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
        self._blocks: dict[bytes, int] = {}

    def wanted(self) -> Wanted:
        known_from = self._query.known_from
        first = max(self._path.first, known_from // BLOCK)
        hits = self._hits(range(first, self._path.last + 1))
        deepest = known_from
        for hit in hits:
            if hit.length >= known_from:
                for variants in (hit.ends, hit.alone):
                    self._cut_off += len(variants) > MOST_VARIANTS
                    self._numbers.update(dict.fromkeys(variants[:MOST_VARIANTS]))
                if hit.ends:
                    deepest = max(deepest, hit.length)
        floor = max(known_from, min(deepest, self._take_named(deepest)))
        self._take_chains(hit for hit in reversed(hits) if hit.block >= floor // BLOCK)
        return Wanted(list(self._numbers), self._cut_off)

    def _hits(self, blocks: range) -> list[_Hit]:
        """Return all places of our text, from its beginning to its end."""
        of_key = self._blocks = {self._path.key(block): block for block in blocks}
        found: list[_Hit] = []
        for some in padded(list(of_key), _MOST_BLOCKS):
            keys = ",".join(["(?)"] * len(some))
            for key, length, *newest in self._connection.execute(_SEARCH.format(keys=keys), some):
                found.append(_Hit(of_key[key], length, *map(_numbers.decode, newest)))
        return sorted(found)

    def digest(self, key: bytes, length: int) -> bytes | None:
        """Return the hash of the first characters of our text, which end in the block of this key; None if they do not."""
        return self._path.hash(length) if BLOCK * self._blocks[key] <= length <= self._size else None

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

    def _take_chains(self, hits: Iterator[_Hit]) -> None:
        """Take chains that the text leaves midway: those that go furthest first, and of one block the newest."""
        for _, group in groupby(hits, key=lambda hit: hit.block):
            if len(self._chains) == MOST_CHAINS:
                self._cut_off += 1
                return
            of_block = list(group)
            for hit in of_block:
                self._take_some(hit.passes)
            for hit in of_block:
                if hit.length == self._size:
                    self._take_prompts(hit.starts)
                else:
                    self._take_some(hit.starts)

    def _take_some(self, numbers: list[int]) -> None:
        for n in numbers:
            if n not in self._chains:
                if len(self._chains) == MOST_CHAINS:
                    self._cut_off += 1
                    return
                self._chains.add(n)
                self._numbers[n] = None

    def _take_prompts(self, replies: list[int]) -> None:
        """Take one reply for each tokenization of a prompt that is the whole text."""
        if not replies:
            return
        sql = f"SELECT max(n) FROM records WHERE n IN ({marks(len(replies))}) GROUP BY parent"
        self._numbers.update(dict.fromkeys(n for (n,) in self._connection.execute(sql, replies)))


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
