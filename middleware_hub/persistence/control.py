"""The store as the channel through which the routers of a fleet talk to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from middleware_hub.store.errors import DamagedRecordError, LogMovedError, StoreError
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Event
from router.peers.channel import DAMAGED, ChannelError, Entry

LOG: Final = "control"
ROUTERS: Final = "router/"
_PAGE: Final = 200


class StoreChannel:
    """A `Channel` in a store that is open."""

    def __init__(self, store: Store, kind: str) -> None:
        self.kind = kind
        self._store = store

    async def append(self, kind: str, data: bytes, expected: int | None = None) -> int | None:
        with _mapped():
            try:
                (number,) = await self._store.append(Batch(events=[Event(LOG, kind, data, expected=expected)]))
            except LogMovedError:
                return None
            return number

    async def read(self, after: int) -> Sequence[Entry]:
        with _mapped():
            try:
                found = await self._store.read(LOG, after=after, limit=_PAGE)
            except DamagedRecordError:
                return await self._read_carefully(after)
            return [Entry(event.number, event.kind, event.data) for event in found]

    async def _read_carefully(self, after: int) -> Sequence[Entry]:
        """Return only the next entry. If it cannot be read, return only its number."""
        if not await self._damaged(after):
            (event,) = await self._store.read(LOG, after=after, limit=1)
            return [Entry(event.number, event.kind, event.data)]
        # Its number may be any after `after`: the entries in between were forgotten.
        behind = await self._store.wait(LOG, after, 0.0)
        if await self._damaged(behind):
            raise ChannelError("the store is damaged: run `tito-router store verify`")
        before = after
        while behind - before > 1:
            middle = (before + behind) // 2
            if await self._damaged(middle):
                before = middle
            else:
                behind = middle
        return [Entry(behind, DAMAGED, b"")]

    async def _damaged(self, after: int) -> bool:
        """Return whether the next entry cannot be read."""
        try:
            await self._store.read(LOG, after=after, limit=1)
        except DamagedRecordError:
            return True
        return False

    async def wait(self, after: int, seconds: float) -> int:
        with _mapped():
            return await self._store.wait(LOG, after, seconds)

    async def trim(self, before: int) -> None:
        with _mapped():
            await self._store.trim(LOG, before)

    async def announce(self, name: str, data: bytes, seconds: float) -> None:
        with _mapped():
            await self._store.announce(ROUTERS + name, data, seconds)

    async def announced(self) -> Mapping[str, bytes]:
        with _mapped():
            return await self._store.announced(ROUTERS)


@contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise ChannelError(error.message) from error
