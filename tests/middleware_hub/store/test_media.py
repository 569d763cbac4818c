"""Files of media in every store, against the dictionary: a file is there as long as a record of its tenant names it."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from middleware_hub.store.media import MediaFile
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import identified, new_id
from middleware_hub.store.sqlite.file import connect
from tests.conftest import SLOW, examples
from tests.middleware_hub.store.world import MEMORY, NS, Turn, World, address_of, sqlite, with_store
from tests.support.dictionary_store import DictionaryStore
from tests.support.programs import Process
from tests.support.usual import usual

KINDS = usual(["sqlite", "redis", "valkey", "cluster"], "sqlite", "redis", "cluster")
CONTENTS = [bytes([number]) * size for number, size in enumerate((0, 1, 5_000, 300_000), 65)]
TENANTS = ("a", "b")


def digest(content: bytes) -> str:
    return f"sha256:{sha256(content).hexdigest()}"


DIGESTS = [digest(one) for one in CONTENTS]


def file_of(tenant: str, number: int, **lengths: int) -> MediaFile:
    content = CONTENTS[number]
    return MediaFile(
        tenant, digest(content), "image/png", number + 1, 7, number % 2 == 0, len(content), content, lengths
    )


def showing(turn: Turn, numbers: tuple[int, ...]) -> Turn:
    """Return a turn whose context has these pictures."""
    assert turn.context is not None
    media = tuple((at, 1, DIGESTS[number]) for at, number in enumerate(numbers))
    context = identified(replace(turn.context, media=media))
    root = context.root
    return Turn(replace(turn.reply, parent=context.id, base=context.id, root=root), context, turn.text)


def batch_of(turn: Turn, *files: MediaFile) -> Batch:
    return replace(turn.batch, media=files)


@pytest.fixture(params=KINDS)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return address_of(request.param, tmp_path)


async def held(store: Any, *, data: bool = True) -> dict[tuple[str, str], MediaFile]:
    return {
        (tenant, name): file
        for tenant in TENANTS
        for name, file in (await store.media(tenant, [*DIGESTS, "sha256:none"], data=data)).items()
    }


def test_a_file_is_kept_once_and_goes_with_the_last_record_that_names_it(address: str) -> None:
    async def work(store: Store) -> None:
        world = World()
        first, second = (
            showing(world.turn(None, user, "y" * 9, namespace=("a", "", ""), own_context=True), (3, 3, 2))
            for user in ("one", "two")
        )
        await store.append(batch_of(first, file_of("a", 3, qwen=77), file_of("a", 2)))
        once = (await store.stats()).media_bytes
        await store.append(batch_of(second, file_of("a", 3, glm=5), file_of("a", 2)))
        stats = await store.stats()
        assert (stats.media, stats.media_bytes, await store.media_unnamed()) == (2, once, 0)
        assert once == len(CONTENTS[3]) + len(CONTENTS[2])
        assert (await store.media("a", [DIGESTS[3]]))[DIGESTS[3]] == file_of("a", 3, qwen=77, glm=5)
        told = (await store.media("a", [DIGESTS[3]], data=False))[DIGESTS[3]]
        assert told == replace(file_of("a", 3, qwen=77, glm=5), data=b"")
        assert await store.media("b", DIGESTS) == {}
        await store.forget_roots([first.reply.root])
        assert set(await store.media("a", DIGESTS)) == {DIGESTS[2], DIGESTS[3]}
        await store.forget_roots([second.reply.root])
        assert await store.media("a", DIGESTS) == {}
        stats = await store.stats()
        assert (stats.media, stats.media_bytes) == (0, 0)
        assert [one async for one in store.verify()] == []

    with_store(address, work)


def test_a_file_outlives_the_process(address: str) -> None:
    turn = showing(World().turn(None, "one", "two", namespace=("a", "", ""), own_context=True), (3,))
    with_store(address, lambda store: store.append(batch_of(turn, file_of("a", 3))))

    async def work(store: Store) -> None:
        assert (await store.media("a", DIGESTS))[DIGESTS[3]].data == CONTENTS[3]

    with_store(address, work)


def test_a_large_file_does_not_hold_up_the_event_loop(address: str) -> None:
    """While 20 MB are written, and while they are read and hashed, others are served."""
    content = b"x" * 20_000_000
    big = MediaFile("a", digest(content), "image/png", 1, 1, True, len(content), content)

    async def work(store: Store) -> None:
        turn = World().turn(None, "one", "two", namespace=("a", "", ""), own_context=True)
        context = identified(replace(turn.context, media=((0, 1, big.digest),)))
        reply = replace(turn.reply, parent=context.id, base=context.id, root=context.root)
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.001)
                turns += 1

        task = asyncio.create_task(others())
        await store.append(Batch([context, reply], {reply.id: turn.path}, media=[big]))
        assert turns >= 5
        turns = 0
        assert (await store.media("a", [big.digest]))[big.digest].data == content
        assert turns >= 3
        task.cancel()

    with_store(address, work)


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("append"),
            st.sampled_from(TENANTS),
            st.lists(st.integers(0, 3), max_size=3).map(tuple),
            st.sets(st.integers(0, 3)),
            st.integers(0, 5),
        ),
        st.tuples(st.just("forget"), st.integers(0, 5)),
        st.just(("again",)),
        st.just(("other",)),
    ),
    max_size=14,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(300))
@given(STEPS)
def test_random_histories_agree_with_the_dictionary(kind: str, steps: list[Any]) -> None:
    """Two routers append, go on, forget, restart and append again; some of the files are never given."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        address = address_of(kind, Path(folder))
        asyncio.run(_history(address, steps))


