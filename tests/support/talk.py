"""A session that goes on over updates of the weights, and what its engine reads of its cache.

The judge is the engine's own `cached_tokens`. The updates leave the cache as it is (`/update_weight_version`), as updates in
place do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.client import call

SYSTEM = "You walk through a large house, room by room, and say in a few words what you see in each of them."
Json = dict[str, Any]
Cacheable = Callable[[int], int]
"""Returns how many of so many tokens, read and sampled, an engine can find in its cache."""


@dataclass
class Talk:
    """A session with one conversation.

    Attributes:
        known: tokens of its last turn, prompt and reply: what a cache could have.
        cached: tokens that the cache had for the prompt of each turn.
        again: those that it could have had and had not.
    """

    router: str
    mode: str
    cacheable: Cacheable
    path: str = ""
    messages: list[Json] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])
    known: int = 0
    cached: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)

    def turn(self, number: int = 0) -> None:
        """Have the next turn. Its question goes by its number."""
        if not self.path:
            self.path = f"{self.router}/sessions/{call(f'{self.router}/sessions', {}).json()['session_id']}"
        text = f"Go into room {number}, please, and look around you."
        self.messages.append({"role": "user", "content": text})
        body = {"model": "m", "messages": self.messages, "max_tokens": 8, "temperature": 0}
        answer = call(f"{self.path}/v1/chat/completions", body, headers={"x-kv-salt": self.mode})
        assert answer.status == 200, answer.content
        found = answer.json()
        self.messages.append(found["choices"][0]["message"])
        usage = found["usage"]
        self.cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
        could = self.cacheable(self.known) if self.known else 0
        self.again.append(max(0, could - self.cached[-1]))
        self.known = usage["prompt_tokens"] + usage["completion_tokens"]

    def kv_versions(self) -> list[str | None]:
        (only,) = call(f"{self.path}/finalize", {}).json()["trajectories"]
        assert only["exact"], only["reasons"]
        return [turn["kv_version"] for turn in only["turns"]]


@dataclass(frozen=True)
class OverUpdates:
    """A talk that had updates.

    Attributes:
        first: the turns before which there was an update.
        old: tokens that each turn read of what weights before its own had computed.
    """

    talk: Talk
    first: list[int]
    old: list[int]


def over_updates(router: str, mode: str, cacheable: Cacheable, *, turns: int, every: int) -> OverUpdates:
    """Have a talk at a router with an empty cache, and an update after each `every` turns. The first version is 1."""
    update(router, "1")
    talk, old, computed_before = Talk(router, mode, cacheable), [0] * turns, 0
    for number in range(turns):
        if number and number % every == 0:
            update(router, str(1 + number // every))
            computed_before = talk.known
        talk.turn(number)
        # What the cache had not is computed again, by the weights of now.
        old[number] = computed_before = min(computed_before, talk.cached[number])
    return OverUpdates(talk, list(range(every, turns, every)), old)


def update(router: str, version: str) -> None:
    assert call(f"{router}/update_weight_version", {"new_version": version, "abort_all_requests": False}).status == 200
