"""Which records one look-up wants.

The lengths that end under a block are read from the index by skipping from one to the next. So a block under which 100,000
replies end costs as many steps as there are lengths in it, 256 at most.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

import apsw
import msgspec

from middleware_hub.spans.chain import names_of
from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError
from middleware_hub.store.look_up import MOST_CHAINS, MOST_NAMED, MOST_VARIANTS, Choice, Hit, last_step
from middleware_hub.store.paths import BLOCK, END, END_ALONE, HASH, KEY, NAME, PASS, START, WAY, TextPath, name_place
from middleware_hub.store.protocol import Query
from middleware_hub.store.records import SpanRecord, decode
from middleware_hub.store.sqlite.rows import THERE, marks

logger = logging.getLogger(__name__)

_Row = tuple[int, int, int]
_Place = tuple[int, int, str, int, int]

_encode = msgspec.json.encode
_places = msgspec.json.Decoder(list[_Place])
_lengths = msgspec.json.Decoder(list[tuple[int, int]])
_rows = msgspec.json.Decoder(list[_Row])
_numbers = msgspec.json.Decoder(list[int])

_FEW: Final = 256
"""Up to this many records, and four of each place, are read without a choice of the newest."""
_FEW_ALL: Final = 32
"""Up to this many places, and three of each block, are read whether they are our text's or not."""
_MOST: Final = {
    START: MOST_CHAINS + 1,
    PASS: 2 * MOST_CHAINS + 1,
    END: MOST_VARIANTS + 1,
    END_ALONE: MOST_VARIANTS + 1,
}
"""How many records of a place are read, by kind: the newest ones."""
_FIELD: Final = {kind: at for at, kind in enumerate(_MOST)}
"""The place of each kind among the lists of a `Hit`."""

# Each statement answers in one step and calls nothing of Python's (see `rows`), and its text is always the same, so that it is
# compiled once: keys and hashes come as one blob, numbers as JSON. A place without a hash has no length there.
_BLOCKS: Final = f"""
WITH keys(i, key) AS MATERIALIZED (SELECT value, substr(?1, 1 + {KEY} * value, {KEY}) FROM json_each(?2))
SELECT json_group_array(json_array(i, length, hex(hash), kind, record)) FROM (
    SELECT i, length, hash, kind, record FROM keys CROSS JOIN places p ON p.key = keys.key LIMIT ?3)"""
_LENGTHS: Final = f"""
WITH RECURSIVE keys(i, key) AS (
    SELECT value, substr(?1, 1 + {KEY} * value, {KEY}) FROM json_each(?2)
), lengths(i, key, length) AS (
    SELECT i, key, (SELECT length FROM places p WHERE p.key = keys.key ORDER BY length LIMIT 1) FROM keys
    UNION ALL
    SELECT i, key, (SELECT length FROM places p WHERE p.key = l.key AND p.length > l.length ORDER BY length LIMIT 1)
    FROM lengths l WHERE length IS NOT NULL)
SELECT json_group_array(json_array(i, length)) FROM lengths WHERE length IS NOT NULL"""
_GIVEN: Final = f"""
WITH f(i, key, length, hash) AS MATERIALIZED (
    SELECT key, substr(?1, 1 + {KEY + HASH} * key, {KEY}), ifnull(value, 0),
        iif(value IS NULL, x'', substr(?1, 1 + {KEY} + {KEY + HASH} * key, {HASH})) FROM json_each(?2))"""
_ALL: Final = f"""{_GIVEN}
SELECT json_group_array(json_array(i, kind, record)) FROM (
    SELECT i, kind, record FROM f CROSS JOIN places p ON p.key = f.key AND p.length = f.length AND p.hash = f.hash LIMIT ?3)"""
_OF_KIND: Final = (
    "(SELECT json_group_array(record) FROM (SELECT record FROM places p WHERE p.key = f.key AND p.length = f.length "
    "AND p.hash = f.hash AND p.kind = {kind} ORDER BY record DESC LIMIT {most}))"
)
_NEWEST: Final = (
    f"{_GIVEN} SELECT i, {', '.join(_OF_KIND.format(kind=kind, most=most) for kind, most in _MOST.items())} FROM f"
)
_NAMED: Final = (
    f"SELECT n, body FROM places JOIN records r ON n = record AND {THERE} "
    f"WHERE key = ? AND length = 0 AND hash = x'' AND kind = {NAME} ORDER BY record DESC LIMIT {MOST_NAMED}"
)
_PASSED: Final = (
    f"SELECT 1 FROM places WHERE key = ? AND length = 0 AND hash = x'' AND kind IN ({PASS}, {WAY}) AND record <= ? "
    "LIMIT 1"
)


class Wanted(NamedTuple):
    """Records that a look-up asks for, by their numbers in the file, and how often a bound left some out."""

    numbers: list[int]
    cut_off: int