async def _history(address: str, steps: list[Any]) -> None:
    world, oracle, turns = World(), DictionaryStore(), list[tuple[Turn, Batch]]()
    await oracle.open("toy")
    stores = [open_store(address), open_store(address)]
    for one in stores:
        await one.open("toy")
    try:
        for number, step in enumerate(steps):
            kind, store = step[0], stores[number % 2]
            if kind == "append":
                _, tenant, shown, given_, parent = step
                mine = [turn for turn, _ in turns if turn.reply.namespace[0] == tenant and await _there(oracle, turn)]
                line = mine[parent % len(mine)] if mine and parent else None
                made = world.turn(line, f"user {number}", "said", namespace=(tenant, "", ""), own_context=True)
                turn = showing(made, shown)
                world.turns[-1] = turn
                batch = batch_of(turn, *(file_of(tenant, one, qwen=one + 1) for one in given_ if one in shown))
                turns.append((turn, batch))
                assert await store.append(batch) == await oracle.append(batch)
            elif kind == "forget" and turns:
                root = turns[step[1] % len(turns)][0].reply.root
                assert (await store.forget_roots([root])).records == (await oracle.forget_roots([root])).records
            elif kind == "again" and turns:
                turn, batch = turns[-1]
                if turn.context is not None and turn.context.parent is None:
                    await store.append(batch)
                    await oracle.append(batch)
            elif kind == "other":
                stores[number % 2] = other = open_store(address)
                await store.close()
                await other.open("toy")
            for asked in stores:
                assert await held(asked) == await held(oracle)
                assert await held(asked, data=False) == await held(oracle, data=False)
            stats, expected = await stores[0].stats(), await oracle.stats()
            assert (stats.media, stats.media_bytes) == (expected.media, expected.media_bytes)
            assert await stores[0].media_unnamed() == 0
    finally:
        for one in stores:
            await one.close()


async def _there(oracle: DictionaryStore, turn: Turn) -> bool:
    return bool((await oracle.get([turn.reply.id])).records)


