"""A store in a SQLite file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError, StoreUnreachableError
from middleware_hub.store.paths import BLOCK
from middleware_hub.store.protocol import Batch, Durability, Finding, Forgotten, Found, LogInfo, Query, StoreStats
from middleware_hub.store.records import Blob, Event, Mark, SpanRecord, decode
from middleware_hub.store.sqlite.appending import prepare
from middleware_hub.store.sqlite.file import place_of
from middleware_hub.store.sqlite.file import prepare as prepare_file
from middleware_hub.store.sqlite.forgetting import (
    MOST_ROOTS,
    Plan,
    forget_events,
    forget_some,
    plan,
    plan_roots,
    used_bytes,
)
from middleware_hub.store.sqlite.others import Ground
from middleware_hub.store.sqlite.reader import Reader
from middleware_hub.store.sqlite.verifying import Verifier
from middleware_hub.store.sqlite.writer import Writer

T = TypeVar("T")

_INLINE_BLOCKS: Final = 64
_INLINE_RECORDS: Final = 16
"""A look-up of no more blocks, that brings no more records, is done on the event loop: a thread costs more than that."""
_MOST_WAITING: Final = 1_000
"""With durability `off`, appends wait all the same while so many batches are not written."""
_PAGE: Final = 500
_NOTHING: Final = Found()


class SqliteStore:
    """A `Store`, see `protocol`. Several processes of one machine may use one file."""

    def __init__(self, path: str, durability: Durability = "process") -> None:
        """`path` is a file, or a folder for one."""
        self._file = place_of(path)
        self._durability = durability
        self._threads: ThreadPoolExecutor | None = None
        self._writer: Writer | None = None
        self._inline: Reader | None = None
        self._threaded: Reader | None = None
        self._ground = Ground()
        self._finds = self._spared = self._cut_off = self._damaged = self._torn = 0

    def __repr__(self) -> str:
        return f"<SqliteStore {self._file}, {'open' if self._writer else 'closed'}>"

    async def open(self, fingerprint: str | None) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        try:
            self._torn = await self._in_thread(lambda: prepare_file(self._file, fingerprint))
            self._inline, self._threaded = Reader(self._file, patient=False), Reader(self._file)
            self._writer = Writer(self._file, self._durability)
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
        for path in batch.paths.values():
            self._ground.carry_on(path)
        numbers: list[int] = await writer.submit(prepare(batch), wait=wait)
        return numbers

    def note(self, marks: Sequence[Mark]) -> None:
        self._open_writer().note(marks)

    def others(self) -> int:
        inline, _ = self._open_readers()
        others = self._open_writer().others
        try:
            return others.seen(inline.newest())
        except StoreUnreachableError:  # locked for a moment: nobody knows what is written meanwhile
            return others.missed()

    async def find(self, query: Query) -> Found:
        inline, threaded = self._open_readers()
        count, horizon = 0, None
        if query.complete:
            count, horizon = self.others(), self._open_writer().others.horizon
            self._ground.check(count)
            if not query.parents and (count == 0 or self._ground.holds(query.path)):
                self._spared += 1
                return _NOTHING
        found = alone = None
        if query.path.last - max(query.path.first, query.known_from // BLOCK) <= _INLINE_BLOCKS:
            with suppress(StoreUnreachableError):  # locked for a moment: a thread may wait for it, the event loop not
                found, alone = inline.find(query, _INLINE_RECORDS, horizon)
        if found is None:
            found, alone = await self._in_thread(lambda: threaded.find(query, horizon=horizon))
            assert found is not None
        if alone is not None and not found.damaged and count == self._open_writer().others.count:
            self._ground.add(alone)
        return self._counted(found)

    async def get(self, ids: Sequence[bytes], *, known: Container[bytes] = ()) -> Found:
        _, threaded = self._open_readers()
        return self._counted(await self._in_thread(lambda: threaded.get(ids, known)))

    def _counted(self, found: Found) -> Found:
        self._finds += 1
        self._cut_off += found.cut_off
        self._damaged += found.damaged
        return found

    async def blobs(self, record: bytes, names: Sequence[str] | None = None) -> list[Blob]:
        _, threaded = self._open_readers()
        return await self._in_thread(lambda: threaded.blobs(record, names))

    async def read(self, log: str, *, after: int = 0, limit: int = 1_000) -> list[Event]:
        inline, threaded = self._open_readers()
        with suppress(StoreUnreachableError):  # as in `find`
            return inline.events(log, after, limit)
        return await self._in_thread(partial(threaded.events, log, after, limit))

    async def logs(self, prefix: str = "", *, after: str = "", limit: int = 1_000) -> list[LogInfo]:
        _, threaded = self._open_readers()
        return await self._in_thread(lambda: threaded.logs(prefix, after, limit))

    async def scan(self) -> AsyncIterator[SpanRecord]:
        _, threaded = self._open_readers()
        after = 0
        while rows := await self._in_thread(partial(threaded.page, after, _PAGE)):
            after = rows[-1][0]
            for record in await self._in_thread(partial(_readable, rows)):
                yield record

    async def verify(self, checked: Callable[[int], None] | None = None) -> AsyncIterator[Finding]:
        _, threaded = self._open_readers()
        verifier = Verifier(threaded)
        if self._torn:
            yield Finding("file", f"{self._torn} bytes at the end of the log were torn, and were cut off on opening")
        more = True
        while more:
            before = verifier.records
            findings, more = await self._in_thread(verifier.page)
            if checked is not None:
                checked(verifier.records - before)
            for finding in findings:
                yield finding

    async def forget(self, max_bytes: int) -> Forgotten:
        _, threaded = self._open_readers()
        done, events = Forgotten(), 0
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
        records, roots, logs, size = await self._in_thread(lambda: _sizes(threaded))
        return StoreStats(
            records=records,
            roots=roots,
            logs=logs,
            bytes=size,
            groups=writer.groups,
            appends=writer.appends,
            finds=self._finds,
            spared=self._spared,
            cut_off=self._cut_off,
            damaged=self._damaged,
            conflicts=writer.conflicts,
            torn_bytes=self._torn,
        )

    def _open_writer(self) -> Writer:
        if self._writer is None:
            raise StoreUnreachableError(f"the store {self._file} is not open")
        return self._writer

    def _open_readers(self) -> tuple[Reader, Reader]:
        if self._inline is None or self._threaded is None:
            raise StoreUnreachableError(f"the store {self._file} is not open")
        return self._inline, self._threaded

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Do something in the one thread that the second reader belongs to."""
        assert self._threads is not None
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _excess(self, reader: Reader, max_bytes: int) -> int:
        return await self._in_thread(lambda: used_bytes(reader.connection)) - max_bytes


def _sizes(reader: Reader) -> tuple[int, int, int, int]:
    with reader.snapshot() as connection:
        counts = (
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("records", "roots", "logs")
        )
        records, roots, logs = counts
        return records, roots, logs, used_bytes(connection)


def _readable(rows: Sequence[tuple[Any, ...]]) -> list[SpanRecord]:
    found = []
    for row in rows:
        with suppress(DamagedRecordError, StoreMismatchError):
            found.append(decode(row[-1]))
    return found
