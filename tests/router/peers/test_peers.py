"""What routers tell each other, in one process: the order of the log decides, whoever is late, away, or set back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.persistence.store_channel import LOG, StoreChannel
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Event
from middleware_hub.store.sqlite.file import connect
from router.errors import BadRequestError, NotFoundError
from router.peers import control_log, events, presence
from router.peers.channel import ChannelError
from router.peers.events import Abort, CallBegan, CallOver, FleetState, RouterCame, WorkerAdded, WorkerRemoved, encoded
from router.peers.peers import Peers
from router.peers.presence import RENEW_SECONDS, Presence
from tests.conftest import examples
from tests.router.peers.fleets import FakeRouter, routers
from tests.support.clock import run_by_a_clock
from tests.support.dictionary_store import DictionaryStore

A, B, C = (f"http://10.0.0.{number}:30000" for number in (1, 2, 3))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is looked at tells nobody of its changes
            await asyncio.sleep(0.002)


async def log_of(store: DictionaryStore) -> list[str]:
    return [event.kind for event in await store.read(LOG)]


def test_without_a_store_nothing_is_told() -> None:
    async def main() -> None:
        one = FakeRouter(None, "one")
        await one.start([A])
        worker, heard = await one.members.add(B)
        assert (worker.url, heard.number, heard.missing) == (B, 0, ())
        assert one.urls == [A, B]
        await one.members.remove(A)
        with pytest.raises(NotFoundError):
            await one.members.remove(A)
        assert one.urls == [B]
        assert one.peers.until == float("inf")
        (shown,) = await one.peers.list()
        assert (shown["id"], shown["this"], shown["store"]) == ("one", True, None)
        await one.peers.close()

    asyncio.run(main())


def test_routers_with_other_settings_are_told_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = DictionaryStore()
        one, two, old = (FakeRouter(store, name) for name in ("one", "two", "old"))
        one.peers.presence.settings |= {"--history": "keep", "--session-match": "strict", "--own": "x"}
        two.peers.presence.settings |= {"--history": "template", "--session-match": "strict", "--chat-template": "1f"}
        for router in (one, two, old):
            await router.start()
        await one.peers.presence.look(StoreChannel(store, "test"))
        await one.peers.presence.look(StoreChannel(store, "test"))
        shown = {router["id"]: router.get("differs") for router in await one.peers.list()}
        assert shown == {"one": None, "two": ["--history"], "old": None}  # one of a former version announces none
        for router in (one, two, old):
            await router.peers.close()

    asyncio.run(main())
    warnings = [record.getMessage() for record in caplog.records if "has another" in record.getMessage()]
    assert [message.partition(":")[0] for message in sorted(warnings)] == [
        "router one on this store has another --history",
        "router two on this store has another --history",
    ]


def test_all_have_read_it_when_the_call_is_answered() -> None:
    async def main() -> None:
        async with routers(3, urls=[A]) as (one, two, three):
            _, heard = await one.members.add(B)
            assert (heard.missing, heard.error) == ((), None)
            assert one.urls == two.urls == three.urls == [A, B]
            assert {worker.version for worker in three.pool.list()} == {None, "1"}
            await two.members.remove(A)
            assert one.urls == two.urls == three.urls == [B]
            assert one.door.taken.count(B) == two.door.taken.count(B) == 1
            shown = await one.peers.list()
            assert [(router["id"], router["this"]) for router in shown] == [
                ("router-0", True),
                ("router-1", False),
                ("router-2", False),
            ]

    asyncio.run(main())


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from(["add", "remove", "away", "back", "again"]), st.sampled_from([A, B, C])
    ),
    max_size=25,
)


@settings(max_examples=examples(60), deadline=None)
@given(steps=STEPS)
def test_all_routers_come_to_the_state_of_the_log(steps: list[tuple[int, str, str]]) -> None:
    """Whatever is done where, also while one of them is away, and with routers that start again."""

    async def main() -> None:
        store = DictionaryStore()
        async with routers(3, store) as found:
            for at, what, url in steps:
                router = found[at]
                assert router.channel is not None
                if what == "add":
                    await router.peers.tell(WorkerAdded(url), seconds=0.0)
                    assert url in router.urls
                elif what == "remove":
                    await router.peers.tell(WorkerRemoved(url), seconds=0.0)
                    assert url not in router.urls
                elif what == "again":
                    router.channel.away = False
                    await router.peers.close()
                    found[at] = FakeRouter(store, f"router-{at}")
                    await found[at].start([A] if url == A else [])
                else:
                    router.channel.away = what == "away"
            for router in found:
                assert router.channel is not None
                router.channel.away = False
            await until(lambda: not any(router.peers.away or router.peers._untold for router in found))
            for router in found:
                assert await router.peers.catch_up()
            state = FleetState()
            for event in await store.read(LOG):
                state.apply(control_log.decoded(event.kind, event.data))
            there = {url for url, there in state.workers.items() if there}
            assert [set(router.urls) for router in found] == [there] * 3
            for router in found:
                await router.peers.close()

    asyncio.run(main())


def test_what_cannot_be_told_is_told_later_and_in_order(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "LEASE_SECONDS", 0.3)

    async def main() -> None:
        store = DictionaryStore()
        async with routers(2, store, urls=[A]) as (one, two):
            assert one.channel is not None
            one.channel.away = True
            _, heard = await one.members.add(B)
            assert heard.shown()["told"] is False
            assert "away" in (heard.error or "")
            await one.members.remove(A)
            assert one.urls == [B]
            assert two.urls == [A]
            await two.members.add(C)
            await one.peers.tell(Abort(rid="r"))  # by then there may be another generation of that name
            one.channel.away = False
            await until(lambda: set(one.urls) == set(two.urls) == {B, C})
            assert (await log_of(store))[-3:] == ["worker_added", "worker_added", "worker_removed"]

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "other routers were not told: worker_added" in caplog.text
    assert "other routers are told only now: worker_removed" in caplog.text


def test_a_version_that_could_not_be_told_is_set_again_before_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order in the store could not be written down, either."""
    monkeypatch.setattr(presence, "LEASE_SECONDS", 0.3)

    async def main() -> None:
        store = DictionaryStore()
        async with routers(1, store) as (one,):
            seen: list[str | None] = []

            async def note(version: str | None) -> None:
                assert "call_over" not in await log_of(store)
                seen.append(version)

            one.peers.on_version = note
            assert one.channel is not None
            one.channel.away = True
            assert (await one.peers.tell(CallOver("1", "7", ("x",)))).error is not None
            one.channel.away = False
            await until(lambda: seen == ["7"])
            await until(lambda: one.peers.log.state.version == "7")

    asyncio.run(main())


