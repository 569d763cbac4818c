"""Forgetting: whole conversations, in the order of their marks, across restarts; and the marks themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import apsw
import pytest

from middleware_hub.store.errors import LogMovedError, MissingRecordError, StoreUnreachableError
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Batch, Forgotten, Store
from middleware_hub.store.records import Blob, Event, Mark
from middleware_hub.store.redis.store import RedisStore
from middleware_hub.store.sqlite import checkpoints
from middleware_hub.store.sqlite.file import connect, place_of, store_error
from middleware_hub.store.sqlite.forgetting import forget_some, plan_roots
from middleware_hub.store.sqlite.store import SqliteStore
from tests.middleware_hub.store.world import (
    Turn,
    World,
    address_of,
    append_all,
    findings,
    ids,
    query,
    sqlite,
    with_store,
)
from tests.support.usual import usual

LASTING = ["sqlite", "redis", "valkey", "cluster"]
KINDS = ["memory", *LASTING]


def conversations(world: World, count: int, turns: int = 3) -> list[list[Turn]]:
    made = []
    for number in range(count):
        line = None
        talk = []
        for at in range(turns):
            line = world.turn(line, f"user {number} asks {at} " * 60, f"answer {at} " * 60, names=(f"{number}.{at}",))
            talk.append(line)
        made.append(talk)
    return made


async def left(store: Store, talks: list[list[Turn]]) -> list[int]:
    """Return which conversations are there; each is whole or not at all."""
    there = []
    for number, talk in enumerate(talks):
        found = ids(await store.find(query(talk[-1].text, parents=[f"{number}.{at}" for at in range(len(talk))])))
        whole = {record.id for turn in talk for record in turn.records}
        assert found in (set(), whole)
        if found:
            there.append(number)
    return there


@pytest.mark.parametrize("kind", usual(KINDS, "memory", "sqlite", "redis"))
def test_the_order_of_forgetting(kind: str, tmp_path: Path) -> None:
    """Retrieved ones first, the least recently hit first; what nobody retrieved goes last."""
    world = World()
    talks = conversations(world, 12)

    async def work(store: Store) -> None:
        for talk in talks:
            await append_all(store, talk)
        tick = world.serials.next()
        for at, number in enumerate([7, 3, 9]):
            store.note([Mark(talks[number][0].reply.root, tick + at, "2", retrieved=True)])
        store.note([Mark(talks[0][0].reply.root, tick + 50, "3")])
        assert await store.forget(1 << 40) == Forgotten()
        forgotten = Forgotten()
        order = []
        while forgotten.unretrieved < 3:
            before = await left(store, talks)
            if len(before) < 2:
                break
            forgotten = await store.forget((await store.stats()).bytes - 1)
            after = await left(store, talks)
            order += sorted(set(before) - set(after), key=[7, 3, 9, 1, 2, 4, 5, 6, 8, 10, 11, 0].index)
            assert forgotten.records == 6 * (len(before) - len(after))
            assert len(forgotten.stamps) == len(before) - len(after)
        assert order == [7, 3, 9, 1, 2, 4, 5, 6, 8, 10, 11, 0][: len(order)]
        assert len(order) >= 4
        assert await findings(store) == []

    with_store(address_of(kind, tmp_path), work)


@pytest.mark.parametrize("kind", usual(KINDS, "memory", "sqlite", "redis"))
def test_everything_can_be_forgotten(kind: str, tmp_path: Path) -> None:
    """Also blobs, and a conversation longer than one transaction; and what is forgotten can be appended again."""
    world = World()
    line = None
    for number in range(200):
        line = world.turn(line, f"user {number}", "reply")
    conversations(world, 3)
    blob = Blob(world.turns[0].reply.id, "routed_experts", "int8", (100,), bytes(100))

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        await store.append(Batch(blobs=[blob]))
        forgotten = await store.forget(0)
        assert (forgotten.unretrieved, forgotten.records) == (4, 418)
        stats = await store.stats()
        assert (stats.records, stats.roots) == (0, 0)
        assert await store.blobs(blob.record) == []
        assert not (await store.find(query(world.turns[50].text))).records
        assert await findings(store) == []
        await append_all(store, world.turns)
        assert (await store.stats()).records == 418
        assert await findings(store) == []

    with_store(address_of(kind, tmp_path), work)


@pytest.mark.parametrize("kind", usual(KINDS, "memory", "sqlite", "redis"))
def test_named_conversations_are_forgotten_and_no_others(kind: str, tmp_path: Path) -> None:
    world = World()
    talks = conversations(world, 6)
    roots = [talk[0].reply.root for talk in talks]

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        store.note([Mark(roots[4], world.serials.next(), "2", retrieved=True)])
        assert await store.forget_roots([]) == Forgotten()
        forgotten = await store.forget_roots([roots[4], roots[1], roots[4], bytes(16)])
        assert (forgotten.retrieved, forgotten.unretrieved, forgotten.records) == (1, 1, 12)
        assert sorted(forgotten.stamps) == ["1", "2"]
        assert await left(store, talks) == [0, 2, 3, 5]
        assert await findings(store) == []

    with_store(address_of(kind, tmp_path), work)


@pytest.mark.parametrize(
    ("count", "turns", "steps"), [(3, 50, [[100], []]), (2, 140, [[24, 280], [280], [24], []])], ids=["short", "long"]
)
def test_a_transaction_splits_only_what_is_longer_than_one(
    count: int, turns: int, steps: list[list[int]], tmp_path: Path
) -> None:
    """A process may be killed after each: `steps` are the records that are left then of each conversation."""
    world = World()
    talks = conversations(world, count, turns)
    with_store(sqlite(tmp_path), lambda store: append_all(store, world.turns))
    connection = connect(place_of(str(tmp_path)))
    plans = plan_roots(connection, [talk[0].reply.root for talk in talks])
    for left_there in steps:
        connection.execute("BEGIN IMMEDIATE")
        forget_some(connection, plans)
        connection.execute("COMMIT")
        counts = connection.execute("SELECT count(*) FROM records GROUP BY root ORDER BY root")
        assert [count for (count,) in counts] == left_there
    connection.close()
    assert not plans


def test_a_damaged_record_is_forgotten_with_the_places_that_led_to_it(tmp_path: Path) -> None:
    """Where it was entered cannot be computed from it any more."""
    world = World()

    async def work(store: Store) -> None:
        await store.append(world.turn(None, "user", "reply", names=("name",)).batch)
        connection = connect(tmp_path / "store.sqlite3")
        connection.execute("UPDATE records SET body = x'00ff'")
        assert (await store.forget(0)).records == 2
        counts = [connection.execute(f"SELECT count(*) FROM {table}").get for table in ("records", "places", "roots")]
        connection.close()
        assert counts == [0, 0, 0]

    with_store(sqlite(tmp_path), work)


def test_a_conversation_that_has_grown_since_it_was_planned_is_left_out(tmp_path: Path) -> None:
    """Its new turn would be left without what it builds on."""
    world = World()
    talks = conversations(world, 2)
    new = world.turn(talks[0][-1], "more", "reply")

    async def work(store: Store) -> None:
        await append_all(store, [*talks[0], *talks[1]])
        connection = connect(place_of(str(tmp_path)))
        plans = plan_roots(connection, [talk[0].reply.root for talk in talks])
        await store.append(new.batch)
        connection.execute("BEGIN IMMEDIATE")
        forget_some(connection, plans)
        connection.execute("COMMIT")
        connection.close()

    async def check(store: Store) -> None:
        kept = {record.id async for record in store.scan()}
        assert kept == {record.id for turn in (*talks[0], new) for record in turn.records}
        assert await findings(store) == []

    with_store(sqlite(tmp_path), work)
    with_store(sqlite(tmp_path), check)


@pytest.mark.parametrize("kind", usual(["redis", "cluster"], "redis"))
def test_a_conversation_that_has_grown_since_it_was_read_is_left_out(kind: str, tmp_path: Path) -> None:
    """Also its places: what is there is found."""
    world = World()
    first = world.turn(None, "user", "reply")
    second = world.turn(first, "more", "reply")

    async def work(store: Store) -> None:
        assert isinstance(store, RedisStore)
        await store.append(first.batch)
        opened = store._open()
        (read,) = await opened.reading.whole([first.reply.root])
        await store.append(second.batch)
        assert await opened.forgetting._forget_one(read) == (Forgotten(), 0)
        assert {first.reply.id, second.reply.id} <= ids(await store.find(query(second.text)))
        assert await findings(store) == []

    with_store(address_of(kind, tmp_path), work)


def test_a_long_conversation_is_forgotten_whole_even_if_the_process_is_killed_meanwhile(tmp_path: Path) -> None:
    """After the first transaction nothing of it is found, a router that goes on appends all, and the next opening ends it."""
    world = World()
    (talk,), other = conversations(world, 1, 200), world.turn(None, "another user", "reply")
    go_on = world.turn(talk[49], "a branch", "reply")

    def forget_first_part() -> None:
        connection = connect(place_of(str(tmp_path)))
        plans = plan_roots(connection, [talk[0].reply.root])
        connection.execute("BEGIN IMMEDIATE")
        assert forget_some(connection, plans) == ([], 256)
        connection.execute("COMMIT")
        connection.close()

    async def interrupted(store: Store) -> None:
        await append_all(store, world.turns[:201])
        await asyncio.to_thread(forget_first_part)
        assert await left(store, [talk]) == []
        first = talk[0].reply
        assert ids(await store.get([first.id])) == set()
        kept = {record.id async for record in store.scan()}
        assert first.id not in kept
        assert (await store.stats()).records == len(kept) == 2
        assert await findings(store) == []
        with pytest.raises(MissingRecordError):
            await store.append(go_on.batch)
        await append_all(store, [*talk[:50], go_on])
        assert go_on.reply.id in ids(await store.find(query(go_on.text)))

    async def reopened(store: Store) -> None:
        assert ids(await store.find(query(go_on.text))) == {r.id for turn in [*talk[:50], go_on] for r in turn.records}
        assert len(ids(await store.find(query(other.text)))) == 2
        await store.forget_roots([])  # waits for what the opening began
        assert (await store.stats()).records == 104
        assert await findings(store) == []

    with_store(sqlite(tmp_path), interrupted)
    with_store(sqlite(tmp_path), reopened)


@pytest.mark.parametrize("kind", usual(LASTING, "sqlite", "redis"))
def test_the_order_outlives_a_restart(kind: str, tmp_path: Path) -> None:
    address = address_of(kind, tmp_path)
    world = World()
    talks = conversations(world, 6)

    async def fill(store: Store) -> None:
        for talk in talks:
            await append_all(store, talk)
        store.note([Mark(talks[4][0].reply.root, world.serials.next(), "2", retrieved=True)])
        store.note([Mark(talks[0][0].reply.root, world.serials.next(), "2")])

    async def forget(store: Store) -> None:
        assert (await store.forget((await store.stats()).bytes - 1)).retrieved == 1
        assert 4 not in await left(store, talks)
        while len(there := await left(store, talks)) > 1:
            await store.forget((await store.stats()).bytes - 1)
        assert there == [0]

    with_store(address, fill)
    with_store(address, forget)


def test_space_is_used_again(tmp_path: Path) -> None:
    """The file does not grow while as much is forgotten as is appended."""
    world = World()

    async def work(store: Store) -> None:
        sizes = []
        for _ in range(8):
            for talk in conversations(world, 30):
                await append_all(store, talk)
            await store.forget(600_000)
            used = (await store.stats()).bytes
            assert used <= 600_000
            with connect(tmp_path / "store.sqlite3") as connection:
                (pages,) = connection.execute("PRAGMA page_count").fetchone()
            connection.close()
            sizes.append(pages)
        assert sizes[-1] <= 1.2 * sizes[2]

    with_store(sqlite(tmp_path), work)


@pytest.mark.parametrize("kind", usual(LASTING, "sqlite", "redis"))
def test_a_conversation_that_goes_on_is_left_out(kind: str, tmp_path: Path) -> None:
    """Turns are appended while others are forgotten: what is acknowledged last of all is there."""
    world = World()
    talks = conversations(world, 40)

    async def work(store: Store) -> None:
        for talk in talks:
            await append_all(store, talk)
        line = talks[39][-1]

        async def go_on() -> Turn:
            nonlocal line
            for number in range(40):
                line = world.turn(line, f"more {number}", "reply")
                await store.append(line.batch)
            return line

        last, forgotten = await asyncio.gather(go_on(), store.forget(300_000))
        assert forgotten.records
        assert last.reply.id in ids(await store.find(query(last.text)))
        assert await findings(store) == []

    with_store(address_of(kind, tmp_path), work)


@pytest.mark.parametrize("kind", usual(LASTING, "sqlite", "redis"))
def test_what_is_forgotten_and_appended_again_at_once_is_found(kind: str, tmp_path: Path) -> None:
    """A router that goes on with a conversation that is being forgotten appends all of it again: under the same ids."""
    world = World()
    talks = conversations(world, 4)
    whole = [
        Batch([r for turn in talk for r in turn.records], {turn.reply.id: turn.path for turn in talk}) for talk in talks
    ]
    roots = [talk[0].reply.root for talk in talks]

    async def work(store: Store) -> None:
        for batch in whole:
            await store.append(batch)

        async def again(batch: Batch) -> None:
            for _ in range(30):
                await store.append(batch)

        async def forget() -> Forgotten:
            done = Forgotten()
            for _ in range(30):
                done = done.plus(await store.forget_roots(roots))
            return done

        *_, forgotten, other = await asyncio.gather(*(again(batch) for batch in whole), forget(), forget())
        assert forgotten.records + other.records >= 24
        for batch in whole:
            await store.append(batch)
        assert await left(store, talks) == [0, 1, 2, 3]
        assert await findings(store) == []
        stats = await store.stats()
        assert (stats.records, stats.roots) == (24, 4)
        await store.forget(0)
        assert (await store.stats()).records == 0

    with_store(address_of(kind, tmp_path), work)


@pytest.mark.parametrize("kind", KINDS)
def test_events_of_deleted_logs_go_first(kind: str, tmp_path: Path) -> None:
    """The log stays closed, and no conversation is forgotten if that is enough. A log that has only ended keeps all."""
    turn = World().turn(None, "user", "reply")

    async def work(store: Store) -> None:
        await store.append(turn.batch)
        size = (await store.stats()).bytes
        for log in ("gone", "kept"):
            await store.append(Batch(events=[Event(log, "turn", bytes(1_000)) for _ in range(500)]))
        await store.append(Batch(events=[Event("gone", "deleted", closes=2), Event("kept", "finalized", closes=1)]))
        forgotten = await store.forget(size + 800_000)
        assert (forgotten.events, forgotten.records) == (500, 0)
        assert [event.number for event in await store.read("gone")] == [501]
        assert len(await store.read("kept")) == 501
        assert (await store.logs("gone"))[0].closed == 2
        assert await findings(store) == []

    with_store(address_of(kind, tmp_path), work)


@pytest.mark.parametrize("kind", usual(LASTING, "sqlite", "redis"))
def test_marks_are_not_waited_for(kind: str, tmp_path: Path) -> None:
    """They are there after a second, or as soon as the store is closed."""
    turn = World().turn(None, "user", "reply")
    mark = Mark(turn.reply.root, turn.reply.serial + 1, "2", retrieved=True)

    async def note(store: Store) -> None:
        await store.append(turn.batch)
        store.note([mark])

    async def check(store: Store) -> None:
        assert (await store.find(query(turn.text))).marks == {turn.reply.root: mark}

    address = address_of(kind, tmp_path)
    with_store(address, note)
    with_store(address, check)


@pytest.mark.parametrize("kind", usual(LASTING, "sqlite", "redis"))
def test_an_earlier_mark_of_another_process_takes_nothing_from_a_later_one(kind: str, tmp_path: Path) -> None:
    turn = World().turn(None, "user", "reply")
    root, serial = turn.reply.root, turn.reply.serial

    async def note(store: Store) -> None:
        await store.append(turn.batch)
        store.note([Mark(root, serial + 9, "2", retrieved=True)])

    async def note_earlier(store: Store) -> None:
        store.note([Mark(root, serial + 1, "1")])

    async def check(store: Store) -> None:
        assert (await store.find(query(turn.text))).marks == {root: Mark(root, serial + 9, "2", retrieved=True)}

    address = address_of(kind, tmp_path)
    for work in (note, note_earlier, check):
        with_store(address, work)


DURABILITIES = [("sqlite", "process"), ("sqlite", "disk"), ("sqlite", "off"), ("redis", "off"), ("cluster", "off")]


@pytest.mark.parametrize(("kind", "durability"), DURABILITIES)
def test_the_last_group_marks_its_conversation(kind: str, tmp_path: Path, durability: str) -> None:
    """A store that is closed behind an append knows that the conversation was used by it."""
    world = World()
    first = world.turn(None, "user", "reply")
    second = world.turn(first, "more", "reply")
    address = address_of(kind, tmp_path)

    async def append() -> None:
        store = open_store(address, durability=durability)  # type: ignore[arg-type]
        await store.open("toy")
        await store.append(first.batch)
        await store.append(second.batch)
        await store.close()

    async def check(store: Store) -> None:
        assert (await store.find(query(second.text))).marks[first.reply.root].tick == second.reply.serial

    asyncio.run(append())
    with_store(address, check)


@pytest.mark.parametrize(("kind", "durability"), DURABILITIES)
def test_every_durability_keeps_what_was_appended(kind: str, tmp_path: Path, durability: str) -> None:
    address = address_of(kind, tmp_path)
    world = World()
    talks = conversations(world, 3)

    async def work() -> None:
        store = open_store(address, durability=durability)  # type: ignore[arg-type]
        await store.open("toy")
        for talk in talks:
            await append_all(store, talk)
        assert await store.append(Batch(events=[Event("log", "turn")])) == [1]
        await store.close()
        await store.close()

    async def check(store: Store) -> None:
        assert await left(store, talks) == [0, 1, 2]

    asyncio.run(work())
    with_store(address, check)


def test_disk_durability_syncs_each_commit(tmp_path: Path) -> None:
    """`synchronous` is FULL (2) where an acknowledgement has to survive a power cut, and NORMAL (1) else."""
    for synced, level in ((True, 2), (False, 1)):
        connection = connect(tmp_path / "x.sqlite3", synced=synced)
        assert connection.execute("PRAGMA synchronous").fetchone() == (level,)
        connection.close()


def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path) -> None:
    """The append is refused with what to do; what was there before is there, and appends go on when there is room."""
    world = World()
    small, large = world.turn(None, "user", "reply"), world.turn(None, "large" * 100_000, "reply")

    async def work(store: Store) -> None:
        assert isinstance(store, SqliteStore)
        await store.append(small.batch)
        connection = store._open_writer()._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 5}")
        with pytest.raises(StoreUnreachableError, match="make room"):
            await store.append(large.batch)
        assert ids(await store.find(query(small.text)))
        connection.execute("PRAGMA max_page_count = 1000000")
        await store.append(large.batch)
        assert await findings(store) == []

    with_store(sqlite(tmp_path), work)


def test_a_disk_without_room_for_the_index_of_the_log_is_full() -> None:
    """SQLite says "disk I/O error"."""
    error = apsw.IOError("disk I/O error")
    error.extendedresult = apsw.SQLITE_IOERR_SHMSIZE
    assert "the disk is full" in store_error(Path("store.sqlite3"), error).message


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    async def work() -> None:
        store = open_store(sqlite(tmp_path))
        with pytest.raises(StoreUnreachableError, match="not open"):
            await store.find(query("x"))
        await store.open("toy")
        await store.close()
        with pytest.raises(StoreUnreachableError, match="not open"):
            await store.append(Batch())

    asyncio.run(work())


@pytest.mark.slow
def test_the_log_is_put_into_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a load that never pauses, too: the log stays a few times as long as a checkpoint's beginning."""
    monkeypatch.setattr(checkpoints, "_CHECKPOINT_PAGES", 100)
    world = World()

    async def work(store: Store) -> None:
        async def client() -> None:
            line = None
            for number in range(400):
                line = world.turn(line, f"user {number}", "reply")
                await store.append(line.batch)

        await asyncio.gather(*(client() for _ in range(8)))
        log = await asyncio.to_thread((tmp_path / "store.sqlite3-wal").stat)
        assert log.st_size < 4_120 * 3_000
        assert await findings(store) == []

    with_store(sqlite(tmp_path), work)


