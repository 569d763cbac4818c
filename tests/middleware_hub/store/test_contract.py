"""What every store promises, judged by an oracle that knows all texts."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.spans.chain import SpanFlag
from middleware_hub.store.chains import Stored, note_on
from middleware_hub.store.errors import (
    ClosedLogError,
    ConflictingRecordError,
    LogMovedError,
    MissingRecordError,
    StoreMismatchError,
    StoreUnreachableError,
)
from middleware_hub.store.look_up import MOST_CHAINS, MOST_NAMED, MOST_VARIANTS
from middleware_hub.store.opening import open_store
from middleware_hub.store.paths import BLOCK, STEP, TextPath
from middleware_hub.store.protocol import Batch, Query, Store
from middleware_hub.store.records import Blob, Event, Mark, SpanRecord
from middleware_hub.store.redis.store import RedisStore
from router.errors import BadRequestError
from tests.conftest import DEAR, examples
from tests.middleware_hub.store.world import (
    EOS,
    MEMORY,
    NS,
    Turn,
    World,
    address_of,
    append_all,
    closed,
    findings,
    ids,
    query,
    sqlite,
    with_store,
)
from tests.support.dictionary_store import DictionaryStore
from tests.support.usual import usual

Work = Callable[[Store], Awaitable[Any]]
Run = Callable[[Work], Any]


@pytest.fixture(params=usual(["memory", "process", "disk", "redis", "valkey", "cluster"], "memory", "process", "redis"))
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Returns what opens a fresh store, does some work with it, and closes it: in SQLite by the event loop, or by a thread."""
    if request.param not in ("process", "disk"):
        address = address_of(request.param, tmp_path)
        return lambda work: with_store(address, work)
    return lambda work: with_store(sqlite(tmp_path), work, durability=request.param)


# Finding ---------------------------------------------------------------------------------------------------------------

