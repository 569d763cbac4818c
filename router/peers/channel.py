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


class Entry(NamedTuple):
    """An entry of the log. Numbers grow by one, from 1; those at the beginning of the log may be gone."""

    number: int
    kind: str
    data: bytes


class Channel(Protocol):
    """Every method may raise ChannelError.

    Attributes:
        kind: what it is, for people: `sqlite`, `redis`.
    """

    kind: str

    async def append(self, kind: str, data: bytes, expected: int | None = None) -> int | None:
        """Append an entry and return its number.

        With `expected`, only if that is the number of the last entry; else return None.
        """
        ...

    async def read(self, after: int) -> Sequence[Entry]:
        """Return the next entries after a number; none at the end."""
        ...

    async def wait(self, after: int, seconds: float) -> int:
        """Return the number of the last entry as soon as it is greater than `after`, or when the time has passed."""
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