# Several at once, and kills -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", usual(["sqlite", "redis", "cluster"], "sqlite", "redis"))
def test_what_is_named_while_it_is_forgotten_is_whole_or_gone(kind: str, tmp_path: Path) -> None:
    """Two routers append one prompt with a picture again and again, and a third one forgets it."""
    address = address_of(kind, tmp_path)

    async def work(first: Store) -> None:
        others = [open_store(address), open_store(address)]
        for one in others:
            await one.open("toy")
        source, world = random.Random(5), World()
        turn = showing(world.turn(None, "one", "two", namespace=("a", "", ""), own_context=True), (2,))
        assert turn.context is not None

        async def append(store: Store) -> None:
            for _ in range(4):
                reply = replace(turn.reply, id=new_id(), serial=world.serials.next())
                batch = Batch([turn.context, reply], {reply.id: turn.path}, media=[file_of("a", 2)])
                await asyncio.sleep(source.uniform(0, 0.002))
                await store.append(batch)

        async def forget(store: Store) -> None:
            for _ in range(4):
                await asyncio.sleep(source.uniform(0, 0.002))
                await store.forget_roots([turn.reply.root])

        kept, rounds = 0, 200 if SLOW else 40
        for number in range(50 * rounds):
            if number >= rounds and kept:  # the last word is that of an append in a few of them only
                break
            await asyncio.gather(append(first), append(others[0]), forget(others[1]))
            there = (await first.get([turn.reply.root], roots={turn.reply.root: turn.reply.root})).records
            assert bool(await first.media("a", [DIGESTS[2]])) == bool(there)
            kept += bool(there)
        assert kept, "nothing was ever left to be looked at"
        assert await _found(first) == []
        await first.append(batch_of(turn, file_of("a", 2)))
        assert (await first.media("a", [DIGESTS[2]]))[DIGESTS[2]].data == CONTENTS[2]
        assert await _found(first) == []
        await first.forget_roots([turn.reply.root])
        stats = await first.stats()
        assert (stats.records, stats.media, stats.media_bytes) == (0, 0, 0)
        assert await _found(first) == []
        for one in others:
            await one.close()

    with_store(address, work)


@pytest.mark.parametrize("kind", usual(["redis", "cluster"], "redis", "cluster"))
def test_a_file_is_counted_whose_lengths_were_left(kind: str, tmp_path: Path) -> None:
    """Another router learned one while the file was removed."""
    address = address_of(kind, tmp_path)

    async def work(first: Any) -> None:
        turn = showing(World().turn(None, "one", "two", namespace=("a", "", ""), own_context=True), (2,))
        opened = first._opened
        await opened.servers.write([("HSET", opened.keys.media(file_of("a", 2).key), b"l:qwen", 7)])
        await first.append(batch_of(turn, file_of("a", 2, qwen=7)))
        stats = await first.stats()
        assert (stats.media, stats.media_bytes) == (1, len(CONTENTS[2]))
        await first.forget_roots([turn.reply.root])
        stats = await first.stats()
        assert (stats.media, stats.media_bytes) == (0, 0)

    with_store(address, work)


