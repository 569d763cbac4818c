"""Files of earlier versions are handed over: a real one (see `tests.support.earlier.make`), whole, torn and damaged."""

from __future__ import annotations

import fcntl
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.store.records import seal
from middleware_hub.store.spool.file import SpoolFile, SpoolHead
from middleware_hub.store.spool.folder import SpoolFolder, identity
from middleware_hub.store.spool.packing import unpack
from tests.middleware_hub.store.dying import dies
from tests.support.earlier.make import FOLDER

NAME = "2026-11-29.spool"
WHOLE = gzip.decompress((FOLDER / f"{NAME}.gz").read_bytes())
SAMPLED: list[dict[str, Any]] = json.loads(gzip.decompress((FOLDER / f"{NAME}.truth.json.gz").read_bytes()))["sampled"]
WAITING = [one["output_ids"] for one in SAMPLED[1:]]


def frames() -> list[int]:
    """Return where the head, the batches, and nothing more, begin."""
    found = [0]
    while found[-1] < len(WHOLE):
        found.append(found[-1] + 4 + int.from_bytes(WHOLE[found[-1] : found[-1] + 4], "big"))
    return found


def sampled(spool: SpoolFile) -> list[list[int]]:
    """Return the sampled ids of each batch."""
    batches = [unpack(spool.read(waiting)) for waiting in spool.waiting]
    return [memoryview(batch.records[-1].ids).cast("i").tolist() for batch in batches]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "17-5f0c.spool"
    made.write_bytes(WHOLE + b"\0" * 5000)
    return made


def adopted(path: Path) -> SpoolFile:
    found = SpoolFile.adopt(path, None)
    assert found is not None
    return found


def test_what_waits_in_one_is_moved_to_a_file_of_this_version(path: Path) -> None:
    head, waiting = SpoolFile.look_into(path)
    assert [one.replies for one in waiting] == [1, 1, 1, 1]
    look = SpoolFile.adopt(path, None, look=True)
    assert look is not None
    assert sampled(look) == WAITING
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == WHOLE + b"\0" * 5000
    look.close()
    assert SpoolFile.adopt(path, SpoolHead("sqlite:/other", None)) is None
    found = SpoolFile.adopt(path, head)
    assert found is not None
    assert (sampled(found), found.torn_bytes, found.damaged) == (WAITING, 0, 0)
    assert not path.exists()
    found.done()
    assert found.path is not None
    dies(found)
    again = adopted(found.path)
    assert sampled(again) == WAITING[1:]
    again.done(3)
    again.close()
    assert list(path.parent.iterdir()) == []


def test_one_that_its_router_holds_is_left_to_it(path: Path) -> None:
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert SpoolFile.adopt(path, None) is None
    adopted(path).close()


def test_routers_find_one(tmp_path: Path) -> None:
    own = SpoolFolder(str(tmp_path), identity("sqlite:/a"), "toy", 1 << 20)
    spool = own.make()
    assert spool.path is not None
    head = seal(b"H" + json.dumps({"store": identity("sqlite:/a"), "fingerprint": "toy"}).encode())
    earlier = spool.path.with_name("17-5f0c.spool")
    earlier.write_bytes(len(head).to_bytes(4, "big") + head + WHOLE[frames()[1] :])
    (found,) = own.left_behind()
    assert sampled(found) == WAITING
    assert own.paths() == sorted([spool.path, earlier.with_name("17-5f0c.spool.sqlite3")])
    found.close()
    spool.close()


def test_what_was_handed_over_is_not_handed_over_again(path: Path) -> None:
    """The last frame of a file says how far that was."""
    done = seal(b"D" + frames()[3].to_bytes(8, "big"))
    path.write_bytes(WHOLE + len(done).to_bytes(4, "big") + done)
    assert sampled(adopted(path)) == WAITING[2:]


@pytest.mark.parametrize("cut", range(1, 900, 7))
def test_a_torn_end_is_cut(path: Path, cut: int) -> None:
    size = len(WHOLE) - cut
    path.write_bytes(WHOLE[:size])
    found = adopted(path)
    last = max(at for at in frames() if at <= size)
    assert sampled(found) == [ids for ids, end in zip(WAITING, frames()[2:], strict=True) if end <= size]
    assert (found.torn_bytes, found.damaged) == (len(WHOLE[last:size].rstrip(b"\0")), 0)
    found.close()


@pytest.mark.parametrize("bit", [*range(32), 32 * 8, 100 * 8 + 3])
def test_damage_costs_one_and_is_kept(path: Path, bit: int) -> None:
    """Also to a length, whether it is too long for the file, too short, or 0."""
    data = bytearray(WHOLE)
    data[frames()[2] + bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    found = adopted(path)
    assert sampled(found) == [WAITING[0], *WAITING[2:]]
    assert (found.damaged, found.torn_bytes) == (1, 0)
    assert path.with_suffix(".damaged").read_bytes() == data
    found.done(3)
    found.close()
    assert [one.name for one in path.parent.iterdir()] == ["17-5f0c.damaged"]


def test_a_damaged_head_costs_nothing(path: Path) -> None:
    path.write_bytes(WHOLE[:20] + b"?" + WHOLE[21:])
    found = adopted(path)
    assert (sampled(found), found.damaged) == (WAITING, 1)
    found.close()
