"""Values in a Redis that are not what was written: found by `verify`, and never taken for tokens."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hiredis
import pytest

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Blob, Event
from middleware_hub.store.redis.cluster import Cluster
from middleware_hub.store.redis.connection import Command
from middleware_hub.store.redis.reading import Reading, StoredConversation
from middleware_hub.store.redis.scattering import Pair, Scatterer
from tests.middleware_hub.store.world import Turn, World, append_all, findings, ids, query, with_store
from tests.support.engine_server import free_port
from tests.support.redis_server import RedisServer, empty_cluster, empty_redis, redis_server, shared, shared_cluster

Change = Callable[[Turn, Turn], tuple[bytes | str, ...]]


async def say(*command: bytes | str) -> object:
    """Return what the server answers to a command."""
    reader, writer = await asyncio.open_connection("127.0.0.1", shared().port)
    writer.write(hiredis.pack_command(command))
    answer = hiredis.Reader()
    while (found := answer.gets()) is False:
        answer.feed(await reader.read(1 << 16))
    writer.close()
    await writer.wait_closed()
    return found


def key(kind: str, turn: Turn) -> str:
    return f"tito:{kind}:{{{turn.reply.root.hex()}}}"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda first, _: ("HSET", key("r", first), first.reply.id, b"\x01garbage"), "record"),
        (lambda first, _: ("HSET", key("r", first), first.reply.id, b""), "record"),
        (lambda first, _: ("HDEL", key("r", first), first.reply.id), "link"),
        (lambda first, _: ("HSET", key("r", first), b"?" * 16, b"x"), "record"),
        (lambda first, _: ("HSET", key("b", first), first.reply.id + b"experts", b"x"), "blob"),
        (lambda first, _: ("HSET", key("b", first), b"?" * 16 + b"stray", b"x"), "index"),
        (lambda first, _: ("ZREM", "tito:o:0", first.reply.root), "index"),
        (lambda *_: ("LSET", "tito:l:log", "1", "x"), "event"),
        (lambda *_: ("ZREM", "tito:i:0", "log"), "event"),
    ],
)
def test_every_damage_is_found(change: Change, kind: str) -> None:
    world = World()
    first = world.turn(None, "user" * 500, "reply" * 500, names=("name",))
    second = world.turn(first, "more", "answer")
    other = world.turn(None, "elsewhere", "untouched")
    blob = Blob(first.reply.id, "experts", "int8", (3,), bytes(3))

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        await store.append(Batch(first.records, {first.reply.id: first.path}, [blob], [Event("log", "turn")]))
        assert await findings(store) == []
        await say(*change(first, second))
        assert kind in await findings(store)
        found = await store.find(query(second.text))
        assert {record.id for record in found.records} <= {record.id for turn in world.turns for record in turn.records}
        if kind in ("record", "link") and second.reply.id not in ids(found):
            assert found.damaged
        assert ids(await store.find(query(other.text))) == {record.id for record in other.records}

    with_store(empty_redis(), work)


@pytest.mark.parametrize("place", ["p", "n"])
def test_a_place_that_is_gone_is_found(place: str) -> None:
    turn = World().turn(None, "user", "reply", names=("name",))

    async def work(store: Store) -> None:
        await append_all(store, [turn])
        for name in await say("KEYS", f"tito:{place}:*"):  # type: ignore[attr-defined]
            await say("DEL", name)
        assert set(await findings(store)) == {"index"}

    with_store(empty_redis(), work)


@pytest.mark.parametrize("event", [False, True])
def test_a_whole_conversation_or_log_that_is_gone_is_found(event: bool) -> None:
    """As after an eviction of its key; what was forgotten is not a finding."""
    world = World()
    turns = [world.turn(None, f"user {number}", "reply") for number in range(3)]

    async def work(store: Store) -> None:
        await append_all(store, turns)
        await store.append(Batch((), {}, [], [Event("log", "turn")]))
        await store.forget_roots([turns[0].reply.root])
        assert await findings(store) == []
        await say("DEL", "tito:l:log" if event else key("r", turns[1]))
        assert await findings(store) == ["event" if event else "record"]

    with_store(empty_redis(), work)


def test_a_cluster_tells_a_lost_conversation_from_one_that_is_half_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that forgets a conversation may be killed before any of its writes."""
    world = World()
    turns = [world.turn(None, f"user {number}", "reply") for number in range(3)]
    write = Cluster.write

    async def killed(self: Cluster, commands: Sequence[Command], *more: Any) -> list[Any]:
        if commands[0][0] == "ZREM":
            raise StoreUnreachableError("killed")
        return await write(self, commands, *more)

    async def work(store: Store) -> None:
        await append_all(store, turns)
        with monkeypatch.context() as patched:
            patched.setattr(Cluster, "write", killed)
            with pytest.raises(StoreUnreachableError):
                await store.forget_roots([turns[0].reply.root])
        assert await findings(store) == []
        for node in shared_cluster():
            node.say(f"DEL {key('r', turns[1])}")
        assert await findings(store) == ["record"]
        await store.forget(0)
        assert await findings(store) == []

    with_store(empty_cluster(), work)


