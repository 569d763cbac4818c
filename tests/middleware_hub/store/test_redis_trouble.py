"""A Redis that is away, hangs, refuses, or is not what it should be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from middleware_hub.store.errors import StoreError, StoreMismatchError, StoreUnreachableError
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Blob, Event
from middleware_hub.store.redis import recovery as recovery_module
from middleware_hub.store.redis.forgetting import Forgetting
from middleware_hub.store.redis.searching import RedisSearch
from router.errors import BadRequestError
from tests.middleware_hub.store.world import World, address_of, append_all, findings, ids, query, with_store
from tests.support.redis_server import RedisServer, empty_redis, redis_server, shared
from tests.support.usual import usual
from worker.http.serve import stop_listening


async def nothing(store: Store) -> None:
    await store.stats()


def refused(address: str, error: type[Exception], *words: str, durability: str = "process") -> str:
    with pytest.raises(error) as raised:
        with_store(address, nothing, durability=durability)  # type: ignore[arg-type]
    for word in words:
        assert word in str(raised.value)
    return str(raised.value)


# Refused at the start --------------------------------------------------------------------------------------------------


def test_nobody_is_there() -> None:
    refused("redis://127.0.0.1:9/0", StoreUnreachableError, "cannot be reached")


def test_a_password_is_needed_and_is_never_shown(tmp_path: Path) -> None:
    with redis_server(tmp_path, ("requirepass", "right")) as server:
        place = f"127.0.0.1:{server.port}/0"
        refused(f"redis://{place}", StoreUnreachableError, "wants a password")
        for wrong in (
            f"redis://:secret@{place}",
            f"redis://someone:secret@{place}",
            f"redis://{place}?password=secret",
        ):
            assert "secret" not in refused(wrong, StoreUnreachableError, "is wrong")
        with_store(f"redis://:right@{place}", nothing)
        with_store(f"redis://{place}?password=right", nothing)
        server.say("PING")


def test_a_user_who_may_not_write(tmp_path: Path) -> None:
    with redis_server(tmp_path, ("user", "reader", "on", ">secret", "~*", "+@all", "-evalsha")) as server:
        address = f"redis://reader:secret@127.0.0.1:{server.port}/0"

        async def work(store: Store) -> None:
            with pytest.raises(StoreUnreachableError, match="may not do what the store needs"):
                await append_all(store, [World().turn(None, "user", "reply")])

        with_store(address, work)


def test_the_rights_that_the_documents_name_are_enough(tmp_path: Path) -> None:
    """See docs/memory.md."""
    page = (Path(__file__).parents[3] / "docs" / "memory.md").read_text()
    (rights,) = re.findall(r"ACL SETUSER tito on >PASSWORD (.*)", page)
    world = World()

    async def work(store: Store) -> None:
        waiting = asyncio.create_task(store.wait("log", 0, 20.0))
        await asyncio.sleep(0.05)
        line = world.turn(None, "user", "reply", names=("name",))
        blob = Blob(line.reply.id, "experts", "int8", (3,), bytes(3))
        await store.append(Batch(line.records, {line.reply.id: line.path}, [blob], [Event("log", "turn")]))
        assert await waiting == 1
        assert len((await store.find(query(line.text, parents=("name",)))).records) == 2
        assert await store.blobs(line.reply.id) == [blob]
        assert [info.log for info in await store.logs()] == ["log"]
        await store.announce("router", b"", 5.0)
        assert await store.announced() == {"router": b""}
        await store.trim("log", 2)
        assert await findings(store) == []
        assert (await store.forget(0)).records == 2

    with redis_server(tmp_path, ("appendfsync", "always")) as server:
        assert server.say(f"ACL SETUSER tito on >PASSWORD {rights}").startswith("+OK")
        address = f"redis://tito:PASSWORD@127.0.0.1:{server.port}/0"
        with_store(address, work)
        with_store(address, work, durability="disk")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("redis://127.0.0.1:x/0", "HOST:PORT"),
        ("redis:///0", "HOST:PORT"),
        ("redis://127.0.0.1/zero", "is a number"),
        ("redis://127.0.0.1/1.5", "is a number"),
        ("redis://127.0.0.1:70000/0", "a port is a number from 1 to 65535"),
        ("redis://127.0.0.1/0?socket_timeout=0", "above 0"),
        ("redis://127.0.0.1/0?replicas=0.5", "is a number"),
        ("redis://u:topsecret@127.0.0.1/0/1", "too much"),
        ("redis://u:topsecret@127.0.0.1/0?colour=red", "colour"),
        ("redis://u:topsecret/topsecret@127.0.0.1/0", "write one of"),
        ("redis://u:topsecret@/0", "%2F"),
        ("redis://u:x/topsecret@127.0.0.1/0", "write one of"),
        ("redis://u:topsecret?topsecret@127.0.0.1/0", "write one of"),
        ("rediss://127.0.0.1/0?ssl_cert_reqs=maybe", "ssl_cert_reqs"),
        ("redis+sentinel://127.0.0.1", "name of the master"),
        ("redis+cluster://127.0.0.1/3", "database 0"),
        ("redis://127.0.0.1?prefix=a{b}", "prefix"),
    ],
)
def test_an_address_that_cannot_be_says_why(address: str, words: str) -> None:
    with pytest.raises(BadRequestError, match=words) as raised:
        open_store(address)
    assert "topsecret" not in str(raised.value)


def test_a_database_that_is_not_there() -> None:
    empty_redis()
    refused(f"redis://127.0.0.1:{shared().port}/99", StoreUnreachableError, "no such database")


def test_another_tokenizer_and_a_newer_format() -> None:
    address = empty_redis()
    with_store(address, nothing)
    with pytest.raises(StoreMismatchError, match="--store-prefix"):
        with_store(address, nothing, "another")
    with_store(f"{address}?prefix=other:", nothing, "another")
    with_store(address, nothing, None)
    shared().say("HSET tito:meta format 2")
    refused(address, StoreMismatchError, "update the router")
    with pytest.raises(StoreUnreachableError, match="there is no store"):
        with_store(f"{address}?prefix=third:", nothing, None)


@pytest.mark.parametrize("shards", ["0", "-1", "many"])
def test_a_number_of_shards_that_was_changed(shards: str) -> None:
    address = empty_redis()
    with_store(address, nothing)
    shared().say(f"HSET tito:meta shards {shards}")
    refused(address, StoreMismatchError, "HSET tito:meta shards 1")


@pytest.mark.parametrize("kind", ["redis", "cluster"])
def test_a_store_that_was_emptied_is_begun_again_and_taken_by_nobody_else(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its router still has ids of its own tokenizer, and goes on writing them."""
    address = address_of(kind, tmp_path)
    world = World()

    async def work(store: Store) -> None:
        await append_all(store, [world.turn(None, "user", "reply")])
        address_of(kind, tmp_path)  # empties it
        await store.announce("router", b"", 5.0)
        with pytest.raises(StoreMismatchError, match="--store-prefix"):
            with_store_in_thread(address, nothing, "another")

    with caplog.at_level(logging.ERROR):
        with_store(address, work, "own")
    assert "was emptied while it was in use" in caplog.text


