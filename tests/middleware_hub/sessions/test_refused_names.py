"""A session whose creation was refused because the store was away: afterwards one router makes it, and only one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.chat.errors import CapacityError
from middleware_hub.sessions.log.archive import REMEMBERED
from middleware_hub.sessions.session import Session
from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.protocol import Batch
from tests.middleware_hub.sessions.in_process import Client, Room
from tests.middleware_hub.sessions.test_shared_sessions import BODY, Broken, Routers, clocks, exported, routers
from tests.support import dictionary_store
from tests.support.usual import usual

NAMED = {"session_id": "s"}


@pytest.fixture(params=usual(["memory", "sqlite", "redis"], "memory", "redis"), autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Routers, "kind", request.param)
    if request.param == "memory":
        shared = dictionary_store.DictionaryStore()
        monkeypatch.setattr(dictionary_store, "DictionaryStore", lambda *_: shared)


class Gate:
    """Holds the appends of a router's store until `go` is set."""

    def __init__(self, room: Room) -> None:
        self._store: Any = room.hub.store
        self._real = self._store.append
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self._store.append = self._append

    async def _append(self, batch: Batch) -> Any:
        self.reached.set()
        await self.go.wait()
        return await self._real(batch)


class Late:
    """Fails the next append of a router's store, and does it later."""

    def __init__(self, room: Room) -> None:
        self._store: Any = room.hub.store
        self._real = self._store.append
        self._batch: Batch | None = None
        self._store.append = self._append

    async def _append(self, batch: Batch) -> Any:
        self._batch, self._store.append = batch, self._real
        raise StoreUnreachableError("the store has not answered")

    async def arrive(self) -> None:
        assert self._batch is not None
        await self._real(self._batch)


async def one_session(rooms: list[Room], maker: int) -> None:
    """All routers have the same session."""
    assert (await rooms[maker].ask(BODY).answer())[0] == 200
    assert (await rooms[1 - maker].ask(BODY).answer())[0] == 200
    found = await exported(rooms[0])
    assert len(found) == 2
    assert await exported(rooms[1]) == found


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("behind", [False, True])
def test_two_routers_that_make_it_at_the_same_moment(first: int, behind: bool, tmp_path: Path) -> None:
    """`behind`: the refused attempt got into the store all the same."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            rooms = [await both.another(), await both.another()]
            broken = Broken(rooms[0], "append", behind=behind)
            assert (await rooms[0].call("POST", "/sessions", NAMED))[0] == 503
            broken.mend()
            gates = [Gate(room) for room in rooms]
            asked = [Client(room.app, "POST", "/sessions", NAMED, {}) for room in rooms]
            await gates[0].reached.wait()
            if not behind:
                await gates[1].reached.wait()
            order = [0, 1] if behind else [first, 1 - first]
            answers = {}
            for number in order:
                gates[number].go.set()
                answers[number] = await asked[number].answer()
            assert [answers[number][0] for number in order] == [201, 409]
            assert answers[order[1]][1]["error"]["type"] == "session_exists"
            await one_session(rooms, order[0])

    asyncio.run(work())


def grouped(room: Room, group: str) -> Client:
    return Client(room.app, "POST", "/sessions", NAMED, {"x-group-id": group, "x-group-size": "1"})


@pytest.mark.parametrize("first", [0, 1])
def test_two_routers_that_make_it_for_two_groups(first: int, tmp_path: Path) -> None:
    """It belongs to the group of the router that made it, and the other group has nothing that waits for an end."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            rooms = [await both.another(), await both.another()]
            gates = [Gate(room) for room in rooms]
            asked = [grouped(room, f"g{number}") for number, room in enumerate(rooms)]
            for gate in gates:
                await gate.reached.wait()
            answers = {}
            for number in (first, 1 - first):
                gates[number].go.set()
                answers[number] = (await asked[number].answer())[0]
            assert answers == {first: 201, 1 - first: 409}
            await one_session(rooms, first)
            assert (await rooms[1 - first].call("POST", "/sessions/s/complete"))[0] == 200
            journal = rooms[first].hub.groups.journal("", "")
            await journal.read_on()
            assert list(journal.ledger.groups) == [f"g{first}"]
            (member,) = journal.ledger.groups[f"g{first}"].members.values()
            assert (member.session, member.ended) == ("s", True)

    asyncio.run(work())


