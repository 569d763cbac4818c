"""`tito-router store` on a file that its user cannot write: a backup, or a read-only mount."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from middleware_hub.store.protocol import Store
from middleware_hub.store.sqlite.read_only import ReadOnlyStore
from tests.middleware_hub.store.world import World, append_all, sqlite, with_store
from tests.middleware_hub.store_cli.running import status

NOBODY = 65534
SUFFIXES = ("", "-wal", "-shm")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that other users reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="tito-") as made:
        for name in ("HOME", "XDG_CACHE_HOME"):
            monkeypatch.setenv(name, made)
        Path(made).chmod(0o777)
        (Path(made) / "store").mkdir()
        yield Path(made) / "store"
        (Path(made) / "store").chmod(0o755)


def fill(folder: Path, copied: tuple[str, ...] = ()) -> None:
    """Make a store of two conversations. `copied`: these of its files, taken while it is in use, take the place of all."""
    world = World()
    world.turn(world.turn(None, "user" * 100, "reply" * 100), "more" * 100, "answer" * 100)
    world.turn(None, "elsewhere", "untouched")

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        for suffix in copied:
            shutil.copy(folder / f"store.sqlite3{suffix}", folder / f"copy{suffix}")

    with_store(sqlite(folder), work)
    if copied:
        for suffix in SUFFIXES:
            (folder / f"store.sqlite3{suffix}").unlink(missing_ok=True)
        for suffix in copied:
            (folder / f"copy{suffix}").rename(folder / f"store.sqlite3{suffix}")


@contextmanager
def unwritable(*places: Path) -> Iterator[None]:
    """Take the right to write from these, and from root the right to ignore that."""
    status("stats", "--store", "sqlite:/nowhere/x.sqlite3")  # another user cannot import what it needs
    for place in places:
        place.chmod(0o555 if place.is_dir() else 0o444)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


def everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[object, str, int]:
    """Return what the commands tell of a store."""
    store, out = sqlite(folder), folder.parent / f"out-{os.geteuid()}-{len(os.listdir(folder.parent))}.jsonl"
    capsys.readouterr()
    assert status("stats", "--store", store, "--json", "--tokens") == 0
    sizes = json.loads(capsys.readouterr().out)
    assert status("verify", "--store", store) == 0
    verified = capsys.readouterr().out
    assert status("export", "--store", store, "--out", str(out)) == 0
    rows = len(out.read_text().splitlines())
    sizes.pop("bytes")
    return sizes, verified, rows


@pytest.mark.parametrize("what", ["all", "file", "folder"])
@pytest.mark.parametrize("copied", [(), ("", "-wal", "-shm")], ids=["closed", "in use"])
def test_what_only_reads_reads(
    folder: Path, what: str, copied: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    fill(folder, copied)
    files = [folder / f"store.sqlite3{suffix}" for suffix in copied or ("",)]
    places = {"all": [*files, folder], "file": files, "folder": [folder]}[what]
    if what == "file":
        folder.chmod(0o777)
    with unwritable(*places):
        found = everything(folder, capsys)
        assert status("stats", "--store", sqlite(folder)) == 0
        assert "cannot be written: it is only read" in capsys.readouterr().err
        assert status("prune", "--store", sqlite(folder), "--unused-for", "0h", "--unretrieved") == 1
        assert "cannot be written" in capsys.readouterr().err
    folder.chmod(0o755)
    for file in files:
        file.chmod(0o644)
    assert everything(folder, capsys) == found
    sizes, verified, rows = found
    assert isinstance(sizes, dict)
    assert (sizes["conversations"], sizes["turns"], rows) == (2, 3, 2)
    assert "nothing is wrong" in verified


def test_a_log_that_cannot_be_read_is_not_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was recorded last is in the log alone: a copy without its index is readable only where one can be made."""
    fill(folder, ("", "-wal"))
    with unwritable(folder, *folder.iterdir()):
        assert status("stats", "--store", sqlite(folder)) == 2
        assert "copy both files into a folder of your own" in capsys.readouterr().err
        copy = folder.parent / "own"
        copy.mkdir()
        for file in folder.iterdir():
            shutil.copyfile(file, copy / file.name)
        assert everything(copy, capsys)[2] == 2
    shutil.rmtree(copy)


def test_a_file_that_is_no_store_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "store.sqlite3").write_text("this is no database" * 100)
    with unwritable(folder, *folder.iterdir()):
        assert status("stats", "--store", sqlite(folder)) == 2
        assert "no SQLite file" in capsys.readouterr().err


def test_a_name_with_signs_of_a_uri_is_that_of_a_file(tmp_path: Path) -> None:
    with_store(f"sqlite:{tmp_path}/a?b#c%20.db", lambda store: append_all(store, []))
    found = ReadOnlyStore(f"{tmp_path}/a?b#c%20.db")

    async def work() -> int:
        await found.open("toy")
        try:
            return (await found.stats()).records
        finally:
            await found.close()

    assert asyncio.run(work()) == 0
