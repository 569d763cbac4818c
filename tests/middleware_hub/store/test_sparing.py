"""Look-ups that are spared: only where nobody else can have written anything."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.store.errors import MissingRecordError, StoreUnreachableError
from middleware_hub.store.opening import open_store
from middleware_hub.store.paths import BLOCK
from middleware_hub.store.protocol import Batch, Forgotten, Store
from middleware_hub.store.records import Event, new_id
from middleware_hub.store.sqlite import others, writer
from middleware_hub.store.sqlite.file import connect
from middleware_hub.store.sqlite.store import SqliteStore
from tests.conftest import examples
from tests.middleware_hub.store.world import MEMORY, NS, Turn, World, append_all, ids, query, sqlite, with_store


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


def test_who_is_alone_keeps_no_more_the_longer_it_runs(tmp_path: Path) -> None:
    """What it appended is noted for the day on which others write, and forgotten when there is too much of it."""
    world = World()

    async def work(store: Store) -> None:
        assert isinstance(store, SqliteStore)
        for number in range(50):
            await store.append(world.turn(None, f"user {number}", "reply", names=(f"a{number}", f"b{number}")).batch)
            assert len(store._absent) <= 12

    with patch.object(others, "_MOST_ABSENT", 10):
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


def test_a_text_begun_after_a_restart_is_spared_soon(tmp_path: Path) -> None:
    """Others are there before, under the same system prompt; what one of them adds on the text's path later is found."""
    world = World()
    system = "system " * 500
    old = [world.turn(None, f"{system} asks {number}", "reply " * 100) for number in range(5)]
    with_store(sqlite(tmp_path), lambda store: append_all(store, old))

    async def work(mine: Store, other: Store) -> None:
        line, known = None, set[bytes]()
        for number in range(8):
            asked = (line.text if line else system) + f"mine {number} " * 30
            known_from = len(line.text) if line else 0
            known |= ids(await mine.find(query(asked, known_from=known_from, known=known, complete=True)))
            line = world.turn(line, asked[known_from:], "reply " * 100)
            known |= {record.id for record in line.records}
            await mine.append(line.batch)
        assert (await mine.stats()).spared >= 6
        twin = world.turn(None, asked, "another reply " * 100)
        await other.append(twin.batch)
        assert twin.reply.id in ids(await mine.find(query(twin.text, known=known, complete=True)))

    with_two(tmp_path, work)


def test_a_prompt_of_others_that_goes_on_is_not_forgotten(tmp_path: Path) -> None:
    """Their reply stands far behind the text that was looked up first."""
    world = World()
    old = world.turn(None, "user" * 1_000, "reply")

    async def again(store: Store) -> None:
        assert not (await store.find(query("user" * 400, complete=True))).records
        assert old.reply.id in ids(await store.find(query(old.text, complete=True)))

    with_store(sqlite(tmp_path), lambda store: store.append(old.batch))
    with_store(sqlite(tmp_path), again)


def test_two_who_write_elsewhere_spare_each_other_the_lookups(tmp_path: Path) -> None:
    """Each goes on with conversations of its own, under one system prompt; what the other writes is heard, and is elsewhere."""
    world = World()
    system = "system " * 500

    async def work(mine: Store, other: Store) -> None:
        lines: dict[Store, Turn | None] = {mine: None, other: None}
        for number in range(8):
            for store, line in lines.items():
                asked = (line.text if line else system) + f"{'mine' if store is mine else 'other'} {number} " * 30
                names = line.reply.request_ids if line else ()
                known_from = len(line.text) if line else 0
                found = store.spared(query(asked, known_from=known_from, parents=names, complete=True, logs=("a",)))
                assert found is not None, number
                assert found.ends == {"a": number}
                line = lines[store] = world.turn(line, asked[known_from:], "reply " * 100, names=(new_id().hex(),))
                await store.append(line.batch)
            await other.append(Batch(events=[Event("a", "turn")]))
        for store, line in ((mine, lines[other]), (other, lines[mine])):
            assert line is not None
            assert store.spared(query(line.text, complete=True)) is None
            assert store.spared(query("elsewhere", parents=line.reply.request_ids, complete=True)) is None

    with_two(tmp_path, work)


