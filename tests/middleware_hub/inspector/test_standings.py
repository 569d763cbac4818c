"""Which ledgers are read for the inspector, and for how long a look waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from middleware_hub.inspector.conversations import texts
from middleware_hub.inspector.conversations.texts import MOST_NAMESPACES, Standings
from middleware_hub.store.errors import StoreUnreachableError


class Told:
    """Ledgers that note what is read."""

    def __init__(self) -> None:
        self.read: list[tuple[str, list[str]]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.away = False

    def standing(self, namespace: tuple[str, ...], request_id: str) -> None:
        return None

    async def read_on(self, tenant: str, namespaces: Iterable[str]) -> None:
        self.read.append((tenant, list(namespaces)))
        await self.gate.wait()
        if self.away:
            raise StoreUnreachableError("it is away")

    def events(self, tenant: str) -> int:
        return len([1 for one, _ in self.read if one == tenant])


def test_the_namespaces_of_a_tenant_are_read_whatever_others_have() -> None:
    async def main() -> None:
        ledgers = Told()
        known = [("b", "", f"{number:03}") for number in range(2 * MOST_NAMESPACES)]
        known += [("a", "", "z"), ("a", "adapter", "z"), ("a", "", "")]
        look = Standings(ledgers, lambda: known).look
        assert (await look("a"), await look("b")) == (1, 1)
        assert ledgers.read == [("a", ["", "z"]), ("b", [f"{number:03}" for number in range(MOST_NAMESPACES)])]

    asyncio.run(main())


def test_a_look_goes_on_without_a_store_that_is_slow_or_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the ledgers are read once for all looks meanwhile."""
    monkeypatch.setattr(texts, "PATIENCE", 0.001)

    async def main() -> None:
        ledgers = Told()
        look = Standings(ledgers, lambda: [("a", "", "")]).look
        ledgers.gate.clear()
        assert [await look("a"), await look("a")] == [1, 1]
        ledgers.away = True
        ledgers.gate.set()
        while await look("a") == 1:
            pass
        assert await look("a") >= 2

    asyncio.run(main())
