"""How routers of one fleet communicate: a log that all append to and read, and announcements that hold for some seconds.

A memory that several routers share has such a channel (`Peers.join`). Without one, a router is alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from router.errors import RouterError

DAMAGED: Final = ""
"""The kind of an entry that cannot be read."""


class ChannelError(RouterError):
    """The channel cannot be read or written now."""

    status = 503
    type = "store_unreachable"


class Entry(Protocol):
    """An entry of the log. Numbers grow by one, from 1. The first entries may be gone."""

    @property
    def number(self) -> int:
        """Return its place in the log."""
        ...

    @property
    def kind(self) -> str:
        """Return its kind, `DAMAGED` if it cannot be read."""
        ...

    @property
    def data(self) -> bytes:
        """Return its content."""
        ...


class SetBack(NamedTuple):
    """The log has lost its end, in which the entry `number` was the last one known. It is read from its beginning again."""

    number: int


class FleetChannel(Protocol):
    """Every method but `take` may raise ChannelError.

    Attributes:
        kind: its name for people: `sqlite`, `redis`.
    """

    kind: str

    async def append(self, kind: str, data: bytes, expected: int | None = None) -> int | None:
        """Append an entry and return its number.

        With `expected`, only if that is the number of the last entry; else return None.
        """
        ...

    async def read_on(self) -> Sequence[Entry] | SetBack:
        """Return the next entries after the last one that was taken; none at the end."""
        ...

    def take(self, entry: Entry) -> None:
        """Note that an entry was applied."""
        ...

    async def wait(self, seconds: float) -> None:
        """Return as soon as there is more to read, or when the time has passed."""
        ...

    async def trim(self, before: int) -> None:
        """Forget the entries before a number."""
        ...

    async def announce(self, name: str, data: bytes, seconds: float) -> None:
        """Announce something for some seconds from now on; it replaces the last announcement under this name."""
        ...

    async def announced(self) -> Mapping[str, bytes]:
        """Return the announcements that hold now, by name."""
        ...