def test_a_name_that_another_gives_again_is_looked_up(tmp_path: Path) -> None:
    world = World()
    ours, theirs = (world.turn(None, user, "reply", names=("name",)) for user in ("ours", "theirs"))
    asked = query("elsewhere", parents=("name",), complete=True)

    async def work(mine: Store, other: Store) -> None:
        await mine.append(ours.batch)
        assert mine.spared(asked) is not None
        await other.append(theirs.batch)
        assert mine.spared(asked) is None
        assert theirs.reply.id in ids(await mine.find(asked))

    with_two(tmp_path, work)


def test_a_name_from_before_is_looked_up_once(tmp_path: Path) -> None:
    turn = World().turn(None, "user", "reply" * 300, names=("name",))
    asked = query("user" + "reply" * 300, known_from=1_504, parents=("name",), complete=True)

    async def again(store: Store) -> None:
        assert store.spared(asked) is None
        assert turn.reply.id in ids(await store.find(asked))
        assert store.spared(query("elsewhere" * 200, parents=("another",), complete=True)) is None
        text = "mine" * 300
        await store.find(query(text, complete=True))
        assert store.spared(query(text, parents=("name",), complete=True)) is not None
        assert store.spared(query(text, parents=("another",), complete=True)) is None

    with_store(sqlite(tmp_path), lambda store: store.append(turn.batch))
    with_store(sqlite(tmp_path), again)


def test_a_longer_reply_of_another_is_found_behind_what_is_known(tmp_path: Path) -> None:
    """It begins as ours does, long before the end of what is known, and the text leaves it midway."""
    world = World()
    ours, theirs = (world.turn(None, "user " * 300, "reply " * 300 + more) for more in ("", "longer " * 300))
    asked = query(theirs.text[:-5], known_from=len(ours.text), complete=True)

    async def work(mine: Store, other: Store) -> None:
        await mine.append(ours.batch)
        assert mine.spared(asked) is not None
        await other.append(theirs.batch)
        assert theirs.reply.id in ids(await mine.find(asked))

    with_two(tmp_path, work)


def test_what_was_written_without_news_is_found_also_when_others_follow(tmp_path: Path) -> None:
    world = World()
    first, second = (world.turn(None, f"user {number}", "reply") for number in range(2))

    async def work(mine: Store, other: Store) -> None:
        await other.append(first.batch)
        without_news(tmp_path)
        await other.append(second.batch)
        assert first.reply.id in ids(await mine.find(query(first.text, complete=True)))

    with_two(tmp_path, work)


@pytest.mark.parametrize(("user", "reply"), [(4, 6), (BLOCK - 1, 5), (BLOCK, 5), (4, BLOCK - 4)])
def test_the_very_text_that_another_wrote_is_looked_up(tmp_path: Path, user: int, reply: int) -> None:
    """And one that goes on from it."""
    world = World()
    ours, theirs = world.turn(None, "ours", "reply"), world.turn(None, "u" * user, "r" * reply)

    async def work(mine: Store, other: Store) -> None:
        await mine.append(ours.batch)
        asked = [query(theirs.text + more, complete=True) for more in ("", "!")]
        assert all(mine.spared(one) is not None for one in asked)
        await other.append(theirs.batch)
        assert [mine.spared(one) for one in asked] == [None, None]

    with_two(tmp_path, work)


def test_what_was_written_last_without_news_is_found(tmp_path: Path) -> None:
    world = World()
    first, second = world.turn(None, "user", "reply"), world.turn(None, "another user", "reply")

    async def work(mine: Store, other: Store) -> None:
        await mine.append(first.batch)
        await mine.find(query(second.text, complete=True))
        await other.append(second.batch)
        without_news(tmp_path)
        assert second.reply.id in ids(await mine.find(query(second.text, complete=True)))

    with_two(tmp_path, work)


