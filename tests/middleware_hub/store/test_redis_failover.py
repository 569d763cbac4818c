"""Masters that die: Sentinels name another one, and slots of a cluster move to another node."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from pathlib import Path
from time import monotonic

import pytest

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Event
from middleware_hub.store.redis import cluster
from middleware_hub.store.redis.cluster import slot_of
from tests.middleware_hub.store.world import Turn, World, append_all, findings, ids, query, with_store
from tests.support.redis_server import RedisServer, empty_cluster, shared_cluster


async def appended_at_last(store: Store, turn: Turn) -> None:
    """Append as the router does: again, until it is taken."""
    end = monotonic() + 60
    while True:
        try:
            await store.append(turn.batch)
            return
        except StoreUnreachableError:
            assert monotonic() < end
            await asyncio.sleep(0.1)


def promoted(server: RedisServer) -> None:
    """Return when a server is the master. Sentinel ends all of its connections when it tells it so."""
    end = monotonic() + 60
    while True:
        with contextlib.suppress(ConnectionError):
            if server.say("ROLE").startswith("*3\r\n$6\r\nmaster"):
                return
        assert monotonic() < end
        time.sleep(0.05)  # a poll of another process


async def until_sentinel_knows(sentinel: RedisServer, replica: RedisServer) -> None:
    end = monotonic() + 60
    while f"{replica.port}" not in await asyncio.to_thread(
        sentinel.say, "SENTINEL REPLICAS main"
    ):  # a poll of another process
        assert monotonic() < end
        await asyncio.sleep(0.05)


@pytest.mark.slow
def test_a_failover_of_sentinels_is_followed(tmp_path: Path) -> None:
    """And what was acknowledged is there, since a replica had it."""
    world = World()
    master = RedisServer(tmp_path / "master")
    replica = RedisServer(tmp_path / "replica", ("replicaof", "127.0.0.1", str(master.port)))
    watching = ("sentinel", "monitor", "main", "127.0.0.1", str(master.port), "1")
    times = [("sentinel", "down-after-milliseconds", "main", "500"), ("sentinel", "failover-timeout", "main", "3000")]
    sentinel = RedisServer(tmp_path / "sentinel", watching, *times, kind="redis-sentinel")
    address = f"redis+sentinel://127.0.0.1:9,127.0.0.1:{sentinel.port}/main/0"

    async def before(store: Store) -> None:
        turn = world.turn(None, "user", "reply")
        await appended_at_last(store, turn)
        await until_sentinel_knows(sentinel, replica)
        await store.append(world.turn(turn, "more", "reply").batch)
        master.kill()
        with pytest.raises(StoreUnreachableError):  # no replica has it
            await store.append(world.turn(turn, "another", "reply").batch)

    async def after(store: Store) -> None:
        await appended_at_last(store, world.turns[2])
        assert replica.say("ROLE").startswith("*3\r\n$6\r\nmaster")
        for turn in world.turns:
            assert {record.id for record in turn.records} <= ids(await store.find(query(turn.text)))
        assert await findings(store) == []

    async def both(store: Store) -> None:
        await before(store)
        await asyncio.to_thread(promoted, replica)
        end = monotonic() + 60
        while (waiting := open_store(address)) is not None:
            try:
                await waiting.open("toy")
                break
            except StoreUnreachableError:
                assert monotonic() < end
                await asyncio.sleep(0.1)
        await after(waiting)
        await waiting.close()

    try:
        for server in (master, replica, sentinel):
            server.start()
        with_store(f"{address}?replicas=1", both)
        with pytest.raises(StoreUnreachableError, match="no Sentinel names a master"):
            with_store(address.replace("/main/", "/other/"), after)
    finally:
        for server in (master, replica, sentinel):
            server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("learn_every", [cluster._LEARN_EVERY, math.inf])
def test_slots_that_move_are_followed(learn_every: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half way (ASK), and when they have moved (MOVED), also if the node that is asked for the owners has not heard of it."""
    monkeypatch.setattr(cluster, "_LEARN_EVERY", learn_every)
    world = World()

    async def work(store: Store) -> None:
        turn = world.turn(None, "user", "reply")
        await append_all(store, [turn])
        key = f"tito:r:{{{turn.reply.root.hex()}}}"
        slot = slot_of(key.encode())
        assert f":{slot}\r\n" == shared_cluster()[0].say(f"CLUSTER KEYSLOT {key}")
        old = next(node for node in shared_cluster() if node.say(f"EXISTS {key}").startswith(":1"))
        new = next(node for node in shared_cluster() if node is not old)
        old_id, new_id = (node.say("CLUSTER MYID").split("\r\n")[1] for node in (old, new))
        new.say(f"CLUSTER SETSLOT {slot} IMPORTING {old_id}")
        old.say(f"CLUSTER SETSLOT {slot} MIGRATING {new_id}")
        old.say(f"MIGRATE 127.0.0.1 {new.port} {key} 0 5000")
        assert ids(await store.find(query(turn.text))) == {record.id for record in turn.records}
        turn = world.turn(turn, "more", "reply")
        await store.append(turn.batch)
        for node in (new, old):
            node.say(f"CLUSTER SETSLOT {slot} NODE {new_id}")
        try:
            turn = world.turn(turn, "and more", "reply")
            await store.append(Batch(turn.records, {turn.reply.id: turn.path}, events=[Event("log", "turn")]))
            assert len((await store.find(query(turn.text))).records) == 6
            assert await findings(store) == []
            assert (await store.forget(0)).records == 6
        finally:
            for node, back in ((old, old_id), (new, old_id)):
                node.say(f"CLUSTER SETSLOT {slot} NODE {back}")

    with_store(empty_cluster(), work)


@pytest.mark.slow
def test_a_node_that_is_away_is_said(tmp_path: Path) -> None:
    world = World()

    async def work(store: Store) -> None:
        await append_all(store, [world.turn(None, f"user {number}", "reply") for number in range(20)])
        node = next(node for node in shared_cluster() if not node.say("EXISTS tito:meta").startswith(":1"))
        node.freeze()
        try:
            with pytest.raises(StoreUnreachableError):
                await append_all(store, [world.turn(None, f"more {number}", "reply") for number in range(20)])
            for number in range(12):  # what the other nodes have is a part
                with pytest.raises(StoreUnreachableError):
                    await store.read(f"log {number}")
        finally:
            node.thaw()
        for turn in world.turns:
            await appended_at_last(store, turn)
        assert await findings(store) == []
        assert len([record async for record in store.scan()]) == 2 * len(world.turns)

    with_store(f"{empty_cluster()}?socket_timeout=0.5&socket_connect_timeout=0.5", work)
