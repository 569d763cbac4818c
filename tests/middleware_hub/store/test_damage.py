"""Damage of a SQLite store: each kind is found, none becomes a wrong token."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from middleware_hub.store.errors import DamagedRecordError, StoreError, StoreMismatchError, StoreUnreachableError
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Batch, Durability, Store
from middleware_hub.store.records import Blob, Event
from middleware_hub.store.sqlite.file import SameFile, connect, place_of
from middleware_hub.store.sqlite.writer import SqliteWriter
from tests.middleware_hub.store.world import World, append_all, closed, findings, ids, query, sqlite, with_store

NAME = "store.sqlite3"


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A store with three turns of one conversation and another conversation, closed."""
    world = World()
    first = world.turn(None, "user" * 100, "reply" * 100, names=("first",))
    second = world.turn(first, "more" * 100, "answer" * 100)
    world.turn(second, "and on", "to the end")
    world.turn(None, "elsewhere", "untouched")

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        blob = Blob(first.reply.id, "routed_experts", "int32", (1,), b"1234")
        await store.append(Batch(blobs=[blob], events=[Event("log", "created"), Event("log", "turn", b"data")]))

    with_store(sqlite(tmp_path), work)
    return world


def change(folder: Path, statement: str, *values: object) -> None:
    connection = connect(folder / NAME)
    with connection:
        connection.execute(statement, values)
        assert connection.changes() > 0
    connection.close()


def flip(folder: Path, table: str, where: str, *values: object) -> None:
    connection = connect(folder / NAME)
    (body,) = connection.execute(f"SELECT body FROM {table} WHERE {where}", values).fetchone()
    cut = body[:-1] + bytes((body[-1] ^ 1,))
    with connection:
        connection.execute(f"UPDATE {table} SET body = ? WHERE {where}", (cut, *values))
    connection.close()


def test_a_whole_store_has_no_findings(tmp_path: Path, world: World) -> None:
    assert with_store(sqlite(tmp_path), findings) == []


NO_UTF8 = "UPDATE {table} SET {column} = CAST(x'ff31' AS TEXT)"


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("record", lambda folder, world: flip(folder, "records", "id = ?", world.turns[0].reply.id)),
        ("link", lambda folder, world: change(folder, "DELETE FROM records WHERE id = ?", world.turns[0].reply.id)),
        (
            "link",
            lambda folder, world: change(folder, "UPDATE records SET line = 1 WHERE id = ?", world.turns[1].reply.id),
        ),
        (
            "link",
            lambda folder, world: change(folder, "UPDATE records SET root = 3 WHERE id = ?", world.turns[1].reply.id),
        ),
        ("record", lambda folder, world: change(folder, "UPDATE records SET id = ? WHERE n = 2", b"?" * 16)),
        ("index", lambda folder, _: change(folder, "DELETE FROM places WHERE kind = 1 AND record = 2")),
        ("index", lambda folder, _: change(folder, "UPDATE places SET length = 401 WHERE kind = 0 AND record = 2")),
        ("index", lambda folder, _: change(folder, "DELETE FROM places WHERE kind = 5")),
        ("index", lambda folder, _: change(folder, "INSERT INTO places VALUES (x'00', 0, x'', 5, 99)")),
        ("blob", lambda folder, _: flip(folder, "blobs", "name = 'routed_experts'")),
        ("event", lambda folder, _: flip(folder, "events", "number = 2")),
        ("event", lambda folder, _: change(folder, "DELETE FROM events WHERE number = 1")),
        ("event", lambda folder, _: change(folder, "DELETE FROM events WHERE number = 2")),
        ("file", lambda folder, _: change(folder, NO_UTF8.format(table="roots", column="stamp"))),
        ("file", lambda folder, _: change(folder, NO_UTF8.format(table="logs", column="name"))),
    ],
)
def test_verify_finds_it(tmp_path: Path, world: World, kind: str, damage: Callable[[Path, World], None]) -> None:
    damage(tmp_path, world)
    assert kind in with_store(sqlite(tmp_path), findings)


def test_what_builds_on_damage_is_left_out(tmp_path: Path, world: World) -> None:
    """Neither it nor what comes behind it is found; what comes before it and other conversations are."""
    flip(tmp_path, "records", "id = ?", world.turns[1].reply.id)

    async def work(store: Store) -> None:
        found = await store.find(query(world.turns[2].text))
        assert closed(found)
        assert ids(found) >= {record.id for record in world.turns[0].records}
        assert not ids(found) & {turn.reply.id for turn in world.turns[1:3]}
        assert found.damaged
        assert (await store.stats()).damaged == found.damaged
        assert not (await store.find(query(world.turns[3].text))).damaged
        assert len([record async for record in store.scan()]) == 7

    with_store(sqlite(tmp_path), work)


