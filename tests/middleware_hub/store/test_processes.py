"""Several processes on one SQLite file, and processes that are killed."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import apsw
import pytest

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Event, Mark
from middleware_hub.store.sqlite import file, writer
from middleware_hub.store.sqlite.file import FORMAT, connect
from middleware_hub.store.sqlite.store import SqliteStore
from tests.conftest import SLOW
from tests.middleware_hub.store.world import World, address_of, closed, findings, ids, query, sqlite, with_store
from tests.support.programs import Process
from tests.support.usual import usual

KILLS = 100 if SLOW else 20


def appender(address: str, name: str, turns: int, folder: Path) -> Process:
    command = sys.executable, "-m", "tests.middleware_hub.store.appender", address, name, str(turns)
    return Process(name, *command, folder=folder, up="open\n")


def acknowledged(lines: list[str]) -> list[bytes]:
    """Return the replies that a process said were appended; the last line may be torn."""
    words = [line.split() for line in lines]
    return [bytes.fromhex(parts[0]) for parts in words if len(parts) == 3 and len(parts[0]) == 32]


@pytest.mark.parametrize("kind", usual(["sqlite", "redis", "cluster"], "sqlite", "redis"))
def test_two_processes_share_a_store(kind: str, tmp_path: Path) -> None:
    """All of both is there, each sees the other's, and their events stand in one log without gaps."""
    address = address_of(kind, tmp_path)
    with appender(address, "one", 25, tmp_path) as one, appender(address, "two", 25, tmp_path) as two:
        assert [process.exit_code() for process in (one, two)] == [0, 0]
        lines = [process.log.splitlines() for process in (one, two)]
    assert [some[-1] for some in lines] == ["done", "done"]

    async def work(store: Store) -> None:
        replies = acknowledged(lines[0]) + acknowledged(lines[1])
        assert len(replies) == 200
        found = await store.get(replies)
        assert closed(found)
        assert set(replies) <= ids(found)
        events = await store.read("shared")
        assert [event.number for event in events] == list(range(1, 201))
        for name in ("one", "two"):
            for number in range(4):
                mine = [event.data.split() for event in events if event.data.startswith(f"{name} {number} ".encode())]
                assert [int(at) for _, _, at in mine] == list(range(25))
        assert await findings(store) == []

    with_store(address, work)


@pytest.mark.slow
@pytest.mark.parametrize("kind", usual(["sqlite", "redis"], "sqlite"))
def test_a_killed_process_loses_nothing_that_was_acknowledged(kind: str, tmp_path: Path) -> None:
    """At random moments, on one store again and again; the next process goes on where it is."""
    source = random.Random(7)
    replies: list[bytes] = []
    address = address_of(kind, tmp_path)
    for number in range(KILLS):
        with appender(address, f"process {number}", 10_000, tmp_path) as process:
            process.wait_until_up()
            while len(process.log.split("\n")) < 10:
                time.sleep(0.002)  # a poll of another process: there is nothing to wait on
            time.sleep(source.uniform(0, 0.1))
            process.kill()
            replies += acknowledged(process.log.split("\n"))

    async def work(store: Store) -> None:
        assert len(replies) > 5 * KILLS
        for at in range(0, len(replies), 500):
            found = await store.get(replies[at : at + 500])
            assert (closed(found), found.damaged) == (True, 0)
            assert set(replies[at : at + 500]) <= ids(found)
        last = (await store.logs("shared"))[0].last
        assert last >= len(replies)
        assert set(await findings(store)) <= {"file"}  # a torn end, which nobody was told of

    with_store(address, work)


