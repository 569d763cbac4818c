"""A store in a Redis or Valkey."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from functools import partial
from itertools import count
from time import time
from typing import Any

from msgspec.structs import replace

from middleware_hub.store.errors import LogMovedError, MissingRecordError, StoreError, StoreUnreachableError
from middleware_hub.store.media import MediaFile
from middleware_hub.store.protocol import (
    Batch,
    Durability,
    Finding,
    Forgotten,
    Found,
    LogInfo,
    LookUps,
    Loss,
    Query,
    Refill,
    StoreStats,
)
from middleware_hub.store.records import Blob, Event, Mark, SpanRecord, decode_blob
from middleware_hub.store.redis.address import PREFIX, Address, parse
from middleware_hub.store.redis.appending import Appender
from middleware_hub.store.redis.cluster import Cluster
from middleware_hub.store.redis.connection import Command
from middleware_hub.store.redis.forgetting import Forgetting
from middleware_hub.store.redis.keys import Keys, encoded
from middleware_hub.store.redis.logs import Logs
from middleware_hub.store.redis.media import RedisMedia, files_of, names_in
from middleware_hub.store.redis.opening import Ownership, check_servers, open_keys
from middleware_hub.store.redis.preparing import SortedBatch, outside, prepare
from middleware_hub.store.redis.reading import Reading
from middleware_hub.store.redis.recovery import Recovery
from middleware_hub.store.redis.scattering import Scatterer
from middleware_hub.store.redis.searching import Fetch, RedisSearch
from middleware_hub.store.redis.servers import OneServer, Servers
from middleware_hub.store.redis.verifying import RedisVerifier
from middleware_hub.store.redis.writer import RedisWriter

logger = logging.getLogger(__name__)

_MOST_WAITING = 1_000
"""Even with durability `off`, appends wait while this many batches are not written."""


class _Open:
    """The parts of an open store."""

    def __init__(
        self, servers: Servers, keys: Keys, writer: RedisWriter, ownership: Ownership | None, clock: Callable[[], float]
    ) -> None:
        """`ownership`: None for a reader without a tokenizer."""
        self.servers = servers
        self.keys = keys
        self.ownership = ownership
        self.writer = writer
        self.logs = Logs(servers, keys, clock)
        self.recovery: Recovery | None = None
        self.reading = Reading(servers, keys)
        self.media = RedisMedia(servers, keys, self.reading)
        self.forgetting = Forgetting(servers, keys, self.reading, self.logs, self.media)

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Return the answers to some commands. If the store was emptied before the last answer, `check` raises from now on."""
        if self.ownership is None or not self.servers.together:  # in a cluster it would be one more node to ask
            return await self.servers.read(commands)
        *replies, owner = await self.servers.read([*commands, self.ownership.question])
        await self.ownership.check(owner)
        return replies

    async def check(self, *, lacking: bool = False) -> None:
        """Raise StoreUnreachableError while the store may lack records that it had.

        `lacking`: something was missing. So ask whether the store was emptied, which may be unnoticed so far.
        """
        if lacking and self.ownership is not None:
            (owner,) = await self.servers.read([self.ownership.question])
            await self.ownership.check(owner)
        if self.recovery is not None:
            self.recovery.check()

    async def list_logs(self, _: Refill) -> None:
        """Enter all logs in the lists of logs once more: in a cluster these are at other nodes than the logs."""
        async for found in self.reading.own(b"l:*", await self.reading.stores_inside()):
            names = [key[len(self.keys.prefix) + 2 :] for key in found]
            lists = [self.keys.index(name.decode("utf-8", "surrogatepass")) for name in names]
            await self.servers.write([("ZADD", one, 0, name) for one, name in zip(lists, names, strict=True)])

    async def append(self, batch: Batch, durability: Durability = "process") -> list[int]:
        """Append a batch, see `Store.append`."""
        roots: Mapping[bytes, bytes] = {}
        if batch.blobs and (others := outside(batch)):
            roots = await self.reading.roots_of(others)
            missing = tuple(one for one in others if one not in roots)
            if missing:
                raise MissingRecordError(missing)
        prepared = prepare(batch, roots)
        if any(record.media for record in batch.records):
            return await self._append_named(batch, prepared)
        wait = durability != "off" or bool(batch.events) or self.writer.waiting > _MOST_WAITING
        future = self.writer.submit(prepared)
        if wait:
            return await future
        future.add_done_callback(_only_logged)
        return []

    async def _append_named(self, batch: Batch, prepared: SortedBatch) -> list[int]:
        """Append a batch whose records name files of media, and those of these files that it has."""
        names = names_in(batch.records)
        files = files_of(batch, names)
        await self.media.put(names, files)
        try:
            numbers = await self.writer.submit(prepared)
        except StoreUnreachableError:
            raise  # perhaps all is appended
        except StoreError:
            await self.media.release(names)
            raise
        await self.media.confirm(names, files)
        return numbers


