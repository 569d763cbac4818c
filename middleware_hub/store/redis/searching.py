"""A look-up: it reads the block ends of its text to choose records, and fetches these records with their links."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from middleware_hub.spans.chain import names_of
from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError
from middleware_hub.store.look_up import Choice, Hit, complete, last_step
from middleware_hub.store.paths import BLOCK, TextPath
from middleware_hub.store.protocol import Found, Query
from middleware_hub.store.records import Mark, SpanRecord, decode
from middleware_hub.store.redis.connection import Command
from middleware_hub.store.redis.keys import Keys
from middleware_hub.store.redis.preparing import GENERATION_SIZE, unpack_mark

logger = logging.getLogger(__name__)

_SIZE: Final = GENERATION_SIZE + 48
_MOST: Final = 256
"""Records of one command. Redis does nothing else meanwhile."""

Ask = Callable[[Sequence[Command]], Awaitable[list[Any]]]


class Reference(NamedTuple):
    """The entry of a record at a place."""

    root: bytes
    id: bytes
    parent: bytes


class RedisSearch:
    """Makes the commands of a look-up, and evaluates the answers.

    Send `commands` first; if `read` returns more, send those too. Then `wanted` has the result.
    """

    def __init__(self, keys: Keys, query: Query) -> None:
        self._keys = keys
        self._query = query
        self._path: TextPath = query.path
        self._size = len(query.path.text)
        self._first = max(self._path.first, last_step(query.known_from))
        self._hits: dict[tuple[int, int], Hit[Reference]] = {}
        self._hashes: dict[int, bytes] = {}
        self._more: list[tuple[int, bytes]] = []
        self._names = [name for parent in query.parents for name in names_of(parent)]
        self._named: dict[str, list[tuple[Reference, int]]] = {}
        self._choice = Choice[Reference](query.known_from, self._size, _one_each)

    def commands(self) -> list[Command]:
        """Return the first commands: they ask for the entries of the block ends, and of the names."""
        keys = self._path.keys(range(self._first, self._path.last + 1))
        found: list[Command] = [("HGETALL", self._keys.block(key)) for key in keys]
        found += [("GET", self._keys.name(self._path.namespace, name)) for name in self._names]
        return found

    def read(self, replies: Sequence[Any]) -> list[Command]:
        """Take the answers to `commands`; return further commands, about crowded blocks."""
        blocks = self._path.last + 1 - self._first
        for at, reply in enumerate(replies[:blocks], self._first):
            if reply:
                self._read_block(at, reply)
        for name, reply in zip(self._names, replies[blocks:], strict=True):
            if reply:
                ends = range(GENERATION_SIZE + 48, len(reply), _SIZE + 4)
                named = [
                    (one, int.from_bytes(reply[at : at + 4], "big"))
                    for one, at in zip(_references(reply, 4), ends, strict=False)  # a damaged value may be cut
                ]
                # A record that waited in a spool is entered late; an id begins with the time of recording.
                self._named[name] = sorted(named, key=lambda one: one[0].id[:8], reverse=True)[: self._query.each]
        block, key = self._keys.block, self._path.key
        return [("GET", block(key(at)) + place) for at, place in self._more]

    def read_more(self, replies: Sequence[Any]) -> None:
        """Take the answers about crowded blocks."""
        for (at, place), reply in zip(self._more, replies, strict=True):
            if reply is not None:
                self._enter(at, place, reply)

    def _read_block(self, block: int, fields: Sequence[bytes]) -> None:
        of_fields = iter(fields)
        for place, value in zip(of_fields, of_fields, strict=True):
            if place[:1] == b"b":
                self._crowded(block, place[1:], value)
            elif len(place) == 1 or self._hash(block, place[1]) == place[2:]:
                self._enter(block, place, value)

    def _crowded(self, block: int, kind: bytes, lengths: bytes) -> None:
        """Note which keys may hold our text, for a block whose entries have separate keys."""
        first = 0 if kind == b"S" else max(0, self._query.known_from - BLOCK * block)
        for offset in range(first, min(BLOCK, self._size - BLOCK * block + 1)):
            if lengths[offset // 8] >> offset % 8 & 1:
                self._more.append((block, kind + bytes((offset,)) + self._hash(block, offset)))

    def _hash(self, block: int, offset: int) -> bytes:
        """Return the hash of our text up to this place; nothing if it ends before."""
        length = BLOCK * block + offset
        if length > self._size:
            return b""
        found = self._hashes.get(length)
        if found is None:
            found = self._hashes[length] = self._path.hash(length)
        return found

    def _enter(self, block: int, place: bytes, value: bytes) -> None:
        length = BLOCK * block + place[1] if len(place) > 1 else 0
        hit = self._hits.setdefault((block, length), Hit(block, length, [], [], [], []))
        of_kind = {b"S": hit.starts, b"E": hit.ends, b"A": hit.alone, b"P": hit.passes}[place[:1]]
        of_kind += _references(value)

    def wanted(self) -> list[tuple[bytes, bytes]]:
        """Return the roots and ids of the records to fetch: what was found, and the contexts before it."""
        self._choice.take([self._hits[at] for at in sorted(self._hits)], self._parents())
        found: dict[tuple[bytes, bytes], None] = {}
        for one in self._choice.taken:
            if one.id not in self._query.known:
                found[one.root, one.id] = None
                if any(one.parent):
                    found[one.root, one.parent] = None
        return list(found)

    @property
    def cut_off(self) -> int:
        """How often a bound kept something out."""
        return self._choice.cut_off

    def _parents(self) -> Iterator[tuple[Reference, int]]:
        """Yield the named parents, and the ends of their texts."""
        for parent in self._query.parents:
            yield from next((self._named[name] for name in names_of(parent) if name in self._named), ())


def _one_each(replies: list[Reference]) -> Iterable[Reference]:
    return {one.parent: one for one in reversed(replies)}.values()


def _references(value: bytes, more: int = 0) -> list[Reference]:
    """Return the entries of a value, newest first; each is followed by `more` bytes."""
    return [
        Reference(value[at : at + 16], value[at + 16 : at + 32], value[at + 32 : at + 48])
        for at in range(GENERATION_SIZE, len(value), _SIZE + more)
    ]


class Fetch:
    """Fetches records by their ids, round by round, until nothing is missing that they build on.

    One command brings those of one conversation.

    Attributes:
        lacking: whether something wanted was missing.
    """

    def __init__(self, ask: Ask, keys: Keys, known: Container[bytes]) -> None:
        self._ask = ask
        self._keys = keys
        self._known = known
        self._records: dict[bytes, SpanRecord] = {}
        self._marks: dict[bytes, Mark] = {}
        self._asked: set[bytes] = set()
        self._damaged = 0
        self.lacking = False

    async def run(self, wanted: Iterable[tuple[bytes, bytes]], cut_off: int = 0) -> Found:
        """Fetch these records, each named by its root and its id. Missing records are left out."""
        while True:
            by_root: dict[bytes, list[bytes]] = {}
            for root, record in wanted:
                if record not in self._asked and record not in self._known:
                    self._asked.add(record)
                    by_root.setdefault(root, []).append(record)
            if not by_root:
                break
            wanted = await self._round(by_root)
        if not self._records and not self._damaged:
            return Found(cut_off=cut_off)
        whole, left_out = complete(self._records.values(), self._known)
        damaged = self._damaged + left_out
        if damaged:
            logger.error("%d records of the store cannot be used: run `tito-router store verify`", damaged)
        roots = {record.root for record in whole}
        marks = {root: mark for root, mark in self._marks.items() if root in roots}
        return Found(whole, marks, cut_off, damaged)

    async def _round(self, by_root: Mapping[bytes, list[bytes]]) -> list[tuple[bytes, bytes]]:
        """Fetch some records; return their links."""
        parts = [(root, ids[at : at + _MOST]) for root, ids in by_root.items() for at in range(0, len(ids), _MOST)]
        key = self._keys.root
        replies = await self._ask([("HMGET", key(root), "m", *ids) for root, ids in parts])
        links: dict[tuple[bytes, bytes], None] = {}
        gone = set()
        for (root, ids), (mark, *bodies) in zip(parts, replies, strict=True):
            if mark is None:
                gone.add(root)
                continue
            self._marks[root] = unpack_mark(root, mark)
            for record, body in zip(ids, bodies, strict=True):
                if body is None:
                    self.lacking = True
                else:
                    self._take(root, record, body, links)
        if gone:  # forgotten, perhaps between two rounds
            self.lacking = True
            self._records = {record.id: record for record in self._records.values() if record.root not in gone}
        return list(links)

    def _take(self, root: bytes, key: bytes, body: bytes, links: dict[tuple[bytes, bytes], None]) -> None:
        try:
            record = decode(body)
            if record.id != key:
                raise DamagedRecordError(f"record {record.id.hex()} is stored as {key.hex()}")
        except (DamagedRecordError, StoreMismatchError) as error:
            self._damaged += 1
            logger.error("%s", error)
            return
        self._records[record.id] = record
        links.update(dict.fromkeys((root, link) for link in record.links))