def test_a_conversation_of_a_cluster_that_grows_while_it_is_forgotten_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    first = world.turn(None, "user", "reply")
    root = first.reply.root
    second = world.turn(first, "more", "answer")
    whole = Reading.whole

    async def work(store: Store) -> None:
        await store.append(first.batch)

        async def late(self: Reading, roots: Sequence[bytes]) -> list[StoredConversation]:
            found = await whole(self, roots)
            await store.append(second.batch)
            return found

        with monkeypatch.context() as patched:
            patched.setattr(Reading, "whole", late)
            assert not (await store.forget_roots([root])).records
        assert ids(await store.find(query(second.text))) >= {second.reply.id}
        places = [node.say(f"ZRANGE tito:o:{root[-1] % 16} 0 -1 WITHSCORES") for node in shared_cluster()]
        assert any(place.startswith("*2") for place in places)
        assert not any("-inf" in place for place in places)

    with_store(empty_cluster(), work)


def test_an_append_of_a_cluster_that_was_cut_off_between_its_events_is_completed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn = World().turn(None, "user", "reply")
    batch = Batch(
        turn.records, {turn.reply.id: turn.path}, events=[Event("one", "turn", expected=0), Event("two", "news")]
    )
    write = Scatterer._write

    async def cut_off(self: Scatterer, pairs: Sequence[Pair]) -> list[Any]:
        if any(b"tito:l:two" in first for first, _ in pairs):
            raise StoreUnreachableError("killed")
        return await write(self, pairs)

    async def work(store: Store) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Scatterer, "_write", cut_off)
            with pytest.raises(StoreUnreachableError):
                await store.append(batch)
        assert [info.last for info in await store.logs()] == [1]
        assert await store.append(batch) == [1, 1]
        assert [info.last for info in await store.logs()] == [1, 1]

    with_store(empty_cluster(), work)


# Encrypted -------------------------------------------------------------------------------------------------------------


def certificates(folder: Path) -> None:
    """Make an authority, and a certificate of it for the server and for a client."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    for name in ("server", "client"):
        openssl(
            "req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=x"
        )
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "9")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)


@pytest.mark.slow
def test_an_encrypted_connection_checks_who_is_there(tmp_path: Path) -> None:
    assert ssl.HAS_TLSv1_3
    certificates(tmp_path)
    port = free_port()
    settings = [("tls-port", str(port)), ("tls-ca-cert-file", f"{tmp_path}/ca.pem")]
    settings += [("tls-cert-file", f"{tmp_path}/server.pem"), ("tls-key-file", f"{tmp_path}/server.key")]
    place = f"rediss://127.0.0.1:{port}/0"
    trusted = f"{place}?ssl_ca_certs={tmp_path}/ca.pem"
    turn = World().turn(None, "user", "reply")

    async def work(store: Store) -> None:
        await append_all(store, [turn])
        assert len((await store.find(query(turn.text))).records) == 2
        assert await store.wait("log", 0, 0.0) == 0

    def refused(server: RedisServer, address: str) -> None:
        with pytest.raises(StoreUnreachableError):
            with_store(address, work)

    with redis_server(tmp_path / "redis", *settings) as server:
        refused(server, trusted)  # it wants a certificate
        mine = f"ssl_certfile={tmp_path}/client.pem&ssl_keyfile={tmp_path}/client.key"
        refused(server, f"{place}?{mine}")  # nobody knows who signed the server's
        with_store(f"{trusted}&{mine}", work)
        with_store(f"{place}?{mine}&ssl_cert_reqs=none", work)