@pytest.mark.parametrize("kind", ["redis", "cluster"])
def test_a_store_that_was_emptied_and_begun_by_another_is_used_no_more(kind: str, tmp_path: Path) -> None:
    address = address_of(kind, tmp_path)
    world = World()
    turn = world.turn(None, "user", "reply")

    async def other(store: Store) -> None:
        await store.append(turn.batch)

    async def work(store: Store) -> None:
        address_of(kind, tmp_path)
        with_store_in_thread(address, other, "another")
        if kind == "cluster":  # where a look-up asks the nodes of its text alone
            with pytest.raises(StoreUnreachableError, match="another tokenizer"):
                await store.announce("router", b"", 5.0)
        for _ in range(2):
            with pytest.raises(StoreUnreachableError, match="another tokenizer"):
                await store.find(query(turn.text))
            with pytest.raises(StoreUnreachableError, match="another tokenizer"):
                await store.append(turn.batch)
            with pytest.raises(StoreUnreachableError, match="another tokenizer"):
                await store.read("probe", limit=1)
        address_of(kind, tmp_path)
        with pytest.raises(StoreUnreachableError, match="lost"):
            await store.find(query(turn.text))
        assert not (await store.find(query(turn.text))).records, "it is begun again"
        await store.append(turn.batch)
        assert len((await store.find(query(turn.text))).records) == 2

    with_store(address, work, "own")


