"""The servers that have the keys: one server, or the nodes of a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from middleware_hub.store.redis.connection import Command

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

        A part of a store is of no use: what it finds lacks the rest, and what is appended to it is not whole.
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


def questions(*, settings: bool) -> list[Command]:
    """Return the commands that ask a server about itself."""
    return [("INFO",), ("CONFIG", "GET", "appendfsync")] if settings else [("INFO",)]


def parse_info(text: bytes, setting: Sequence[bytes] = ()) -> dict[str, str]:
    """Return what a server answered, by name."""
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
    found = {name: value for name, colon, value in lines if colon}
    return found | ({"appendfsync": setting[1].decode()} if setting else {})