def test_what_was_known_of_texts_holds_no_more_once_others_wrote_without_news(tmp_path: Path) -> None:
    world = World()
    first, begun = world.turn(None, "user", "reply"), world.turn(None, "u" * 8 * BLOCK, "reply", names=("n",))

    async def work(mine: Store, other: Store) -> None:
        await other.append(first.batch)
        without_news(tmp_path)
        asked = [query(begun.text, parents=parents, complete=True) for parents in ((), ("n",))]
        for one in asked:
            assert mine.spared(one) is None
            assert not (await mine.find(one)).records
            assert mine.spared(one) is not None
        await other.append(begun.batch)
        without_news(tmp_path)
        assert [mine.spared(one) for one in asked] == [None, None]
        for one in asked:
            assert begun.reply.id in ids(await mine.find(one))

    with_two(tmp_path, work)


def test_what_cannot_be_read_is_looked_up_again_each_time(tmp_path: Path) -> None:
    """Else the second request would know nothing of it, and nobody would be told."""
    world = World()
    turn = world.turn(None, "user", "reply", names=("n",))

    async def work(mine: Store, other: Store) -> None:
        await other.append(turn.batch)
        without_news(tmp_path)
        with closing(connect(tmp_path / "store.sqlite3")) as connection:
            connection.execute("UPDATE records SET body = x'00' WHERE id = ?", (turn.reply.id,))
        for text in (turn.text + "!", "u" * 8 * BLOCK):
            asked = query(text, parents=("n",), complete=True)
            assert (await mine.find(asked)).damaged
            assert mine.spared(asked) is None

    with_two(tmp_path, work)


def test_a_log_to_which_another_has_appended_has_another_end(tmp_path: Path) -> None:
    async def work(mine: Store, other: Store) -> None:
        for number in range(3):
            for asked in (query("a text", complete=True, logs=("log",)), query("a text", logs=("log",))):
                spared = mine.spared(asked)
                assert (spared or await mine.find(asked)).ends.get("log", 0) == number
            await other.append(Batch(events=[Event("log", "kind", b"%d" % number)]))

    with_two(tmp_path, work)


def test_others_are_heard_while_the_writer_is_at_work(tmp_path: Path) -> None:
    world = World()
    ours, theirs = (world.turn(None, user, "reply") for user in ("ours", "theirs"))

    async def work(mine: Store, other: Store) -> None:
        assert isinstance(mine, SqliteStore)
        await mine.append(Batch(ours.records, {ours.reply.id: ours.path}, events=[Event("a", "turn")]))
        with mine._open_writer()._turn:
            await other.append(Batch(theirs.records, {theirs.reply.id: theirs.path}, events=[Event("a", "turn")]))
            assert mine.spared(query(theirs.text, complete=True)) is None
            spared = mine.spared(query(ours.text, complete=True, logs=("a",)))
            assert spared is not None
            assert spared.ends == {"a": 2}
            assert theirs.reply.id in ids(await mine.find(query(theirs.text, complete=True)))

    with_two(tmp_path, work)


def test_a_file_of_a_router_that_writes_no_news_gets_them(tmp_path: Path) -> None:
    """That router goes on to write: what it adds is found, and what it forgets is not built on."""
    world = World()
    before, theirs = (world.turn(None, f"user {number}", "reply") for number in range(2))
    with_store(sqlite(tmp_path), lambda store: store.append(before.batch))
    with closing(connect(tmp_path / "store.sqlite3")) as connection:
        triggers = ("forgotten", "media_of_root", "media_without_name")
        tables = ("news", "media", "media_lengths", "media_named")
        made_since = [f"DROP TRIGGER {one}" for one in triggers] + [f"DROP TABLE {one}" for one in tables]
        for change in (*made_since, "DELETE FROM meta WHERE key = 'forgotten'"):
            connection.execute(change)

    async def work(mine: Store, other: Store) -> None:
        assert before.reply.id in ids(await mine.find(query(before.text, complete=True)))
        await mine.append(world.turn(before, "mine", "reply").batch)
        await other.append(theirs.batch)
        without_news(tmp_path)
        assert theirs.reply.id in ids(await mine.find(query(theirs.text, complete=True)))
        with closing(connect(tmp_path / "store.sqlite3")) as connection:
            connection.execute("DELETE FROM records")
        with pytest.raises(MissingRecordError):
            await mine.append(world.turn(before, "more", "reply").batch)

    with_two(tmp_path, work)


