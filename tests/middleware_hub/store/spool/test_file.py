"""The file of what waits for a store: whole after a kill, cut where it is torn, and never adopted while a process holds it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.hub import Hub
from middleware_hub.store.errors import DamagedRecordError
from middleware_hub.store.paths import BLOCK, STEP, TextPath
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Blob, Event, places_of
from middleware_hub.store.spool.file import _OVERDRAFT, SpoolFile, SpoolHead
from middleware_hub.store.spool.folder import SpoolFolder, identity
from middleware_hub.store.spool.packing import pack, unpack
from middleware_hub.store.sqlite.file import index_of, log_of
from router.config import StoreConfig
from tests.middleware_hub.store.dying import dies
from tests.middleware_hub.store.world import MEMORY, NS, World
from tests.support.lives import tokenizer_of
from tests.support.small_disk import enlarge, small_disk
from worker.models.ngram import shipped_tokenizer

HEAD = SpoolHead("sqlite:/a", "toy")


def made(path: Path, *data: bytes) -> SpoolFile:
    found = SpoolFile.make(path, HEAD, 1 << 20)
    for one in data:
        found.put(one)
    return found


def adopted(path: Path, head: SpoolHead | None = HEAD) -> list[bytes] | None:
    found = SpoolFile.adopt(path, head)
    if found is None:
        return None
    read = [bytes(found.read(waiting)) for waiting in found.waiting]
    dies(found)
    return read


def adopted_copy(path: Path, folder: Path) -> list[bytes] | None:
    """Return what would be adopted if the file's process died now."""
    shutil.copy(log_of(path), log_of(folder / "copy.spool"))
    return adopted(Path(shutil.copy(path, folder / "copy.spool")))


def test_what_was_put_is_read_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    spool = made(path, b"one", b"two" * 1000, b"three")
    assert adopted(path) is None, "it is in use"
    dies(spool)
    assert adopted(path, SpoolHead("sqlite:/a", "another")) is None
    assert adopted(path, SpoolHead("sqlite:/b", "toy")) is None
    assert adopted(path) == [b"one", b"two" * 1000, b"three"]
    assert adopted(path, None) == [b"one", b"two" * 1000, b"three"]
    assert oct(path.stat().st_mode)[-3:] == "600"


