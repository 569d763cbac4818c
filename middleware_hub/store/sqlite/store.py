"""A store in a SQLite file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import monotonic, time
from typing import Any, Final, TypeVar

import apsw
from msgspec.structs import replace

from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError, StoreUnreachableError
from middleware_hub.store.media import MediaFile
from middleware_hub.store.paths import BLOCK
from middleware_hub.store.protocol import (
    Batch,
    Durability,
    Finding,
    Forgotten,
    Found,
    LogInfo,
    LookUps,
    Query,
    StoreStats,
)
from middleware_hub.store.records import Blob, Event, Mark, SpanRecord, decode
from middleware_hub.store.sqlite.appending import prepare
from middleware_hub.store.sqlite.file import place_of
from middleware_hub.store.sqlite.file import prepare as prepare_file
from middleware_hub.store.sqlite.forgetting import (
    MOST_ROOTS,
    Plan,
    forget_events,
    forget_logs,
    forget_rest,
    forget_some,
    hidden,
    plan,
    plan_roots,
    sizes,
    trim,
    used_bytes,
)
from middleware_hub.store.sqlite.media import media_sizes, remove_unnamed, unnamed
from middleware_hub.store.sqlite.others import AbsentPaths, trim_news
from middleware_hub.store.sqlite.reader import Reader
from middleware_hub.store.sqlite.verifying import SqliteVerifier
from middleware_hub.store.sqlite.writer import SqliteWriter

T = TypeVar("T")

_INLINE_BLOCKS: Final = 64
_INLINE_RECORDS: Final = 16
"""A look-up of at most so many blocks and records is done on the event loop: a thread costs more than that."""
_MOST_WAITING: Final = 1_000
"""Even with durability `off`, appends wait while this many batches are not written."""
_PAGE: Final = 500
_LOOK_EVERY: Final = 0.02
"""Seconds between two looks for news in a log: about 10 us each."""
_NOTHING: Final = Found()


class SqliteStore:
    """A `Store`, see `protocol`. Several processes on one machine may share a file."""

    def __init__(self, path: str, durability: Durability = "process") -> None:
        """`path` is a file, or a folder for one."""
        self._file = place_of(path)
        self._durability = durability
        self._threads: ThreadPoolExecutor | None = None
        self._writer: SqliteWriter | None = None
        self._inline: Reader | None = None
        self._threaded: Reader | None = None
        self._absent = AbsentPaths()
        self._look_ups = LookUps()
        self._torn = 0

    def __repr__(self) -> str:
        return f"<SqliteStore {self._file}, {'open' if self._writer else 'closed'}>"

    async def open(self, fingerprint: str | None) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        try:
            self._torn = await self._in_thread(lambda: prepare_file(self._file, fingerprint))
            self._writer = SqliteWriter(self._file, self._durability)
            same = self._writer.same
            self._inline, self._threaded = Reader(self._file, same, patient=False), Reader(self._file, same)
            if await self._in_thread(partial(self._threaded.within, hidden)):
                self._writer.submit(forget_rest, wait=False)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.close()
        if self._threads is not None:
            await asyncio.to_thread(self._threads.shutdown)
        for reader in (self._inline, self._threaded):
            if reader is not None:
                reader.close()
        self._inline = self._threaded = self._threads = None

    async def append(self, batch: Batch) -> list[int]:
        writer = self._open_writer()
        wait = self._durability != "off" or bool(batch.events) or writer.waiting > _MOST_WAITING
        self._absent.check(writer.others.epoch)
        for path in batch.paths.values():
            self._absent.carry_on(path)
        for record in batch.records:
            for name in record.request_ids:
                self._absent.add_name(record.namespace, name)
        numbers: list[int] = await writer.submit(prepare(batch), wait=wait, now=batch.gathered)
        return numbers

    def on_loss(self, refill: object) -> None:
        """Do nothing: this store loses nothing by itself."""

    def note(self, marks: Sequence[Mark]) -> None:
        self._open_writer().note(marks)

    def others(self) -> int:
        others = self._open_writer().others
        return others.count if self._open_writer().hear() or self._listen() else others.missed()

    def _listen(self) -> bool:
        """Read the writes of others while the writer works; return whether that was possible at once."""
        inline, _ = self._open_readers()
        try:
            inline.within(self._open_writer().others.listen)
            return True
        except StoreUnreachableError:  # locked for a moment: what is written meanwhile is unknown
            return False

    def spared(self, query: Query) -> Found | None:
        writer = self._open_writer()
        heard = query.complete and writer.hear()
        if not query.complete or not (heard or self._listen()):
            return None
        others, absent, path = writer.others, self._absent, query.path
        if others.count:  # else this process wrote everything that is there
            absent.check(others.epoch)
            before = others.horizon > 0
            if others.wrote_on(path, query.known_from) or (before and not absent.holds(path)):
                return None
            for name in query.parents:
                if others.named(path.namespace, name) or (before and not absent.holds_name(path.namespace, name)):
                    return None
        self._look_ups.spared += 1
        return Found(ends=self._ends(query.logs, heard=heard)) if query.logs else _NOTHING

    def _ends(self, logs: Sequence[str], *, heard: bool) -> dict[str, int]:
        """Return the ends of logs. `heard`: what the writer knows of others is not older than this turn of the event loop."""
        inline, _ = self._open_readers()
        end_of = partial(self._open_writer().end_of, read=inline.last) if heard else inline.last
        return {log: end_of(log) for log in logs}

    async def find(self, query: Query) -> Found:
        found = await self._find(query)
        return replace(found, ends=self._ends(query.logs, heard=False)) if query.logs else found

    async def _find(self, query: Query) -> Found:
        inline, threaded = self._open_readers()
        others, horizon, epoch = self._open_writer().others, None, -1
        if query.complete:
            if not query.parents and self.spared(replace(query, logs=())) is not None:
                return _NOTHING
            horizon, epoch = others.horizon, others.epoch
            self._absent.check(epoch)
        found = alone = None
        if query.path.last - max(query.path.first, query.known_from // BLOCK) <= _INLINE_BLOCKS:
            with suppress(StoreUnreachableError):  # locked for a moment: only a thread may wait for it
                found, alone = inline.find(query, _INLINE_RECORDS, horizon)
        if found is None:
            found, alone = await self._in_thread(lambda: threaded.find(query, horizon=horizon))
            assert found is not None
        if epoch == others.epoch and not found.damaged:
            if alone is not None:
                self._absent.add(alone)
            for name in query.parents:
                self._absent.add_name(query.path.namespace, name)
        return self._look_ups.counted(found)

    async def get(
        self, ids: Sequence[bytes], *, known: Container[bytes] = (), roots: Mapping[bytes, bytes] | None = None
    ) -> Found:
        _, threaded = self._open_readers()
        return self._look_ups.counted(await self._in_thread(lambda: threaded.get(ids, known)))

    async def blobs(
        self, record: bytes, names: Sequence[str] | None = None, *, root: bytes | None = None
    ) -> list[Blob]:
        _, threaded = self._open_readers()
        return await self._in_thread(lambda: threaded.blobs(record, names))

    async def media(self, tenant: str, digests: Sequence[str], *, data: bool = True) -> Mapping[str, MediaFile]:
        _, threaded = self._open_readers()
        return await self._in_thread(lambda: threaded.media(tenant, digests, data=data))

    async def media_unnamed(self) -> int:
        _, threaded = self._open_readers()
        return await self._in_thread(partial(threaded.within, unnamed))

    async def sweep_media(self) -> int:
        gone: int = await self._open_writer().submit(remove_unnamed)
        return gone

    async def read(self, log: str, *, after: int = 0, limit: int = 1_000) -> list[Event]:
        inline, threaded = self._open_readers()
        writer = self._open_writer()
        with suppress(StoreUnreachableError):  # as in `find`
            end = writer.end_of(log, inline.last) if writer.hear() else None
            if end == after:
                return []
            found = inline.events(log, after, limit)
            if end is not None and found and found[-1].number > end:
                writer.look_again()  # else the next read of the last of these events would miss it
            return found
        return await self._in_thread(partial(threaded.events, log, after, limit))

    async def wait(self, log: str, after: int, seconds: float) -> int:
        deadline = monotonic() + seconds
        while True:
            inline, _ = self._open_readers()
            writer = self._open_writer()
            left = deadline - monotonic()
            try:
                last = writer.end_of(log, inline.last) if writer.hear() else inline.last(log)
                if last > after or left <= 0:
                    return last
            except StoreUnreachableError:  # as in `find`: the next look may do better
                if left <= 0:
                    raise
            await asyncio.sleep(min(left, _LOOK_EVERY))

    async def trim(self, log: str, before: int) -> None:
        await self._open_writer().submit(partial(trim, log=log, before=before))

    async def forget_logs(self, logs: Sequence[str]) -> int:
        gone: int = await self._open_writer().submit(partial(forget_logs, names=logs))
        return gone

    async def announce(self, name: str, data: bytes, seconds: float) -> None:
        await self._open_writer().submit(partial(_announce, name=name, data=data, seconds=seconds))

    async def announced(self, prefix: str = "") -> Mapping[str, bytes]:
        inline, threaded = self._open_readers()
        with suppress(StoreUnreachableError):  # as in `find`
            return inline.announced(prefix)
        return await self._in_thread(lambda: threaded.announced(prefix))

    async def logs(self, prefix: str = "", *, after: str = "", limit: int = 1_000) -> list[LogInfo]:
        _, threaded = self._open_readers()
        return await self._in_thread(lambda: threaded.logs(prefix, after, limit))

    def now(self) -> float:
        return time()

    async def scan(self) -> AsyncIterator[SpanRecord]:
        _, threaded = self._open_readers()
        after = 0
        while rows := await self._in_thread(partial(threaded.page, after, _PAGE)):
            after = rows[-1][0]
            for record in await self._in_thread(partial(_readable, rows)):
                yield record

    async def verify(self, checked: Callable[[int], None] | None = None) -> AsyncIterator[Finding]:
        _, threaded = self._open_readers()
        if self._torn:
            yield Finding("file", f"{self._torn} bytes at the end of the log were torn, and were cut off on opening")
        async for finding in SqliteVerifier(threaded).run(self._in_thread, checked):
            yield finding

    async def forget(self, max_bytes: int) -> Forgotten:
        _, threaded = self._open_readers()
        done, events = Forgotten(), 0
        if await self._excess(threaded, max_bytes) > 0:
            await self._open_writer().submit(trim_news)
        while (excess := await self._excess(threaded, max_bytes)) > 0:
            forgotten = await self._open_writer().submit(forget_events)
            events += forgotten
            if forgotten:
                continue
            plans = await self._in_thread(partial(threaded.within, plan, excess))
            if not plans:
                break
            done = done.plus(await self._forget_planned(plans))
        return done.plus(Forgotten(events=events))

    async def forget_roots(self, roots: Sequence[bytes]) -> Forgotten:
        _, threaded = self._open_readers()
        done = Forgotten()
        await self._open_writer().submit(lambda _: None)  # a step writes the marks that wait
        for at in range(0, len(roots), MOST_ROOTS):
            some = roots[at : at + MOST_ROOTS]
            plans = await self._in_thread(partial(threaded.within, plan_roots, some))
            done = done.plus(await self._forget_planned(plans))
        return done

    async def _forget_planned(self, plans: list[Plan]) -> Forgotten:
        gone: list[Plan] = []
        records = 0
        while plans:
            some, count = await self._open_writer().submit(partial(forget_some, plans=plans))
            gone += some
            records += count
        kept = sum(one.retrieved for one in gone)
        return Forgotten(kept, len(gone) - kept, records, 0, tuple(one.stamp for one in gone))

    async def stats(self) -> StoreStats:
        _, threaded = self._open_readers()
        writer = self._open_writer()
        records, roots, logs, size = await self._in_thread(partial(threaded.within, sizes))
        media, media_bytes = await self._in_thread(partial(threaded.within, media_sizes))
        found = StoreStats(
            records,
            roots,
            logs,
            size,
            writer.groups,
            writer.appends,
            conflicts=writer.conflicts,
            torn_bytes=self._torn,
            media=media,
            media_bytes=media_bytes,
        )
        return self._look_ups.added_to(found)

    def _open_writer(self) -> SqliteWriter:
        if self._writer is None:
            raise StoreUnreachableError(f"the store {self._file} is not open")
        return self._writer

    def _open_readers(self) -> tuple[Reader, Reader]:
        if self._inline is None or self._threaded is None:
            raise StoreUnreachableError(f"the store {self._file} is not open")
        return self._inline, self._threaded

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Do something in the one thread to which the second reader belongs."""
        assert self._threads is not None
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _excess(self, reader: Reader, max_bytes: int) -> int:
        return await self._in_thread(lambda: used_bytes(reader.connection)) - max_bytes


def _announce(connection: apsw.Connection, name: str, data: bytes, seconds: float) -> None:
    now = monotonic()
    connection.execute("DELETE FROM announced WHERE until <= ? OR said > ?", (now, now))
    row = (name, data, now, now + seconds)
    connection.execute("INSERT OR REPLACE INTO announced(name, data, said, until) VALUES (?, ?, ?, ?)", row)


def _readable(rows: Sequence[tuple[Any, ...]]) -> list[SpanRecord]:
    found = []
    for row in rows:
        with suppress(DamagedRecordError, StoreMismatchError):
            found.append(decode(row[-1]))
    return found
