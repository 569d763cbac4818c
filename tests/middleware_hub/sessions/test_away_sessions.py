"""Sessions while the store is away: what was answered is in them afterwards, once, also if a router died meanwhile."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.sessions import events
from middleware_hub.sessions.exchange import KEPT_SECONDS
from middleware_hub.sessions.log.stored_log import EventPlace, LogState
from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.spool import handover
from middleware_hub.store.spool.file import SpoolFile
from middleware_hub.store.spool.folder import SpoolFolder
from tests.middleware_hub.sessions.in_process import Client, Room, until
from tests.middleware_hub.sessions.test_shared_sessions import BODY, Broken, Held, exported, more, routers, waiting
from tests.middleware_hub.store.dying import dies as ends


async def spooling(room: Room, folder: Path) -> SpoolFile:
    """Give a router a spool file that outlives it."""
    assert room.hub.saving is not None

    async def another() -> Store:
        store = open_store(f"sqlite:{folder}")
        await store.open("t")
        return store

    await room.hub.saving.open(SpoolFolder(str(folder / "spool"), "s", "t", 1 << 20), another)
    return room.hub.saving._spool


def dies(room: Room) -> None:
    """End the lock of a router's spool file, as its death does."""
    assert room.hub.saving is not None
    ends(room.hub.saving._spool)
    room.hub.saving._spool = SpoolFile.anonymous()


def last_words(branches: list[dict[str, Any]]) -> list[str]:
    return [branch["messages"][-1]["content"] for branch in branches]


def test_the_kinds_of_events_are_those_of_the_log() -> None:
    assert {events.TurnCommitted.__struct_config__.tag} == {handover.TURN}
    assert {events.Finalized.__struct_config__.tag, events.SessionEnded.__struct_config__.tag} == handover.OVER


@pytest.mark.parametrize("first", [0, 1])
def test_two_routers_go_on_while_the_store_takes_nothing(first: int, tmp_path: Path) -> None:
    """Both branches are there afterwards, each once, and both routers agree."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            rooms = [await both.another(), await both.another()]
            await rooms[0].open()
            assert (await rooms[0].ask(BODY).answer())[0] == 200
            assert len(await exported(rooms[1])) == 1
            broken = [Broken(room, "append") for room in rooms]
            for number, room in enumerate(rooms):
                for text in ("x", "y"):
                    room.engine.says(f"{text}{number}")
                    client = room.ask(more(BODY))
                    assert (await client.answer())[0] == 200
                    assert dict(client.out[0]["headers"])[b"x-radix-saved"] == b"no"
            for number in (first, 1 - first):
                broken[number].mend()
                saving = rooms[number].hub.saving
                assert saving is not None
                assert await saving.hand_over()
            found = await exported(await both.another())
            order = [f"{text}{number}" for number in (first, 1 - first) for text in ("x", "y")]
            assert last_words(found) == order
            for room in rooms:
                await room.call("GET", "/sessions/s")  # reads on
                assert await exported(room) == found
            for room in rooms:
                client = room.ask(more(BODY))
                assert (await client.answer())[0] == 200
                assert b"x-radix-saved" not in dict(client.out[0]["headers"])

    asyncio.run(work())


@pytest.mark.parametrize("away", [None, 0.0, KEPT_SECONDS + 1])
def test_a_reply_that_is_kept_for_a_resend_does_not_keep_the_order_of_turns(away: float | None, tmp_path: Path) -> None:
    """The router exports in the store's order as others do, and a client that resends gets the reply that it missed.

    `away`: for so many seconds the store is away again, just when the session is to be read again. A reply that is
    kept no longer is written again from its turn.
    """

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            session = await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            broken = Broken(one, "append")
            says = one.engine.says("mine", hold=0)
            left = one.ask(more(BODY), key="k")
            await one.engine.arrived()
            await left.leave()
            says.go.set()
            log: Any = session.log
            await until(lambda: log.unsaved)
            other.engine.says("theirs")
            assert (await other.ask(more(BODY)).answer())[0] == 200
            broken.mend()
            assert one.hub.saving is not None
            assert await one.hub.saving.hand_over()
            told = await exported(other)
            assert last_words(told) == ["theirs", "mine"]
            if away is not None:
                again = Broken(one, "logs")
                assert (await one.call("GET", "/sessions/s"))[0] == 503
                one.app.registry.sweep(time.monotonic() + away)
                again.mend()
            await one.call("GET", "/sessions/s")  # reads on
            assert await exported(one) == told
            status, found = await one.ask(more(BODY), key="k").answer()
            assert (status, found["choices"][0]["message"]["content"]) == (200, "mine")
            assert await exported(one) == told
            assert one.session.idle  # the reply is not kept any longer

    asyncio.run(work())


def test_what_a_dead_router_left_and_the_store_does_not_take_may_belong_to_any_session(tmp_path: Path) -> None:
    """Answers say so, until it is in the store."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await spooling(room, tmp_path)
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            Broken(room, "append")
            assert (await room.ask(more(BODY)).answer())[0] == 200
            told = await exported(room)
            dies(room)
            other = await both.another()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(handover.Drain, "empty", full)
                await spooling(other, tmp_path)
            (only,) = await exported(other)
            assert (only["exact"], only["reasons"]) == (False, ["store_unreachable"])
            saving = other.hub.saving
            assert saving is not None
            assert saving._adoption is not None
            await saving._adoption.run()
            assert await exported(other) == told
            await saving.close()

    asyncio.run(work())