@pytest.mark.parametrize("read", [False, True], ids=["before it is read", "while others read it"])
def test_an_entry_is_done_at_once_if_the_store_fails_behind_it(read: bool) -> None:
    async def main() -> None:
        async with routers(1) as (one,):
            done: list[str] = []

            async def hear(event: Abort, _: int, own: bool) -> None:
                assert own
                done.append(event.rid)

            one.peers.log.hear(Abort, hear)
            channel = one.channel
            assert channel is not None
            append = channel.append

            async def fail_behind_it(*given: Any) -> int | None:
                number = await append(*given)
                channel.away = True
                return number

            async def fail() -> Mapping[str, bytes]:
                raise ChannelError("it is away")

            with pytest.MonkeyPatch.context() as patch:
                if read:
                    patch.setattr(channel, "announced", fail)
                else:
                    patch.setattr(channel, "append", fail_behind_it)
                heard = await one.peers.tell(Abort(rid="r"))
            assert (heard.number, heard.error) == (2, "it is away")
            assert done == ["r"]
            channel.away = False
            await until(lambda: one.peers.log.read == 2)
            assert done == ["r"] * (1 if read else 2), "it is done again when it can be read"

    asyncio.run(main())


def test_a_router_that_comes_while_the_store_goes_is_away_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """It has said that it comes, and then cannot ask who is there: that is no error of the entry."""

    async def main() -> None:
        async with routers(1) as (one,):
            channel = one.channel
            assert channel is not None
            channel.away = True
            await one.peers.log.do(RouterCame(), own=True)
            assert one.peers.away
            channel.away = False
            await until(lambda: not one.peers.away)

    asyncio.run(main())
    assert "could not do" not in caplog.text
    assert "this one goes on alone: it is away" in caplog.text


