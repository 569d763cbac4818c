"""How routers make a Redis whole again that has lost something: all of them, or none answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, cast

import pytest

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Refill, Store
from middleware_hub.store.redis import recovery as recovery_module
from middleware_hub.store.redis.address import parse
from middleware_hub.store.redis.cluster import Cluster
from middleware_hub.store.redis.connection import BrokenError, Command, CommandRefusedError, Connection
from middleware_hub.store.redis.keys import Keys
from middleware_hub.store.redis.recovery import OTHERS_SECONDS, RecoveryProgress, RecoveryStage
from middleware_hub.store.redis.server import Server
from middleware_hub.store.redis.store import RedisStore
from tests.middleware_hub.store.world import World, ids, query, with_store
from tests.support.redis_server import RedisServer, empty_redis, redis_server, shared, start_cluster


async def found_at_last(store: Store, text: str) -> set[bytes]:
    """Return what a look-up brings, as soon as the store answers."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(StoreUnreachableError):
                return ids(await store.find(query(text)))
            await asyncio.sleep(0.01)


@pytest.mark.slow
def test_a_refill_that_fails_is_tried_again_and_the_store_stays_away_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it is no fault of the store's: what a text finds may be a part of what was recorded."""
    turn = World().turn(None, "user", "reply")
    tries = count(1)
    second, go = asyncio.Event(), asyncio.Event()

    async def refill(store: Refill) -> None:
        if next(tries) == 1:
            raise RuntimeError("a fault of ours")
        second.set()
        await go.wait()
        await store.append(turn.batch)

    async def work(server: RedisServer, store: Store) -> None:
        store.on_loss(refill)
        await store.append(turn.batch)
        server.say("FLUSHALL")
        with pytest.raises(StoreUnreachableError, match="lost"):
            await store.find(query(turn.text))
        async with asyncio.timeout(30):
            await second.wait()
        assert "a fault of ours" in caplog.text
        for asked in (store.find(query(turn.text)), store.append(turn.batch), store.read("log")):
            with pytest.raises(StoreUnreachableError, match="lost"):
                await asked
        go.set()
        assert await found_at_last(store, turn.text) == {record.id for record in turn.records}

    with redis_server(tmp_path) as server, caplog.at_level(logging.ERROR):
        with_store(server.address, lambda store: work(server, store))


# How far the others are -------------------------------------------------------------------------------------------------