async def full(*_: object) -> bool:
    """Stands for a store that takes no writes."""
    return False


@pytest.mark.parametrize("behind", [False, True])
def test_a_router_that_dies_leaves_its_turns_to_the_next(behind: bool, tmp_path: Path) -> None:
    """Also if some of it had been written, and nobody heard of that."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await spooling(room, tmp_path)
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            Broken(room, "append", behind=behind)
            assert (await room.ask(more(BODY)).answer())[0] == 200
            assert (await room.call("POST", "/sessions/s/complete", {"reward_info": {"r": 1}}))[0] == 200
            assert (await room.ask(more(more(BODY))).answer())[0] == 200
            told = await exported(room)
            dies(room)
            other = await both.another()
            await spooling(other, tmp_path)
            assert await exported(other) == told
            status, found = await other.call("GET", "/sessions/s")
            assert (status, found["phase"], found["reward_info"]) == (200, "complete", {"r": 1})
            assert found["num_generations"] == 3
            assert other.hub.saving is not None
            await other.hub.saving.close()

    asyncio.run(work())


def test_a_turn_of_a_session_that_ended_elsewhere_is_kept_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was exported stays what it is. The turn that came too late is said, counted, and kept in a file."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            spool = await spooling(one, tmp_path)
            await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            broken = Broken(one, "append")
            assert (await one.ask(more(BODY)).answer())[0] == 200
            status, final = await other.call("POST", "/sessions/s/finalize", {})
            assert status == 200
            broken.mend()
            saving = one.hub.saving
            assert saving is not None
            assert await saving.hand_over()
            assert saving.lost == 1
            assert (await one.call("POST", "/sessions/s/finalize", {}))[1]["trajectories"] == final["trajectories"]
            assert await exported(await both.another()) == final["trajectories"]
            assert (await one.ask(more(BODY)).answer())[0] == 409
            assert spool.path is not None
            kept = SpoolFile.adopt(spool.path.with_suffix(".refused"), None)
            assert kept is not None
            assert len(kept.waiting) == 1
            ends(kept)
            await saving.close()

    asyncio.run(work())
    assert "ended elsewhere" in caplog.text


@pytest.mark.parametrize("what", ["a reward", "the end"])
def test_what_waited_together_with_a_turn_that_came_too_late_is_not_lost(what: str, tmp_path: Path) -> None:
    """A reward, or the end of the session, that was answered in the same moment as the turn."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            session = await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            says = one.engine.says("late", hold=0)
            late = one.ask(more(BODY))
            await one.engine.arrived()
            held = Held(one)
            held.client = look = Client(one.app, "GET", "/sessions/s", {}, {})
            await held.reached.wait()
            says.go.set()
            await waiting(session.log, 1)
            rewarded = events.SessionRewarded(b'{"r": 1}', None, time=0.0)
            does = session.happen(rewarded) if what == "a reward" else one.app.registry.delete(session)
            doing = asyncio.create_task(does)
            await waiting(session.log, 2)
            broken = Broken(one, "append")
            held.go.set()
            await asyncio.gather(late.answer(), look.answer(), doing)
            assert (await other.call("POST", "/sessions/s/finalize", {}))[0] == 200
            broken.mend()
            assert one.hub.saving is not None
            assert await one.hub.saving.hand_over()
            assert one.hub.saving.lost == 1
            for room in (one, other, await both.another()):
                status, found = await room.call("GET", "/sessions/s")
                if what == "a reward":
                    assert (found["num_generations"], found["reward_info"]) == (1, {"r": 1})
                else:
                    assert status == 404

    asyncio.run(work())