class SqliteSearch:
    """Which records one look-up wants."""

    def __init__(self, connection: apsw.Connection, query: Query) -> None:
        self._connection = connection
        self._query = query
        self._path: TextPath = query.path
        self._size = len(query.path.text)

    def wanted(self) -> Wanted:
        first = max(self._path.first, last_step(self._query.known_from))
        choice = Choice[int](self._query.known_from, self._size, self._one_each)
        choice.take(self._hits(range(first, self._path.last + 1)), self._named())
        return Wanted(list(choice.taken), choice.cut_off)

    def alone(self, horizon: int) -> bytes | None:
        """Return the digest at the last `STEP`-th block end of the text, if no record up to this number continues it."""
        block = last_step(self._size)
        if not block or self._connection.execute(_PASSED, (self._path.key(block), horizon)).get:
            return None
        return self._path.digest(block)

    def _hits(self, blocks: range) -> list[Hit[int]]:
        """Return all places of our text, from its beginning to its end."""
        path = self._path
        given = b"".join(path.keys(blocks)), _encode(list(range(len(blocks))))
        most = _FEW_ALL + 3 * len(blocks)
        answer = self._connection.execute(_BLOCKS, (*given, most)).get
        rows = _places.decode(answer)
        if len(rows) < most:  # else a crowd
            return self._ours(blocks, rows)
        answer = self._connection.execute(_LENGTHS, given).get
        places: list[tuple[int, int, bytes]] = []
        for i, length in sorted(_lengths.decode(answer)):
            block = blocks[i]
            if not length:
                places.append((block, 0, b""))
            if BLOCK * block <= length <= self._size:
                places.append((block, length, path.hash(length)))
        return [Hit(*places[i][:2], *newest) for i, newest in self._newest(places)]

    def _ours(self, blocks: range, rows: Sequence[_Place]) -> list[Hit[int]]:
        """Return the places of our text among all that are entered under these blocks."""
        hashes: dict[int, str] = {}
        found: dict[tuple[int, int], list[list[int]]] = {}
        for i, length, digest, kind, record in sorted(rows, key=itemgetter(4), reverse=True):
            block = blocks[i]
            if kind not in _MOST or (digest and not self._passes(block, length, digest, hashes)):
                continue
            of_place = found.get((block, length))
            if of_place is None:
                of_place = found[block, length] = [[] for _ in _MOST]
            of_kind = of_place[_FIELD[kind]]
            if len(of_kind) < _MOST[kind]:
                of_kind.append(record)
        return [Hit(*at, *found[at]) for at in sorted(found)]

    def _passes(self, block: int, length: int, digest: str, hashes: dict[int, str]) -> bool:
        """Return whether our text has this hash after so many characters, which are in this block. `hashes` are those known."""
        if not BLOCK * block <= length <= min(self._size, BLOCK * block + BLOCK - 1):
            return False
        if length not in hashes:
            hashes[length] = self._path.hash(length).hex().upper()
        return hashes[length] == digest

    def _newest(self, places: Sequence[tuple[int, int, bytes]]) -> Iterator[tuple[int, Sequence[list[int]]]]:
        """Yield the newest records of each place (block, length, hash) that has any: those of each kind of `_MOST`.

        The hash is empty where no text ends.
        """
        path, most = self._path, _FEW + 4 * len(places)
        blob = b"".join([path.key(block) + digest.ljust(HASH) for block, _, digest in places])
        given = blob, _encode([length if digest else None for _, length, digest in places])
        answer = self._connection.execute(_ALL, (*given, most)).get
        rows = _rows.decode(answer)
        if len(rows) == most:  # a crowd
            for i, *newest in self._connection.execute(_NEWEST, given):
                if any(answer != "[]" for answer in newest):
                    yield i, [_numbers.decode(answer) for answer in newest]
            return
        wanted = sorted((row for row in rows if row[1] in _MOST), key=_newest_first)
        for i, of_place in groupby(wanted, key=itemgetter(0)):
            of_kind: dict[int, list[int]] = {kind: [] for kind in _MOST}
            for _, kind, record in of_place:
                of_kind[kind].append(record)
            yield i, [of_kind[kind][:count] for kind, count in _MOST.items()]

    def _named(self) -> Iterator[tuple[int, int]]:
        """Yield the numbers of the named parents, and the ends of their texts."""
        for parent in self._query.parents:
            for name in names_of(parent):
                place = name_place(self._path.namespace, name)
                rows = list(self._connection.execute(_NAMED, (place.key,)))
                if rows:
                    # A record that waited in a spool is entered late.
                    records = [(number, decode_all([body])[0]) for number, body in rows]
                    records.sort(key=lambda row: max((one.serial for one in row[1]), default=-1), reverse=True)
                    for number, newest in records[: self._query.each]:
                        yield number, min((record.text_end for record in newest), default=self._size)
                    break

    def _one_each(self, replies: list[int]) -> list[int]:
        if not replies:
            return []
        sql = f"SELECT max(n) FROM records WHERE n IN ({marks(len(replies))}) GROUP BY parent"
        return [n for (n,) in self._connection.execute(sql, replies)]


def _newest_first(row: _Row) -> tuple[int, int]:
    return row[0], -row[2]


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