def test_an_append_waits_in_a_thread_for_another_process(tmp_path: Path) -> None:
    """While that holds the file's lock, the event loop goes on; nothing overtakes what waits, and all of it is written."""
    world = World()
    turns = [world.turn(None, f"user {number}", "reply") for number in range(3)]

    async def work(store: Store) -> None:
        other = connect(tmp_path / "store.sqlite3")
        other.execute("BEGIN IMMEDIATE")
        waiting = []
        for number, turn in enumerate(turns):
            batch = Batch(turn.records, {turn.reply.id: turn.path}, events=[Event("log", "turn", b"%d" % number)])
            waiting.append(asyncio.ensure_future(store.append(batch)))
            await asyncio.sleep(0.02)
        assert not any(append.done() for append in waiting)
        other.execute("COMMIT")
        other.close()
        assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == [[1], [2], [3]]
        assert [event.data for event in await store.read("log")] == [b"0", b"1", b"2"]
        await store.append(world.turn(turns[0], "more", "reply").batch)
        assert await findings(store) == []

    with_store(sqlite(tmp_path), work)


def test_a_disk_that_was_slow_is_left_to_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is what is large; all of it is written."""
    world = World()

    async def work(store: Store) -> None:
        assert isinstance(store, SqliteStore)
        monkeypatch.setattr(writer, "_SLOW", -1.0)
        used = store._open_writer()
        line = None
        for handed in (0, 0, 1):  # one slow group may have waited for a processor
            line = world.turn(line, "user", "reply")
            await store.append(line.batch)
            assert used._handed == used._done == handed
        used._patient_until = 0.0
        await store.append(world.turn(line, "user" * 100_000, "reply").batch)
        assert used._handed == used._done == 2
        assert await findings(store) == []

    with_store(sqlite(tmp_path), work)


def test_a_lookup_waits_in_a_thread_for_a_file_that_is_locked(tmp_path: Path) -> None:
    """A process that mends the log after another was killed holds all locks for a moment: the event loop goes on."""
    world = World()
    turn = world.turn(None, "user", "reply")

    async def work(store: Store) -> None:
        await store.append(turn.batch)
        assert isinstance(store, SqliteStore)
        inline, _ = store._open_readers()
        inline.connection.create_scalar_function("known", locked, 1)
        found = await store.find(query(turn.text))
        assert ids(found) == {record.id for record in turn.records}

    def locked(*_: object) -> None:
        raise apsw.BusyError("database is locked")

    with_store(sqlite(tmp_path), work)


def test_news_of_another_process_are_waited_for_and_announcements_are_shared(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        other = open_store(sqlite(tmp_path))
        await other.open("toy")
        try:
            waiting = asyncio.ensure_future(store.wait("control", 0, 30.0))
            await asyncio.sleep(0.05)
            await other.append(Batch(events=[Event("control", "said")]))
            assert await waiting == 1
            await other.announce("router/2", b"here", 30.0)
            await store.announce("router/1", b"here", 30.0)
            assert set(await store.announced("router/")) == {"router/1", "router/2"} == set(await other.announced())
            await other.trim("control", 2)
            assert await store.read("control") == []
            assert await store.append(Batch(events=[Event("control", "said")])) == [2]
        finally:
            await other.close()
        assert set(await store.announced("router/")) == {"router/1", "router/2"}, "they outlive the process"

    with_store(sqlite(tmp_path), work)


def test_a_closed_store_ends_the_waiting(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        waiting = asyncio.ensure_future(store.wait("control", 0, 30.0))
        await asyncio.sleep(0.05)
        await store.close()
        with pytest.raises(StoreUnreachableError):
            await waiting

    with_store(sqlite(tmp_path), work)


def test_a_file_of_the_first_format_is_brought_up(tmp_path: Path) -> None:
    """Also while a router that knows only the first format has it open."""

    async def work(store: Store) -> None:
        await store.append(Batch(events=[Event("a", "turn"), Event("a", "turn")]))

    with_store(sqlite(tmp_path), work)
    connection = connect(tmp_path / "store.sqlite3")
    for change in ("DROP TABLE announced", "ALTER TABLE logs DROP COLUMN first", "PRAGMA user_version = 1"):
        connection.execute(change)

    async def again(store: Store) -> None:
        connection.execute("UPDATE logs SET last = last")
        assert connection.changes() == 1
        assert len(await store.read("a")) == 2
        await store.trim("a", 2)
        await store.announce("router/1", b"here", 30.0)
        assert len(await store.read("a")) == 1
        assert await findings(store) == []

    with_store(sqlite(tmp_path), again)
    assert connection.execute("PRAGMA user_version").fetchone() == (FORMAT,)
    connection.close()


def test_marks_never_hold_up_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes the lock between a group and the marks behind it. They are kept until they can be written."""
    world = World()
    first, second = (world.turn(None, f"user {number}", "reply") for number in range(2))
    mark = Mark(first.reply.root, second.reply.serial + 1, "2", retrieved=True)
    other = connect(tmp_path / "store.sqlite3")
    append = writer.SqliteWriter._append
    sleep, slept = time.sleep, set[threading.Thread]()

    def noted(seconds: float) -> None:
        slept.add(threading.current_thread())
        sleep(seconds)

    def and_then_another(*args: Any, **more: Any) -> Any:
        found = append(*args, **more)
        other.execute("BEGIN IMMEDIATE")
        return found

    async def work(store: Store) -> None:
        await store.append(first.batch)
        await asyncio.sleep(writer._MARKS_EVERY / 3)  # else the next group leaves them to a later one
        store.note([mark])
        monkeypatch.setattr(writer.SqliteWriter, "_append", and_then_another)
        monkeypatch.setattr(file, "_BUSY_SECONDS", 2.0)
        monkeypatch.setattr(time, "sleep", noted)
        await store.append(second.batch)
        assert threading.current_thread() not in slept, "who waits for the lock sleeps"
        other.execute("COMMIT")
        other.close()

    async def check(store: Store) -> None:
        assert (await store.find(query(first.text))).marks == {first.reply.root: mark}

    with_store(sqlite(tmp_path), work)
    with_store(sqlite(tmp_path), check)


