"""A single server, or the master that Sentinels name."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.redis.address import Address
from middleware_hub.store.redis.connection import Command, CommandRefusedError, Connection, trouble
from middleware_hub.store.redis.server import Server, dial_first
from middleware_hub.store.redis.servers import Heard, parse_info, questions

logger = logging.getLogger(__name__)

_MOST_HEARD: Final = 10_000


class OneServer:
    """`Servers` of an address that is not a cluster."""

    together = True

    def __init__(self, address: Address) -> None:
        self._address = address
        self.replaced: Callable[[], None] = lambda: None
        server = partial(Server, partial(dial_first, address), address.shown, address.timeout, answers=self._answers)
        self._life = ""
        self._reads, self._writes = server(), server(writes=True)
        self._listener: Connection | None = None
        self._heard: Heard | None = None
        self._keys: set[bytes] = set()
        self._closed = False

    def _answers(self, life: str) -> None:
        before, self._life = self._life, life
        if before not in ("", life):
            self.replaced()

    async def read(self, commands: Sequence[Command]) -> list[Any]:
        return await self._ask(self._reads, commands)

    async def write(self, commands: Sequence[Command], again: Sequence[Command] | None = None) -> list[Any]:
        return await self._ask(self._writes, commands, again)

    async def _ask(
        self, server: Server, commands: Sequence[Command], again: Sequence[Command] | None = None
    ) -> list[Any]:
        try:
            return await server.call(commands, again)
        except CommandRefusedError as error:
            raise trouble(str(error), self._address.shown) from error

    async def life(self) -> str:
        return self._life

    async def attend(self) -> None:
        """Do nothing: each new connection asks for the master, and a caller is told if that fails."""

    async def complete(self) -> bool:
        return await self._writes.complete()

    async def listen(self, key: bytes, heard: Heard) -> None:
        if self._closed:
            raise StoreUnreachableError(f"the store {self._address.shown} is not open")
        listener = self._listener
        if listener is None or listener.broken is not None or len(self._keys) > _MOST_HEARD:
            if listener is not None:
                listener.close()
            self._keys.clear()
            listener = self._listener = await Server(
                partial(dial_first, self._address, pushed=self._pushed), self._address.shown, 0
            ).connection()
        self._heard = heard
        if key not in self._keys:
            self._keys.add(key)
            listener.send([("SSUBSCRIBE", key)])

    def _pushed(self, key: bytes, _: bytes) -> None:
        if self._heard is not None:
            self._heard(key)

    async def scan(self, pattern: bytes) -> AsyncIterator[list[bytes]]:
        cursor = b"0"
        while True:
            ((cursor, found),) = await self.read([("SCAN", cursor, "MATCH", pattern, "COUNT", 1_000)])
            if found:
                yield found
            if cursor == b"0":
                return

    async def infos(self, *, settings: bool) -> list[Mapping[str, str]]:
        return [parse_info(*await self.read(questions(settings=settings)))]

    async def close(self) -> None:
        self._closed = True
        await self._reads.close()
        await self._writes.close()
        if self._listener is not None:
            self._listener.close()
