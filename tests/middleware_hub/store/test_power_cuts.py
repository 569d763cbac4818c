"""Power cuts: with `disk`, whatever was acknowledged is on the disk, whole, whenever the power goes."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Batch, Durability, Store
from middleware_hub.store.records import Event
from middleware_hub.store.sqlite import checkpoints
from tests.conftest import SLOW
from tests.middleware_hub.store.world import MEMORY, Turn, World, findings, with_store
from tests.support.power import Disk, recorded

CUTS = 200 if SLOW else 30


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as made:
        yield Path(made).resolve()


@pytest.fixture
def disk() -> Iterator[Disk]:
    with recorded() as made:
        yield made


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is put into the file all the time: that is when a file is half written."""
    monkeypatch.setattr(checkpoints, "_CHECKPOINT_PAGES", 60)


async def live(
    folder: Path, disk: Disk, durability: Durability, dice: random.Random, cuts: int = CUTS
) -> list[tuple[Path, set[bytes]]]:
    """Append from several conversations at once, with a checkpoint now and then, and cut the power again and again.

    Returns the files after each cut, and what had been acknowledged before it.
    """
    told: set[bytes] = set()
    images: list[tuple[Path, set[bytes]]] = []
    over = False
    store = open_store(f"sqlite:{folder / 'live'}/", durability=durability)
    await store.open("toy")

    async def talk(number: int) -> None:
        world = World()
        line: Turn | None = None
        while not over:
            line = world.turn(line if len(world.turns) % 9 else None, f"{number} asks " * 20, "is told " * 50)
            event = Event("log", "turn", line.reply.id)
            await store.append(Batch(line.records, {line.reply.id: line.path}, events=[event]))
            told.add(line.reply.id)
            await asyncio.sleep(0)

    async def cut() -> None:
        nonlocal over
        try:
            for number in range(cuts):
                await asyncio.sleep(dice.uniform(0, 0.01))
                known, image = set(told), folder / f"cut-{number}"
                await asyncio.to_thread(disk.cut, folder / "live", image, dice if number % 3 else None)
                images.append((image, known))
        finally:
            over = True

    await asyncio.gather(cut(), *(talk(number) for number in range(4)))
    await store.close()
    return images


def lost(image: Path, told: set[bytes]) -> int:
    """Return how many of these replies are not in a store. All that is there is whole."""

    async def work(store: Store) -> int:
        found = {record.id async for record in store.scan() if record.sampled}
        assert set(await findings(store)) <= {"file"}
        logged = {event.data for event in await store.read("log", limit=100_000)}
        assert logged == found, "the records and the events of a turn are there together, or neither"
        return len(told - found)

    missing: int = with_store(f"sqlite:{image}/", work)
    shutil.rmtree(image)
    return missing


@pytest.mark.slow
def test_with_disk_nothing_acknowledged_is_lost(folder: Path, disk: Disk) -> None:
    images = asyncio.run(live(folder, disk, "disk", random.Random(1)))
    assert [lost(*image) for image in images] == [0] * len(images)
    assert len(images[-1][1]) > 20


def test_with_process_the_power_takes_the_end_only(folder: Path, disk: Disk) -> None:
    """The store is whole, and shorter: so the simulated cut does take what was not synced."""
    for attempt in range(5):  # a slow machine may sync all that it was told before a cut comes
        images = asyncio.run(live(folder / f"{attempt}", disk, "process", random.Random(attempt), 10))
        missing = [lost(*image) for image in images if (image[0] / "store.sqlite3").exists()]  # each of them is whole
        if any(missing):
            return
    raise AssertionError("no cut took anything")
