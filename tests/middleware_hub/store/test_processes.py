"""Several processes on one SQLite file, and processes that are killed."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Event
from middleware_hub.store.sqlite import writer
from middleware_hub.store.sqlite.store import SqliteStore
from tests.conftest import SLOW
from tests.middleware_hub.store.world import World, closed, findings, ids, query, sqlite, with_store

ROOT = Path(__file__).parents[3]
KILLS = 100 if SLOW else 20


def start(address: str, name: str, turns: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.middleware_hub.store.appender", address, name, str(turns)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def acknowledged(lines: list[str]) -> list[bytes]:
    """Return the replies that a process said were appended; the last line may be torn."""
    words = [line.split() for line in lines]
    return [bytes.fromhex(parts[0]) for parts in words if len(parts) == 3 and len(parts[0]) == 32]


def test_two_processes_share_a_file(tmp_path: Path) -> None:
    """All of both is there, each sees the other's, and their events stand in one log without gaps."""
    processes = [start(sqlite(tmp_path), name, 25) for name in ("one", "two")]
    lines = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
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

    with_store(sqlite(tmp_path), work)


def test_a_killed_process_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """At random moments, on one file again and again; the next process goes on where it is."""
    source = random.Random(7)
    replies: list[bytes] = []
    for number in range(KILLS):
        process = start(sqlite(tmp_path), f"process {number}", 10_000)
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        time.sleep(source.uniform(0, 0.15))
        process.kill()
        replies += acknowledged(process.communicate()[0].split("\n"))

    async def work(store: Store) -> None:
        assert len(replies) > 5 * KILLS
        for at in range(0, len(replies), 500):
            found = await store.get(replies[at : at + 500])
            assert (closed(found), found.damaged) == (True, 0)
            assert set(replies[at : at + 500]) <= ids(found)
        last = (await store.logs("shared"))[0].last
        assert last >= len(replies)
        assert set(await findings(store)) <= {"file"}  # a torn end, which nobody was told of

    with_store(sqlite(tmp_path), work)


def test_an_append_waits_in_a_thread_for_another_process(tmp_path: Path) -> None:
    """While that holds the file's lock, the event loop goes on; nothing overtakes what waits, and all of it is written."""
    world = World()
    turns = [world.turn(None, f"user {number}", "reply") for number in range(3)]

    async def work(store: Store) -> None:
        other = sqlite3.connect(tmp_path / "store.sqlite3", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        waiting = []
        for number, turn in enumerate(turns):
            batch = Batch(turn.records, {turn.reply.id: turn.path}, events=[Event("log", "turn", b"%d" % number)])
            waiting.append(asyncio.ensure_future(store.append(batch)))
            await asyncio.sleep(0.02)
        assert not any(append.done() for append in waiting)
        other.execute("COMMIT")
        other.close()
        assert await asyncio.wait_for(asyncio.gather(*waiting), 5) == [[1], [2], [3]]
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
        line = world.turn(None, "user", "reply")
        await store.append(line.batch)
        assert used._handed == 0
        line = world.turn(line, "user", "reply")
        await store.append(line.batch)
        assert used._handed == used._done == 1
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
        inline.connection.create_function("known", 1, lambda _: locked())
        found = await store.find(query(turn.text))
        assert ids(found) == {record.id for record in turn.records}

    def locked() -> None:
        raise sqlite3.OperationalError("database is locked")

    with_store(sqlite(tmp_path), work)