def test_what_was_handed_over_is_not_there_again(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    spool = made(path, b"one", b"two", b"three" * 1_000_000)
    spool.done()
    spool.put(b"four")
    dies(spool)
    assert adopted(path) == [b"two", b"three" * 1_000_000, b"four"]
    again = SpoolFile.adopt(path, HEAD)
    assert again is not None
    again.done(3)
    assert path.stat().st_size + log_of(path).stat().st_size < 20_000, "the room is given back"
    again.put(b"five")
    dies(again)
    assert adopted(path) == [b"five"]


def test_what_was_moved_back_has_its_place_again_after_a_kill(tmp_path: Path) -> None:
    """The file has the order of recording, and what was handed over before it is not there again."""
    path = tmp_path / "a.spool"
    spool = made(path, b"one", b"two", b"three")
    spool.move_back()
    spool.done()
    assert [bytes(spool.read(waiting)) for waiting in spool.waiting] == [b"three", b"one"]
    dies(spool)
    assert adopted(path) == [b"one", b"three"]


def test_an_empty_file_goes_with_its_router(tmp_path: Path) -> None:
    spool = made(tmp_path / "a.spool", b"one")
    spool.close()
    assert (tmp_path / "a.spool").exists()
    again = SpoolFile.adopt(tmp_path / "a.spool", HEAD)
    assert again is not None
    again.done()
    again.close()
    assert list(tmp_path.iterdir()) == []


@given(cut=st.integers(1, 30_000), data=st.lists(st.binary(min_size=1, max_size=9_000), min_size=1, max_size=5))
def test_a_torn_end_is_cut(cut: int, data: list[bytes]) -> None:
    """A power cut leaves a part of SQLite's log."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder, "torn.spool")
        spool = made(path)
        ends = [log_of(path).stat().st_size]
        for one in data:
            spool.put(one)
            ends.append(log_of(path).stat().st_size)
        dies(spool)
        size = max(ends[0], ends[-1] - cut)
        os.truncate(log_of(path), size)
        index_of(path).unlink()  # it is in memory only
        found = SpoolFile.adopt(path, HEAD)
        assert found is not None
        whole = [one for one, at in zip(data, ends[1:], strict=True) if at <= size]
        assert [bytes(found.read(one)) for one in found.waiting] == whole
        assert found.torn_bytes == size - max(at for at in ends if at <= size)
        assert found.damaged == 0
        found.put(b"next")
        dies(found)
        assert adopted(path) == [*whole, b"next"]


def test_damage_within_costs_one_and_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    made(path, b"one" * 9, b"two" * 9, b"three" * 9).close()
    path.write_bytes(path.read_bytes().replace(b"twotwo", b"twoTwo", 1))
    found = SpoolFile.adopt(path, HEAD)
    assert found is not None
    assert [bytes(found.read(one)) for one in found.waiting] == [b"one" * 9, b"three" * 9]
    assert found.damaged == 1
    found.done(2)
    found.close()
    assert [one.name for one in tmp_path.iterdir()] == ["a.damaged"]
    assert b"two" * 3 in (tmp_path / "a.damaged").read_bytes()


def test_a_damaged_page_costs_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    made(path, *(b"<%03d>" % number * 300 for number in range(100))).close()
    data = bytearray(path.read_bytes())
    page = data.index(b"<050>") // 4096 * 4096
    lost = {number for number in range(100) if b"<%03d>" % number in data[page : page + 4096]}
    data[page : page + 100] = b"\xff" * 100
    path.write_bytes(data)
    found = SpoolFile.adopt(path, HEAD)
    assert found is not None
    assert [int(bytes(found.read(one))[1:4]) for one in found.waiting] == sorted(set(range(100)) - lost)
    assert found.damaged == len(lost) > 1
    found.done(len(found.waiting))
    found.close()
    assert [one.name for one in tmp_path.iterdir()] == ["a.damaged"]


def test_a_file_of_which_nothing_can_be_read_gets_another_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = SpoolFolder(str(tmp_path), identity("sqlite:/a"), "toy", 1 << 20)
    spool = folder.make()
    spool.put(b"one")
    spool.close()
    assert spool.path is not None
    data = bytearray(spool.path.read_bytes())
    data[16:5000] = b"\xff" * 4984
    spool.path.write_bytes(data)
    assert list(folder.left_behind()) == []
    assert "cannot be read" in caplog.text
    assert spool.path.with_suffix(".damaged").read_bytes() == data
    assert list(folder.left_behind()) == []
    assert caplog.text.count("cannot be read") == 1


def test_a_file_that_was_removed_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With its folder, under a router that is at work."""
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "a.spool"
    spool = made(path, b"one", b"two")
    spool.done()
    shutil.rmtree(folder)
    spool.put(b"three")
    assert "was removed" in caplog.text
    assert SpoolFile.adopt(path, HEAD) is None, "it is in use"
    spool.put(b"four")
    dies(spool)
    assert adopted(path) == [b"two", b"three", b"four"]


def test_a_full_disk_leaves_the_file_whole(tmp_path: Path) -> None:
    """In a process of its own, which may write no more than some bytes."""
    path = tmp_path / "a.spool"
    script = f"""
import resource, sys
from pathlib import Path
from middleware_hub.store.spool.file import SpoolFile, SpoolHead
spool = SpoolFile.make(Path({str(path)!r}), SpoolHead("sqlite:/a", "toy"), 1 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
count = 0
while spool.put(b"x" * 5000):
    count += 1
assert spool.full
print(count)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    count = int(done.stdout)
    assert 30 < count < 50  # the file is as long as it may be, and what its log has is in it
    assert adopted(path) == [b"x" * 5000] * count


def test_a_disk_that_fills_up_leaves_room_for_what_is_in_flight(tmp_path: Path) -> None:
    """The file is full before anything is lost, although the disk has no byte left when the first batch comes."""
    with small_disk(tmp_path / "disk", 8 << 10):
        spool = SpoolFile.make(tmp_path / "disk" / "a.spool", HEAD, 1 << 30)
        other = tmp_path / "disk" / "other"
        for _ in range(2):
            with suppress(OSError), other.open("wb", buffering=0) as file:
                while file.write(b"x" * 4096):
                    pass
            while not spool.full:
                spool.put(b"x" * 10_000)
            assert spool.waiting
            assert all(spool.put(b"x" * 10_000) for _ in range(100)), "they were in flight"
            assert spool.held_bytes == 0
            other.unlink()
            spool.done(len(spool.waiting))
            assert not spool.full
        spool.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 3 << 10):
        yield tmp_path / "disk"


def test_a_batch_beyond_the_disk_is_held_until_there_is_room(disk: Path) -> None:
    """What was reserved stays for shorter ones, and nothing new is begun meanwhile."""
    other = disk / "other"
    other.write_bytes(b"x" * (1 << 20))
    path = disk / "a.spool"
    spool = SpoolFile.make(path, HEAD, 1 << 30)
    large = bytes(range(256)) * 12_000  # 3 MB
    assert spool.put(b"one")
    assert not spool.put(large, 5)
    assert (spool.full, spool.waiting_bytes - spool.held_bytes < 1000, "No space left" in spool.fault) == (True,) * 3
    assert spool.put(b"short"), "the reserve is for it"
    assert [bytes(spool.read(one)) for one in spool.waiting] == [b"one", large, b"short"]
    assert not spool.settle()
    assert [one.replies for one in spool.waiting] == [1, 5, 1]
    assert adopted_copy(path, disk.parent) == [b"one", b"short"], "what a kill would leave"
    other.unlink()
    enlarge(disk, 9 << 10)
    assert spool.settle()
    assert (spool.full, spool.held_bytes) == (False, 0)
    assert spool.put(b"last")
    assert [bytes(spool.read(one)) for one in spool.waiting] == [b"one", large, b"short", b"last"]
    assert spool.done(1)[0].replies == 1
    dies(spool)
    assert adopted(path) == [b"short", large, b"last"]


@pytest.mark.parametrize("first", [True, False], ids=["first", "behind others"])
def test_what_is_held_is_handed_over_from_memory(disk: Path, first: bool) -> None:
    path = disk / "a.spool"
    spool = SpoolFile.make(path, HEAD, 1 << 30)
    before = [] if first else [b"one", b"two"]
    for data in before:
        spool.put(data)
    assert not spool.put(b"x" * (4 << 20))
    assert spool.put(b"three")
    for data in before:
        assert bytes(spool.read(spool.waiting[0])) == data
        spool.done()
    assert len(spool.read(spool.waiting[0])) == 4 << 20
    assert spool.full
    spool.done()
    assert (spool.full, spool.held_bytes) == (False, 0)
    assert adopted_copy(path, disk.parent) == [b"three"]
    spool.done()
    assert (spool.waiting_bytes, spool.full) == (0, False)
    spool.close()
    assert not path.exists()


def test_a_batch_beyond_the_budget_is_held(tmp_path: Path) -> None:
    spool = SpoolFile.make(tmp_path / "a.spool", HEAD, 1000 - _OVERDRAFT)
    assert not spool.put(b"x" * 1000)
    assert "--store-spool-max-bytes" in spool.fault
    assert [len(spool.read(one)) for one in spool.waiting] == [1000]
    dies(spool)


@pytest.mark.parametrize("moment", range(4))
@pytest.mark.parametrize("handing_over", [False, True])
def test_a_kill_takes_nothing_that_was_written(tmp_path: Path, *, handing_over: bool, moment: int) -> None:
    """Nor does it bring back what was handed over."""
    path = tmp_path / "a.spool"
    script = f"""
from pathlib import Path
from middleware_hub.store.spool.file import SpoolFile, SpoolHead
spool = SpoolFile.make(Path({str(path)!r}), SpoolHead("sqlite:/a", "toy"), 1 << 30)
number = done = 0
while True:
    number += 1
    spool.put(number.to_bytes(4, "big") * 500)
    if {handing_over} and number % 30 == 0:
        done += len(spool.done(number % 50))
    print(number, done, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(40 + 333 * moment)]
        process.send_signal(signal.SIGKILL)
        told += process.stdout.readlines()
    written, done = map(int, [line for line in told if line.endswith("\n")][-1].split())  # the last one may be torn
    found = SpoolFile.adopt(path, HEAD)
    assert found is not None
    assert found.damaged == 0
    assert found.torn_bytes < 10 * 4200, "at most the pages of the batch that was being written"
    numbers = [int.from_bytes(found.read(one)[:4], "big") for one in found.waiting]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert done < numbers[0] <= done + 50
    assert written <= numbers[-1] <= written + 1, "the last line may not have been written any more"
    dies(found)


def test_a_batch_is_what_it_was() -> None:
    """It is entered at the same places, though only the end of its text was kept."""
    world = World()
    first = world.turn(None, "a" * (BLOCK * STEP * 2 + 7), "b" * 600)
    second = world.turn(first, "c" * 900, "d" * 300, names=("r",))
    state = first.path.state(first.reply.text_end)
    path = TextPath(NS, second.text, state)
    batch = Batch(
        second.records,
        {second.reply.id: path},
        [Blob(second.reply.id, "x", "int32", (1,), b"1234")],
        [Event("log", "kind", b"data", expected=3, closes=1)],
    )
    packed = pack(batch)
    assert len(packed) < 12_000
    found = unpack(packed)
    assert list(found.records) == second.records
    assert list(found.blobs) == list(batch.blobs)
    assert list(found.events) == list(batch.events)
    for record in second.records:
        assert places_of(record, found.paths[second.reply.id]) == places_of(record, path)
    with pytest.raises(DamagedRecordError):
        unpack(b"\x93nothing")


def test_folders_are_those_of_stores(tmp_path: Path) -> None:
    one, again = (SpoolFolder(str(tmp_path), identity("sqlite:/a/b"), "toy", 1 << 20) for _ in range(2))
    other = SpoolFolder(str(tmp_path), identity("sqlite:/a/c"), "toy", 1 << 20)
    spools = [one.make(), again.make(), other.make()]
    assert len({spool.path for spool in spools}) == 3
    assert len(one.paths()) == 2
    assert list(one.left_behind()) == []
    spools[0].put(b"x")
    dies(spools[0])
    (left,) = again.left_behind()
    assert len(left.waiting) == 1
    assert identity("redis://user:secret@host:1/0", "p:") == identity("redis://host:1/0", "p:")
    assert identity("redis://host:1/0", "p:") != identity("redis://host:1/0", "q:")
    for spool in (left, *spools[1:]):
        spool.close()


def test_what_waits_for_another_address_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the command that hands it over; neither what is handed over anyway, nor an empty file, is told of."""
    old, now = (SpoolFolder(str(tmp_path), identity(at), "toy", 1 << 20) for at in ("sqlite:/a/b", "sqlite:/a/c"))
    spools = [old.make(), old.make(), now.make()]
    for spool in spools[1:]:
        spool.put(b"x", replies=3)
    now.warn_of_others()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"3 replies wait in {spools[1].path} for the store {identity('sqlite:/a/b')}. If")
    assert line.endswith(f"store handover --store {identity('sqlite:/a/c')} --any-store {spools[1].path}")
    for spool in spools:
        spool.done(len(spool.waiting))
        spool.close()


def test_a_folder_that_its_router_removes_meanwhile_has_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SpoolFolder(str(tmp_path), identity("sqlite:/a/c"), "toy", 1 << 20)
    gone, scandir = tmp_path / "gone", os.scandir
    gone.mkdir()

    def removed(path: Any) -> Any:
        if Path(path) == gone:
            gone.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed)
    now.warn_of_others()
    assert not gone.exists()


def test_a_router_tells_of_it_at_its_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spool = SpoolFolder(str(tmp_path / "spool"), identity("sqlite:/a/b"), "toy", 1 << 20).make()
    spool.put(b"x", replies=3)
    hub = Hub(tokenizer_of(shipped_tokenizer()), StoreConfig(url=f"sqlite:{tmp_path}", spool=str(tmp_path / "spool")))

    async def nothing(*_: object) -> Any:
        pass

    asyncio.run(hub.live(nothing, {"type": "lifespan"}, nothing, nothing))
    for thread in threading.enumerate():
        if thread.name == "spool-others":
            thread.join(30)
    assert f"3 replies wait in {spool.path}" in caplog.text
    spool.done()
    spool.close()
