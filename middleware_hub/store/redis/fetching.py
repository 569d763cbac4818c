"""Fetches records by their ids: those of one conversation with one command, together with what they build on."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Final

from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError
from middleware_hub.store.look_up import complete
from middleware_hub.store.protocol import Found
from middleware_hub.store.records import Mark, SpanRecord, decode
from middleware_hub.store.redis.connection import Command
from middleware_hub.store.redis.keys import Keys
from middleware_hub.store.redis.preparing import unpack_mark

logger = logging.getLogger(__name__)

_MOST: Final = 256
"""Records of one command. Redis does nothing else meanwhile."""

Ask = Callable[[Sequence[Command]], Awaitable[list[Any]]]


class Fetch:
    """Fetches records of one look-up, round by round, until nothing is missing that they build on.

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
        """Fetch some records; return what they build on."""
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