@pytest.mark.parametrize("turns", [1, 24])
def test_the_length_of_the_log_is_known_for_groups_of_any_size(tmp_path: Path, turns: int) -> None:
    """Else a busy router's log grows to many times the length at which a checkpoint begins."""

    async def work(store: Store) -> None:
        assert isinstance(store, SqliteStore)
        counted = store._open_writer()._checkpoints
        before, length = counted.pages, (tmp_path / "store.sqlite3-wal").stat().st_size
        for number in range(20):
            group = [World().turn(None, f"{number}/{turn} asks " * 100, "reply " * 200) for turn in range(turns)]
            records = [record for turn in group for record in turn.records]
            await store.append(Batch(records, {turn.reply.id: turn.path for turn in group}))
        written = ((tmp_path / "store.sqlite3-wal").stat().st_size - length) / 4_120
        assert 0.5 < (counted.pages - before) / written < 2

    with_store(sqlite(tmp_path), work)


@pytest.mark.parametrize("kind", KINDS)
def test_deleted_logs_are_forgotten_as_a_whole(kind: str, tmp_path: Path) -> None:
    """An open log stays, and what is appended after this begins the log again."""

    async def work(store: Store) -> None:
        empty = (await store.stats()).bytes
        await store.append(Batch(events=[Event("open", "turn"), Event("closed", "finalized", closes=1)]))
        size = (await store.stats()).bytes
        names = [f"gone/{number}" for number in range(300)]
        for name in names:
            await store.append(Batch(events=[Event(name, "turn", bytes(300)), Event(name, "deleted", closes=2)]))
        assert (await store.stats()).bytes >= size + 90_000
        assert await store.forget_logs([*names, "open", "closed", "missing", names[0]]) == 300
        assert [info.log for info in await store.logs()] == ["closed", "open"]
        assert (await store.stats()).logs == 2
        assert (await store.stats()).bytes <= size + 2 * (size - empty)
        assert await store.read(names[0]) == []
        assert await findings(store) == []
        with pytest.raises(LogMovedError) as refused:
            await store.append(Batch(events=[Event(names[0], "turn", expected=2)]))
        assert refused.value.last == 0
        assert await store.append(Batch(events=[Event(names[0], "turn", expected=0)])) == [1]
        assert (await store.logs("gone"))[0].closed == 0
        assert await findings(store) == []

    with_store(address_of(kind, tmp_path), work)
