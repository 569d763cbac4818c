"""What clients are told of a session of which the store lost turns, or cannot be asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.sessions.exports import SessionSamples
from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.protocol import Batch
from middleware_hub.trajectories.samples import GroupSample, Member, SampleGroup
from tests.middleware_hub.sessions.in_process import Client, Room
from tests.middleware_hub.sessions.test_shared_sessions import BODY, Broken, exported, more, routers


def said(client: Client) -> set[str]:
    """The reasons in the head of a reply."""
    return set(dict(client.out[0]["headers"]).get(b"x-radix-reasons", b"").decode().split(", ")) - {""}


class Forgetful:
    """Lets a router's store acknowledge what it does not keep, as one does that is killed in the next moment."""

    def __init__(self, room: Room) -> None:
        self._store: Any = room.hub.store
        self._real, self._store.append = self._store.append, self._lose

    async def _lose(self, batch: Batch) -> list[int]:
        return [(event.expected or 0) + 1 for event in batch.events]

    def mend(self) -> None:
        self._store.append = self._real


async def lose_a_turn(room: Room) -> str:
    """Play two turns of a session of which the store keeps the first, and a third that is refused; return the lost one's id."""
    await room.open()
    assert (await room.ask(BODY).answer())[0] == 200
    store = Forgetful(room)
    client = room.ask(more(BODY))
    assert (await client.answer())[0] == 200
    store.mend()
    assert (await room.ask(more(more(BODY))).answer())[0] == 503
    return dict(client.out[0]["headers"])[b"x-generation-id"].decode()


def test_clients_are_told_which_turns_the_store_has_lost(tmp_path: Path) -> None:
    """What they had been answered reads as context from then on, wherever the session goes on."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room, other = await both.another(), await both.another()
            lost = await lose_a_turn(room)
            client = room.ask(more(more(BODY)))
            assert (await client.answer())[0] == 200
            assert said(client) == {"unknown_reply"}
            status, summary = await room.call("GET", "/sessions/s")
            assert (status, summary["lost_turns"]) == (200, [lost])
            for one in (room, other):
                status, found = await one.call("GET", "/sessions/s/trajectories")
                (behind,) = found["trajectories"]
                assert (behind["exact"], set(behind["reasons"])) == (False, {"unknown_reply"})
                assert found.get("missing", []) == ([lost] if one is room else [])
            client = room.ask(BODY)  # a conversation without it
            assert (await client.answer())[0] == 200
            assert said(client) == set()

    asyncio.run(work())


def test_a_reply_that_contradicted_itself_is_missed_at_every_router(tmp_path: Path) -> None:
    """Its client continues it at any router, where its text reads as context, also after a restart."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room, other = await both.another(), await both.another()
            await room.open()
            room.engine.says("Yes.", extra={"output_ids": []})
            client = room.ask(BODY)
            assert (await client.answer())[0] == 200
            head = dict(client.out[0]["headers"])
            assert head[b"x-radix-recorded"].startswith(b"no; engine_mismatch")
            lost = head[b"x-generation-id"].decode()
            client = other.ask(more(BODY))
            assert (await client.answer())[0] == 200
            assert said(client) == {"unknown_reply"}
            assert (await other.ask(BODY).answer())[0] == 200  # a conversation without it
            await both.end(room)
            for one in (other, await both.another()):
                assert (await one.call("GET", "/sessions/s"))[1]["lost_turns"] == [lost]
                _, found = await one.call("GET", "/sessions/s/trajectories")
                assert [each["reasons"] for each in found["trajectories"]] == [["unknown_reply"], []]
                assert [each["exact"] for each in found["trajectories"]] == [False, True]
                assert found["missing"] == [lost]

    asyncio.run(work())


def test_an_answer_from_memory_says_that_the_store_was_not_asked(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            room, other = await both.another(), await both.another()
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            broken = Broken(room, "read")
            for method, path in [("GET", ""), ("GET", "/complete"), ("POST", "/reward_info")]:
                client = Client(room.app, method, f"/sessions/s{path}", {"reward_info": {"r": 1}}, {})
                assert (await client.answer())[0] == 200
                assert said(client) == {"store_unreachable"}, path
            assert (await other.ask(more(BODY)).answer())[0] == 200
            unwritten = Broken(room, "append")
            # The first router does not know that the assistant's second message was sampled.
            client = room.ask(more(more(BODY)))
            assert (await client.answer())[0] == 200
            assert said(client) == {"store_unreachable"}
            broken.mend()
            unwritten.mend()
            assert room.hub.saving is not None
            assert await room.hub.saving.hand_over()
            client = Client(room.app, "GET", "/sessions/s", {}, {})
            assert (await client.answer())[0] == 200
            assert said(client) == set()
            for one in (room, other):
                _, found = await one.call("GET", "/sessions/s/trajectories")
                assert [each["reasons"] for each in found["trajectories"]] == [[], ["store_unreachable"]]

    asyncio.run(work())


def test_trainers_are_told_too(tmp_path: Path) -> None:
    """A claim says what an export of the session says. The router that continued it has not heard of the loss."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room, other = await both.another(), await both.another()
            await lose_a_turn(room)
            assert (await other.ask(more(more(BODY))).answer())[0] == 200
            (exported,) = (await room.call("GET", "/sessions/s/trajectories"))[1]["trajectories"]
            sample = GroupSample((Member(b"", SampleGroup("g"), 1, "s"),), complete=True)
            built = await SessionSamples(room.app.registry).built("", sample, {})
            assert built is not None
            assert (built.exact, exported["exact"], exported["reasons"]) == (False, False, ["unknown_reply"])

    asyncio.run(work())


def test_trainers_get_no_session_whose_turns_cannot_be_read(tmp_path: Path) -> None:
    """Another router has sampled all of them: a sample without any would say that there are none."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room, other = await both.another(), await both.another()
            await room.open()
            assert (await other.ask(BODY).answer())[0] == 200
            samples, sample = (
                SessionSamples(room.app.registry),
                GroupSample((Member(b"", SampleGroup("g"), 1, "s"),), complete=True),
            )
            broken = Broken(room, "read")
            with pytest.raises(StoreUnreachableError):
                await samples.built("", sample, {})
            broken.mend()
            built = await samples.built("", sample, {})
            assert built is not None
            assert (built.exact, len(built.trajectories)) == (True, 1)

    asyncio.run(work())


class AnotherStore:
    """What a store that was set back has now; see `Refill`."""

    def __init__(self, room: Room) -> None:
        self._store: Any = room.hub.store
        self.append = self._store.append

    async def lacking(self, records: dict[bytes, bytes]) -> set[bytes]:
        return records.keys() - {record.id for record in (await self._store.get(list(records))).records}

    async def ends(self, logs: list[str]) -> list[int]:
        return [len(await self._store.read(log)) for log in logs]

    async def events(self, log: str, after: int, limit: int) -> Any:
        return await self._store.read(log, after=after, limit=limit)


@pytest.mark.parametrize("turns", [1, 2])
def test_a_session_that_was_begun_anew_gets_no_turns_of_the_one_that_was_lost(turns: int, tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path / "before") as before, routers(tmp_path / "now") as now:
            room, other = await before.another(), await now.another()
            for one, count in (room, 2), (other, turns):
                await one.open()
                for _ in range(count):
                    assert (await one.ask(BODY).answer())[0] == 200
            log: Any = room.session.log
            told = await exported(other)
            await log.refill(AnotherStore(other))
            assert log.diverged
            assert await exported(other) == told == await exported(await now.another())

    asyncio.run(work())