@pytest.mark.parametrize("stored", [False, True])
def test_a_session_that_is_refused_for_lack_of_room_is_in_no_group(stored: bool, tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another(max_tokens=1) if stored else Room(max_tokens=1)
            registry = room.app.registry
            registry.held(1)
            if stored:  # it has room only for what the store takes
                registry.require_room = full  # type: ignore[method-assign]
            assert (await grouped(room, "g").answer())[0] == 429
            journal = room.hub.groups.journal("", "")
            await journal.read_on()
            assert not journal.ledger.groups
            registry.held(-1)

    def full(user: Session) -> None:
        raise CapacityError("sessions hold 1 token")

    asyncio.run(work())


def test_an_attempt_for_a_group_that_arrives_late(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            rooms = [await both.another(), await both.another()]
            asked = rooms[0].app, "POST", "/sessions", NAMED, {"x-group-id": "g", "x-group-size": "1"}
            late = Late(rooms[0])
            assert (await Client(*asked).answer())[0] == 503
            await late.arrive()
            assert (await Client(*asked).answer())[0] == 201
            assert (await Client(*asked).answer())[0] == 409
            await one_session(rooms, 0)
            journal = rooms[1].hub.groups.journal("", "")
            await journal.read_on()
            (member,) = journal.ledger.groups["g"].members.values()
            assert (member.session, member.done, member.ended) == ("s", False, False)

    asyncio.run(work())


@pytest.mark.parametrize("attempts", [1, 2])
def test_attempts_that_arrive_late(attempts: int, tmp_path: Path) -> None:
    """Whichever of the refused attempts is in the store when the client asks again, this router replaces it."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            rooms = [await both.another(), await both.another()]
            late = []
            for _ in range(attempts):
                late.append(Late(rooms[0]))
                assert (await rooms[0].call("POST", "/sessions", NAMED))[0] == 503
            await late[0].arrive()
            assert (await rooms[1].call("POST", "/sessions", NAMED))[0] == 409
            assert (await rooms[0].call("POST", "/sessions", NAMED))[0] == 201
            assert (await rooms[1].call("POST", "/sessions", NAMED))[0] == 409
            await one_session(rooms, 0)

    asyncio.run(work())


def test_an_attempt_that_arrives_while_the_client_asks_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            rooms = [await both.another(), await both.another()]
            late = Late(rooms[0])
            assert (await rooms[0].call("POST", "/sessions", NAMED))[0] == 503
            gate = Gate(rooms[0])
            again = Client(rooms[0].app, "POST", "/sessions", NAMED, {})
            await gate.reached.wait()
            await late.arrive()
            gate.go.set()
            assert (await again.answer())[0] == 201
            assert (await rooms[1].call("POST", "/sessions", NAMED))[0] == 409
            await one_session(rooms, 0)

    asyncio.run(work())


def test_a_name_that_was_deleted_here_long_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log is forgotten after a day, so another router begins the same log again: it is a session like any other."""
    later = clocks(monkeypatch)

    async def work() -> None:
        async with routers(tmp_path) as both:
            rooms = [await both.another(), await both.another()]
            await rooms[0].open()
            assert (await rooms[0].call("DELETE", "/sessions/s"))[0] == 200
            later(REMEMBERED + 10)
            for _ in range(2):
                await rooms[1].app.registry.sweep_store(rooms[1].app.registry.archive)  # type: ignore[arg-type]
            assert (await rooms[1].call("POST", "/sessions", NAMED))[0] == 201
            assert (await rooms[0].call("POST", "/sessions", NAMED))[0] == 409
            await one_session(rooms, 1)

    asyncio.run(work())