class Clock:
    """A time that goes on when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(recovery_module, "monotonic", made)
    return made


class Board:
    """`Servers` that have one hash."""

    def __init__(self) -> None:
        self.said: dict[bytes, bytes] = {}

    async def write(self, commands: Sequence[Any]) -> list[Any]:
        _, _, *pairs = commands[0]
        self.said.update(zip(pairs[::2], pairs[1::2], strict=True))
        return []

    async def read(self, commands: Sequence[Any]) -> list[Any]:
        _, _, *names = commands[0]
        return [[self.said.get(name) for name in names]]

    def progress(self, name: str, *others: str, life: bytes = b"life") -> RecoveryProgress:
        return RecoveryProgress(self, Keys("t:"), life, {name}, others)  # type: ignore[arg-type]


def test_a_router_is_waited_for_as_long_as_it_gets_on(clock: Clock) -> None:
    async def run() -> None:
        board = Board()
        one, other = board.progress("one", "other"), board.progress("other", "one")
        await one.say(RecoveryStage.REFILLED)
        await other.say(RecoveryStage.REFILLING)
        for _ in range(20):
            clock.now += 0.9 * OTHERS_SECONDS
            await other.step()
            await one.look()
            assert not one.silent
            assert not one.others_are(RecoveryStage.REFILLED)
        await other.say(RecoveryStage.REFILLED)
        await one.look()
        assert one.others_are(RecoveryStage.REFILLED)
        assert not one.others_are(RecoveryStage.DONE)
        clock.now += 1.1 * OTHERS_SECONDS
        await one.look()
        assert one.silent

    asyncio.run(run())


def test_a_router_that_begins_again_and_again_gets_no_more_time(clock: Clock) -> None:
    async def run() -> None:
        board = Board()
        one = board.progress("one", "other")
        await one.say(RecoveryStage.REFILLED)
        for _ in range(2):
            other = board.progress("other", "one")
            for _ in range(3):
                clock.now += 0.4 * OTHERS_SECONDS
                await other.step()
                await one.look()
        assert one.silent

    asyncio.run(run())


def test_what_was_said_of_another_loss_counts_for_nothing(clock: Clock) -> None:
    async def run() -> None:
        board = Board()
        before = board.progress("other", "one", life=b"life-of-before")
        await before.say(RecoveryStage.DONE)
        one = board.progress("one", "other")
        await one.look()
        assert not one.others_are(RecoveryStage.REFILLING)
        for word in (b"", b"done", b"life ", b"life nothing", b"life refilling x"):
            board.said[b"other"] = word
            await one.look()
            assert not one.others_are(RecoveryStage.REFILLED)
        await board.progress("other", "one").say(RecoveryStage.DONE)
        await one.look()
        assert one.others_are(RecoveryStage.DONE)

    asyncio.run(run())


def heard_by(store: Store) -> tuple[int, int]:
    """Return what a router has read of the furthest of the others."""
    assert isinstance(store, RedisStore)
    recovery = store._open().recovery
    if recovery is None or recovery._progress is None:
        return (-1, 0)
    return max(recovery._progress._furthest.values(), default=(-1, 0))


@pytest.mark.slow
def test_nobody_answers_before_a_slow_router_has_written_what_it_knows(clock: Clock) -> None:
    """However long it takes: it says that it gets on."""
    world = World()
    known, unknown = world.turn(None, "user", "reply"), world.turn(None, "another", "answer")

    async def work(one: Store) -> None:
        other = open_store(shared().address)
        await other.open("toy")

        async def slow(store: Refill) -> None:
            for step in range(1, 11):
                clock.now += 0.9 * OTHERS_SECONDS
                await store.lacking({})
                while heard_by(one) < (0, step):  # noqa: ASYNC110  # it has no event
                    await asyncio.sleep(0.005)
            with pytest.raises(StoreUnreachableError, match="lost"):
                await one.find(query(unknown.text))
            await store.append(unknown.batch)

        other.on_loss(slow)
        for number, store in enumerate((one, other)):
            await store.announce(f"router/{number}", b"", 600.0)
        for store in (one, other):
            assert len(await store.announced()) == 2
        await one.append(known.batch)
        await other.append(unknown.batch)
        shared().say("FLUSHALL")
        for store in (one, other):
            with pytest.raises(StoreUnreachableError, match="lost"):
                await store.find(query(known.text))
        assert await found_at_last(one, unknown.text) == {record.id for record in unknown.records}
        await other.close()

    with_store(empty_redis(), work)


@pytest.mark.slow
def test_a_cluster_has_another_life_when_one_of_its_nodes_has(tmp_path: Path) -> None:
    nodes = start_cluster(tmp_path)
    cluster_address = f"redis+cluster://127.0.0.1:{nodes[0].port}"

    async def run() -> None:
        servers = Cluster(parse(cluster_address))
        try:
            before = await servers.life()
            assert await servers.life() == before
            nodes[2].kill()
            await asyncio.to_thread(nodes[2].start)
            end = monotonic() + 30
            while True:
                with contextlib.suppress(StoreUnreachableError):
                    assert await servers.life() != before
                    break
                assert monotonic() < end
                await asyncio.sleep(0.05)
        finally:
            await servers.close()

    try:
        asyncio.run(run())
    finally:
        for node in nodes:
            node.stop()


def test_a_server_that_takes_the_place_of_another_has_to_keep_what_it_is_given_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else `disk` would promise what nobody holds."""
    turn = World().turn(None, "user", "reply")

    async def work(server: RedisServer, store: Store) -> None:
        await store.append(turn.batch)
        server.kill()
        settings = server.folder / "redis.conf"
        settings.write_text(settings.read_text() + "appendonly no\nappendfsync everysec\n")
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(30):
            while "writes no file" not in caplog.text:  # noqa: ASYNC110  # a log has no event
                await asyncio.sleep(0.01)
        for asked in (store.find(query(turn.text)), store.append(turn.batch)):
            with pytest.raises(StoreUnreachableError):
                await asked

    with redis_server(tmp_path, ("appendfsync", "always")) as server, caplog.at_level(logging.WARNING):
        with_store(server.address, lambda store: work(server, store), durability="disk")


def test_a_connection_over_which_nothing_could_be_written_again_is_closed() -> None:
    """Else each try leaves one behind, for as long as the server refuses."""

    class Refusing:
        broken = None

        def __init__(self, life: str) -> None:
            self.life = life
            self.closed = False

        async def call(self, commands: Sequence[Command]) -> list[Any]:
            if self.life == "second":
                raise CommandRefusedError("LOADING Redis is loading the dataset in memory")
            return [b"OK"] * len(commands)

        def close(self) -> None:
            self.closed = True

    made = [Refusing("first"), Refusing("second")]
    dialed = iter(made)

    async def dial() -> Connection:
        return cast(Connection, next(dialed))

    async def run() -> None:
        server = Server(dial, "a server", 1.0, writes=True)
        await server.call([("SET", "a", "b")])
        made[0].broken = BrokenError("gone")
        with pytest.raises(StoreUnreachableError):
            await server.call([("GET", "a")])
        assert made[1].closed
        await server.close()

    asyncio.run(run())
