"""A Redis loses sessions that routers have in memory: they write them again, whole."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.store.errors import StoreUnreachableError
from tests.middleware_hub.sessions.in_process import Room
from tests.middleware_hub.sessions.lives import Ids, Life, Side, ids, masked, shown
from tests.support.redis_server import RedisServer, redis_server
from tests.support.usual import usual

__all__ = ["ids"]

STEPS = 40
ASKED = {"model": "m", "messages": [{"role": "user", "content": "Is it?"}]}


class Losing:
    """Routers on a server that loses what it has."""

    def __init__(self, server: RedisServer, side: Side) -> None:
        self.server, self.side = server, side

    async def lose(self, how: str) -> None:
        """Lose something, and wait until the routers have made the store whole."""
        if how == "emptied":
            self.server.say("FLUSHALL")
        else:
            self.server.kill()
            await asyncio.to_thread(self.server.start)
        for _ in range(2):
            await asyncio.gather(*(self._announced(at, room) for at, room in enumerate(self.side.rooms)))
        for room in self.side.rooms:
            assert room.hub.store is not None
            assert len(await room.hub.store.announced("router/")) == len(self.side.rooms)

    async def _announced(self, number: int, room: Room) -> None:
        assert room.hub.store is not None
        async with asyncio.timeout(30):
            while True:
                try:
                    await room.hub.store.announce(f"router/{number}", b"", 3600.0)
                    await room.hub.store.announced("router/")
                    return
                except StoreUnreachableError:
                    await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rooms"), usual([("emptied", 1), ("emptied", 2), ("set back", 1), ("set back", 2)], ("set back", 2))
)
def test_sessions_that_a_router_has_are_whole_again(tmp_path: Path, ids: Ids, rooms: int, how: str) -> None:
    """Messages, tokens, rewards and phases: also for a router that starts afterwards."""

    async def work(server: RedisServer) -> None:
        dice = random.Random(f"{rooms} {how}")
        one, many = Side("one", ids), Side("many", ids, server.address)
        life, only = Life(dice), await one.begin()
        losing = Losing(server, many)
        for _ in range(rooms):
            await many.begin()
        await losing.lose("emptied")
        for step in range(STEPS):
            call, speak, hear = life.next()
            answers = []
            for side, at in ((one, only), (many, dice.choice(many.rooms))):
                speak(side.engine)
                status, body = await side.live(at, call)
                answers.append((status, masked(body) if rooms == 1 else without_extras(masked(body))))
                side.engine._queue.clear()
            assert answers[1] == answers[0], step
            assert shown(many.engine)[-3:] == shown(one.engine)[-3:], step
            hear(*answers[0])
            if dice.random() < 0.15:
                await losing.lose(how)
        late = await many.begin()
        for name in "st":
            for body in ({}, {"export_all_checkpoints": True, "shared_turns": "every"}):
                path = f"/sessions/{name}/finalize"
                ends = [masked(await room.call("POST", path, body)) for room in (only, late)]
                assert ends[0] == ends[1] or (rooms > 1 and without_extras(ends[0]) == without_extras(ends[1]))
        store = late.hub.store
        assert store is not None
        assert [finding async for finding in store.verify()] == []
        for side in (one, many):
            for room in list(side.rooms):
                await side.end(room, killed=False)

    with redis_server(tmp_path, ("appendonly", "no")) as server:
        asyncio.run(work(server))


def without_extras(answer: Any) -> Any:
    """An answer without what was beside replies: of two routers perhaps the one that lacks it writes them again."""
    if isinstance(answer, dict):
        left_out = ("routed_experts", "other", "extra", "per_token")
        return {key: without_extras(value) for key, value in answer.items() if key not in left_out}
    return [without_extras(one) for one in answer] if isinstance(answer, list | tuple) else answer


def test_a_deleted_session_does_not_come_back(tmp_path: Path, ids: Ids) -> None:
    """Another router still has it, and has not heard of its end when the store forgets that."""

    async def work(server: RedisServer) -> None:
        side = Side("many", ids, server.address)
        one, two = [await side.begin() for _ in range(2)]
        losing = Losing(server, side)
        await losing.lose("emptied")
        for name, there in ("kept", one), ("gone", two):
            await one.call("POST", "/sessions", {"session_id": name})
            side.engine.says("Yes.")
            await one.call("POST", f"/sessions/{name}/v1/chat/completions", ASKED)
            await there.call("GET", f"/sessions/{name}")
        await one.call("DELETE", "/sessions/gone")
        await losing.lose("emptied")
        late = await side.begin()
        for room in (two, one, late):
            assert (await room.call("GET", "/sessions/gone"))[0] == 404
            assert [found["session_id"] for found in (await room.call("GET", "/sessions"))[1]["sessions"]] == ["kept"]
        assert (await two.call("POST", "/sessions", {"session_id": "gone"}))[0] == 201
        assert (await one.call("GET", "/sessions/gone"))[1]["num_generations"] == 0
        for room in list(side.rooms):
            await side.end(room, killed=False)

    with redis_server(tmp_path, ("appendonly", "no")) as server:
        asyncio.run(work(server))