class RedisStore:
    """A `Store`, see `protocol`. Processes on several machines may share one."""

    def __init__(
        self,
        address: str,
        durability: Durability = "process",
        prefix: str = PREFIX,
        clock: Callable[[], float] = time,
    ) -> None:
        """`clock` is that of this machine."""
        self._clock = clock
        self._address: Address = parse(address, prefix)
        self._durability = durability
        self._opened: _Open | None = None
        self._refills: list[Loss] = []
        self._others = count(1)
        self._look_ups = LookUps()

    def __repr__(self) -> str:
        return f"<RedisStore {self._address.shown}, {'open' if self._opened else 'closed'}>"

    async def open(self, fingerprint: str | None) -> None:
        servers: Servers = (Cluster if self._address.kind == "redis+cluster" else OneServer)(self._address)
        try:
            keys, synced, life = await open_keys(servers, self._address, fingerprint, self._durability)
        except BaseException:
            await servers.close()
            raise
        appender = (
            Appender(servers, keys, synced=synced, replicas=self._address.replicas)
            if servers.together
            else Scatterer(servers, keys)
        )
        ownership = None if fingerprint is None else Ownership(servers, keys, fingerprint, self._address.shown, life)
        self._opened = opened = _Open(servers, keys, RedisWriter(appender.commit), ownership, self._clock)
        if ownership is not None:
            if not servers.together:
                self._refills.insert(0, opened.list_logs)
            trusted = partial(check_servers, servers, self._address, self._durability)
            opened.recovery = Recovery(servers, keys, ownership, opened.logs, opened.append, trusted, self._refills)
            ownership.emptied = servers.replaced = opened.recovery.begin

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            if opened.recovery is not None:
                await opened.recovery.close()
            await opened.writer.flush()
            await opened.servers.close()
            opened.logs.close()

    def _open(self) -> _Open:
        if self._opened is None:
            raise StoreUnreachableError(f"the store {self._address.shown} is not open")
        return self._opened

    async def _owned(self) -> _Open:
        """Return the open store, if it is whole and not another tokenizer's."""
        opened = self._open()
        if opened.recovery is not None:
            await opened.recovery.over()
        await opened.servers.attend()
        if opened.ownership is not None and opened.ownership.lost:
            await opened.ownership.hold()
        return opened

    async def append(self, batch: Batch) -> list[int]:
        opened = await self._owned()
        try:
            return await opened.append(batch, self._durability)
        except (MissingRecordError, LogMovedError):
            await opened.check(lacking=True)  # what is missing may be written again in a moment
            raise

    def on_loss(self, refill: Loss) -> None:
        self._refills.append(refill)

    def note(self, marks: Sequence[Mark]) -> None:
        self._open().writer.note(marks)

    def others(self) -> int:
        """Return a number that grows each time: others write at any moment, without a notification."""
        return next(self._others)

    def spared(self, query: Query) -> Found | None:
        """Spare nothing, see `others`."""
        return None

    async def find(self, query: Query) -> Found:
        opened = await self._owned()
        search = RedisSearch(opened.keys, query)
        commands = search.commands()
        replies = await opened.ask([*commands, *map(opened.logs.end_of, query.logs)])
        ends = {log: reply[0] for log, reply in zip(query.logs, replies[len(commands) :], strict=True)}
        more = search.read(replies[: len(commands)])
        if more:
            search.read_more(await opened.ask(more))
        wanted = search.wanted()
        fetch = Fetch(opened.servers.read, opened.keys, query.known)
        found = await fetch.run(wanted, search.cut_off)
        await opened.check(lacking=fetch.lacking)
        return replace(self._look_ups.counted(found), ends=ends)

    async def get(
        self, ids: Sequence[bytes], *, known: Container[bytes] = (), roots: Mapping[bytes, bytes] | None = None
    ) -> Found:
        opened = await self._owned()
        found = dict(roots or {})
        unknown = [one for one in ids if one not in found]
        if unknown:
            found.update(await opened.reading.roots_of(unknown))
        fetch = Fetch(opened.servers.read, opened.keys, known)
        brought = await fetch.run([(found[one], one) for one in ids if one in found])
        await opened.check(lacking=fetch.lacking or len(found) < len(ids))
        return self._look_ups.counted(brought)

    async def blobs(
        self, record: bytes, names: Sequence[str] | None = None, *, root: bytes | None = None
    ) -> list[Blob]:
        opened = await self._owned()
        if root is None:
            root = (await opened.reading.roots_of([record])).get(record)
        if root is None:
            return []
        key = opened.keys.blobs(root)
        if names is None:
            (listed,) = await opened.servers.read([("HGET", key, record)])
            fields = sorted(listed.split(b"\0")) if listed is not None else []
        else:
            fields = [encoded(name) for name in names]
        if not fields:
            await opened.check(lacking=True)
            return []
        (bodies,) = await opened.servers.read([("HMGET", key, *(record + name for name in fields))])
        await opened.check(lacking=None in bodies)
        return [decode_blob(body) for body in bodies if body is not None]

    async def media(self, tenant: str, digests: Sequence[str], *, data: bool = True) -> Mapping[str, MediaFile]:
        return await (await self._owned()).media.read(tenant, digests, data=data)

    async def media_unnamed(self) -> int:
        return await self._open().media.unnamed()

    async def sweep_media(self) -> int:
        return await self._open().media.sweep()

    async def read(self, log: str, *, after: int = 0, limit: int = 1_000) -> list[Event]:
        opened = await self._owned()
        events = await opened.logs.read(log, after, limit)
        await opened.check(lacking=not events)
        return events

    async def logs(self, prefix: str = "", *, after: str = "", limit: int = 1_000) -> list[LogInfo]:
        return await (await self._owned()).logs.list(prefix, after, limit)

    async def wait(self, log: str, after: int, seconds: float) -> int:
        return await (await self._owned()).logs.wait(log, after, seconds)

    async def trim(self, log: str, before: int) -> None:
        await (await self._owned()).logs.trim(log, before)

    async def forget_logs(self, logs: Sequence[str]) -> int:
        return await (await self._owned()).logs.forget(logs)

    async def announce(self, name: str, data: bytes, seconds: float) -> None:
        opened = self._open()
        if opened.ownership is not None and opened.recovery is not None:
            await opened.recovery.over()
            await opened.ownership.hold()
            await opened.servers.attend()
            await opened.recovery.over()
            opened.recovery.announced(name, seconds)
        await opened.logs.announce(name, data, seconds)

    async def announced(self, prefix: str = "") -> Mapping[str, bytes]:
        opened = await self._owned()
        found = await opened.logs.announced(prefix)
        await opened.check()
        if opened.recovery is not None:
            opened.recovery.saw(found)
        return found

    def now(self) -> float:
        return self._clock() if self._opened is None else self._opened.logs.now()

    async def scan(self) -> AsyncIterator[SpanRecord]:
        async for records in self._open().reading.conversations():
            for record in records:
                yield record

    async def verify(self, checked: Callable[[int], None] | None = None) -> AsyncIterator[Finding]:
        opened = self._open()
        verifier = RedisVerifier(opened.servers, opened.keys, opened.reading)
        before = 0
        async for findings in verifier.run():
            if checked is not None:
                checked(verifier.records - before)
            before = verifier.records
            for finding in findings:
                yield finding
        async for findings in opened.media.verify():
            for finding in findings:
                yield finding

    async def forget(self, max_bytes: int) -> Forgotten:
        opened = self._open()
        await opened.writer.flush()  # waiting marks decide the order
        return await opened.forgetting.forget(max_bytes)

    async def forget_roots(self, roots: Sequence[bytes]) -> Forgotten:
        opened = self._open()
        await opened.writer.flush()
        return await opened.forgetting.forget_roots(roots)

    async def stats(self) -> StoreStats:
        opened = self._open()
        writer = opened.writer
        sizes, (media, media_bytes) = await opened.reading.sizes(), await opened.media.sizes()
        more = {"conflicts": writer.conflicts, "media": media, "media_bytes": media_bytes}
        return self._look_ups.added_to(StoreStats(*sizes, writer.groups, writer.appends, **more))


def _only_logged(future: asyncio.Future[list[int]]) -> None:
    if not future.cancelled() and future.exception() is not None:
        logger.error("an append failed, and nobody waited for it: %s", future.exception())
