"""The servers that have the keys: one server, or the nodes of a cluster (see `cluster`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.redis.address import Address
from middleware_hub.store.redis.connection import Command, CommandRefusedError, Connection, trouble
from middleware_hub.store.redis.server import Server, dial_first, parse_info

_MOST_HEARD: Final = 10_000

Heard = Callable[[bytes], None]


class Servers(Protocol):
    """Sends commands to the servers that have the keys. Every method raises StoreError."""

    together: bool
    """Whether all keys may be in one command."""
    replaced: Callable[[], None]
    """Called when another process answers than before, before any caller is answered: it may lack what the old one had."""

    async def read(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies of commands, which are sent at once. They may be sent twice."""
        ...

    async def write(self, commands: Sequence[Command], again: Sequence[Command] | None = None) -> list[Any]:
        """Do the same over a connection that look-ups do not use. `again` is sent in their place the second time."""
        ...

    async def life(self) -> str:
        """Return a name for the processes that have the keys now: a different name if any of them was replaced."""
        ...

    async def attend(self) -> None:
        """Find out which server has the keys of one that is away. Raises StoreUnreachableError if that has not changed.

        A part of a store is of no use: its look-ups lack the rest, and an append to it is not whole.
        """
        ...

    async def complete(self) -> bool:
        """Write again what was lost and follows writes of others; return whether nothing waits for that any more."""
        ...

    async def listen(self, key: bytes, heard: Heard) -> None:
        """Tell, at least once, when a log changes from now on; after a broken connection there may be no notification."""
        ...

    def scan(self, pattern: bytes) -> AsyncIterator[list[bytes]]:
        """Yield all keys of a pattern, some at a time; a key may come twice."""
        ...

    async def infos(self, *, settings: bool) -> list[Mapping[str, str]]:
        """Return what each server says of itself (INFO); with `settings`, also its `appendfsync`."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class OneServer:
    """A single server, or the master that Sentinels name."""

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
        async for found in scanned(self.read, pattern):
            yield found

    async def infos(self, *, settings: bool) -> list[Mapping[str, str]]:
        return [parse_info(*await self.read(questions(settings=settings)))]

    async def close(self) -> None:
        self._closed = True
        await self._reads.close()
        await self._writes.close()
        if self._listener is not None:
            self._listener.close()


def questions(*, settings: bool) -> list[Command]:
    """Return the commands that ask a server about itself."""
    return [("INFO",), ("CONFIG", "GET", "appendfsync")] if settings else [("INFO",)]


async def scanned(
    ask: Callable[[Sequence[Command]], Awaitable[list[Any]]], pattern: bytes
) -> AsyncIterator[list[bytes]]:
    """Yield the keys of one server that match a pattern, some at a time."""
    cursor = b"0"
    while True:
        ((cursor, found),) = await ask([("SCAN", cursor, "MATCH", pattern, "COUNT", 1_000)])
        if found:
            yield found
        if cursor == b"0":
            return
