"""Two samples of one message with equal tokens are two chains: a turn behind one sample has that sample in its chain."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.middleware_hub.sessions.in_process import Room

FIRST: list[dict[str, Any]] = [{"role": "user", "content": "Count"}]
LATER = [*FIRST, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]


async def say(room: Room, messages: list[dict[str, Any]], **headers: str) -> str:
    """The id of the generation."""
    status, reply = await room.ask({"messages": messages, "max_tokens": 20}, **headers).answer()
    assert status == 200, reply
    generation_id: str = reply["choices"][0]["meta_info"]["generation_id"]
    return generation_id


def test_equal_contexts_behind_two_samples_are_not_one() -> None:
    """The same messages are sent behind each of them in turn, by name, and once more behind the first."""

    async def work() -> None:
        room = Room()
        await room.open()
        one, other = await say(room, FIRST), await say(room, FIRST)
        behind = [(parent, await say(room, LATER, parent=parent)) for parent in (one, other, one)]
        sent = [log[0]["input_ids"] for log in room.engine.log[2:]]
        assert sent[0] == sent[1] == sent[2]
        _, found = await room.call("POST", "/sessions/s/finalize", {"shared_turns": "every"})
        chains = {
            one["branch"]: [turn["generation_id"] for turn in one["extra_fields"]["turns"]]
            for one in found["trajectories"]
        }
        assert chains == {later: [parent, later] for parent, later in behind}
        masks = [sum(one["response_mask"]) for one in found["trajectories"]]
        assert masks == [2 * len(room.engine.log[0][1])] * 3
        _, once = await room.call("GET", "/sessions/s/trajectories")
        trained = sum(sum(one["response_mask"]) for one in once["trajectories"])
        assert trained == sum(len(sampled) for _, sampled in room.engine.log)

    asyncio.run(work())
