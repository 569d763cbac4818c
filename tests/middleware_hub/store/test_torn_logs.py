"""What a crash or a bad disk leaves of a SQLite store: whole commits from the first one on, and never another token."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from middleware_hub.store.errors import StoreError
from middleware_hub.store.protocol import Store
from middleware_hub.store.sqlite import file
from middleware_hub.store.sqlite.file import connect
from tests.conftest import SLOW
from tests.middleware_hub.store.world import MEMORY, World, append_all, closed, findings, ids, query, with_store

ROOT = Path(__file__).parents[3]
NAME = "store.sqlite3"
HEAD, FRAME = 32, 24 + 4096
"""Bytes of a log's head, and of a page in it."""
STEP = 1 if SLOW else 61
GARBAGE = 200 if SLOW else 25


@pytest.fixture
def folder() -> Iterator[Path]:
    """One in which syncing takes no time."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as made:
        yield Path(made)


def conversation(turns: int) -> World:
    world, line = World(), None
    for number in range(turns):
        line = world.turn(line, f"user {number} " * 20, f"reply {number} " * 20, names=(f"name {number}",))
    return world


def live_copy(folder: Path, world: World) -> dict[str, bytes]:
    """Return the files of a store as they are while it is open: all of it is in the log."""
    files: dict[str, bytes] = {}

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        for name in (NAME, f"{NAME}-wal"):
            files[name] = (folder / name).read_bytes()

    with_store(f"sqlite:{folder}/", work)
    return files


def put(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def commits(log: bytes) -> list[int]:
    """Return where in a log each commit ends: in its last page's head stands the size of the file, else 0."""
    ends = range(HEAD, len(log) - FRAME + 1, FRAME)
    return [at + FRAME for at in ends if log[at + 8 : at + 16] == log[16:24] and any(log[at + 4 : at + 8])]


@pytest.mark.slow
def test_a_log_cut_at_any_byte_keeps_whole_commits(folder: Path) -> None:
    """Of its last commits: what was committed before the cut is there, and what was torn is told."""
    world = conversation(6)
    files = live_copy(folder / "live", world)
    log = files[f"{NAME}-wal"]
    ends = commits(log)
    near = {end + by for end in ends[-4:] for by in (-1, 0, 1, 7, 8, 23, 24, 25)}
    replies = [turn.reply.id for turn in world.turns]
    seen: dict[int, int] = {}
    for cut in sorted({*range(ends[-4], len(log), STEP), *(cut for cut in near if cut <= len(log))}):
        put(folder / "cut", {**files, f"{NAME}-wal": log[:cut]})
        torn = file.prepare(folder / "cut" / NAME, "toy")
        connection = connect(folder / "cut" / NAME)
        found = {row[0] for row in connection.execute("SELECT id FROM records")}
        connection.close()
        done = max(end for end in ends if end <= cut)
        count = seen.setdefault(done, sum(reply in found for reply in replies))
        assert found == {record.id for turn in world.turns[:count] for record in turn.records}, cut
        assert bool(torn) == (cut >= done + 16), (cut, done, torn)  # fewer bytes do not tell that they are a page's
    assert list(seen.values()) == sorted(seen.values())
    assert list(seen.values())[-1] == 6
    assert len(set(seen.values())) >= 3


@pytest.mark.parametrize("part", [NAME, f"{NAME}-wal"])
def test_garbage_gives_what_was_written_or_nothing(folder: Path, part: str) -> None:
    """Bytes of the file and of its log are spoilt: a record is as it was, or is not there, or an error says so."""
    world = conversation(8)
    files = live_copy(folder / "live", world)
    if part == NAME:  # all of it is in the file once the store was closed
        files = {NAME: (folder / "live" / NAME).read_bytes()}
    written = {record.id: record for turn in world.turns for record in turn.records}
    dice = random.Random(part)
    lost = whole = refused = 0

    async def work(store: Store) -> None:
        nonlocal lost, whole
        for turn in world.turns:
            try:
                found = await store.find(query(turn.text))
                assert closed(found)
                assert all(written[record.id] == record for record in found.records)
                lost += turn.reply.id not in ids(found)
                whole += turn.reply.id in ids(found)
            except StoreError:
                lost += 1
        try:
            async for record in store.scan():
                assert written[record.id] == record
        except StoreError:
            pass
        await findings(store)  # it ends, whatever it finds

    for _ in range(GARBAGE):
        spoilt = bytearray(files[part])
        for _ in range(dice.choice((1, 3, 30))):
            at, size = dice.randrange(len(spoilt)), dice.choice((1, 8, 512, 4096))
            spoilt[at : at + size] = dice.randbytes(min(size, len(spoilt) - at))
        put(folder / "spoilt", {**files, part: bytes(spoilt)})
        try:
            with_store(f"sqlite:{folder / 'spoilt'}/", work)
        except StoreError:
            refused += 1
    assert whole
    assert lost or refused


DYING = """
import os, sys
from middleware_hub.store.sqlite import appending, writer
import asyncio
from tests.middleware_hub.store import appender

left, where = int(sys.argv[4]), sys.argv[5]

class Dying:
    '''A connection that lets the process die around the last of some commits.'''
    def __init__(self, connection): self._connection = connection
    def __getattr__(self, name): return getattr(self._connection, name)
    def execute(self, sql, *values):
        global left
        if sql != 'COMMIT':
            return self._connection.execute(sql, *values)
        left -= 1
        if not left and where == 'before':
            os.kill(os.getpid(), 9)
        done = self._connection.execute(sql, *values)
        if not left:
            os.kill(os.getpid(), 9)
        return done

connect = writer.connect
writer.connect = lambda *given, **options: Dying(connect(*given, **options))
asyncio.run(appender.main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_process_dies_between_a_commit_and_its_acknowledgement(folder: Path, where: str) -> None:
    """What it was about to acknowledge is there whole, once, if it was committed; else it is not. The rest is there."""
    told: list[bytes] = []
    for life in range(4):
        command = [sys.executable, "-c", DYING, f"sqlite:{folder}/", f"life {life}", "1000", str(5 + life), where]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
        )
        assert done.returncode == -9, done.stderr
        told += [bytes.fromhex(line.split()[0]) for line in done.stdout.splitlines()[1:]]

    async def work(store: Store) -> None:
        found = [record.id async for record in store.scan() if record.sampled]
        assert len(found) == len(set(found))
        assert set(told) <= set(found)
        # The group that was being written has at most one batch of each of the four conversations.
        assert len(found) - len(told) in (range(1, 17) if where == "after" else range(17))
        assert set(await findings(store)) <= {"file"}

    with_store(f"sqlite:{folder}/", work)
    assert told


def test_a_full_disk_refuses_and_goes_on_when_there_is_room(folder: Path) -> None:
    """SQLite's own error for it: nothing of the batch is stored, what was is, and the same batch is taken later."""
    world = conversation(3)
    big = world.turn(world.turns[-1], "x", "much text " * 40_000)

    async def work(store: Store) -> None:
        await append_all(store, world.turns[:3])
        connection = store._writer._connection  # type: ignore[attr-defined]
        connection.execute("PRAGMA max_page_count = 60")
        with pytest.raises(StoreError, match="disk is full"):
            await store.append(big.batch)
        assert big.reply.id not in ids(await store.find(query(big.text)))
        assert world.turns[2].reply.id in ids(await store.find(query(world.turns[2].text)))
        connection.execute("PRAGMA max_page_count = 100000")
        await store.append(big.batch)
        assert big.reply.id in ids(await store.find(query(big.text)))
        assert await findings(store) == []

    with_store(f"sqlite:{folder}/", work)