@pytest.mark.parametrize("what", ["a reward", "the end"])
def test_what_was_answered_behind_a_turn_that_came_too_late_is_not_lost(what: str, tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            broken = Broken(one, "append")
            assert (await one.ask(more(BODY)).answer())[0] == 200
            if what == "a reward":
                assert (await one.call("POST", "/sessions/s/reward_info", {"reward_info": {"r": 1}}))[0] == 200
            else:
                assert (await one.call("DELETE", "/sessions/s"))[0] == 200
            assert (await other.call("POST", "/sessions/s/finalize", {}))[0] == 200
            broken.mend()
            assert one.hub.saving is not None
            assert await one.hub.saving.hand_over()
            assert one.hub.saving.lost == 1
            for room in (one, other, await both.another()):
                status, found = await room.call("GET", "/sessions/s")
                if what == "a reward":
                    assert (found["num_generations"], found["reward_info"]) == (1, {"r": 1})
                else:
                    assert status == 404

    asyncio.run(work())


def test_a_reward_behind_turns_that_came_too_late_may_take_two_attempts(tmp_path: Path) -> None:
    """The store goes away again between the turns and the reward, whose number is then beyond the end of the log."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            broken = Broken(one, "append")
            for _ in range(3):
                assert (await one.ask(more(BODY)).answer())[0] == 200
            assert (await one.call("POST", "/sessions/s/reward_info", {"reward_info": {"r": 1}}))[0] == 200
            assert (await other.call("POST", "/sessions/s/finalize", {}))[0] == 200
            broken.mend()
            saving = one.hub.saving
            assert saving is not None
            store: Any = one.hub.store
            real = store.append

            async def append(batch: Batch) -> None:
                if [event.kind for event in batch.events] == ["reward"]:
                    raise StoreUnreachableError("the disk is full")
                await real(batch)

            store.append = append
            assert not await saving.hand_over()
            store.append = real
            assert await saving.hand_over()
            assert saving.lost == 3
            for room in (one, other, await both.another()):
                assert (await room.call("GET", "/sessions/s"))[1]["reward_info"] == {"r": 1}

    asyncio.run(work())


def test_a_turn_of_a_session_that_was_deleted_and_forgotten_holds_up_nobody(tmp_path: Path) -> None:
    """It waited for the store. What it builds on is gone there, and here it is cut into pieces."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            broken = Broken(room, "append")
            assert (await room.ask(more(BODY)).answer())[0] == 200
            assert (await room.ask(more(more(BODY))).answer())[0] == 200
            assert (await room.call("DELETE", "/sessions/s"))[0] == 200
            saving, store = room.hub.saving, room.hub.store
            assert saving is not None
            assert store is not None
            await store.forget(0)
            broken.mend()
            assert await saving.hand_over()
            assert saving.lost == 2
            await room.open()
            client = room.ask(BODY)
            assert (await client.answer())[0] == 200
            assert b"x-radix-saved" not in dict(client.out[0]["headers"])
            assert await exported(await both.another()) == await exported(room)

    asyncio.run(work())


def test_a_turn_that_neither_the_store_nor_the_disk_takes_stays_in_memory(tmp_path: Path) -> None:
    """Its client is told, and the next one is refused, until there is room."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            broken = Broken(room, "append")
            saving = room.hub.saving
            assert saving is not None
            saving._spool._connection.execute("PRAGMA query_only = 1")  # as on a disk that takes nothing
            held = room.ask(more(BODY))
            assert (await held.answer())[0] == 200
            assert dict(held.out[0]["headers"])[b"x-radix-saved"] == b"no"
            status, found = await room.ask(more(BODY)).answer()
            assert (status, found["error"]["type"]) == (503, "store_unreachable")
            assert "in memory only" in found["error"]["message"]
            saving._spool._connection.execute("PRAGMA query_only = 0")
            broken.mend()
            assert await saving.hand_over()
            assert (await room.ask(more(BODY)).answer())[0] == 200
            assert room.session.samples == 3
            assert await exported(await both.another()) == await exported(room)

    asyncio.run(work())


def test_a_forgotten_session_that_others_went_on_with_is_not_written_again_without_them(tmp_path: Path) -> None:
    """The turn that waited is lost, and that is told; the router that has all the rest writes it again with its next turn."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            assert (await other.ask(more(BODY)).answer())[0] == 200  # which the first router does not read any more
            broken = [Broken(one, name) for name in ("append", "read", "logs")]
            away = one.ask(more(BODY))
            assert (await away.answer())[0] == 200
            assert dict(away.out[0]["headers"])[b"x-radix-saved"] == b"no"
            assert other.hub.store is not None
            await other.hub.store.forget(0)
            for method in broken:
                method.mend()
            saving = one.hub.saving
            assert saving is not None
            assert await saving.hand_over()
            assert saving.lost == 1
            assert (await one.call("GET", "/sessions/s"))[0] == 404
            assert (await other.ask(more(more(BODY))).answer())[0] == 200
            told = await exported(other)
            assert await exported(await both.another()) == told
            assert len(told["trajectories"] if isinstance(told, dict) else told) == 1

    asyncio.run(work())


def test_a_session_that_is_forgotten_between_two_turns_that_waited_is_written_again(tmp_path: Path) -> None:
    """The first of them is in the log already. No other router went on with the session."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            broken = [Broken(one, name) for name in ("append", "read", "logs")]
            for body in (more(BODY), more(more(BODY))):
                assert (await one.ask(body).answer())[0] == 200
            assert (await other.call("POST", "/sessions/s/reward_info", {"reward_info": {"r": 1}}))[0] == 200
            for method in broken:
                method.mend()
            store: Any = one.hub.store
            real = store.append

            async def append(batch: Batch) -> None:
                await real(batch)
                store.append = real
                await other.hub.store.forget(0)  # type: ignore[union-attr]

            store.append = append
            saving = one.hub.saving
            assert saving is not None
            assert await saving.hand_over()
            assert saving.lost == 0
            (told,) = await exported(await both.another())
            assert (told["num_turns"], told["reward_info"]) == (3, {"r": 1})
            assert [told] == await exported(one)

    asyncio.run(work())


@pytest.mark.parametrize("forgets", [0, 1])
def test_a_session_that_is_forgotten_behind_a_turn_of_which_nobody_heard_is_written_again(
    forgets: int, tmp_path: Path
) -> None:
    """The turn was appended, but the store did not acknowledge it: in the log it is this router's own."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            broken = Broken(one, "append", behind=True)
            assert (await one.ask(more(BODY)).answer())[0] == 200
            broken.mend()
            store = (one, other)[forgets].hub.store
            assert store is not None
            assert (await store.forget(0)).unretrieved == 1
            saving = one.hub.saving
            assert saving is not None
            assert await saving.hand_over()
            assert saving.lost == 0
            (told,) = await exported(await both.another())
            assert told["num_turns"] == 2
            assert [told] == await exported(one)

    asyncio.run(work())


def test_a_forgotten_session_has_nothing_that_waits_for_the_store(tmp_path: Path) -> None:
    """What waited is in the log, which can no longer be read: while it counted as unsaved, others had no room in memory."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            assert (await other.ask(more(BODY)).answer())[0] == 200  # which the first router does not read any more
            broken = [Broken(one, name) for name in ("append", "read", "logs")]
            assert (await one.call("POST", "/sessions/s/reward_info", {"reward_info": {"r": 1}}))[0] == 200
            log: Any = one.session.log
            assert log.unsaved
            assert other.hub.store is not None
            await other.hub.store.forget(0)
            for method in broken:
                method.mend()
            await log.hand_over()
            assert not log.unsaved
            assert (await one.call("GET", "/sessions/s"))[0] == 404

    asyncio.run(work())


@pytest.mark.parametrize("known", [True, False])
def test_a_session_of_a_group_that_is_deleted_while_the_store_is_away_leaves_the_group(
    known: bool, tmp_path: Path
) -> None:
    """It was gone, but the answer was 503, and its group kept it. `known`: the router has read what the group is made of."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            grouped = {"x-group-id": "g", "x-group-size": "2"}
            for name in ("s", "t"):
                made = Client(one.app, "POST", "/sessions", {"session_id": name}, grouped)
                assert (await made.answer())[0] == 201
            if known:
                await one.hub.groups.journal("", "").read_on()
            broken = [Broken(one, name) for name in ("append", "read", "logs")]
            assert (await one.call("DELETE", "/sessions/s"))[0] == 200
            for method in broken:
                method.mend()
            assert one.hub.saving is not None
            assert await one.hub.saving.hand_over()
            assert (await other.call("GET", "/sessions/s"))[0] == 404
            journal = other.hub.groups.journal("", "")
            await journal.read_on()
            members = journal.ledger.groups["g"].members.values()
            left = [(member.session, member.done, member.ended) for member in members]
            assert left == [("s", known, not known), ("t", False, False)]  # nothing of what has ended is there to claim

    asyncio.run(work())


def test_a_session_that_was_refused_takes_no_place_in_a_group(tmp_path: Path) -> None:
    """Another router made it meanwhile. Its sample was lost when the entry of the refused one reached the store."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            broken = Broken(one, "append")
            for room, group, status in ((one, "h", 503), (other, "g", 201)):
                grouped = {"x-group-id": group, "x-group-size": "1"}
                assert (await Client(room.app, "POST", "/sessions", {"session_id": "s"}, grouped).answer())[0] == status
            assert (await other.call("POST", "/sessions/s/complete"))[0] == 200
            broken.mend()
            assert one.hub.saving is not None
            assert await one.hub.saving.hand_over()
            journal = other.hub.groups.journal("", "")
            await journal.read_on()
            (member,) = journal.ledger.groups["g"].members.values()
            assert (member.session, member.ended) == ("s", True)

    asyncio.run(work())


def test_a_log_knows_whether_what_happened_here_is_in_the_store(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            log: Any = (await one.open()).log
            states = [log.state]
            broken = Broken(one, "append")
            for hand_over in (True, False):
                assert (await one.ask(more(BODY)).answer())[0] == 200
                states.append(log.state)
                assert one.hub.saving is not None
                if hand_over:
                    broken.mend()
                    assert await one.hub.saving.hand_over()
                    await log.read_on()
                    states.append(log.state)
                    broken = Broken(one, "append")
            assert (await other.ask(more(BODY)).answer())[0] == 200
            await log.read_on()
            states.append(log.state)
            broken.mend()
            assert await one.hub.saving.hand_over()
            await log.read_on()
            states.append(log.state)
            assert [state.value for state in states] == ["current", "ahead", "current", "ahead", "diverged", "diverged"]
            assert await exported(one) == await exported(other)

    asyncio.run(work())


def test_nothing_happens_in_a_session_whose_log_was_not_read(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            log: Any = (await (await both.another()).open()).log
            log.state = LogState.NEW
            with pytest.raises(RuntimeError, match="is new"):
                log._found(EventPlace.WAITING)

    asyncio.run(work())