def test_an_answer_waits_for_what_a_router_still_does_about_an_entry() -> None:
    async def main() -> None:
        async with routers(2) as (one, two):
            finish = asyncio.Event()
            tasks: list[asyncio.Task[None]] = []

            async def hear(event: Abort, number: int, own: bool) -> None:
                async def do() -> None:
                    await finish.wait()
                    two.peers.presence.busy.discard(number)
                    await two.peers.announce()

                two.peers.presence.busy.add(number)
                tasks.append(asyncio.create_task(do()))

            two.peers.log.hear(Abort, hear)
            telling = asyncio.create_task(one.peers.tell(Abort(rid="r")))
            await until(lambda: tasks and two.peers.presence.told == two.peers.log.read)
            done, _ = await asyncio.wait([telling], timeout=0.2)
            assert not done
            finish.set()
            assert (await telling).missing == ()

    asyncio.run(main())


def test_a_router_that_comes_is_known_to_the_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for it if the store loses what it has written. Otherwise they look now and then."""
    monkeypatch.setattr("tests.support.dictionary_store.monotonic", lambda: time.monotonic())

    async def main() -> None:
        store = DictionaryStore()
        async with routers(1, store) as (one,):
            await asyncio.sleep(RENEW_SECONDS / 3)
            async with routers(1, store) as (late,):
                await until(lambda: late.peers.presence.token in one.peers.presence.others)
                assert time.monotonic() < RENEW_SECONDS / 2

    run_by_a_clock(monkeypatch, main())


def test_one_that_does_not_hear_is_named_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.dictionary_store.monotonic", lambda: time.monotonic())

    async def main() -> None:
        async with routers(2, urls=[A]) as (one, two):
            assert two.channel is not None
            two.channel.away = True
            begun = time.monotonic()
            _, heard = await one.members.add(B)
            assert heard.missing == ("router-1",)
            assert time.monotonic() - begun < presence.LEASE_SECONDS + 0.1
            two.channel.away = False
            await until(lambda: two.urls == [A, B])

    run_by_a_clock(monkeypatch, main())


def test_a_router_whose_time_was_over_reads_on_before_it_serves() -> None:
    """It was stopped: nobody waited for it. It announces itself first, so that whoever tells something now waits for it."""

    async def main() -> None:
        store = DictionaryStore()
        async with routers(1, store, urls=[A]) as (one,):
            late = Peers(Presence("late"))
            late.join(StoreChannel(store, "test"))
            seen: list[str] = []

            async def hear(event: WorkerAdded, _: int, own: bool) -> None:
                # An entry of the very moment between reading and announcing.
                if not seen:
                    assert "late" in {each.id for each in (await one.peers.presence.look(one.channel)).values()}  # type: ignore[arg-type]
                seen.append(event.url)

            late.log.hear(WorkerAdded, hear)
            late.log.live = True
            late.until = 0.0
            await one.members.add(B)
            await late.look_again()
            assert seen == [A, B]
            assert late.until > time.monotonic()
            await late.look_again()
            assert late.log.read == one.peers.log.read

    asyncio.run(main())


def test_an_update_waits_for_that_of_another_router() -> None:
    async def main() -> None:
        async with routers(2) as (one, two):
            first = CallBegan("1", "/update_weight_version", updates=True)
            assert (await one.peers.take_turn(first)).error is None
            waiting = asyncio.ensure_future(two.peers.take_turn(CallBegan("2", "/update_weight_version", updates=True)))
            await two.peers.take_turn(CallBegan("3", "/pause_generation", aborts=True))
            done, _ = await asyncio.wait([waiting], timeout=0.2)
            assert not done
            await one.peers.tell(CallOver("1", "7", ("x",)))
            assert (await waiting).error is None
            assert two.peers.log.state.version == "7"
            await two.peers.catch_up()
            assert set(two.peers.log.state.calls) == {"2", "3"}

    asyncio.run(main())


def test_a_routers_own_calls_do_not_wait_for_each_other() -> None:
    """They come one after the other by themselves; one whose end could not be told must not stop the next."""

    async def main() -> None:
        async with routers(1) as (one,), asyncio.timeout(30):
            for call in ("1", "2"):
                heard = await one.peers.take_turn(CallBegan(call, "/update_weight_version", updates=True))
                assert heard.error is None

    asyncio.run(main())


def test_a_call_that_the_others_have_to_know_begins_when_they_have_heard_of_it() -> None:
    async def main() -> None:
        async with routers(2) as (one, two):
            heard = await one.peers.take_turn(CallBegan("1", "/pause_generation"), seconds=30.0)
            assert two.peers.log.read >= heard.number > 0

    asyncio.run(main())


def test_a_version_that_no_worker_took_is_not_the_fleets() -> None:
    state = FleetState()
    state.apply(CallOver("1", "7", ("x",)))
    state.apply(CallOver("2", "8"))
    assert state.version == "7"


def test_workers_that_are_awake_in_part_are_paused() -> None:
    state = FleetState()
    for path, paused in (("/sleep", True), ("/wake_up", True), ("/wake_up", False)):
        state.apply(CallBegan(path, path))
        state.apply(CallOver(path, paused=paused))
        assert state.paused is paused
    state.apply(CallBegan("1", "/pause"))
    state.apply(CallOver("1"))
    assert state.paused, "an older router does not say it"


def test_an_announcement_holds_from_its_beginning() -> None:
    """The store counts from when it takes it, which may be long before its answer is here."""

    class Slow(StoreChannel):
        async def announce(self, name: str, data: bytes, seconds: float) -> None:
            await super().announce(name, data, seconds)
            await asyncio.sleep(0.05)

    async def main() -> None:
        one = Presence("one")
        for held in (False, True):
            assert await one.announce(Slow(DictionaryStore(), "test"), 0) is held
            if not held:
                one.held()
            assert one.until <= time.monotonic() - 0.05 + presence.LEASE_SECONDS

    asyncio.run(main())


def test_the_call_of_a_router_that_died_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "LEASE_SECONDS", 0.3)
    over: list[str] = []

    async def main() -> None:
        store = DictionaryStore()
        async with routers(1, store) as (one,):

            async def hear(event: CallOver, _: int, own: bool) -> None:
                over.append(event.call)

            one.peers.log.hear(CallOver, hear)
            dead = Peers(Presence("dead"))
            dead.join(StoreChannel(store, "test"))
            await dead.take_turn(CallBegan("1", "/update_weight_version", updates=True, aborts=True))
            assert (await one.peers.take_turn(CallBegan("2", "/update_weight_version", updates=True))).error is None
            await until(lambda: over == ["1"])
            await one.peers.catch_up()
            assert set(one.peers.log.state.calls) == {"2"}

    asyncio.run(main())


# -- the log ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_log_stays_short_and_keeps_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_log, "SNAPSHOT_EVERY", 20)
    monkeypatch.setattr("router.peers.peers.RENEW_SECONDS", 0.02)

    async def main() -> None:
        store = DictionaryStore()
        async with routers(2, store, urls=[A]) as (one, two):
            await one.members.remove(A)
            await one.peers.tell(CallOver("0", "5", ("x",)))
            for number in range(120):
                await one.members.add(B if number % 2 else C)
                await two.members.remove(B if number % 2 else C)
                assert len(await store.read(LOG)) < 90
            await one.members.add(C)
            late = FakeRouter(store, "late")
            await late.start([A, B])
            assert late.urls == [C] == one.urls == two.urls
            assert late.peers.log.state.workers[A] is False
            assert late.peers.log.state.version == "5"
            assert not late.peers.log.entries["lost"]
            await late.peers.close()

    asyncio.run(main())


def test_a_snapshot_says_what_the_entries_before_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_REMOVED", 2)
    state = FleetState()
    for url in (A, B, C):
        state.apply(WorkerAdded(url))
        state.apply(WorkerRemoved(url))
    state.apply(WorkerAdded("http://10.0.0.4:30000"))
    state.apply(CallOver("1", "7", ("x",)))
    state.apply(CallBegan("2", "/pause_generation", aborts=True))
    assert state.workers == {B: False, C: False, "http://10.0.0.4:30000": True}, (
        "the latest removed ones are remembered"
    )
    other = FleetState()
    other.apply(state.snapshot())
    assert (other.workers, other.version, other.paused, other.calls) == (state.workers, "7", True, state.calls)
    assert list(other.calls) == ["2"]


def test_a_snapshot_has_all_that_was_said_and_some_of_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken if another router has gone on meanwhile, and routers that lag behind find what they have not read."""
    monkeypatch.setattr(control_log, "SNAPSHOT_EVERY", 2)

    async def main() -> None:
        store = DictionaryStore()
        channel, log = StoreChannel(store, "test"), control_log.ControlLog("one")
        for url in (A, B, C, A):
            await log.append(channel, WorkerAdded(url))
        await log.read_on(channel)
        await store.append(Batch(events=[Event(LOG, "worker_removed", encoded(WorkerRemoved(B), "x"))]))
        await log.shorten(channel)
        assert await log_of(store) == ["worker_added"] * 4 + ["worker_removed"]
        await log.read_on(channel)
        await log.shorten(channel)
        assert [(event.number, event.kind) for event in await store.read(LOG)] == [
            (4, "worker_added"),
            (5, "worker_removed"),
            (6, "snapshot"),
        ]

    asyncio.run(main())