def with_store_in_thread(*arguments: Any) -> None:
    """Do what `with_store` does while a loop runs here."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(with_store, *arguments).result()


def test_keys_of_another_program() -> None:
    address = empty_redis()
    shared().say("SET tito:meta 1")
    refused(address, StoreMismatchError, "another program")


def test_a_server_that_forgets_keys_by_itself_is_refused(tmp_path: Path) -> None:
    with redis_server(tmp_path, ("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru")) as server:
        refused(server.address, StoreMismatchError, "noeviction")


def test_a_server_that_writes_no_file_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path, ("appendonly", "no")) as server, caplog.at_level(logging.WARNING):
        with_store(server.address, nothing)
        assert "appendonly yes" in caplog.text
        refused(server.address, StoreMismatchError, "appendonly yes", durability="disk")


@pytest.mark.parametrize("kind", usual(["redis-server", "valkey-server"], "valkey-server"))
def test_disk_durability_needs_a_server_that_can_say_so(tmp_path: Path, kind: str) -> None:
    async def work(store: Store) -> None:
        world = World()
        await append_all(store, [world.turn(None, "user", "reply")])
        assert len((await store.find(query("userreply"))).records) == 2

    with redis_server(tmp_path, kind=kind) as server:
        if "redis_version:7.0" in server.say("INFO server"):
            refused(server.address, StoreMismatchError, "appendfsync always", durability="disk")
            server.say("CONFIG SET appendfsync always")
        with_store(server.address, work, durability="disk")


def test_a_missing_library_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['hiredis'] = None\n"
        "from middleware_hub.store.opening import open_store\n"
        "try: open_store('redis://localhost/0')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("BadRequestError")
    assert "pip install 'tito-router[redis]'" in said


# In the middle ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    """A request waits for the time of one answer, those behind it do not; and when it answers again, all is well."""
    world = World()

    async def work(server: RedisServer, store: Store) -> None:
        await append_all(store, [world.turn(None, "user", "reply")])
        server.freeze()
        begun = monotonic()
        with pytest.raises(StoreUnreachableError):
            await store.find(query("userreply"))
        assert monotonic() - begun < 3
        await asyncio.sleep(0.7)  # a client tries to connect meanwhile
        begun = monotonic()
        for _ in range(60):
            with pytest.raises(StoreUnreachableError):
                await store.append(world.turn(None, "more", "reply").batch)
        assert monotonic() - begun < 15, "it takes 30 s if each waits"
        server.thaw()
        await until_it_answers(store)
        assert (await store.find(query("userreply"))).records
        assert await findings(store) == []

    with redis_server(tmp_path) as server:
        address = f"{server.address}?socket_timeout=0.5&socket_connect_timeout=0.5"
        with_store(address, lambda store: work(server, store))


class _EmptiedMidway:
    """A search; the server is emptied behind its first question, and before what that found is fetched."""

    def __init__(self, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server, self._wanted = server, RedisSearch.wanted
        monkeypatch.setattr(RedisSearch, "wanted", lambda search: self.wanted(search))

    def wanted(self, search: RedisSearch) -> list[tuple[bytes, bytes]]:
        self._server.say("FLUSHALL")
        return self._wanted(search)


def test_a_store_that_is_emptied_in_the_middle_of_a_lookup_is_not_taken_for_one_that_knows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = World().turn(None, "user", "reply")

    async def work(server: RedisServer, store: Store) -> None:
        await append_all(store, [turn])
        with monkeypatch.context() as patched:
            _EmptiedMidway(server, patched)
            with pytest.raises(StoreUnreachableError, match="lost"):
                await store.find(query(turn.text))

    with redis_server(tmp_path) as server:
        with_store(server.address, lambda store: work(server, store))


@pytest.mark.parametrize("what", ["get", "read", "blobs", "append"])
def test_who_misses_something_asks_whether_the_store_was_emptied(what: str, tmp_path: Path) -> None:
    world = World()
    turn = world.turn(None, "user", "reply")

    async def work(server: RedisServer, store: Store) -> None:
        await append_all(store, [turn])
        await store.append(Batch(events=[Event("log", "turn", b"x")]))
        server.say("FLUSHALL")
        asked = {
            "get": lambda: store.get([turn.reply.id]),
            "read": lambda: store.read("log"),
            "blobs": lambda: store.blobs(turn.reply.id, ["routed_experts"], root=turn.reply.root),
            "append": lambda: store.append(world.turn(turn, "more", "reply").batch),
        }
        with pytest.raises(StoreUnreachableError, match="lost"):
            await asked[what]()

    with redis_server(tmp_path) as server:
        with_store(server.address, lambda store: work(server, store))


async def until_it_answers(store: Store) -> None:
    end = monotonic() + 60
    while True:
        try:
            await store.stats()
            return
        except StoreUnreachableError:
            assert monotonic() < end
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", usual(["redis-server", "valkey-server"], "redis-server"))
@pytest.mark.parametrize("synced", usual(["always", "everysec"], "always"))
def test_a_server_that_is_killed_loses_nothing_that_it_acknowledged(tmp_path: Path, synced: str, kind: str) -> None:
    """With `everysec` Redis itself may answer up to two seconds before it writes its file."""
    world = World()
    acknowledged: list[bytes] = []
    told: list[bytes] = []

    async def client(store: Store, number: int) -> None:
        line = None
        for at in range(60):
            turn = world.turn(line, f"user {number} {at}", "reply " * 20)
            data = b"%d %d" % (number, at)
            batch = Batch(turn.records, {turn.reply.id: turn.path}, events=[Event("shared", "turn", data)])
            while True:
                try:
                    await store.append(batch)
                    break
                except StoreUnreachableError:
                    await asyncio.sleep(0.02)
            acknowledged.append(turn.reply.id)
            told.append(data)
            line = turn
            await asyncio.sleep(0.005)

    async def work(server: RedisServer, store: Store) -> None:
        async def trouble() -> None:
            for _ in range(4):
                await asyncio.sleep(0.15)
                server.kill()
                await asyncio.sleep(0.05)
                await asyncio.to_thread(server.start)

        await asyncio.gather(trouble(), *(client(store, number) for number in range(6)))
        assert len(acknowledged) == 360
        found = await store.get(acknowledged)
        assert set(acknowledged) <= ids(found)
        events = await store.read("shared")
        assert sorted(event.data for event in events) == sorted(told), "none is lost, and none is doubled"
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        assert await findings(store) == []

    with redis_server(tmp_path, ("appendfsync", synced), kind=kind) as server:
        with_store(server.address, lambda store: work(server, store))


def test_what_a_killed_server_lost_of_the_last_seconds_is_written_again(tmp_path: Path) -> None:
    """Before anything else is asked for: another router may need it."""
    world = World()
    first = world.turn(None, "user", "reply")
    second = world.turn(first, "more", "answer")

    async def work(server: RedisServer, store: Store) -> None:
        await append_all(store, [first])
        batch = Batch(second.records, {second.reply.id: second.path}, events=[Event("log", "turn", b"1")])
        await store.append(batch)
        server.kill()
        await asyncio.to_thread(server.start)
        other = open_store(server.address)
        end = monotonic() + 60
        while True:  # the first store connects again by itself
            with contextlib.suppress(StoreUnreachableError):
                await other.open(None)
                break
            assert monotonic() < end
            await asyncio.sleep(0.05)
        while len(ids(await other.find(query(second.text)))) < 4:
            assert monotonic() < end
            await asyncio.sleep(0.05)
        assert [event.data for event in await other.read("log")] == [b"1"]
        await other.close()
        await store.append(batch)
        assert [event.data for event in await store.read("log")] == [b"1"], "it is not doubled"
        assert await findings(store) == []

    with redis_server(tmp_path, ("appendonly", "no")) as server:
        with_store(server.address, lambda store: work(server, store))


def test_what_several_wrote_in_turns_is_written_again_in_that_order(tmp_path: Path) -> None:
    """Events and records, each behind what the other one wrote. Nothing is found before all have written."""
    world = World()

    async def work(server: RedisServer, one: Store) -> None:
        stores = [one, open_store(server.address)]
        await stores[1].open("toy")
        for number, store in enumerate(stores):
            await store.announce(f"router/{number}", b"", 600.0)
        for store in stores:
            await store.announced()
        line = None
        for number in range(12):
            line = world.turn(line, f"user {number}", "reply")
            event = Event("log", "turn", b"%d" % number, expected=number)
            await stores[number % 2].append(Batch(line.records, {line.reply.id: line.path}, events=[event]))
        server.kill()
        await asyncio.to_thread(server.start)
        assert line is not None
        end = monotonic() + 60
        while True:
            with contextlib.suppress(StoreUnreachableError):
                found, events = await stores[0].find(query(line.text)), await stores[0].read("log")
                break
            assert monotonic() < end
            await asyncio.sleep(0.02)
        assert len(ids(found)) == 24
        assert [event.data for event in events] == [b"%d" % number for number in range(12)]
        assert await findings(stores[1]) == []
        await stores[1].close()

    with redis_server(tmp_path, ("appendonly", "no")) as server:
        with_store(server.address, lambda store: work(server, store))


def test_a_router_that_died_with_the_server_is_waited_for_no_longer_than_it_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery_module, "OTHERS_SECONDS", 0.5)
    world = World()

    async def work(server: RedisServer, store: Store) -> None:
        turn = world.turn(None, "user", "reply")
        await store.append(turn.batch)
        await store.announce("router/own", b"", 600.0)
        dead = open_store(server.address)
        await dead.open("toy")
        await dead.announce("router/dead", b"", 600.0)
        await store.announced()
        await dead.close()
        server.kill()
        begun = monotonic()  # the store may find the server before `start` does
        await asyncio.to_thread(server.start)
        await until_it_answers(store)
        while True:
            with contextlib.suppress(StoreUnreachableError):
                assert len((await store.find(query(turn.text))).records) == 2
                break
        assert monotonic() - begun > 0.4

    with redis_server(tmp_path, ("appendonly", "no")) as server:
        with_store(server.address, lambda store: work(server, store))


@asynccontextmanager
async def losing_answers(port: int, lose: set[int]) -> AsyncIterator[int]:
    """Stand between a client and a server: of these connections, the second answer and all behind it never arrives."""
    count = 0
    tasks = set[asyncio.Task[None]]()

    async def answer(number: int, there: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers = 0
        while data := await there.read(1 << 20):
            answers += 1
            if number in lose and answers > 1:
                break
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        there, back = await asyncio.open_connection("127.0.0.1", port)
        answering = asyncio.create_task(answer(count, there, writer))
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 20):
                back.write(data)
        answering.cancel()
        for one in (back, writer):
            one.close()
            with contextlib.suppress(OSError):
                await one.wait_closed()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        tasks.add(task)

    async with await asyncio.start_server(accepted, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await stop_listening(server)
        await asyncio.gather(*tasks)


def test_an_append_whose_answer_was_lost_is_not_doubled() -> None:
    empty_redis()
    turn = World().turn(None, "user", "reply")

    async def run() -> None:
        async with losing_answers(shared().port, set(range(2, 8))) as port:
            # The first connection reads; each that writes loses the answer to what it wrote, but for the eighth.
            store = open_store(f"redis://127.0.0.1:{port}/0")
            await store.open("toy")
            try:
                events = [Event("log", "turn", b"1", expected=0), Event("log", "turn", b"2")]
                assert await store.append(Batch(turn.records, {turn.reply.id: turn.path}, events=events)) == [1, 2]
                assert [event.data for event in await store.read("log")] == [b"1", b"2"]
                assert await store.append(Batch(turn.records, {turn.reply.id: turn.path}, events=events)) == [1, 2]
                assert await store.append(Batch(turn.records, {turn.reply.id: turn.path}, events=events[1:])) == [3]
                assert await store.append(Batch(events=events[1:])) == [4]
            finally:
                await store.close()

    asyncio.run(run())


def test_a_full_memory_is_said_and_loses_nothing(tmp_path: Path) -> None:
    world = World()

    async def work(server: RedisServer, store: Store) -> None:
        turn = world.turn(None, "user", "reply")
        await store.append(turn.batch)
        server.say("CONFIG SET maxmemory 1mb")
        with pytest.raises(StoreUnreachableError, match="--store-max-bytes"):
            await store.append(world.turn(turn, "more", "reply").batch)
        assert ids(await store.find(query(turn.text))) == {record.id for record in turn.records}
        server.say("CONFIG SET maxmemory 0")
        await append_all(store, world.turns)
        assert await findings(store) == []

    with redis_server(tmp_path) as server:
        with_store(server.address, lambda store: work(server, store))


def test_scripts_that_the_server_forgot_are_given_again() -> None:
    world = World()

    async def work(store: Store) -> None:
        await store.append(world.turn(None, "user", "reply").batch)
        shared().say("SCRIPT FLUSH")
        await store.append(world.turn(None, "more", "reply").batch)
        assert len(await store.read("nothing")) == 0

    with_store(empty_redis(), work)


def test_a_replica_takes_no_writes(tmp_path: Path) -> None:
    world = World()

    async def work(server: RedisServer, store: Store) -> None:
        await store.append(world.turn(None, "user", "reply").batch)
        server.say("REPLICAOF 127.0.0.1 9")
        with pytest.raises(StoreError, match="replica"):
            await store.append(world.turn(None, "more", "reply").batch)
        server.say("REPLICAOF NO ONE")
        await store.append(world.turn(None, "more", "reply").batch)

    with redis_server(tmp_path) as server:
        with_store(f"{server.address}?socket_timeout=0.5", lambda store: work(server, store))


def test_a_closed_store_ends_the_waiting_and_says_so() -> None:
    async def work(store: Store) -> None:
        waiting = asyncio.ensure_future(store.wait("control", 0, 30.0))
        await asyncio.sleep(0.05)
        await store.close()
        with pytest.raises(StoreUnreachableError):
            await waiting
        with pytest.raises(StoreUnreachableError, match="not open"):
            await store.append(Batch())
        await store.close()

    with_store(empty_redis(), work)


@pytest.mark.parametrize("kind", ["redis", "cluster"])
def test_what_is_appended_again_while_its_places_are_removed_stays(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    turn = world.turn(None, "user", "reply", names=("name",))

    async def work(store: Store) -> None:
        remove = Forgetting._leave

        async def late(self: Forgetting, *arguments: Any) -> None:
            await store.append(turn.batch)
            await remove(self, *arguments)

        await store.append(turn.batch)
        monkeypatch.setattr(Forgetting, "_leave", late)
        assert (await store.forget_roots([turn.reply.root])).records == 2
        assert await findings(store) == []
        assert len((await store.find(query(turn.text))).records) == 2
        assert len((await store.find(query("x", parents=("name",)))).records) == 2
        monkeypatch.undo()
        assert (await store.forget_roots([turn.reply.root])).records == 2
        assert not (await store.find(query("x", parents=("name",)))).records

    with_store(address_of(kind, tmp_path), work)