SPACES = [NS, ("tenant", "", ""), ("", "adapter", ""), ("", "", "evaluation")]
PIECES = st.sampled_from(
    [
        "",
        "a",
        "b",
        "ab",
        "ü",
        "日本",
        "🙂",
        "a" * (BLOCK - 1),
        "a" * BLOCK,
        "b" * (BLOCK + 1),
        "ab" * BLOCK,
        "x" * 5_000,
    ]
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Trees of conversations: forks, samples of one prompt, equal texts, prefixes of one another, several namespaces."""
    world = World()
    for number in range(draw(st.integers(1, 12))):
        line = draw(st.sampled_from([None, *world.turns])) if world.turns else None
        inside = None
        if line is not None and line.reply.width and draw(st.integers(0, 4)) == 0:
            inside = draw(st.integers(1, line.reply.width))
        world.turn(
            line,
            draw(PIECES) + draw(PIECES),
            draw(PIECES),
            namespace=draw(st.sampled_from(SPACES)),
            own_context=inside is not None or draw(st.integers(0, 5)) > 0,
            inside=inside,
            names=(f"name {draw(st.integers(0, 3))}", f"turn {number}"),
            flags=SpanFlag.MISMATCH if draw(st.integers(0, 9)) == 0 else SpanFlag.NONE,
            tail=(EOS,) if draw(st.booleans()) else (),
        )
    return world


@st.composite
def asked(draw: st.DrawFn, world: World) -> tuple[str, tuple[str, ...]]:
    """A text that has something in common with what is recorded, and a namespace."""
    turn = draw(st.sampled_from(world.turns))
    text = turn.text[: draw(st.one_of(st.just(len(turn.text)), st.integers(0, len(turn.text))))] + draw(PIECES)
    return text, draw(st.sampled_from([turn.reply.namespace, turn.reply.namespace, draw(st.sampled_from(SPACES))]))


@pytest.mark.parametrize("kind", usual(["memory", "sqlite", "redis", "valkey", "cluster"], "memory", "sqlite", "redis"))
@settings(max_examples=examples(400, DEAR))
@given(data=st.data())
def test_find_against_the_oracle(kind: str, data: st.DataObject) -> None:
    """All complete replies of the path are found, and what the text has of others behind them; nothing from elsewhere."""
    world = data.draw(worlds())
    questions = [data.draw(asked(world)) for _ in range(4)]

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        for text, namespace in questions:
            found = await store.find(query(text, namespace))
            ends = world.ending_on(text, namespace)
            floor = max((len(turn.text) for turn in ends if turn.reply.continuable), default=0)
            wanted = {turn.reply.id for turn in [*ends, *world.leaving(text, namespace, floor)]}
            assert wanted <= ids(found)
            assert closed(found)
            assert {record.namespace for record in found.records} <= {namespace}
            assert (found.cut_off, found.damaged) == (0, 0)
            prompts = {
                t.reply.parent
                for t in world.turns
                if t.text and t.text[: t.reply.start] == text and t.reply.namespace == namespace
            }
            assert prompts <= ids(found)
            await check_partly_known(store, world, text, namespace)
        assert await findings(store) == []

    async def check_partly_known(store: Store, world: World, text: str, namespace: tuple[str, ...]) -> None:
        """What a caller knows does not come again; what it lacks does."""
        whole = await store.find(query(text, namespace))
        for known_turn in [turn for turn in world.ending_on(text, namespace) if turn.reply.continuable][-2:]:
            known = {record.id for record in (await store.get([known_turn.reply.id])).records}
            known_from = len(known_turn.text)
            path = query(text, namespace).path
            late = type(path)(namespace, text, path.state(known_from))
            found = await store.find(type(query(""))(late, known_from, known))
            assert not ids(found) & known
            assert closed(found, known)
            wanted = {turn.reply.id for turn in world.ending_on(text, namespace, known_from)} - known
            assert wanted <= ids(found) <= ids(whole) | {t.reply.id for t in world.turns} | known | all_ids(world)

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        with_store(address_of(kind, Path(folder)), work)


def all_ids(world: World) -> set[bytes]:
    return {record.id for turn in world.turns for record in turn.records}


def test_a_record_comes_back_as_it_was(run: Run) -> None:
    world = World()
    first = world.turn(None, "grüße 🙂 " * 99, "reply", names=("rid", "meta"), tail=(EOS,))
    second = world.turn(first, "user", "answer")

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        found = await store.find(query(second.text))
        assert list(found.records) == [*first.records, *second.records]
        assert list((await store.get([first.reply.id])).records) == first.records
        assert [record async for record in store.scan()] == [*first.records, *second.records]

    run(work)


def test_a_lookup_says_how_far_logs_go(run: Run) -> None:
    """Also one that is spared, or finds nothing."""
    turn = World().turn(None, "user", "reply")

    async def work(store: Store) -> None:
        await store.append(
            Batch(turn.records, {turn.reply.id: turn.path}, events=[Event("a", "one"), Event("a", "two")])
        )
        for text, complete in ((turn.text, False), (turn.text, True), ("elsewhere", True)):
            assert (await store.find(query(text, complete=complete, logs=("a", "b")))).ends == {"a": 2, "b": 0}
            assert (await store.find(query(text, complete=complete))).ends == {}

    run(work)


def test_another_namespace_finds_nothing(run: Run) -> None:
    world = World()
    turn = world.turn(None, "user", "reply" * 200, namespace=("tenant", "lora", "eval"), names=("rid",))

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        for namespace in [NS, ("tenant", "lora", ""), ("other", "lora", "eval"), ("tenantlora", "", "eval")]:
            assert not (await store.find(query(turn.text, namespace, parents=("rid",)))).records
        assert (await store.find(query("", turn.reply.namespace, parents=("rid",)))).records

    run(work)


def test_the_newest_of_a_name_is_found_whatever_its_text(run: Run) -> None:
    world = World()
    old = world.turn(None, "one", "reply", names=("rid",))
    new = world.turn(None, "two", "reply", names=("rid", "meta"))

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        for name in ("rid", "meta", "chatcmpl-meta"):
            assert ids(await store.find(query("elsewhere", parents=(name,)))) == {record.id for record in new.records}
        both = await store.find(query(old.text, parents=("rid", "unknown")))
        assert ids(both) == all_ids(world)

    run(work)


def test_the_newest_of_a_name_is_the_one_that_was_recorded_last(run: Run) -> None:
    """What waited in a spool is appended later than what was recorded after it."""
    world = World()
    turns = [world.turn(None, f"text {number}", "reply" * (number + 1), names=("rid",)) for number in range(3)]

    async def work(store: Store) -> None:
        await append_all(store, [turns[2], turns[0], turns[1]])
        found = await store.find(query("elsewhere", parents=("rid",)))
        assert ids(found) == {record.id for record in turns[2].records}

    run(work)


NOTES = (*NS, "messages")


def note(turn: Turn, number: int, *names: str) -> Batch:
    stored = Stored(turn.reply.id, turn.reply.root)
    record = note_on(stored, NOTES, names, b"%d" % number, serial=turn.reply.serial, stamp="1")
    return Batch([record], {record.id: TextPath(NOTES, "")})


def test_a_note_is_found_by_its_names_alone(run: Run) -> None:
    """It brings the reply that it is on, is never found by a text, and is forgotten with its conversation."""
    world = World()
    turn = world.turn(None, "user", "reply", names=("rid",))
    batch = note(turn, 1, "one", "two")

    async def work(store: Store) -> None:
        with pytest.raises(MissingRecordError):
            await store.append(batch)
        await append_all(store, world.turns)
        for _ in range(2):
            await store.append(batch)
        for name in ("one", "two"):
            found = await store.find(Query(TextPath(NOTES, ""), parents=(name,)))
            assert ids(found) == {record.id for record in [*turn.records, *batch.records]}
            assert [record.note for record in found.records if record.note] == [b"1"]
            assert closed(found)
            known = {record.id for record in turn.records}
            assert ids(await store.find(Query(TextPath(NOTES, ""), known=known, parents=(name,)))) == ids(found) - known
        for asked in (query("userreply"), query("", NOTES), query("user", NOTES), query("", parents=("one",))):
            assert not ids(await store.find(asked)) & {batch.records[0].id}
        assert not ids(await store.find(Query(TextPath(NOTES, ""), parents=("rid",))))
        assert [record.note async for record in store.scan()].count(b"1") == 1
        assert await findings(store) == []
        await store.forget_roots([turn.reply.root])
        assert not ids(await store.find(Query(TextPath(NOTES, ""), parents=("one",))))
        assert await findings(store) == []

    run(work)


def test_the_newest_of_one_name_are_found(run: Run) -> None:
    world = World()
    turns = [world.turn(None, f"user {number}", "reply", names=("rid",)) for number in range(MOST_NAMED + 2)]

    async def work(store: Store) -> None:
        await append_all(store, turns)
        for number, turn in enumerate(turns):
            await store.append(note(turn, number, "said"))
        for each in (1, 3, MOST_NAMED):
            found = await store.find(Query(TextPath(NOTES, ""), parents=("said",), each=each))
            assert {int(one.note) for one in found.records if one.note} == set(range(len(turns))[-each:])
            found = await store.find(query("elsewhere", parents=("rid",), each=each))
            assert ids(found) == {record.id for turn in turns[-each:] for record in turn.records}

    run(work)


def test_chains_behind_a_named_parent_are_found(run: Run) -> None:
    """A named parent is continued although the path goes deeper: chains that go on behind it count, too."""
    world = World()
    parent = world.turn(None, "user", "same", names=("parent",))
    twin = world.turn(None, "user", "same")
    deeper = world.turn(twin, "b" * 600, "deeper" + "c" * (2 * STEP * BLOCK))
    behind = world.turn(parent, "b" * 600, "deep" * 100)

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        text = deeper.text + " and on"
        assert behind.reply.id in ids(await store.find(query(text, parents=("parent",))))

    run(work)


def test_chains_that_a_prompt_of_others_leaves_are_found(run: Run) -> None:
    """That the prompt was sampled from is no reply that goes deeper."""
    world = World()
    left = world.turn(None, "user", "deep" * 100)
    prompt = "user" + "deep" * 50 + "c" * (2 * STEP * BLOCK)
    world.turn(None, prompt, "reply")

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        assert left.reply.id in ids(await store.find(query(prompt + "and on")))

    run(work)


def test_equal_texts_are_bounded_and_counted(run: Run) -> None:
    world = World()
    variants = [world.turn(None, "user", "reply") for _ in range(MOST_VARIANTS + 3)]

    async def work(store: Store) -> None:
        await append_all(store, variants)
        found = await store.find(query("userreply and on"))
        assert {v.reply.id for v in variants[3:]} <= ids(found)
        assert found.cut_off >= 1
        assert (await store.stats()).records == 1 + len(variants)

    run(work)


def test_chains_left_midway_are_bounded_and_counted(run: Run) -> None:
    world = World()
    samples = [world.turn(None, "user", f"same start {number:03}") for number in range(3 * MOST_CHAINS)]

    async def work(store: Store) -> None:
        await append_all(store, samples)
        found = await store.find(query("usersame start of another"))
        assert {turn.reply.id for turn in samples[-MOST_CHAINS:]} <= ids(found)
        assert found.cut_off >= 1

    run(work)


def test_a_prompt_brings_one_reply_for_each_tokenization(run: Run) -> None:
    """A request for a sample of a prompt has use for its context, and not for the other samples."""
    world = World()
    samples = [world.turn(None, "user", f"sample {number}") for number in range(10)]

    async def work(store: Store) -> None:
        await append_all(store, samples)
        assert len((await store.find(query("user"))).records) == 2

    run(work)


def test_the_furthest_chain_is_found_among_many(run: Run) -> None:
    """It shares whole blocks with the text, and a hundred newer ones do not."""
    world = World()
    far = world.turn(None, "user", "a" * 2_000)
    many = [world.turn(None, "user", "a" * 500 + f"{number:03}" * 100) for number in range(100)]

    async def work(store: Store) -> None:
        await append_all(store, [far, *many])
        assert far.reply.id in ids(await store.find(query("user" + "a" * 1_900 + "b")))

    run(work)


def test_a_reply_is_found_among_hundreds_that_end_in_the_same_block(run: Run) -> None:
    """They are too many for a store to read all of them."""
    world = World()
    replies = [world.turn(None, "user", f"says {number}") for number in range(300)]

    async def work(store: Store) -> None:
        paths = {turn.reply.id: turn.path for turn in replies}
        await store.append(Batch([record for turn in replies for record in turn.records], paths))
        for turn in replies[::40]:
            asked = turn.text + " and goes on"
            complete = {one.reply.id for one in world.ending_on(asked, NS)}
            assert turn.reply.id in complete <= ids(await store.find(query(asked)))

    run(work)


# Appending -------------------------------------------------------------------------------------------------------------


def test_the_same_record_twice_is_no_fault(run: Run) -> None:
    world = World()
    turn = world.turn(None, "user", "reply")

    async def work(store: Store) -> None:
        for _ in range(2):
            await asyncio.gather(*(store.append(turn.batch) for _ in range(3)))
        assert (await store.stats()).records == 2

    run(work)


def test_a_reply_with_another_content_is_refused(run: Run) -> None:
    world = World()
    turn = world.turn(None, "user", "reply")
    forged = msgspec.structs.replace(turn.reply, finish="length")

    async def work(store: Store) -> None:
        await store.append(turn.batch)
        with pytest.raises(ConflictingRecordError):
            await store.append(Batch([forged], {forged.id: turn.path}, events=[Event("log", "turn")]))
        with pytest.raises(ConflictingRecordError):
            await store.append(Batch([turn.reply, forged], {forged.id: turn.path}))
        assert list((await store.get([turn.reply.id])).records) == turn.records
        assert await store.read("log") == []

    run(work)


def test_what_a_record_builds_on_has_to_be_there(run: Run) -> None:
    world = World()
    first = world.turn(None, "user", "reply")
    second = world.turn(first, "more", "reply")

    async def work(store: Store) -> None:
        with pytest.raises(MissingRecordError) as refused:
            await store.append(second.batch)
        assert set(refused.value.missing) == {first.reply.id}
        assert (await store.stats()).records == 0
        await store.append(Batch([*first.records, *second.records], {**first.batch.paths, **second.batch.paths}))
        assert (await store.stats()).records == 4

    run(work)


def test_a_record_stays_in_its_root(run: Run) -> None:
    world = World()
    first, other = world.turn(None, "user", "reply"), world.turn(None, "other", "reply")
    second = world.turn(first, "more", "reply")
    moved = msgspec.structs.replace(second.reply, root=other.reply.root)

    async def work(store: Store) -> None:
        await append_all(store, [first, other])
        with pytest.raises(ConflictingRecordError, match="another root"):
            await store.append(Batch([second.records[0], moved], {moved.id: second.path}))
        for root in (
            first.reply.root,
            other.reply.root,
        ):  # that of its parent, or of the reply that its prompt continued
            between = msgspec.structs.replace(second.reply, line=other.reply.id, root=root)
            with pytest.raises((ConflictingRecordError, MissingRecordError)):  # Redis looks in one root only
                await store.append(Batch([second.records[0], between], {between.id: second.path}))
        await store.append(second.batch)
        assert await findings(store) == []

    run(work)


def test_a_refused_batch_leaves_nothing(run: Run) -> None:
    """A new conversation that was refused together with a turn that lacks something can be appended by itself."""
    world = World()
    lacking = world.turn(world.turn(None, "user", "reply"), "more", "reply")
    new = world.turn(None, "new", "reply")

    async def work(store: Store) -> None:
        together = Batch([*new.records, *lacking.records], {**new.batch.paths, **lacking.batch.paths})
        with pytest.raises(MissingRecordError):
            await store.append(together)
        await store.append(new.batch)
        assert ids(await store.find(query(new.text))) == {record.id for record in new.records}
        assert await findings(store) == []

    run(work)


def test_a_record_that_is_wrong_in_itself_is_refused(run: Run) -> None:
    turn = World().turn(None, "user", "reply")
    short = msgspec.structs.replace(turn.reply, logprobs=b"")

    async def work(store: Store) -> None:
        with pytest.raises(ValueError, match="logprobs"):
            await store.append(Batch([*turn.records[:1], short], {short.id: turn.path}))
        assert (await store.stats()).records == 0

    run(work)


def test_a_context_needs_no_reply(run: Run) -> None:
    """And a record without any text is found by its id alone."""
    world = World()
    turn = world.turn(None, "user" * 1_000, "reply")
    assert turn.context is not None
    empty = world.turn(None, "", "", names=("name",))

    async def work(store: Store) -> None:
        await store.append(Batch([turn.context] if turn.context else []))
        await store.append(Batch([turn.reply], {turn.reply.id: turn.path}))
        await store.append(empty.batch)
        assert await findings(store) == []
        assert ids(await store.find(query(turn.text))) == {record.id for record in turn.records}
        assert not (await store.find(query("", parents=("name",)))).records
        assert ids(await store.get([empty.reply.id])) == {record.id for record in empty.records}

    run(work)


def test_a_path_of_another_text_is_refused(tmp_path: Path) -> None:
    world = World()
    first, other = world.turn(None, "user", "reply"), world.turn(None, "another", "reply")
    second = world.turn(first, "more", "reply")

    async def work(store: Store) -> None:
        await append_all(store, [first])
        with pytest.raises(ValueError, match="no path of its text"):
            await store.append(Batch(second.records, {second.reply.id: other.path}))

    with_store(sqlite(tmp_path), work)


def test_one_refused_batch_takes_no_other_with_it(run: Run) -> None:
    world = World()
    turns = [world.turn(None, f"user {number}", "reply") for number in range(20)]
    lost = world.turn(World().turn(None, "nowhere", "reply"), "more", "reply")

    async def work(store: Store) -> None:
        batches = [turn.batch for turn in turns]
        batches.insert(10, lost.batch)
        done = await asyncio.gather(*(store.append(batch) for batch in batches), return_exceptions=True)
        assert [type(answer) for answer in done].count(MissingRecordError) == 1
        assert (await store.stats()).records == 40

    run(work)


def test_of_batches_that_begin_one_log_at_once_the_refused_leave_nothing_in_other_logs(run: Run) -> None:
    """As when two groups get a session of one name."""

    async def work(store: Store) -> None:
        made = [Batch(events=[Event("one", "made", expected=0), Event(f"group {n}", "joined")]) for n in range(9)]
        done = await asyncio.gather(*(store.append(batch) for batch in made), return_exceptions=True)
        assert [type(answer) for answer in done].count(LogMovedError) == len(made) - 1
        won = next(at for at, answer in enumerate(done) if isinstance(answer, list))
        assert done[won] == [1, 1]
        assert [info.log for info in await store.logs("")] == [f"group {won}", "one"]

    run(work)


def test_an_append_is_read_at_once(run: Run) -> None:
    world = World()

    async def work(store: Store) -> None:
        turn: Turn | None = None
        for number in range(50):
            turn = world.turn(turn, f"user {number}", "reply")
            await store.append(turn.batch)
            assert turn.reply.id in ids(await store.find(query(turn.text + " and on")))

    run(work)


def test_blobs_lie_beside_a_record(run: Run) -> None:
    turn = World().turn(None, "user", "reply")
    blobs = [Blob(turn.reply.id, name, "int32", (5, 2), bytes(40)) for name in ("routed_experts", "top_p")]

    async def work(store: Store) -> None:
        with pytest.raises(MissingRecordError):
            await store.append(Batch(blobs=blobs[:1]))
        await store.append(Batch(turn.records, {turn.reply.id: turn.path}, blobs))
        assert await store.blobs(turn.reply.id) == blobs
        assert await store.blobs(turn.reply.id, ["top_p"]) == blobs[1:]
        assert await store.blobs(b"?" * 16) == []

    run(work)


# Logs ------------------------------------------------------------------------------------------------------------------


def test_a_log_keeps_its_order(run: Run) -> None:
    async def work(store: Store) -> None:
        assert await store.append(
            Batch(events=[Event("a", "created"), Event("b", "created"), Event("a", "turn", b"1")])
        ) == [
            1,
            1,
            2,
        ]
        await asyncio.gather(*(store.append(Batch(events=[Event("a", "turn", b"%d" % n)])) for n in range(30)))
        read = await store.read("a")
        assert [event.number for event in read] == list(range(1, 33))
        assert [event.data for event in read[2:]] == [b"%d" % n for n in range(30)]
        assert await store.read("a", after=30) == read[30:]
        assert await store.read("a", limit=2) == read[:2]
        assert await store.read("nothing") == []

    run(work)


def test_a_closed_log_takes_no_more(run: Run) -> None:
    turn = World().turn(None, "user", "reply")

    async def work(store: Store) -> None:
        await store.append(Batch(events=[Event("s", "created"), Event("s", "finalized", closes=1)]))
        with pytest.raises(ClosedLogError):
            await store.append(Batch(turn.records, {turn.reply.id: turn.path}, events=[Event("s", "turn")]))
        assert (await store.stats()).records == 0
        with pytest.raises(ClosedLogError):
            await store.append(Batch(events=[Event("s", "finalized", closes=1)]))
        assert await store.append(Batch(events=[Event("s", "deleted", closes=2)])) == [3]
        with pytest.raises(ClosedLogError):
            await store.append(Batch(events=[Event("s", "deleted", closes=2)]))
        with pytest.raises(ClosedLogError):
            await store.append(Batch(events=[Event("new", "deleted", closes=2), Event("new", "turn")]))
        assert await store.logs() == [(info := (await store.logs("s"))[0])]
        assert (info.last, info.closed) == (3, 2)

    run(work)


def test_an_event_may_expect_the_end_of_its_log(run: Run) -> None:
    async def work(store: Store) -> None:
        await store.append(Batch(events=[Event("s", "created", expected=0), Event("s", "turn", expected=1)]))
        with pytest.raises(LogMovedError) as refused:
            await store.append(Batch(events=[Event("s", "turn", expected=1)]))
        assert refused.value.last == 2
        assert await store.append(Batch(events=[Event("s", "turn", expected=2)])) == [3]
        assert all(event.expected is None for event in await store.read("s"))

    run(work)


def test_logs_are_listed_in_pages(run: Run) -> None:
    names = ["session/1", "session/2", "session/🙂", "sessions", "versions"]

    async def work(store: Store) -> None:
        await store.append(Batch(events=[Event(name, "created") for name in reversed(names)]))
        assert [info.log for info in await store.logs()] == names
        assert [info.log for info in await store.logs("session/")] == names[:3]
        assert [info.log for info in await store.logs("session", after="session/1", limit=2)] == names[1:3]
        assert await store.logs("session%") == []

    run(work)


def test_waiting_ends_with_an_event_or_with_the_time(run: Run) -> None:
    async def work(store: Store) -> None:
        assert await store.wait("a", 0, 0.0) == 0
        assert await store.wait("a", 0, 0.1) == 0
        waiting = [asyncio.ensure_future(store.wait("a", after, 20.0)) for after in (0, 0, 1)]
        await asyncio.sleep(0.05)
        await store.append(Batch(events=[Event("b", "other")]))
        await store.append(Batch(events=[Event("a", "first")]))
        assert [await waiting[0], await waiting[1]] == [1, 1]
        assert await store.wait("a", 0, 20.0) == 1, "what is there already needs no waiting"
        waiting[2].cancel()
        await store.append(Batch(events=[Event("a", "second"), Event("a", "third")]))
        assert await store.wait("a", 1, 20.0) == 3
        assert await store.wait("a", 3, 0.05) == 3
        assert await store.wait("a", 9, 0.05) == 3, "a number that the log never had"

    run(work)


def test_a_trimmed_log_goes_on(run: Run) -> None:
    async def work(store: Store) -> None:
        await store.trim("nothing", 5)
        await store.append(Batch(events=[Event(log, "turn", b"%d" % n) for n in range(1, 11) for log in ("a", "b")]))
        await store.trim("a", 4)
        await store.trim("a", 2)
        assert [event.number for event in await store.read("a")] == list(range(4, 11))
        assert [event.number for event in await store.read("a", after=1, limit=2)] == [4, 5]
        assert [event.number for event in await store.read("b")] == list(range(1, 11))
        assert await findings(store) == []
        await store.trim("a", 99)
        assert await store.read("a") == []
        assert await store.wait("a", 9, 0.0) == 10
        assert [(info.log, info.last) for info in await store.logs()] == [("a", 10), ("b", 10)]
        assert await findings(store) == []
        with pytest.raises(LogMovedError):
            await store.append(Batch(events=[Event("a", "turn", expected=0)]))
        assert await store.append(Batch(events=[Event("a", "turn", expected=10)])) == [11]
        assert [event.number for event in await store.read("a")] == [11]
        assert await findings(store) == []

    run(work)


def test_a_closed_log_stays_closed_when_it_is_trimmed(run: Run) -> None:
    async def work(store: Store) -> None:
        await store.append(Batch(events=[Event("s", "created"), Event("s", "finalized", closes=1)]))
        await store.trim("s", 3)
        with pytest.raises(ClosedLogError):
            await store.append(Batch(events=[Event("s", "turn")]))
        assert await store.append(Batch(events=[Event("s", "deleted", closes=2)])) == [3]
        await store.trim("s", 4)
        await store.forget(1)
        assert (await store.logs())[0].closed == 2

    run(work)


# Announcements ---------------------------------------------------------------------------------------------------------


def test_an_announcement_holds_for_its_time(run: Run) -> None:
    async def work(store: Store) -> None:
        assert await store.announced() == {}
        await store.announce("router/1", b"one", 30.0)
        await store.announce("router/2", b"two", 30.0)
        await store.announce("router%", b"\0\xff", 30.0)
        assert await store.announced("router/") == {"router/1": b"one", "router/2": b"two"}
        begun = monotonic()
        await store.announce("router/2", b"briefly", 0.2)
        assert (await store.announced()).get("router/2") == b"briefly" or monotonic() - begun > 0.2
        assert await store.announced("router%") == {"router%": b"\0\xff"}
        await store.announce("router/1", b"again", 30.0)
        await asyncio.sleep(0.25)
        assert await store.announced() == {"router/1": b"again", "router%": b"\0\xff"}
        await store.announce("router/2", b"back", 30.0)
        await store.announce("router/1", b"", 0)
        await store.announce("nobody", b"", 0)
        assert await store.announced("router/") == {"router/2": b"back"}
        assert (await store.stats()).records == 0
        if not isinstance(store, RedisStore):  # which cannot know without asking
            assert store.others() == 0

    run(work)


# The rest --------------------------------------------------------------------------------------------------------------


def test_marks_come_with_what_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for writer in ("sqlite", "redis"):
        monkeypatch.setattr(f"middleware_hub.store.{writer}.writer._MARKS_EVERY", 0.05)
    turn = World().turn(None, "user", "reply", stamp="7")
    root = turn.reply.root

    async def work(store: Store) -> None:
        await store.append(turn.batch)
        late = turn.reply.serial + 10
        store.note([Mark(root, late, "9"), Mark(root, 1, "0", retrieved=True), Mark(b"?" * 16, 5)])
        await store.forget(1 << 40)
        await asyncio.sleep(0.1)  # two intervals
        async with asyncio.timeout(30):
            expected = {root: Mark(root, late, "9", retrieved=True)}
            while (await store.find(query(turn.text))).marks != expected:  # noqa: ASYNC110  # it has no event
                await asyncio.sleep(0.01)

    run(work)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        other = store if isinstance(store, DictionaryStore) else open_store(sqlite(tmp_path))
        with pytest.raises(StoreMismatchError, match="tokenizer"):
            await other.open("another")

    for address in ("memory:process", sqlite(tmp_path)):
        with_store(address, work)
    with pytest.raises(StoreMismatchError, match="name another path"):
        with_store(sqlite(tmp_path), work, "another")


def test_a_store_opens_without_a_tokenizer_if_it_is_there(tmp_path: Path) -> None:
    """As programs do that have none. They never make a store."""
    path = tmp_path / "store.sqlite3"

    async def records(store: Store) -> list[SpanRecord]:
        return [record async for record in store.scan()]

    with pytest.raises(StoreUnreachableError, match="there is no store"):
        with_store(f"sqlite:{path}", records, None)
    assert not path.exists()
    world = World()
    world.turn(None, "user", "reply")
    with_store(f"sqlite:{path}", lambda store: append_all(store, world.turns), "mine")
    assert with_store(f"sqlite:{path}", records, None) == world.turns[0].records


@pytest.mark.parametrize("address", ["redis", "redis:", "redis://", "sqlite", "sqlite:", "mysql:x", ""])
def test_an_unknown_address_says_what_to_write(address: str) -> None:
    with pytest.raises(BadRequestError, match="sqlite:PATH"):
        open_store(address)


def test_sqlites_own_name_for_a_store_in_memory_makes_no_folder() -> None:
    with pytest.raises(BadRequestError, match="leave --store out"):
        open_store("sqlite::memory:")


def test_an_unknown_durability_says_what_there_is() -> None:
    with pytest.raises(BadRequestError, match="process, disk, off"):
        open_store("sqlite:x", durability="none")  # type: ignore[arg-type]
