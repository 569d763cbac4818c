"""Reads whole conversations, and finds records without knowing their root."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError
from middleware_hub.store.look_up import complete
from middleware_hub.store.records import ID_SIZE, Mark, SpanRecord, decode
from middleware_hub.store.redis.connection import Command
from middleware_hub.store.redis.keys import Keys
from middleware_hub.store.redis.preparing import unpack_mark
from middleware_hub.store.redis.servers import Servers

logger = logging.getLogger(__name__)

_PAGE: Final = 128
"""Records that one command reads."""
_AT_ONCE: Final = 64
"""Conversations, or names of logs, that are read at once."""
_ASKED: Final = 16_384
"""Records that are looked for at once, counted once for each conversation in which they may be."""


class StoredConversation(NamedTuple):
    """Everything that is stored of one root.

    Attributes:
        generation: the present life of the root.
        size: the number of the records, as the server counts them.
        bodies: by id.
    """

    root: bytes
    generation: bytes
    mark: Mark
    size: int
    bodies: dict[bytes, bytes]

    def records(self) -> dict[bytes, SpanRecord]:
        """Return the records that can be read."""
        found = {}
        for record, body in self.bodies.items():
            with suppress(DamagedRecordError, StoreMismatchError):
                found[record] = decode(body)
        return found


class Reading:
    """Reads conversations, some at a time."""

    def __init__(self, servers: Servers, keys: Keys) -> None:
        self._servers = servers
        self._keys = keys

    async def whole(self, roots: Sequence[bytes]) -> list[StoredConversation]:
        """Return conversations with all their records; missing ones are left out."""
        key = self._keys.root
        found: dict[bytes, StoredConversation] = {}
        commands: list[Command] = [("HMGET", key(root), "g", "m", "n") for root in roots]
        for root, (generation, mark, number) in zip(roots, await self._servers.read(commands), strict=True):
            if generation is not None:
                found[root] = StoredConversation(
                    root, generation, unpack_mark(root, mark or bytes(9)), int(number or 0), {}
                )
        cursors = dict.fromkeys(found, b"0")
        while cursors:
            scans: list[Command] = [("HSCAN", key(root), cursor, "COUNT", _PAGE) for root, cursor in cursors.items()]
            replies = await self._servers.read(scans)
            for root, (cursor, fields) in zip(list(cursors), replies, strict=True):
                pairs = iter(fields)
                found[root].bodies.update(
                    (name, body) for name, body in zip(pairs, pairs, strict=True) if len(name) == ID_SIZE
                )
                cursors[root] = cursor
            cursors = {root: cursor for root, cursor in cursors.items() if cursor != b"0"}
        return list(found.values())

    async def marks(self, roots: Sequence[bytes]) -> dict[bytes, Mark]:
        """Return the marks of conversations; missing ones have none."""
        commands: list[Command] = [("HGET", self._keys.root(root), "m") for root in roots]
        marks = await self._servers.read(commands)
        return {root: unpack_mark(root, mark) for root, mark in zip(roots, marks, strict=True) if mark is not None}

    def roots(self) -> AsyncIterator[list[bytes]]:
        """Yield the roots of all conversations, some at a time."""
        return self._members(self._keys.orders)

    def logs(self) -> AsyncIterator[list[bytes]]:
        """Yield the names of all logs, some at a time."""
        return self._members(self._keys.indexes)

    async def _members(self, sets: Sequence[bytes]) -> AsyncIterator[list[bytes]]:
        for name in sets:
            cursor = b"0"
            while True:
                ((cursor, flat),) = await self._servers.read([("ZSCAN", name, cursor, "COUNT", _AT_ONCE)])
                for at in range(0, len(flat), 2 * _AT_ONCE):
                    yield flat[at : at + 2 * _AT_ONCE : 2]
                if cursor == b"0":
                    break

    async def conversations(self) -> AsyncIterator[list[SpanRecord]]:
        """Yield the records of each conversation, those that others build on first; damaged ones are left out."""
        seen: set[bytes] = set()
        async for roots in self.roots():
            new = [root for root in dict.fromkeys(roots) if root not in seen]
            seen.update(new)
            for one in await self.whole(new):
                yield complete(one.records().values(), ())[0]

    async def roots_of(self, ids: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return the roots of records, by searching one conversation after the other, a last resort."""
        wanted, key = list(dict.fromkeys(ids)), self._keys.root
        found: dict[bytes, bytes] = {}
        async for roots in self.roots():
            wanted = [one for one in wanted if one not in found]
            if not wanted:
                break
            some = max(1, _ASKED // len(wanted))
            for at in range(0, len(roots), some):
                names = roots[at : at + some]
                replies = await self._servers.read([("HMGET", key(root), *wanted) for root in names])
                for root, bodies in zip(names, replies, strict=True):
                    found.update({one: root for one, body in zip(wanted, bodies, strict=True) if body is not None})
        return found

    async def own(self, pattern: bytes, others: tuple[bytes, ...]) -> AsyncIterator[list[bytes]]:
        """Yield the keys of this store that match a pattern after its prefix."""
        async for found in self._servers.scan(self._keys.prefix + pattern):
            yield [key for key in found if not key.startswith(others)]

    async def stores_inside(self) -> tuple[bytes, ...]:
        """Return the prefixes of other stores that begin with this one's: `tito:l:`, where this store's is `tito:`."""
        prefixes: set[bytes] = set()
        async for found in self._servers.scan(self._keys.prefix + b"?*meta"):
            kinds = await self._servers.read([("TYPE", key) for key in found])
            hashes = [key for key, kind in zip(found, kinds, strict=True) if kind == b"hash"]
            formats = await self._servers.read([("HGET", key, "format") for key in hashes])
            prefixes.update(
                key.removesuffix(b"meta") for key, form in zip(hashes, formats, strict=True) if form is not None
            )
        return tuple(prefixes)

    async def sizes(self) -> tuple[int, int, int, int]:
        """Return how many records, conversations and logs there are, and their bytes."""
        keys = self._keys
        sets = [*keys.orders, *keys.indexes]
        counted: Command = ("HMGET", keys.counters, "records", "bytes", "media_bytes")
        (records, size, media), *counts = await self._servers.read([counted, *(("ZCARD", one) for one in sets)])
        roots, logs = sum(counts[: keys.shards]), sum(counts[keys.shards :])
        return int(records or 0), roots, logs, int(size or 0) + max(0, int(media or 0))
