"""Sessions with a store are what they would be in one process that never dies, whatever happens to the processes."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.middleware_hub.sessions.in_process import Room
from tests.middleware_hub.sessions.lives import Ids, Life, Side, ids, masked, shown, url
from tests.support.usual import usual

__all__ = ["ids"]

Fate = Literal["restarted", "killed", "in turns", "evicted", "all"]
STEPS = 60


async def fated(side: Side, fate: Fate, dice: random.Random) -> Room:
    """The process that serves the next call."""
    now = dice.choice(("restarted", "killed", "in turns", "evicted")) if fate == "all" else fate
    if now == "in turns":
        if len(side.rooms) < 3:
            await side.begin()
        return dice.choice(side.rooms)
    room = dice.choice(side.rooms)
    if dice.random() < 0.5:
        return room
    if now == "evicted":
        for session in list(room.app.registry):
            assert session.idle
            room.app.registry._end(session)
        return room
    await side.end(room, killed=now == "killed")
    return side.rooms[0] if side.rooms else await side.begin()


@pytest.mark.parametrize("fate", usual(["restarted", "killed", "in turns", "evicted", "all"], "all"))
@pytest.mark.parametrize("seed", range(int(os.environ.get("LIVES", "1"))))
def test_nobody_notices_what_happens_to_the_processes(seed: int, fate: Fate, ids: Ids, tmp_path: Path) -> None:
    async def work() -> None:
        dice = random.Random(f"{seed} {fate}")
        options: dict[str, Any] = {
            "history": dice.choice(("keep", "template")),
            "reasoning_parser": dice.choice(("think", "think", "none")),
            "verify_rate": 1.0,
        }
        one, many = Side("one", ids, options=options), Side("many", ids, url(tmp_path), options)
        life, only = Life(dice, appends=options["history"] == "keep"), await one.begin()
        await many.begin()
        for step in range(STEPS):
            call, speak, hear = life.next()
            room = await fated(many, fate, dice)
            answers = []
            for side, at in ((one, only), (many, room)):
                speak(side.engine)
                status, body = await side.live(at, call)
                answers.append((status, masked(body)))
                side.engine._queue.clear()
            assert answers[1] == answers[0], (step, room)
            assert shown(many.engine)[-3:] == shown(one.engine)[-3:], step
            hear(*answers[0])
        for name in "st":
            for body in ({}, {"export_all_checkpoints": True, "shared_turns": "every"}):
                path = f"/sessions/{name}/finalize"
                ends = [masked(await side.rooms[-1].call("POST", path, body)) for side in (one, many)]
                assert ends[0] == ends[1]
        store = many.rooms[-1].hub.store
        assert store is not None
        assert [finding async for finding in store.verify()] == []
        for side in (one, many):
            for room in list(side.rooms):
                await side.end(room, killed=False)

    asyncio.run(work())
