"""Values in a Redis that are not what was written: found by `verify`, and never taken for tokens."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import hiredis
import pytest

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Blob, Event
from tests.middleware_hub.store.world import Turn, World, append_all, findings, ids, query, with_store
from tests.support.engine_server import free_port
from tests.support.redis_server import RedisServer, empty_redis, redis_server, shared

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