def test_a_missing_parent_is_left_out(tmp_path: Path, world: World) -> None:
    change(tmp_path, "DELETE FROM records WHERE id = ?", world.turns[0].reply.id)

    async def work(store: Store) -> None:
        found = await store.find(query(world.turns[2].text))
        assert found.damaged
        assert not ids(found) & {turn.reply.id for turn in world.turns[:3]}

    with_store(sqlite(tmp_path), work)


def test_a_text_that_is_no_utf8_is_damage(tmp_path: Path, world: World) -> None:
    """SQLite does not check texts, and has no checksums."""
    change(tmp_path, NO_UTF8.format(table="roots", column="stamp"))
    change(tmp_path, NO_UTF8.format(table="logs", column="name"))

    async def work(store: Store) -> None:
        for asked in (store.find(query(world.turns[0].text)), store.logs(), store.forget(1)):
            with pytest.raises(DamagedRecordError, match="store verify"):
                await asked
        assert (await store.stats()).logs == 1

    with_store(sqlite(tmp_path), work)


def test_damaged_blobs_and_events_are_refused(tmp_path: Path, world: World) -> None:
    flip(tmp_path, "blobs", "name = 'routed_experts'")
    flip(tmp_path, "events", "number = 2")

    async def work(store: Store) -> None:
        with pytest.raises(DamagedRecordError):
            await store.blobs(world.turns[0].reply.id)
        with pytest.raises(DamagedRecordError):
            await store.read("log")
        assert len(await store.read("log", limit=1)) == 1

    with_store(sqlite(tmp_path), work)


@pytest.mark.parametrize("share", [0.0005, 0.1, 0.5, 0.9])
def test_a_cut_file_is_told(tmp_path: Path, world: World, share: float) -> None:
    path = tmp_path / NAME
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))

    async def work(store: Store) -> list[str]:
        return await findings(store)

    try:
        kinds = with_store(sqlite(tmp_path), work)
    except (StoreMismatchError, DamagedRecordError, StoreUnreachableError):
        return  # it did not even open
    assert "file" in kinds


def cut_log(folder: Path, world: World) -> Path:
    """Return a folder with a copy of a store that is in use: all of it is in the log still."""
    copy = folder / "copy"
    copy.mkdir()

    def take() -> None:
        for part in folder.glob("live/*"):
            shutil.copy(part, copy / part.name)

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        await asyncio.to_thread(take)

    with_store(f"sqlite:{folder / 'live'}/", work)
    return copy


@pytest.mark.parametrize("lost", [1, 100, 4_096, 9_000, 20_000])
def test_a_cut_log_loses_its_end_only(tmp_path: Path, lost: int) -> None:
    """What is left is whole, from the first turn on; and that something was torn is told."""
    world = World()
    line = None
    for number in range(30):
        line = world.turn(line, f"user {number}", "reply")
    copy = cut_log(tmp_path, world)
    log = copy / f"{NAME}-wal"
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - lost)

    async def work(store: Store) -> None:
        kinds = await findings(store)
        records = [record async for record in store.scan()]
        every = [record for turn in world.turns for record in turn.records]
        assert records == every[: len(records)]
        assert len(records) < len(every)
        assert kinds == (["file"] if (await store.stats()).torn_bytes else [])
        assert (await store.stats()).torn_bytes or lost % 4_120 == 0

    with_store(f"sqlite:{copy}/", work)


def test_a_flipped_byte_in_the_log_cuts_it_there(tmp_path: Path) -> None:
    world = World()
    for number in range(20):
        world.turn(None, f"user {number}", "reply")
    copy = cut_log(tmp_path, world)
    log = copy / f"{NAME}-wal"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(bytes(data))

    async def work(store: Store) -> None:
        assert await findings(store) == ["file"]
        assert (await store.stats()).torn_bytes > 0
        assert 0 < len([record async for record in store.scan()]) < 40

    with_store(f"sqlite:{copy}/", work)


def refused(address: str, kind: type[StoreError], words: str) -> None:
    async def work() -> None:
        store = open_store(address)
        with pytest.raises(kind, match=words):
            await store.open("toy")
        await store.close()

    asyncio.run(work())


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("these are notes, and no store of anything at all\n" * 100)
    refused(f"sqlite:{tmp_path / 'notes.txt'}", StoreMismatchError, "name another path")
    connection = connect(tmp_path / "other.db")
    connection.execute("CREATE TABLE t(a)")
    connection.close()
    refused(f"sqlite:{tmp_path / 'other.db'}", StoreMismatchError, "something else")
    assert (tmp_path / "notes.txt").read_text().startswith("these are notes")


