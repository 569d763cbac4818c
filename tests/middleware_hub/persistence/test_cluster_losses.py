"""A cluster loses a part: a node comes back empty, or a replica takes over that lacks the last writes. Trees make it whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import pytest

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Event
from middleware_hub.store.redis import last_written
from middleware_hub.store.redis.cluster import Cluster
from middleware_hub.store.redis.store import RedisStore
from tests.middleware_hub.persistence.lives import Ask
from tests.middleware_hub.persistence.test_set_back import SPACE, Losing
from tests.support.redis_server import RedisServer, start_cluster

pytestmark = pytest.mark.slow

SLOTS = 16_384
LONG = "ab a" * 200
"""Several blocks of text: they lie at several nodes."""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[RedisServer]]:
    """Three masters, and a replica of the first. None of them keeps anything beyond its end."""
    settings = (("appendonly", "no"), ("cluster-replica-validity-factor", "0"), ("cluster-require-full-coverage", "no"))
    made = start_cluster(tmp_path, 3, *settings, replicas=1)
    try:
        yield made
    finally:
        for node in made:
            node.stop()


class LosingCluster(Losing):
    """The same with a cluster."""

    def __init__(self, nodes: list[RedisServer], count: int) -> None:
        super().__init__(nodes[1], count)
        self.nodes = nodes
        # Patient, because a busy machine is no node that does not answer.
        self.lives.address = f"redis+cluster://127.0.0.1:{nodes[1].port}?socket_timeout=20&socket_connect_timeout=20"

    async def conversations(self, name: str, count: int = 8) -> None:
        """Conversations, whose turns the routers serve in turns."""
        for number in range(count):
            text = await self.ask(
                number, Ask(SPACE, f"{'ab'[number % 2]}{LONG}a", None, None, [5, 0], f"{name}{number}", "1")
            )
            for turn in range(2):
                text = await self.ask(
                    number + turn, Ask(SPACE, text + LONG, None, None, [6, 5], f"{name}{number}-{turn}", "1")
                )

    async def noticed(self, there: Callable[[Cluster], bool]) -> None:
        """Wait until each router has met the other process, although nobody asks it for anything."""
        end = monotonic() + 60
        for number, store in enumerate(self.lives.stores):
            assert isinstance(store, RedisStore)
            servers = store._open().servers
            assert isinstance(servers, Cluster)
            while not there(servers):
                assert monotonic() < end
                with contextlib.suppress(StoreUnreachableError):
                    await store.announce(f"router/{number}", b"", 3600.0)
                await asyncio.sleep(0.05)
        await self.heard()


def run_id(node: RedisServer) -> str:
    return next(line.partition(":")[2] for line in node.say("INFO server").splitlines() if line.startswith("run_id"))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_node_that_comes_back_empty_is_filled_again(
    nodes: list[RedisServer], lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With records, and with what finds those that other nodes have; however long ago that was written."""
    monkeypatch.setattr(last_written, "_KEPT_SECONDS", 0.0)

    async def run() -> None:
        losing = LosingCluster(nodes[:3], 2)
        async with losing.lives:
            await losing.announced()
            await losing.conversations("r")
            nodes[lost].kill()
            await asyncio.to_thread(nodes[lost].start)
            place, life = ("127.0.0.1", nodes[lost].port), run_id(nodes[lost])
            await losing.noticed(lambda servers: servers._lives.get(place) == life)
            await losing.check()

    nodes[3].stop()
    asyncio.run(run())


def test_a_replica_that_takes_over_without_the_last_writes_is_given_them(nodes: list[RedisServer]) -> None:
    """Events as well, each of them once."""

    async def run() -> None:
        losing = LosingCluster(nodes, 2)
        async with losing.lives:
            await losing.announced()
            await losing.conversations("r", 2)
            master, replica = nodes[0], nodes[3]
            assert master.say("ACL SETUSER default -psync -sync").startswith("+OK")
            assert master.say("CLIENT KILL TYPE replica").startswith(":1")
            await losing.conversations("late")
            store = losing.lives.stores[0]
            logs = [f"log {number}" for number in range(12)]
            for log in logs:
                await store.append(Batch(events=[Event(log, "first", expected=0), Event(log, "second")]))
            master.kill()
            place = ("127.0.0.1", replica.port)
            await losing.noticed(lambda servers: place in servers._owners and place in servers._lives)
            for log in logs:
                assert [event.kind for event in await store.read(log)] == ["first", "second"]
            await losing.check()

    asyncio.run(run())


def test_slots_that_were_given_to_another_node_without_what_they_had_are_filled_again(
    nodes: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_written, "_KEPT_SECONDS", 0.0)

    async def run() -> None:
        losing = LosingCluster(nodes[:3], 2)
        async with losing.lives:
            await losing.announced()
            await losing.conversations("r")
            lost, heir, other = nodes[0], nodes[1], nodes[2]
            name = lost.say("CLUSTER MYID").split("\r\n")[1]
            lost.kill()
            for node in (heir, other):
                assert node.say(f"CLUSTER FORGET {name}").startswith("+OK")
            assert heir.say(f"CLUSTER ADDSLOTSRANGE 0 {SLOTS // 3 - 1}").startswith("+OK")
            heir.say("CLUSTER BUMPEPOCH")
            place = ("127.0.0.1", lost.port)
            await losing.noticed(lambda servers: place not in servers._owners)
            await losing.check()

    nodes[3].stop()
    asyncio.run(run())
