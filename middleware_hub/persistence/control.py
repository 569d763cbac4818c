"""The store as the channel through which the routers of a fleet talk to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from middleware_hub.store.errors import DamagedRecordError, LogMovedError, StoreError, next_event
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
                one = await next_event(self._store, LOG, after)
                if isinstance(one, int):
                    return [Entry(one, DAMAGED, b"")]
                found = [one]
            return [Entry(event.number, event.kind, event.data) for event in found]

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
