"""The live routers: each announces itself for some seconds, again and again, with its load and how far it has read.

No router waits for a router whose announcement has expired (it was stopped, or the store was away). So before such a router
continues, it announces itself and *then* reads the log to its end: the log has all entries appended meanwhile, and a router
that appends one from then on waits for this router.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from router.peers.channel import FleetChannel
from router.peers.events import WorkerAdded

logger = logging.getLogger(__name__)

LEASE_SECONDS: Final = 5.0
"""How long an announcement holds."""
RENEW_SECONDS: Final = 1.5


class Announced(msgspec.Struct, frozen=True, omit_defaults=True):
    """The announcement of a router.

    Attributes:
        read: the number of the last entry of the log that it has read and applied.
        busy: the entries among them to which its own answer is still to come.
        said: the time of the announcement, in seconds since the epoch by the router's own clock.
        settings: by flag, the values that all routers must share, or the hashes of long values.
        draining: the removed workers at which it still has requests.
    """

    id: str
    token: str
    read: int = 0
    busy: tuple[int, ...] = ()
    said: float = 0.0
    url: str | None = None
    pid: int | None = None
    started: float = 0.0
    version: str | None = None
    load: dict[str, int] = {}
    settings: dict[str, str] = {}
    draining: tuple[WorkerAdded, ...] = ()


class Presence:
    """The announcements of this router and of the others.

    Attributes:
        token: of this process; two processes with the same `id` are two routers.
        load: returns counts, for people.
        version: returns the fleet's weight version as this router knows it.
        settings: as in `Announced`. Parts of the router add theirs before it is announced.
        draining: returns the removed workers at which this router still has requests.
        until: the moment (`time.monotonic`) to which the announcement surely holds.
        others: as they were when they were last asked for, by token.
    """

    def __init__(self, name: str | None = None, url: str | None = None) -> None:
        """`name`: `--router-id`."""
        self.token = secrets.token_hex(8)
        self.id = name or f"{socket.gethostname()}:{(url or '').rpartition(':')[2] or 0}:{os.getpid()}"
        self.url = url
        self.load: Callable[[], dict[str, int]] = dict
        self.version: Callable[[], str | None] = lambda: None
        self.settings: dict[str, str] = {}
        self.draining: Callable[[], tuple[WorkerAdded, ...]] = tuple
        self.until = -math.inf
        self.others: dict[str, Announced] = {}
        self.busy: set[int] = set()
        self.told = 0
        """The number up to which the others know that this router has read."""
        self._started = time.time()
        self._begun = -math.inf

    def own(self, read: int = 0) -> Announced:
        return Announced(
            self.id,
            self.token,
            read,
            tuple(self.busy),
            time.time(),
            self.url,
            os.getpid(),
            self._started,
            self.version(),
            self.load(),
            self.settings,
            self.draining(),
        )

    async def announce(self, channel: FleetChannel, read: int) -> bool:
        """Announce this router; return whether its announcement held all the time. Raises ChannelError.

        If it did not, `until` is unchanged: the log has to be read first (`held`).
        """
        begun = time.monotonic()
        await channel.announce(self._name, msgspec.json.encode(self.own(read)), LEASE_SECONDS)
        self.told = read
        if time.monotonic() >= self.until:
            self._begun = begun
            return False
        self.until = begun + LEASE_SECONDS
        return True

    def held(self) -> None:
        """Note that the log was read to its end after the last announcement."""
        self.until = self._begun + LEASE_SECONDS

    async def leave(self, channel: FleetChannel) -> None:
        """Take the announcement back. Raises ChannelError."""
        await channel.announce(self._name, b"", 0)

    async def look(self, channel: FleetChannel) -> Mapping[str, Announced]:
        """Return the other routers that are there now, by token. Raises ChannelError."""
        found: dict[str, Announced] = {}
        for data in (await channel.announced()).values():
            try:
                one = msgspec.json.decode(data, type=Announced)
            except msgspec.MsgspecError:  # of another version of this program
                continue
            if one.token != self.token:
                found[one.token] = one
        for token in found.keys() - self.others.keys():
            if names := self.differing(found[token]):
                logger.warning(
                    "router %s on this store has another %s: a conversation that both serve is not one sequence, so start all"
                    " routers with the same",
                    *(found[token].id, ", ".join(names)),
                )
        self.others = found
        return found

    def differing(self, other: Announced) -> list[str]:
        """Return the flags for which another router has another value. A flag that it does not announce is not compared."""
        return sorted(name for name, value in other.settings.items() if self.settings.get(name, value) != value)

    @property
    def _name(self) -> str:
        return f"{self.id}/{self.token}"

    def shown(self, one: Announced, *, store: str | None, this: bool) -> dict[str, Any]:
        """Return a router as GET /routers shows it."""
        differing = self.differing(one)
        return {
            "id": one.id,
            "this": this,
            "url": one.url,
            "pid": one.pid,
            "started": datetime.fromtimestamp(one.started, UTC).isoformat(timespec="milliseconds"),
            "version": one.version,
            "inflight": one.load.get("inflight", 0),
            "queued": one.load.get("queued", 0),
            "workers": one.load.get("workers", 0),
            "store": store,
            "read": one.read,
            "seen_seconds_ago": round(max(0.0, time.time() - one.said), 3),
            **({"differs": differing} if differing else {}),
        }
