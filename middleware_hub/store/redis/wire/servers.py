"""Where the keys are: in one server, or in the nodes of a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from middleware_hub.store.redis.wire.connection import Command

Heard = Callable[[bytes], None]


class Servers(Protocol):
    """Asks whoever has the keys. Everything raises StoreError."""

    together: bool
    """Whether one command may have all keys."""
    replaced: Callable[[], None]
    """Is called when another process answers than before, which may lack what that one had, before it answers anybody."""

    async def read(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies of commands, which are asked at once. They may be sent twice."""
        ...

    async def write(self, commands: Sequence[Command], again: Sequence[Command] | None = None) -> list[Any]:
        """The same by a connection on which nobody waits for look-ups. `again` is sent in their place the second time."""
        ...

    async def life(self) -> str:
        """Return a name for the processes that have the keys now: another one if any of them was replaced since."""
        ...

    async def attend(self) -> None:
        """Look who has the keys of a server that is away. Raises StoreUnreachableError if it is still that one.

        A part of a store is no store: what it finds lacks what the others have, and what it is given is not whole.
        """
        ...

    async def complete(self) -> bool:
        """Write again what was lost and stands behind what others wrote; return whether nothing waits for that any more."""
        ...

    async def listen(self, key: bytes, heard: Heard) -> None:
        """Tell when a log changes from now on, once at least; after a break it may be that nobody is told."""
        ...

    def scan(self, pattern: bytes) -> AsyncIterator[list[bytes]]:
        """Yield all keys of a pattern, some at a time; some of them twice, perhaps."""
        ...

    async def infos(self, *, settings: bool) -> list[Mapping[str, str]]:
        """Return what each server says of itself (INFO); with `settings`, its `appendfsync`, too."""
        ...

    async def close(self) -> None:
        """Let go of all connections."""
        ...


def questions(*, settings: bool) -> list[Command]:
    """Return what to ask a server about itself."""
    return [("INFO",), ("CONFIG", "GET", "appendfsync")] if settings else [("INFO",)]


def parse_info(text: bytes, setting: Sequence[bytes] = ()) -> dict[str, str]:
    """Return what a server answered, by names."""
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
    found = {name: value for name, colon, value in lines if colon}
    return found | ({"appendfsync": setting[1].decode()} if setting else {})
