"""Which records one look-up wants.

The lengths that end under a block are read from the index by skipping from one to the next. So a block under which 100,000
replies end costs as many steps as there are lengths in it, 256 at most.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from middleware_hub.spans.chain import names_of
from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError
from middleware_hub.store.look_up import MOST_CHAINS, MOST_VARIANTS, Choice, Hit, last_step
from middleware_hub.store.paths import BLOCK, END, END_ALONE, NAME, PASS, START, WAY, TextPath, name_place
from middleware_hub.store.protocol import Query
from middleware_hub.store.records import SpanRecord, decode
from middleware_hub.store.sqlite.rows import marks, padded

logger = logging.getLogger(__name__)

_numbers = msgspec.json.Decoder(list[int])

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
_NAMED: Final = (
    "SELECT n, body FROM places JOIN records ON n = record "
    f"WHERE key = ? AND length = 0 AND hash = x'' AND kind = {NAME} ORDER BY record DESC LIMIT 8"
)
_PASSED: Final = (
    f"SELECT 1 FROM places WHERE key = ? AND length = 0 AND hash = x'' AND kind IN ({PASS}, {WAY}) AND record <= ? "
    "LIMIT 1"
)


class Wanted(NamedTuple):
    """Records that a look-up asks for, by their numbers in the file, and how often a bound left some out."""

    numbers: list[int]
    cut_off: int


class Search:
    """Which records one look-up wants."""

    def __init__(self, connection: sqlite3.Connection, query: Query) -> None:
        self._connection = connection
        self._query = query
        self._path: TextPath = query.path
        self._size = len(query.path.text)
        self._blocks: dict[bytes, int] = {}

    def wanted(self) -> Wanted:
        first = max(self._path.first, last_step(self._query.known_from))
        choice = Choice[int](self._query.known_from, self._size, self._one_each)
        choice.take(self._hits(range(first, self._path.last + 1)), self._named())
        return Wanted(list(choice.taken), choice.cut_off)

    def alone(self, horizon: int) -> bytes | None:
        """Return the digest at the last `STEP`-th block end of the text, if no record up to this number continues it."""
        block = last_step(self._size)
        if not block or self._connection.execute(_PASSED, (self._path.key(block), horizon)).fetchone():
            return None
        return self._path.digest(block)

    def _hits(self, blocks: range) -> list[Hit[int]]:
        """Return all places of our text, from its beginning to its end."""
        of_key = self._blocks = {self._path.key(block): block for block in blocks}
        found: list[Hit[int]] = []
        for some in padded(list(of_key), _MOST_BLOCKS):
            keys = ",".join(["(?)"] * len(some))
            for key, length, *newest in self._connection.execute(_SEARCH.format(keys=keys), some):
                found.append(Hit(of_key[key], length, *map(_numbers.decode, newest)))
        return sorted(found)

    def digest(self, key: bytes, length: int) -> bytes | None:
        """Return the hash of the first characters of our text, which end in the block of this key; None if they do not."""
        return self._path.hash(length) if BLOCK * self._blocks[key] <= length <= self._size else None

    def _named(self) -> Iterator[tuple[int, int]]:
        """Yield the number of each named parent, and the end of its text."""
        for parent in self._query.parents:
            for name in names_of(parent):
                place = name_place(self._path.namespace, name)
                rows = self._connection.execute(_NAMED, (place.key,)).fetchall()
                if rows:
                    # A record that waited in a spool is entered late.
                    records = [(number, decode_all([body])[0]) for number, body in rows]
                    number, newest = max(records, key=lambda row: max((one.serial for one in row[1]), default=-1))
                    yield number, min((record.text_end for record in newest), default=self._size)
                    break

    def _one_each(self, replies: list[int]) -> list[int]:
        if not replies:
            return []
        sql = f"SELECT max(n) FROM records WHERE n IN ({marks(len(replies))}) GROUP BY parent"
        return [n for (n,) in self._connection.execute(sql, replies)]


def decode_all(bodies: Iterable[bytes]) -> tuple[list[SpanRecord], int]:
    """Return the records that can be read, and how many cannot."""
    found, damaged = [], 0
    for body in bodies:
        try:
            found.append(decode(body))
        except (DamagedRecordError, StoreMismatchError) as error:
            damaged += 1
            logger.error("%s", error)
    return found, damaged
