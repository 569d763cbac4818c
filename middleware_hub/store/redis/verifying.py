"""Checks a store, some keys at a time: every record, its links, and its places."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from middleware_hub.store.protocol import Finding
from middleware_hub.store.records import ID_SIZE
from middleware_hub.store.redis.connection import Command
from middleware_hub.store.redis.keys import Keys
from middleware_hub.store.redis.preparing import MOST, TRY_SIZE, Entered, entries
from middleware_hub.store.redis.reading import Reading, StoredConversation
from middleware_hub.store.redis.scripts import READ_LOG
from middleware_hub.store.redis.servers import Servers
from middleware_hub.store.retracing import Retracer
from middleware_hub.store.verifying import check_blob, check_chain, check_event, check_links, check_record, not_entered

_AT_ONCE: Final = 16
_EVENTS: Final = 500
_PATIENCE: Final = 0.5
"""Seconds after which an apparent fault is checked again: the record may just have been written."""

_Name = TypeVar("_Name", str, bytes)


class RedisVerifier:
    """Checks everything in a store. A conversation that is forgotten meanwhile is no finding."""

    def __init__(self, servers: Servers, keys: Keys, reading: Reading) -> None:
        self._servers = servers
        self._keys = keys
        self._reading = reading
        self.records = 0
        """How many were checked."""

    async def run(self) -> AsyncIterator[list[Finding]]:
        """Yield findings, page by page."""
        others = await self._reading.stores_inside()
        seen: set[bytes] = set()
        async for found in self._reading.own(b"r:*", others):
            roots = [_root(key) for key in found]
            new = [root for root in dict.fromkeys(roots) if root is not None and root not in seen]
            seen.update(new)
            for at in range(0, len(new), _AT_ONCE):
                yield await self._guarded(new[at : at + _AT_ONCE])
        async for found in self._reading.own(b"b:*", others):
            for key in found:
                yield await self._blobs(key)
        async for found in self._reading.own(b"l:*", others):
            for key in found:
                yield await self._log(key)
        async for found in self._reading.roots():
            yield await self._missing(found, self._lost_roots)
        if self._servers.together:  # in a cluster a log is listed before it has events, which may never come
            async for found in self._reading.logs():
                yield await self._missing(found, self._lost_logs)

    async def _missing(
        self, names: list[bytes], lost: Callable[[list[bytes]], Awaitable[list[Finding]]]
    ) -> list[Finding]:
        """Return the findings about names in a list that are nowhere else, if they are the same a moment later."""
        if not await lost(names):
            return []
        await asyncio.sleep(_PATIENCE)
        return await lost(names)

    async def _lost_roots(self, roots: list[bytes]) -> list[Finding]:
        keys = self._keys
        pairs: list[Command] = [
            one for root in roots for one in (("HGET", keys.root(root), "g"), ("ZSCORE", keys.order(root), root))
        ]
        return [
            Finding("record", f"the conversation {root.hex()} has none of its records", root)
            for root in _left(roots, await self._servers.read(pairs))
        ]

    async def _lost_logs(self, names: list[bytes]) -> list[Finding]:
        logs = [name.decode("utf-8", "surrogatepass") for name in names]
        pairs: list[Command] = [
            one
            for log, name in zip(logs, names, strict=True)
            for one in (("LINDEX", self._keys.log(log), 0), ("ZSCORE", self._keys.index(log), name))
        ]
        return [
            Finding("event", f"the log {log!r} has none of its events")
            for log in _left(logs, await self._servers.read(pairs))
        ]

    async def _guarded(self, roots: Sequence[bytes]) -> list[Finding]:
        """Check some conversations; check again before anything is reported."""
        suspects = []
        for one in await self._reading.whole(roots):
            self.records += len(one.bodies)
            if [finding async for finding in self._conversation(one)]:
                suspects.append(one.root)
        if not suspects:
            return []
        await asyncio.sleep(_PATIENCE)
        return [f for one in await self._reading.whole(suspects) async for f in self._conversation(one)]

    async def _conversation(self, one: StoredConversation) -> AsyncIterator[Finding]:
        key = self._keys.order(one.root)
        (score,) = await self._servers.read([("ZSCORE", key, one.root)])
        if score is None:
            yield Finding("index", f"the conversation {one.root.hex()} is not in the order of forgetting", one.root)
        if one.size != len(one.bodies):
            yield Finding(
                "record", f"the conversation {one.root.hex()} has {len(one.bodies)} of {one.size} records", one.root
            )
        retracer = Retracer(one.records().get)
        places: list[Entered] = []
        for record, body in one.bodies.items():
            for finding in _record(one, record, body, retracer, places):
                yield finding
        for finding in await self._places(one.generation, places):
            yield finding

    async def _places(self, generation: bytes, places: Sequence[Entered]) -> list[Finding]:
        commands: list[Command] = []
        for place, _, _ in places:
            main, more, field = self._keys.places(place)
            commands += [("HGET", main, field), ("GET", more)] if field else [("GET", main), ("GET", main)]
        replies = await self._servers.read(commands)
        findings = []
        for (place, _, reference), value, more in zip(places, replies[::2], replies[1::2], strict=True):
            whole = generation + reference
            most = MOST[place.kind] * len(whole)
            if not any(held is not None and (whole in held or len(held) >= most) for held in (value, more)):
                findings.append(not_entered(reference[16:32], place))
        return findings

    async def _blobs(self, key: bytes) -> list[Finding]:
        root = _root(key)
        if root is None:
            return [Finding("blob", f"{key!r} is no key of a conversation")]
        findings, cursor = [], b"0"
        while True:
            ((cursor, flat),) = await self._servers.read([("HSCAN", key, cursor, "COUNT", 10)])
            pairs = [(flat[at], flat[at + 1]) for at in range(0, len(flat), 2) if len(flat[at]) > ID_SIZE]
            owners: list[Command] = [("HEXISTS", self._keys.root(root), field[:ID_SIZE]) for field, _ in pairs]
            for (field, body), there in zip(pairs, await self._servers.read(owners), strict=True):
                findings += check_blob(field[ID_SIZE:], body, field[:ID_SIZE])
                if not there and (await self._servers.read([("EXISTS", key)]))[0]:
                    findings.append(
                        Finding("index", f"a blob {field[ID_SIZE:]!r} belongs to a record that is not there")
                    )
            if cursor == b"0":
                return findings

    async def _log(self, key: bytes) -> list[Finding]:
        name = key[len(self._keys.prefix) + 2 :]
        log = name.decode("utf-8", "surrogatepass")
        (score,) = await self._servers.read([("ZSCORE", self._keys.index(log), name)])
        findings = [] if score is not None else [Finding("event", f"the log {log!r} is not in the list of logs")]
        after = 0
        while True:
            ((first, bodies),) = await self._servers.read([READ_LOG.of([key], [after, _EVENTS])])
            if not bodies:
                return findings
            for number, body in enumerate(bodies, first):
                findings += check_event(log, number, body[TRY_SIZE:])
            after = first + len(bodies) - 1


def _record(
    one: StoredConversation, key: bytes, body: bytes, retracer: Retracer, places: list[Entered]
) -> Iterator[Finding]:
    """Yield the faults of a record and of its links; add the places where it has to be entered."""
    record, wrong = check_record(key, body)
    yield from wrong
    if record is None:
        return
    if record.id != key or record.root != one.root:
        yield Finding(
            "record",
            f"record {record.id.hex()} is stored as {key.hex()} of the conversation {one.root.hex()}",
            key,
        )
    if missing := check_links(record, key, one.bodies):
        yield from missing
        return
    where, wrong = check_chain(record, key, retracer)
    yield from wrong
    if record.findable:
        places += entries(record, where)


def _left(names: Sequence[_Name], replies: Sequence[Any]) -> list[_Name]:
    """Return the names that are in their list and nowhere else.

    Args:
        replies: two for each name: what is there, and its place in the list, which is `FORGETTING` while it is removed.
    """
    there = zip(names, replies[::2], replies[1::2], strict=True)
    return [name for name, held, place in there if held is None and place is not None and float(place) > -math.inf]


def _root(key: bytes) -> bytes | None:
    """Return the root that a key belongs to."""
    try:
        found = bytes.fromhex(key.rpartition(b"{")[2].rstrip(b"}").decode())
    except ValueError:
        return None
    return found if len(found) == ID_SIZE else None