def test_news_go_before_any_conversation_is_forgotten(tmp_path: Path) -> None:
    world = World()

    async def work(store: Store) -> None:
        for number in range(400):
            await store.append(world.turn(None, f"user {number}", "reply", names=(f"{number}",)).batch)
        assert await store.forget((await store.stats()).bytes - 1) == Forgotten()
        assert (await store.stats()).roots == 400

    with_store(sqlite(tmp_path), work)


def test_what_another_forgot_is_not_built_on(tmp_path: Path) -> None:
    """Also where this process wrote it, and knows where it is."""
    world = World()
    first = world.turn(None, "user", "reply")
    second = world.turn(first, "more", "reply")

    async def work(mine: Store, other: Store) -> None:
        await mine.append(first.batch)
        await other.append(world.turn(None, "elsewhere", "reply").batch)
        await other.forget_roots([first.reply.root])
        with pytest.raises(MissingRecordError):
            await mine.append(second.batch)

    with_two(tmp_path, work)


PARTS = ["", "a", "ab", "a" * 1_023, "a" * 1_024, "b" * 1_100, "a" * 3_000]


def without_news(folder: Path) -> None:
    """Take away what was said of the last record, as if a router of an earlier version had written it."""
    with closing(connect(folder / "store.sqlite3")) as connection:
        connection.execute("DELETE FROM news WHERE n = (SELECT max(n) FROM news)")


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(data=st.data(), most=st.sampled_from([0, 3, 200_000]), kept=st.sampled_from([-1, 2, 4_000]))
def test_sparing_hides_nothing(data: st.DataObject, most: int, kept: int) -> None:
    """Who keeps all it appended and found has, after each look-up, what an oracle knows of the path; also after a restart.

    However little of the news is kept, in memory (`most`) and in the file (`kept`), and where a router writes none.
    """
    world = World()
    held = set[bytes]()

    async def check(mine: Store) -> None:
        turn = data.draw(st.sampled_from(world.turns))
        text = turn.text[: data.draw(st.sampled_from([len(turn.text), len(turn.text) // 2]))]
        text += data.draw(st.sampled_from(PARTS))
        held.update(ids(await mine.find(query(text, known=held, complete=True))))
        ends = world.ending_on(text, NS)
        floor = max((len(turn.text) for turn in ends if turn.reply.continuable), default=0)
        assert {turn.reply.id for turn in [*ends, *world.leaving(text, NS, floor)]} <= held

    async def work(mine: Store, other: Store) -> None:
        for _ in range(data.draw(st.integers(1, 8))):
            line = data.draw(st.sampled_from([None, *world.turns]))
            turn = world.turn(line, data.draw(st.sampled_from(PARTS)), data.draw(st.sampled_from(PARTS)))
            if data.draw(st.integers(0, 3)):
                # What it builds on is known to whoever continues it.
                held.update(ids(await mine.get([link for record in turn.records for link in record.links])))
                held.update(record.id for record in turn.records)
                await mine.append(turn.batch)
            else:
                await other.append(turn.batch)
                if not data.draw(st.integers(0, 4)):
                    without_news(Path(folder))
                    await other.append(world.turn(None, "a", "b").batch)
            await check(mine)

    with (
        tempfile.TemporaryDirectory(dir=MEMORY) as folder,
        patch.object(others, "_MOST_KEPT", most),
        patch.object(writer, "NEWS_KEPT", kept),
        patch.object(writer, "_TRIM_EVERY", 1),
    ):
        for _ in range(2):
            with_two(Path(folder), work)
            held.clear()


def test_an_event_that_was_read_stays_there(tmp_path: Path) -> None:
    """Another process writes between two reads of one turn of the event loop, which looks for others once."""

    def append(number: int) -> None:
        async def work(store: Store) -> None:
            await store.append(Batch(events=[Event("log", "kind", str(number).encode())]))

        thread = threading.Thread(target=with_store, args=(sqlite(tmp_path), work))
        thread.start()
        thread.join()

    async def read_on(store: Store) -> None:
        append(1)
        assert [event.number for event in await store.read("log")] == [1]
        append(2)
        assert [event.number for event in await store.read("log")] == [1, 2]
        assert [event.number for event in await store.read("log", after=1)] == [2]
        assert await store.read("log", after=2) == []

    with_store(sqlite(tmp_path), read_on)
