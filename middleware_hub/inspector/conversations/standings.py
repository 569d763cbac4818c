"""Groups and rewards from the ledgers, including the entries of other routers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from middleware_hub.radix.records import Namespace
from router.errors import RouterError

MOST_NAMESPACES: Final = 64
"""Namespaces of a tenant whose ledgers are read for one look."""
PATIENCE: Final = 0.1
"""Seconds that a look waits for the store. What comes later is in the next look."""


class Ledgers(Protocol):
    """Has the groups; `trajectories.groups.Groups` is one."""

    def standing(self, namespace: Namespace, request_id: str) -> tuple[str, float | None] | None:
        """Return the group of a reply, and its reward, if known here; None if it is in no group."""
        ...

    async def read_on(self, tenant: str, namespaces: Iterable[str]) -> None:
        """Read what was written down since the last time. Raises StoreError."""
        ...

    def events(self, tenant: str) -> int:
        """Return how many events of a tenant's ledgers are known here."""
        ...


class Standings:
    """Reads the new events of a tenant's ledgers, one ledger after the other.

    Args:
        known: returns the namespaces of the texts that are remembered.
    """

    def __init__(self, ledgers: Ledgers, known: Callable[[], Iterable[Namespace]]) -> None:
        self._ledgers = ledgers
        self._known = known
        self._reading: dict[str, asyncio.Task[None]] = {}

    async def look(self, tenant: str) -> int:
        """Read on, for as long as a look may take; return a number that changes with every group and reward."""
        reading = self._reading.get(tenant)
        if reading is None:
            reading = self._reading[tenant] = asyncio.create_task(self._read(tenant))
        await asyncio.wait([reading], timeout=PATIENCE)
        return self._ledgers.events(tenant)

    async def _read(self, tenant: str) -> None:
        names = sorted({place[2] for place in self._known() if place[0] == tenant})
        try:
            await self._ledgers.read_on(tenant, names[:MOST_NAMESPACES])
        except RouterError:
            pass  # the store is away, which is reported elsewhere: what is known stays
        finally:
            del self._reading[tenant]
