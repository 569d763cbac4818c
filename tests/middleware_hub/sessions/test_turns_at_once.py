"""Sessions whose turns are in flight at several routers at once are what they would be in one process that never dies."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.middleware_hub.sessions.in_process import Room, Says
from tests.middleware_hub.sessions.lives import NAMES, Call, Ids, Life, Side, ids, masked, shown, url

__all__ = ["ids"]

STEPS = 50
MOST = 5
LOCAL = frozenset({"num_inflight_generations", "nodes", "tokens"})
"""What a router says only of the turns in flight there: a prompt that two of them have is counted once at one router."""


@dataclass
class Flight:
    """A turn on both sides, which stands still until it is let on."""

    clients: list[Any]
    said: list[list[Says]]
    room: Room
    hear: Any

    async def land(self) -> list[tuple[int, Any]]:
        for says in (*self.said[0], *self.said[1]):
            says.go.set()
        return [comparable(await client.answer()) for client in self.clients]


def comparable(answer: tuple[int, Any]) -> tuple[int, Any]:
    status, body = answer
    return status, _comparable(masked(body))


def _comparable(body: Any) -> Any:
    if isinstance(body, dict):
        return {key: _comparable(value) for key, value in body.items() if key not in LOCAL}
    return [_comparable(one) for one in body] if isinstance(body, list) else body


class AtOnce:
    """One process, and some that share a store. Turns begin, stand still, and end in any order."""

    def __init__(self, dice: random.Random, one: Side, many: Side, life: Life) -> None:
        self._dice, self._sides, self._life = dice, (one, many), life
        self._flights: list[Flight] = []

    async def step(self) -> None:
        if self._flights and self._dice.random() < 0.35:
            flight = self._flights.pop(self._dice.randrange(len(self._flights)))
            answers = await flight.land()
            assert answers[0] == answers[1]
            flight.hear(*answers[0])
            return
        call, speak, hear = self._life.next()
        rooms = self._sides[0].rooms[0], await self._fated()
        said = []
        for side in self._sides:
            speak(side.engine)
            said.append(list(side.engine._queue))
        stopped = bool(said[0]) and said[0][0].hold is not None
        if stopped and self._flights:
            pass  # a client that stops a stream waits until it is the only one that stands still
        elif said[0] and not stopped and len(self._flights) < MOST and self._dice.random() < 0.5:
            hold = self._dice.choice((0, 1))
            for says in (*said[0], *said[1]):
                says.hold = hold
            begun = [await self._begun(side, call, room) for side, room in zip(self._sides, rooms, strict=True)]
            self._flights.append(Flight(begun, said, rooms[1], hear))
        else:
            found = [await side.live(room, call) for side, room in zip(self._sides, rooms, strict=True)]
            answers = [comparable(one) for one in found]
            assert answers[0] == answers[1]
            hear(*answers[0])
        for side in self._sides:
            side.engine._queue.clear()
        assert shown(self._sides[1].engine)[-3:] == shown(self._sides[0].engine)[-3:]
        await self._land_what_is_over()

    async def _begun(self, side: Side, call: Call, room: Room) -> Any:
        """Begin a turn, and wait until it stands still, or is answered."""
        side.ids.side = side.name
        wanted = side.engine._waiting + len(side.engine._queue)
        client: Any = call(room)
        async with asyncio.timeout(60):
            while not client._task.done() and side.engine._waiting < wanted:  # noqa: ASYNC110  # one of two events
                await asyncio.sleep(0)
        return client

    async def _land_what_is_over(self) -> None:
        """The end of a session ends its turns: at once at the router that was asked for it, elsewhere before they are kept."""
        for flight in [one for one in self._flights if one.clients[0]._task.done()]:
            self._flights.remove(flight)
            answers = await flight.land()
            if answers[0] != answers[1]:
                assert "the session ended before" in str(answers[0])
                assert "the session ended before" in str(answers[1])

    async def _fated(self) -> Room:
        """The process that serves the next call. One that has turns in flight lives on."""
        many = self._sides[1]
        room = self._dice.choice(many.rooms)
        fate = self._dice.choice(("another", "evicted", "restarted", "killed", "", ""))
        if fate == "another" and len(many.rooms) < 3:
            return await many.begin()
        if fate == "evicted":
            for session in [one for one in room.app.registry if one.idle]:
                room.app.registry._end(session)
        elif fate in ("restarted", "killed") and all(one.room is not room for one in self._flights):
            await many.end(room, killed=fate == "killed")
            return many.rooms[0] if many.rooms else await many.begin()
        return room

    async def end(self) -> None:
        while self._flights:
            answers = await self._flights.pop().land()
            assert answers[0] == answers[1]
        for name in NAMES:
            for body in ({}, {"export_all_checkpoints": True, "shared_turns": "every"}, {"format": "tree"}):
                path = f"/sessions/{name}/finalize"
                ends = [comparable(await side.rooms[-1].call("POST", path, body)) for side in self._sides]
                assert ends[0] == ends[1]
        store = self._sides[1].rooms[-1].hub.store
        assert store is not None
        assert [finding async for finding in store.verify()] == []
        for side in self._sides:
            for room in list(side.rooms):
                await side.end(room, killed=False)


@pytest.mark.parametrize("seed", range(int(os.environ.get("LIVES", "2"))))
def test_nobody_notices_where_the_turns_of_a_session_run(seed: int, ids: Ids, tmp_path: Path) -> None:
    async def work() -> None:
        dice = random.Random(f"{seed} at once")
        options: dict[str, Any] = {"history": dice.choice(("keep", "template")), "verify_rate": 1.0}
        room = {"max_tokens": 100} if dice.random() < 0.5 else {}
        one, many = Side("one", ids, options=options), Side("many", ids, url(tmp_path), {**options, **room})
        await one.begin()
        await many.begin()
        lives = AtOnce(dice, one, many, Life(dice))
        for _ in range(STEPS):
            await lives.step()
        await lives.end()

    asyncio.run(work())