@pytest.mark.slow
def test_a_router_that_was_away_for_too_long_takes_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for meanwhile is not known, so it is assumed: nothing in flight is sent again."""
    monkeypatch.setattr(control_log, "SNAPSHOT_EVERY", 10)
    monkeypatch.setattr("router.peers.peers.RENEW_SECONDS", 0.02)

    async def main() -> None:
        async with routers(2, urls=[A]) as (one, two):
            lost: list[int] = []
            two.peers.log.on_lost = lambda: lost.append(1)
            assert two.channel is not None
            two.channel.away = True
            await two.peers.catch_up()
            for number in range(60):
                await one.peers.tell(WorkerAdded(B) if number % 2 else WorkerRemoved(B), seconds=0.0)
                await asyncio.sleep(0.003)
            await one.peers.tell(WorkerRemoved(A), seconds=0.0)
            await one.peers.tell(WorkerAdded(C), seconds=0.0)
            await until(lambda: one.peers.log.state.entries <= 10)
            two.channel.away = False
            await until(lambda: set(two.urls) == {B, C} == set(one.urls))
            assert lost

    asyncio.run(main())


def test_an_entry_of_a_newer_router_is_passed_over_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = DictionaryStore()
        async with routers(1, store) as (one,):
            unknown = [Event(LOG, "worker_painted", b'{"url": 1}')] * 3
            newer = Event(LOG, "worker_added", encoded(WorkerAdded(A), "x")[:-1] + b',"colour":"red"}')
            broken = Event(LOG, "worker_added", b'{"uri": 1}')
            await store.append(Batch(events=[*unknown, newer, broken, Event(LOG, "worker_added", b"\xff")]))
            await store.append(Batch(events=[Event(LOG, "worker_added", encoded(WorkerAdded(B), "x"))]))
            await until(lambda: one.urls == [A, B])
            assert one.peers.log.entries["worker_painted"] == 3

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert caplog.text.count("worker_painted") == 1
    assert caplog.text.count("cannot be read") == 2


@pytest.mark.parametrize("damaged", [[3], [1], [5], [2, 3]])
@pytest.mark.parametrize("trimmed", [0, 2])
def test_a_damaged_entry_is_passed_over(tmp_path: Path, damaged: list[int], trimmed: int) -> None:
    async def main() -> None:
        store = open_store(f"sqlite:{tmp_path}/")
        await store.open("toy")
        channel = StoreChannel(store, "sqlite")
        urls = [f"http://10.0.0.{number}:1" for number in range(1, 6)]
        for url in urls:
            await channel.append("worker_added", encoded(WorkerAdded(url), "x"))
        await channel.trim(trimmed + 1)
        with connect(tmp_path / "store.sqlite3") as connection:
            for number in damaged:
                connection.execute("UPDATE events SET body = x'00ff00ff' WHERE number = ?", (number,))
        connection.close()
        one = FakeRouter(store, "one")
        await one.start()
        left = [url for number, url in enumerate(urls, 1) if number not in damaged and number > trimmed]
        if len(damaged) == 1:
            assert one.urls == left
        assert one.peers.log.entries["lost"] == bool([number for number in damaged if number > trimmed])
        assert one.peers.log.read == 6, "the last one is its own"
        await one.peers.close()
        await store.close()

    asyncio.run(main())


def test_a_log_that_was_set_back_is_read_again_and_gets_back_what_it_lost(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = DictionaryStore()
        async with routers(1, store, urls=[A]) as (one,):
            lost: list[int] = []
            one.peers.log.on_lost = lambda: lost.append(1)
            await one.members.add(B)
            await one.members.remove(A)
            store._logs.pop(LOG)
            store._ends.pop(LOG)
            await store.append(Batch(events=[Event(LOG, "worker_added", encoded(WorkerAdded(C), "x"))]))
            await until(lambda: set(one.urls) == {B, C})
            assert lost, "an abort may have been lost, too"
            await until(lambda: one.peers.log.read == 3)
            late = FakeRouter(store, "late")
            await late.start([A])
            assert set(late.urls) == {B, C}
            await late.peers.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "set back" in caplog.text


def test_a_log_that_was_set_back_and_went_on_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    """It may be as long as it was, or longer, when a router reads it."""

    async def main() -> None:
        store = DictionaryStore()
        async with routers(1, store, urls=[A]) as (one,):
            await one.members.add(B)
            store._logs.pop(LOG)
            store._ends.pop(LOG)
            for url in (C, A, C):
                await store.append(Batch(events=[Event(LOG, "worker_added", encoded(WorkerAdded(url), "x"))]))
            await until(lambda: set(one.urls) == {A, B, C})
            late = FakeRouter(store, "late")
            await late.start([])
            await until(lambda: set(late.urls) == {A, B, C})
            await late.peers.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert caplog.text.count("set back") == 1


def test_a_store_that_hangs_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_log, "PATIENCE", 0.05)

    async def main() -> None:
        with pytest.raises(ChannelError, match=r"0\.05 s"):
            await control_log.in_time(asyncio.sleep(30))

    asyncio.run(main())


def test_a_worker_that_is_not_allowed_here_stays_out(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with routers(2) as (one, two):
            two.door.refused.add(A)
            await one.members.add(A)
            await one.members.add(C)
            assert (one.urls, two.urls) == ([A, C], [C])

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "is refused here" in caplog.text


def test_another_router_is_no_worker() -> None:
    """What it forwards would be recorded twice."""

    async def main() -> None:
        store = DictionaryStore()
        async with routers(1, store) as (one,):
            two = FakeRouter(store, "two")
            two.peers.presence.url = B
            await two.start()
            await one.members.add(A)
            with pytest.raises(BadRequestError, match="another router"):
                await one.members.add(B)
            assert one.urls == two.urls == [A]
            await two.peers.close()

    asyncio.run(main())


def test_a_worker_that_is_not_allowed_stays_out_of_a_router_that_starts_later(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = DictionaryStore()
        async with routers(1, store) as (one,):
            for url in (A, B, C):
                await one.members.add(url)
            later = FakeRouter(store, "later")
            later.door.refused.add(A)
            later.peers.presence.url = B
            await later.start()
            assert (one.urls, later.urls) == ([A, B, C], [C])
            await later.peers.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "is refused here" in caplog.text
    assert "which is this router" in caplog.text


def test_what_is_told_while_a_router_starts_is_done_there() -> None:
    """It has read the log, and asks the workers of its command line how they are, which others do not know yet."""

    async def main() -> None:
        store = DictionaryStore()
        async with routers(1, store, urls=[A]) as (one,):
            later = FakeRouter(store, "later")

            async def meanwhile() -> None:
                await one.members.add(B)
                await one.members.remove(A)

            later.door.meanwhile = meanwhile
            await later.start([C])
            await one.peers.catch_up()
            assert set(one.urls) == set(later.urls) == {B, C}
            await later.peers.close()

    asyncio.run(main())
