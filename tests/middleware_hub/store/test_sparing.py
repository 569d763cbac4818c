"""Look-ups that are spared: only where nobody else can have written anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Store
from middleware_hub.store.sqlite.store import SqliteStore
from tests.middleware_hub.store.world import World, append_all, ids, query, sqlite, with_store


def with_two(folder: Path, work: Callable[[Store, Store], Awaitable[None]]) -> None:
    """Do something with two stores that share a file, as two processes do."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            stores = [open_store(sqlite(folder)) for _ in range(2)]
            for store in stores:
                await store.open("toy")
                stack.push_async_callback(store.close)
            await work(stores[0], stores[1])

    asyncio.run(run())


def test_who_is_alone_pays_no_lookup(tmp_path: Path) -> None:
    world = World()
    turn = world.turn(None, "user", "reply", names=("name",))

    async def work(store: Store) -> None:
        await store.append(turn.batch)
        assert store.others() == 0
        assert not (await store.find(query(turn.text, complete=True))).records
        assert ids(await store.find(query(turn.text))) == {record.id for record in turn.records}
        assert (await store.find(query("elsewhere", parents=("name",), complete=True))).records
        assert (await store.stats()).spared == 1

    with_store(sqlite(tmp_path), work)


def test_what_was_there_before_is_found(tmp_path: Path) -> None:
    world = World()
    turn = world.turn(None, "user", "reply")

    async def again(store: Store) -> None:
        assert store.others() == 1
        assert (await store.find(query(turn.text, complete=True))).records

    with_store(sqlite(tmp_path), lambda store: store.append(turn.batch))
    with_store(sqlite(tmp_path), again)


def test_what_another_writes_is_found_at_once(tmp_path: Path) -> None:
    world = World()

    async def work(mine: Store, other: Store) -> None:
        line = None
        for number in range(20):
            before = mine.others()
            line = world.turn(line, f"user {number}", "reply")
            await other.append(line.batch)
            assert mine.others() > before
            assert line.reply.id in ids(await mine.find(query(line.text, complete=True)))
            line = world.turn(line, f"more {number}", "reply")
            await mine.append(line.batch)
            assert line.reply.id in ids(await other.find(query(line.text, complete=True)))

    with_two(tmp_path, work)


def test_no_number_is_given_twice(tmp_path: Path) -> None:
    """Another forgets everything and writes as many records again: that is noticed."""
    world = World()
    turns = [world.turn(None, f"user {number}", "reply") for number in range(3)]

    async def work(mine: Store, other: Store) -> None:
        await append_all(mine, turns)
        assert mine.others() == 0
        await other.forget(0)
        again = [world.turn(None, f"user {number}", "reply") for number in range(3)]
        for number, turn in enumerate(again):
            before = mine.others()
            await other.append(turn.batch)
            assert mine.others() > before
            assert turn.reply.id in ids(await mine.find(query(turn.text, complete=True))), number

    with_two(tmp_path, work)


def test_own_forgetting_is_not_another_writer(tmp_path: Path) -> None:
    world = World()

    async def work(store: Store) -> None:
        for number in range(3):
            await store.append(world.turn(None, f"user {number}", "reply").batch)
            await store.forget(0)
        assert store.others() == 0

    with_store(sqlite(tmp_path), work)


def test_a_group_that_failed_gave_no_numbers(tmp_path: Path) -> None:
    """What another writes under the numbers that were not used is noticed."""
    world = World()
    small, large = world.turn(None, "user", "reply"), world.turn(None, "large" * 100_000, "reply")

    async def work(mine: Store, other: Store) -> None:
        assert isinstance(mine, SqliteStore)
        connection = mine._open_writer()._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 5}")
        with pytest.raises(StoreUnreachableError, match="make room"):
            await mine.append(large.batch)
        await other.append(small.batch)
        assert small.reply.id in ids(await mine.find(query(small.text, complete=True)))

    with_two(tmp_path, work)
