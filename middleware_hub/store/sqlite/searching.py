"""Which records one look-up wants.

Which lengths end under a block is asked of the index by skipping from one to the next. So a block under which 100,000 replies
end costs as many steps as there are lengths in it, 256 at most.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final, NamedTuple

import msgspec

from middleware_hub.spans.chain import names_of
from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError
from middleware_hub.store.paths import BLOCK, END, END_ALONE, NAME, PASS, START, STEP, WAY, TextPath, name_place
from middleware_hub.store.protocol import MOST_CHAINS, MOST_VARIANTS, Query
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
    """Records that a look-up asks for, by their numbers in the file, and how often a bound kept some out."""

    numbers: list[int]
    cut_off: int


class _Hit(NamedTuple):
    """A place under which our text, or its first `length` characters, is entered; with the newest records of each kind."""

    block: int
    length: int
    starts: list[int]
    passes: list[int]
    ends: list[int]
    alone: list[int]


class Search:
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
        first = max(self._path.first, _step(known_from))
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
        self._take_chains(hit for hit in reversed(hits) if hit.block >= _step(floor))
        return Wanted(list(self._numbers), self._cut_off)

    def alone(self, horizon: int) -> bytes | None:
        """Return the digest at the last `STEP`-th block end of the text, if no record up to this number goes on behind it."""
        block = _step(len(self._path.text))
        if not block or self._connection.execute(_PASSED, (self._path.key(block), horizon)).fetchone():
            return None
        return self._path.digest(block)

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
                place = name_place(self._path.namespace, name)
                rows = self._connection.execute(_NAMED, (place.key,)).fetchall()
                if rows:
                    # What waited in a spool is entered late.
                    records = [(number, decode_all([body])[0]) for number, body in rows]
                    number, newest = max(records, key=lambda row: max((one.serial for one in row[1]), default=-1))
                    self._numbers[number] = None
                    end = min([end, *(record.text_end for record in newest)])
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


def _step(at: int) -> int:
    """Return the last `STEP`-th block end at or before a character."""
    return at // BLOCK // STEP * STEP


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
