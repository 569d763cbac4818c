"""A server loses what it had: emptied, or back at an earlier state. Trees that wrote in turns make it whole again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.store.errors import StoreUnreachableError
from tests.conftest import examples
from tests.middleware_hub.persistence.drawn import NAMESPACES, PICK, REQUEST, request_of
from tests.middleware_hub.persistence.lives import Ask, Lives
from tests.support.redis_server import RedisServer, redis_server

ASK = st.tuples(st.just("ask"), PICK, REQUEST)
STEP = st.one_of(
    *[ASK] * 4,
    st.tuples(st.just("retrieve"), PICK, PICK),
    st.tuples(st.just("emptied")),
    st.tuples(st.just("saved")),
    st.tuples(st.just("set back")),
)
SPACE = NAMESPACES[0]


class Losing:
    """Lives on a server that loses what it had, and each of which says that it is there, as routers do."""

    def __init__(self, server: RedisServer, count: int) -> None:
        self.server = server
        self.lives = Lives("memory", count)
        self.lives.address = server.address
        self.said: list[tuple[int, str, str, list[int]]] = []
        self.count = 0

    async def announced(self) -> None:
        """Be there, and see the others; wait until the store is whole."""
        for number, store in enumerate(self.lives.stores):
            await answered(lambda store=store, number=number: store.announce(f"router/{number}", b"", 3600.0))
        for store in self.lives.stores:
            assert len(await store.announced("router/")) == self.lives.count

    async def heard(self) -> None:
        """What each router does every second or two, whatever it is asked."""
        await asyncio.gather(
            *(
                answered(lambda store=store, number=number: store.announce(f"router/{number}", b"", 3600.0))
                for number, store in enumerate(self.lives.stores)
            )
        )
        await self.announced()

    async def lose(self, how: str) -> None:
        if how == "emptied":
            self.server.say("FLUSHALL")
        elif how == "saved":
            self.server.say("SAVE")
            return
        else:
            self.server.kill()
            await asyncio.to_thread(self.server.start)
        await self.heard()

    async def ask(self, life: int, ask: Ask) -> str:
        # How many replies in a row came below the current version is not written down: a fall may be noticed later.
        text = await self.lives.ask(life, ask, alone=False)
        chain = await self.lives.chain_of(life, ask.namespace, ask.name)
        assert chain is not None
        self.said.append((NAMESPACES.index(ask.namespace), text, ask.name, chain))
        return text

    async def check(self) -> None:
        """Every router answers as one whose store lost nothing, and so does one that is started now."""
        for number in range(self.lives.count):
            for space, text, name, _ in self.said:
                await self.lives.retrieve(number, NAMESPACES[space], text)
                await self.lives.retrieve(number, NAMESPACES[space], text, name)
            await self.lives.made_again(number)
        assert [finding async for finding in self.lives.stores[0].verify()] == []
        await self.lives.restart(0)
        for space, text, name, _ in self.said:
            await self.lives.retrieve(0, NAMESPACES[space], text)
            await self.lives.retrieve(0, NAMESPACES[space], text, name)

    async def run(self, steps: list[Any]) -> None:
        async with self.lives:
            await self.announced()
            for kind, *rest in steps:
                if kind == "ask":
                    self.count += 1
                    ask = request_of(rest[1], self.said, self.count)
                    if ask is not None:
                        await self.ask(rest[0], ask)
                elif kind != "retrieve":
                    await self.lose(kind)
                elif self.said:
                    space, text, _, _ = self.said[rest[1] % len(self.said)]
                    await self.lives.retrieve(rest[0], NAMESPACES[space], text)
            await self.check()


async def answered(ask: Any) -> None:
    """Ask until there is an answer."""
    async with asyncio.timeout(20):
        while True:
            try:
                await ask()
                return
            except StoreUnreachableError:
                await asyncio.sleep(0.01)


def server_of(folder: Path, kind: str) -> Any:
    return redis_server(folder, ("appendonly", "no"), kind=kind)


@pytest.mark.parametrize("how", ["emptied", "set back"])
@pytest.mark.parametrize("kind", ["redis-server", "valkey-server"])
def test_a_chain_that_routers_wrote_in_turns_is_whole_again(tmp_path: Path, kind: str, how: str) -> None:
    """Also what nobody goes on with, and what stands behind a record that the other router wrote."""

    async def run(server: RedisServer) -> None:
        losing = Losing(server, 2)
        async with losing.lives:
            await losing.announced()
            text = await losing.ask(0, Ask(SPACE, "a", None, None, [5, 0], "r0", "1"))
            await losing.ask(1, Ask(SPACE, text + "c", None, None, [6, 5], "aside", "1"))
            for number in range(1, 6):
                text = await losing.ask(number, Ask(SPACE, text + "b", None, None, [6, 5], f"r{number}", "1"))
            await losing.lose(how)
            await losing.check()

    with server_of(tmp_path, kind) as server:
        asyncio.run(run(server))


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None, report_multiple_bugs=False)
@given(lives=st.integers(1, 3), steps=st.lists(STEP, min_size=3, max_size=16))
def test_whatever_a_server_loses_its_routers_write_again(
    tmp_path_factory: pytest.TempPathFactory, lives: int, steps: list[Any]
) -> None:
    with server_of(tmp_path_factory.mktemp("redis"), "redis-server") as server:
        asyncio.run(Losing(server, lives).run(steps))