@pytest.mark.parametrize("kind", usual(["redis", "cluster"], "redis", "cluster"))
def test_the_hold_of_a_process_that_died_is_swept(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It died between the records that it forgot and their file."""
    monkeypatch.setattr("middleware_hub.store.redis.media._HELD_SECONDS", 0.0)
    address = address_of(kind, tmp_path)

    async def work(store: Any) -> None:
        turn = showing(World().turn(None, "one", "two", namespace=("a", "", ""), own_context=True), (2,))
        await store.append(batch_of(turn, file_of("a", 2)))
        opened = store._opened
        await opened.servers.write([("SADD", opened.keys.named(file_of("a", 2).key), b"hold:" + new_id())])
        await store.forget_roots([turn.reply.root])
        assert (await store.stats()).media == 1
        assert await store.media_unnamed() == 1
        assert await store.sweep_media() == 1
        assert (await store.stats()).media == 0
        assert await _found(store) == []

    with_store(address, work)


@pytest.mark.parametrize("kind", usual(["redis", "cluster"], "redis", "cluster"))
def test_a_conversation_that_is_appended_again_while_it_is_forgotten(kind: str, tmp_path: Path) -> None:
    """Its picture is there, whichever of the steps of the two comes first."""
    address = address_of(kind, tmp_path)

    async def work(first: Any) -> None:
        second: Any = open_store(address)
        await second.open("toy")
        turn = showing(World().turn(None, "one", "two", namespace=("a", "", ""), own_context=True), (2,))
        batch = batch_of(turn, file_of("a", 2))
        await first.append(batch)
        submit, released = first._opened.writer.submit, second._opened.media.release

        async def forgotten_before(prepared: Any) -> Any:
            await second.forget_roots([turn.reply.root])
            return await submit(prepared)

        # Forgotten as a whole, between the file and the records.
        first._opened.writer.submit = forgotten_before
        await first.append(batch)
        first._opened.writer.submit = submit
        assert set(await first.media("a", DIGESTS)) == {DIGESTS[2]}
        assert await _found(first) == []

        async def appended_before(names: Any) -> Any:
            await first.append(batch)
            return await released(names)

        # Appended as a whole, between the records that are forgotten and their file.
        second._opened.media.release = appended_before
        await second.forget_roots([turn.reply.root])
        assert set(await first.media("a", DIGESTS)) == {DIGESTS[2]}
        assert await _found(first) == []

        # The same, and the only other conversation with this file is forgotten before the name of this one is back.
        world = World()
        other = showing(world.turn(None, "three", "four", namespace=("a", "", ""), own_context=True), (2,))
        await first.append(batch_of(other, file_of("a", 2)))
        there = second._opened.media._there

        async def other_forgotten_before(roots: Any) -> Any:
            second._opened.media._there = there
            await first.forget_roots([other.reply.root])
            return await there(roots)

        second._opened.media._there = other_forgotten_before
        await second.forget_roots([turn.reply.root])
        assert set(await first.media("a", DIGESTS)) == {DIGESTS[2]}
        assert await _found(first) == []
        second._opened.media.release = released

        async def forgotten_after(prepared: Any) -> Any:
            numbers = await submit(prepared)
            await second.forget_roots([turn.reply.root])
            return numbers

        # Forgotten as a whole, between the records and the last look at their file.
        first._opened.writer.submit = forgotten_after
        await first.append(batch)
        assert await first.media("a", DIGESTS) == {}
        assert await _found(first) == []
        await second.close()

    with_store(address, work)


@pytest.mark.slow
@pytest.mark.parametrize("kind", usual(["sqlite", "redis"], "sqlite", "redis"))
def test_a_killed_process_leaves_no_record_without_its_file(kind: str, tmp_path: Path) -> None:
    """At random moments, also between a file and the record that names it. What is left without a record is swept away."""
    address, source, kept = address_of(kind, tmp_path), random.Random(3), list[str]()
    for number in range(25):
        command = sys.executable, "-m", "tests.middleware_hub.store.media_appender", address, str(number)
        with Process(f"process {number}", *command, folder=tmp_path, up="open\n") as process:
            process.wait_until_up()
            while len(process.log.split("\n")) < 6:
                time.sleep(0.002)  # a poll of another process: there is nothing to wait on
            time.sleep(source.uniform(0, 0.05))
            process.kill()
            kept += [
                line.split()[1] for line in process.log.splitlines() if line.startswith("kept ") and len(line) == 76
            ]

    async def whole(store: Store) -> list[str]:
        """Return the findings, without the bytes of an append that was never acknowledged."""
        return [one for one in await _found(store) if not (one.startswith("file: ") and "torn" in one)]

    async def work(store: Store) -> None:
        assert len(kept) > 25
        for name in kept:
            assert set(await store.media("a", [name])) == {name}
        found = await whole(store)
        assert not [one for one in found if "named by no record" not in one and "names of a file are left" not in one]
        unnamed = await store.media_unnamed()
        before = (await store.stats()).media
        assert await store.sweep_media() == unnamed
        assert (await store.stats()).media == before - unnamed
        assert await store.media_unnamed() == 0
        assert await whole(store) == []
        for name in kept:
            assert set(await store.media("a", [name])) == {name}

    with_store(address, work)


@pytest.mark.parametrize("kind", usual(["redis", "cluster"], "redis"))
def test_what_a_dead_router_left_in_redis_is_swept_away(kind: str, tmp_path: Path) -> None:
    """A file with a name whose record never came, and one that was forgotten but for the last step."""
    address = address_of(kind, tmp_path)

    async def work(store: Any) -> None:
        media = store._opened.media
        lost, forgotten = file_of("a", 2), file_of("a", 3)
        await media.put({lost.key: {new_id()}, forgotten.key: {new_id()}}, [lost, forgotten])
        await store._opened.servers.write([("DEL", store._opened.keys.named(forgotten.key))])
        there = showing(World().turn(None, "one", "two", namespace=("a", "", ""), own_context=True), (1,))
        await store.append(batch_of(there, file_of("a", 1)))
        assert len(await _found(store)) == 2
        assert await store.media_unnamed() == 2
        assert await store.sweep_media() == 2
        assert await _found(store) == []
        assert set(await store.media("a", DIGESTS)) == {DIGESTS[1]}
        stats = await store.stats()
        assert (stats.media, stats.media_bytes) == (1, len(CONTENTS[1]))

    with_store(address, work)


# What is wrong -------------------------------------------------------------------------------------------------------------


def one_picture(address: str) -> Turn:
    turn = showing(World().turn(None, "one", "two", namespace=("a", "", ""), own_context=True), (2,))
    with_store(address, lambda store: store.append(batch_of(turn, file_of("a", 2))))
    return turn


async def _found(store: Store) -> list[str]:
    return [f"{one.kind}: {one.message}" async for one in store.verify()]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("UPDATE media SET data = zeroblob(5000)", "others than its name says"),
        ("UPDATE media SET about = zeroblob(40)", "checksum is wrong"),
        ("DELETE FROM media", "names a picture whose file is not there"),
        ("DROP TRIGGER media_without_name; DELETE FROM media_named", "is named by no record"),
    ],
)
def test_damage_is_found_and_never_shown(tmp_path: Path, damage: str, says: str) -> None:
    one_picture(sqlite(tmp_path))
    connection = connect(tmp_path / "store.sqlite3")
    connection.execute(damage)
    connection.close()

    async def work(store: Store) -> None:
        (found,) = await _found(store)
        assert found.startswith("media: ")
        assert says in found
        shown = await store.media("a", [DIGESTS[2]])
        assert [one.data for one in shown.values()] == ([CONTENTS[2]] if "TRIGGER" in damage else [])

    with_store(sqlite(tmp_path), work)


def test_a_router_that_knows_of_no_files_deletes_them_with_their_records(tmp_path: Path) -> None:
    """It deletes the row of the root; the triggers are in the file."""
    one_picture(sqlite(tmp_path))
    connection = connect(tmp_path / "store.sqlite3")
    connection.execute("DELETE FROM places; DELETE FROM roots; DELETE FROM records")
    assert connection.execute("SELECT count(*) FROM media").get == 0
    assert connection.execute("SELECT count(*) FROM media_named").get == 0
    connection.close()


def test_a_file_of_an_earlier_version_gets_the_tables(tmp_path: Path) -> None:
    one_picture(sqlite(tmp_path))
    connection = connect(tmp_path / "store.sqlite3")
    for name in ("media", "media_named", "media_lengths"):
        connection.execute(f"DROP TABLE {name}")
    connection.execute("DROP TRIGGER media_of_root")
    connection.close()
    turn = showing(World().turn(None, "three", "four", namespace=NS, own_context=True), (1,))

    async def work(store: Store) -> None:
        await store.append(batch_of(turn, file_of("", 1)))
        assert (await store.media("", DIGESTS))[DIGESTS[1]].data == CONTENTS[1]
        assert await _found(store) == []

    with_store(sqlite(tmp_path), work)


def test_to_keep_to_its_size_a_store_forgets_what_frees_enough(tmp_path: Path) -> None:
    """The pictures of a conversation count, so that not every conversation is forgotten for the room of one picture."""

    async def work(store: Store) -> None:
        world = World()
        for number in range(20):
            turn = world.turn(None, f"conversation {number}", "y" * 9, own_context=True)
            content = bytes([number]) * 200_000
            media = ((0, 1, digest(content)),)
            context = identified(replace(turn.context, media=media))
            reply = replace(turn.reply, parent=context.id, base=context.id, root=context.root)
            file = MediaFile("", digest(content), "image/png", 1, 1, True, len(content), content)
            await store.append(Batch([context, reply], {reply.id: turn.path}, media=[file]))
        before = await store.stats()
        gone = await store.forget(before.bytes - 300_000)
        assert gone.unretrieved == 2
        after = await store.stats()
        assert (after.roots, after.media) == (18, 18)

    with_store(sqlite(tmp_path), work)
