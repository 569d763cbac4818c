"""The store as the channel through which the routers of a fleet talk to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from middleware_hub.store.errors import StoreError
from middleware_hub.store.event_log import EventLog
from middleware_hub.store.protocol import Store
from router.peers.channel import ChannelError, Entry, SetBack

LOG: Final = "control"
ROUTERS: Final = "router/"


class StoreChannel:
    """A `Channel` in a store that is open."""

    def __init__(self, store: Store, kind: str) -> None:
        self.kind = kind
        self._store = store
        self._log = EventLog(store, LOG, whole=False)

    async def append(self, kind: str, data: bytes, expected: int | None = None) -> int | None:
        with _mapped():
            return await self._log.append(kind, data, expected=expected)

    async def read_on(self) -> Sequence[Entry] | SetBack:
        with _mapped():
            return await self._log.read_on()

    def take(self, entry: Entry) -> None:
        self._log.take(entry)

    async def wait(self, seconds: float) -> None:
        with _mapped():
            await self._log.wait(seconds)

    async def trim(self, before: int) -> None:
        with _mapped():
            await self._log.trim(before)

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