def test_a_newer_format_is_refused(tmp_path: Path, world: World) -> None:
    connection = connect(tmp_path / NAME)
    connection.execute("PRAGMA user_version = 3")
    connection.close()
    refused(sqlite(tmp_path), StoreMismatchError, "update the router")


def test_a_place_where_no_file_can_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(f"sqlite:{tmp_path}/file/store.sqlite3", StoreUnreachableError, "cannot be made|cannot be opened")
    refused("sqlite:/proc/none/store.sqlite3", StoreUnreachableError, "cannot be made")
    # As in a folder that this user may not see: a system call fails with something else than "there is no such file".
    refused(f"sqlite:{tmp_path}/{'x' * 300}", StoreUnreachableError, "cannot be made")
    refused(f"sqlite:{tmp_path}/{'x' * 300}.sqlite3", StoreUnreachableError, "cannot be opened|unable to open")


@pytest.mark.parametrize("given", ["store", "store/"])
def test_a_folder_that_another_process_makes_meanwhile_has_the_file_in_it(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two routers that start together with one path use one file, whichever is first."""

    def looking(look: Callable[[str], bool]) -> Callable[[str], bool]:
        def looked(path: str) -> bool:
            found = look(path)
            with suppress(FileExistsError):
                os.mkdir(tmp_path / "store")
            return found

        return looked

    for name in ("isdir", "exists"):
        monkeypatch.setattr(os.path, name, looking(getattr(os.path, name)))
    assert place_of(f"{tmp_path}/{given}") == tmp_path / "store" / NAME


# A file that is not the one that was opened -----------------------------------------------------------------------------


def moved_away(folder: Path) -> Callable[[], None]:
    (folder / NAME).rename(folder / "elsewhere")
    return lambda: (folder / "elsewhere").replace(folder / NAME) and None


def replaced(folder: Path) -> Callable[[], None]:
    back = moved_away(folder)
    shutil.copy(folder / "elsewhere", folder / NAME)
    return back


def emptied(folder: Path) -> Callable[[], None]:
    data = (folder / NAME).read_bytes()
    os.truncate(folder / NAME, 0)
    return lambda: (folder / NAME).write_bytes(data) and None


def folder_moved(folder: Path) -> Callable[[], None]:
    folder.rename(folder.with_name("moved"))
    return lambda: folder.with_name("moved").rename(folder) and None


def log_moved(folder: Path) -> Callable[[], None]:
    log = folder / f"{NAME}-wal"
    log.rename(folder / "elsewhere")
    return lambda: (folder / "elsewhere").rename(log) and None


def log_emptied(folder: Path) -> Callable[[], None]:
    log = folder / f"{NAME}-wal"
    data = log.read_bytes()
    os.truncate(log, 0)
    return lambda: log.write_bytes(data) and None


@pytest.mark.parametrize("durability", ["process", "disk"])
@pytest.mark.parametrize("how", [moved_away, replaced, emptied, folder_moved, log_moved, log_emptied])
def test_nothing_is_written_into_a_file_that_is_gone(
    tmp_path: Path, how: Callable[[Path], Callable[[], None]], durability: str
) -> None:
    """Nor is anything read from it, or a new one made. When it is there again all goes on."""
    world, folder = World(), tmp_path / "folder"
    folder.mkdir()

    async def work(store: Store) -> None:
        turn = world.turn(None, "user", "reply")
        await append_all(store, [turn])
        await store.forget_roots(
            []
        )  # the thread has written the marks, too: now nothing is written while the file goes
        back = how(folder)
        there = (folder / NAME).exists()
        late = world.turn(turn, "more", "answer")
        asked = query(late.text, complete=True, logs=("log",))
        assert store.spared(asked) is None
        for fails in (
            store.append(late.batch),
            store.append(Batch(events=[Event("log", "turn")])),
            store.find(query(late.text)),
            store.find(asked),
            store.get([turn.reply.id]),
            store.blobs(turn.reply.id),
            store.read("probe", limit=1),
            store.logs(),
            store.announce("router", b"", 5.0),
            store.announced(),
            store.wait("log", 0, 0.01),
            store.stats(),
            store.forget_roots([turn.reply.root]),
        ):
            with pytest.raises(StoreUnreachableError, match="removed, emptied or replaced"):
                await fails
        assert (folder / NAME).exists() == there
        back()
        assert ids(await store.find(query(late.text))) == {record.id for record in turn.records}
        assert await store.read("log") == []
        await store.append(late.batch)
        assert len((await store.find(query(late.text))).records) == 4
        assert await findings(store) == []

    with_store(sqlite(folder), work, durability=durability)  # type: ignore[arg-type]


@pytest.mark.parametrize("durability", ["process", "disk"])
@pytest.mark.parametrize("how", [moved_away, emptied, log_moved, log_emptied])
def test_an_append_during_which_the_file_is_lost_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[[Path], Callable[[], None]], durability: Durability
) -> None:
    """Also where SQLite writes on at the end of a log that has lost its beginning: the log is not empty then."""
    world = World()

    async def work(store: Store) -> None:
        await append_all(store, [world.turn(None, "user", "reply")])
        await store.forget_roots([])  # the marks of that are written, too
        begin = SqliteWriter._begin

        def lost(self: SqliteWriter, **patience: bool) -> None:
            begin(self, **patience)
            how(tmp_path)

        monkeypatch.setattr(SqliteWriter, "_begin", lost)
        with pytest.raises(StoreUnreachableError, match="removed, emptied or replaced"):
            await store.append(world.turn(None, "another", "reply").batch)
        monkeypatch.undo()
        for _ in range(2):
            with pytest.raises(StoreUnreachableError, match="removed, emptied or replaced"):
                await store.append(world.turn(None, "third", "reply").batch)

    with_store(sqlite(tmp_path), work, durability=durability)


def test_a_log_that_begins_while_a_thread_looks_at_it_was_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread found nothing in it; before it says so, another one has written, and has looked as well."""
    with_store(sqlite(tmp_path), lambda _: asyncio.sleep(0))
    connection = connect(tmp_path / NAME)
    connection.execute("SELECT * FROM meta").fetchall()
    same, read = SameFile(tmp_path / NAME), os.pread

    def slow(*where: int) -> bytes:
        found = read(*where)
        monkeypatch.undo()
        connection.execute("INSERT INTO meta VALUES ('log', '')")
        assert same
        assert found == b"" != read(*where)
        return found

    monkeypatch.setattr(os, "pread", slow)
    assert same
    assert os.pread is read
    os.truncate(tmp_path / f"{NAME}-wal", 0)
    assert not same
    connection.close()


# A log that is removed alone --------------------------------------------------------------------------------------------


def test_a_log_that_is_removed_while_it_is_used_is_put_into_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So even a process that is killed then has lost nothing that was acknowledged."""
    world, killed = World(), tmp_path / "killed"
    killed.mkdir()

    async def work(store: Store) -> None:
        await append_all(store, [world.turn(None, f"user {number}", "reply") for number in range(20)])
        (tmp_path / f"{NAME}-wal").unlink()
        async with asyncio.timeout(20):
            while "was removed while it is in use" not in caplog.text:  # noqa: ASYNC110  # a thread says so
                await asyncio.sleep(0.05)
        shutil.copy(tmp_path / NAME, killed)
        with pytest.raises(StoreUnreachableError, match="removed, emptied or replaced"):
            await store.append(world.turn(None, "late", "reply").batch)

    async def check(store: Store) -> None:
        assert await findings(store) == []
        assert len([record async for record in store.scan()]) == 40

    with_store(sqlite(tmp_path), work)
    with_store(sqlite(killed), check)
    with_store(sqlite(tmp_path), check)


@pytest.mark.parametrize("fingerprint", ["toy", None])
def test_a_log_that_was_removed_between_two_runs_is_told(tmp_path: Path, fingerprint: str | None) -> None:
    """A new one must not be made: what was recorded last would be lost, and nobody would know."""
    world = World()
    for number in range(20):
        world.turn(None, f"user {number}", "reply")
    copy = cut_log(tmp_path, world)
    assert (copy / f"{NAME}-shm").exists()
    (copy / f"{NAME}-wal").unlink()

    async def work() -> None:
        for _ in range(2):
            store = open_store(f"sqlite:{copy}/")
            with pytest.raises(StoreUnreachableError, match="-wal was removed"):
                await store.open(fingerprint)
            await store.close()
        assert not (copy / f"{NAME}-wal").exists()

    asyncio.run(work())


def test_nobody_opens_a_store_whose_log_was_removed_while_another_process_uses_it(tmp_path: Path) -> None:
    """Two logs of one file would damage it."""
    world = World()

    async def work(store: Store) -> None:
        await append_all(store, [world.turn(None, "user", "reply")])
        (tmp_path / f"{NAME}-wal").unlink()
        other = open_store(sqlite(tmp_path))
        with pytest.raises(StoreUnreachableError, match="-wal was removed"):
            await other.open("toy")
        await other.close()

    with_store(sqlite(tmp_path), work)