@pytest.mark.parametrize("long", [False, True])
def test_what_another_process_holds_up_is_written_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, long: bool
) -> None:
    """By the event loop, if that was short; else by the thread. A step, and what builds on what waits, come behind it."""
    monkeypatch.setattr(writer, "_HELD_UP", 0.0 if long else 60.0)
    world = World()
    turns = [world.turn(None, "user", "reply")]
    for number in range(3):
        turns.append(world.turn(turns[-1], f"more {number}", "reply"))
    other = connect(tmp_path / "store.sqlite3")

    async def work(store: Store) -> None:
        assert isinstance(store, SqliteStore)
        own = store._open_writer()
        other.execute("BEGIN IMMEDIATE")
        waiting = [asyncio.create_task(store.append(turns[0].batch))]
        await asyncio.sleep(0.02)
        assert not waiting[0].done()
        waiting += [asyncio.create_task(store.append(turn.batch)) for turn in turns[1:]]
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in waiting)
        assert own.waiting == len(turns)
        assert bool(own._handed) is long
        other.execute("COMMIT")
        await asyncio.gather(*waiting)
        other.execute("BEGIN IMMEDIATE")
        last = world.turn(turns[-1], "and last", "reply")
        appended = asyncio.create_task(store.append(last.batch))
        await asyncio.sleep(0.02)
        forgotten = asyncio.create_task(store.forget_roots([last.reply.root]))
        await asyncio.sleep(0.02)
        other.execute("COMMIT")
        await appended
        assert (await forgotten).records == 2 * len(world.turns)
        assert await findings(store) == []

    with_store(sqlite(tmp_path), work)
    other.close()


def test_who_announces_itself_again_during_a_look_is_there(tmp_path: Path) -> None:
    """Another router writes its announcement again between the beginning of a look and what the look reads."""

    async def work(store: Store) -> None:
        assert isinstance(store, SqliteStore)
        await store.announce("router/other", b"1", 60.0)
        inline, _ = store._open_readers()
        other = connect(tmp_path / "store.sqlite3")
        again: list[str] = []

        def announce_again(_: object, statement: str, __: object) -> bool:
            if "announced" in statement and not again:
                again.append(statement)
                now = time.monotonic()
                other.execute("UPDATE announced SET data = x'32', said = ?, until = ?", (now, now + 60))
            return True

        inline.connection.set_exec_trace(announce_again)
        found = await store.announced("router/")
        inline.connection.set_exec_trace(None)
        other.close()
        assert again
        assert list(found) == ["router/other"]

    with_store(sqlite(tmp_path), work)
