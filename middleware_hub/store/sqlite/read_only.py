"""A store in a file that is only read, for the commands that only read.

SQLite reads a file that has a log (`-wal`) only with the index of the log (`-shm`), which it makes beside the file if there is
none. A file without a log is in no use, so it is read as one that does not change.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import apsw
from msgspec.structs import replace

from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError, StoreUnreachableError
from middleware_hub.store.media import MediaFile
from middleware_hub.store.protocol import Finding, Found, LogInfo, LookUps, Query, StoreStats
from middleware_hub.store.records import Blob, Event, Mark, SpanRecord, decode
from middleware_hub.store.sqlite.file import (
    FORMAT,
    SameFile,
    check,
    connect,
    index_of,
    log_of,
    mapped,
    place_of,
    read_options,
)
from middleware_hub.store.sqlite.forgetting import sizes
from middleware_hub.store.sqlite.media import media_sizes, unnamed
from middleware_hub.store.sqlite.reader import Reader
from middleware_hub.store.sqlite.verifying import SqliteVerifier

T = TypeVar("T")
_PAGE: Final = 500


class ReadOnlyStore:
    """The methods of a `Store` that read. `note` does nothing, and `forget_roots` raises StoreUnreachableError."""

    def __init__(self, path: str) -> None:
        """`path` is a file, or a folder with one."""
        self._file = place_of(path)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        self._opened: Reader | None = None
        self._look_ups = LookUps()

    def __repr__(self) -> str:
        return f"<ReadOnlyStore {self._file}, {'open' if self._opened else 'closed'}>"

    async def open(self, fingerprint: str | None) -> None:
        how = await self._in_thread(lambda: how_to_read(self._file, fingerprint))
        self._opened = await self._in_thread(lambda: Reader(self._file, SameFile(self._file), how=how))

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def note(self, marks: Sequence[Mark]) -> None:
        """Note nothing."""

    async def find(self, query: Query) -> Found:
        reader = self._reader
        found, _ = await self._in_thread(lambda: reader.find(query))
        assert found is not None
        ends = await self._in_thread(lambda: {log: reader.last(log) for log in query.logs})
        return replace(self._look_ups.counted(found), ends=ends)

    async def get(
        self, ids: Sequence[bytes], *, known: Container[bytes] = (), roots: Mapping[bytes, bytes] | None = None
    ) -> Found:
        reader = self._reader
        return self._look_ups.counted(await self._in_thread(lambda: reader.get(ids, known)))

    async def blobs(
        self, record: bytes, names: Sequence[str] | None = None, *, root: bytes | None = None
    ) -> list[Blob]:
        return await self._in_thread(partial(self._reader.blobs, record, names))

    async def media(self, tenant: str, digests: Sequence[str], *, data: bool = True) -> Mapping[str, MediaFile]:
        return await self._in_thread(lambda: self._reader.media(tenant, digests, data=data))

    async def media_unnamed(self) -> int:
        return await self._in_thread(partial(self._reader.within, unnamed))

    async def sweep_media(self) -> NoReturn:
        raise StoreUnreachableError(f"the store {self._file} cannot be written: it is only read")

    async def read(self, log: str, *, after: int = 0, limit: int = 1_000) -> list[Event]:
        return await self._in_thread(partial(self._reader.events, log, after, limit))

    async def logs(self, prefix: str = "", *, after: str = "", limit: int = 1_000) -> list[LogInfo]:
        return await self._in_thread(partial(self._reader.logs, prefix, after, limit))

    async def scan(self) -> AsyncIterator[SpanRecord]:
        after = 0
        while rows := await self._in_thread(partial(self._reader.page, after, _PAGE)):
            after = rows[-1][0]
            for row in rows:
                with suppress(DamagedRecordError, StoreMismatchError):
                    yield decode(row[-1])

    async def verify(self, checked: Callable[[int], None] | None = None) -> AsyncIterator[Finding]:
        async for finding in SqliteVerifier(self._reader).run(self._in_thread, checked):
            yield finding

    async def forget_roots(self, roots: Sequence[bytes]) -> NoReturn:
        raise StoreUnreachableError(f"the store {self._file} cannot be written: it is only read")

    async def stats(self) -> StoreStats:
        found = await self._in_thread(partial(self._reader.within, sizes))
        media, media_bytes = await self._in_thread(partial(self._reader.within, media_sizes))
        return StoreStats(*found, damaged=self._look_ups.damaged, media=media, media_bytes=media_bytes)

    @property
    def _reader(self) -> Reader:
        if self._opened is None:
            raise StoreUnreachableError(f"the store {self._file} is not open")
        return self._opened

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Do something in the one thread to which the reader belongs."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def cannot_write(path: str, error: StoreUnreachableError | None) -> bool:
    """Return whether a file may not be written, or could not be opened (`error`): its folder may not, or its disk is full."""
    if error is None:
        file = place_of(path)
        return file.is_file() and not os.access(file, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    code = getattr(error.__cause__, "extendedresult", 0) & 0xFF
    return code in (apsw.SQLITE_READONLY, apsw.SQLITE_CANTOPEN, apsw.SQLITE_FULL, apsw.SQLITE_IOERR)


def how_to_read(path: Path, fingerprint: str | None) -> str:
    """Return the options with which SQLite reads a file. Raises a StoreError if it cannot read all that was recorded in it."""
    how = read_options(path)
    if "immutable" not in how and not index_of(path).exists():
        raise StoreUnreachableError(
            f"the store {path} cannot be written, and what was recorded last is in {log_of(path)}, which SQLite reads only "
            "where it can write: copy both files into a folder of your own, and name the copy"
        )
    connection = connect(path, how=how)
    try:
        with mapped(path):
            check(connection, path, fingerprint)
            version = connection.execute("PRAGMA user_version").get
    finally:
        connection.close()
    if version < FORMAT:
        raise StoreMismatchError(
            f"{path} has format {version}, and cannot be brought to format {FORMAT} where it cannot be written: copy it into a "
            "folder of your own, and name the copy"
        )
    return how
