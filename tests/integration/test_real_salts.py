"""Salts on real engines: what a session of thirty turns over two updates reads of its cache, by its own `cached_tokens`.

The updates leave the cache as it is (`/update_weight_version`), as updates in place do. `pytest -s` prints the table of
docs/trainers.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.integration.conftest import RouterFor
from tests.support import templates
from tests.support.client import call
from tests.support.engines import Engine

ENGINES = ("sglang", "vllm")
TURNS, EVERY = 30, 10
SYSTEM = "You walk through a large house, room by room, and say in a few words what you see in each of them."
Json = dict[str, Any]


@pytest.fixture
def router(router_for: RouterFor) -> str:
    """In front of one worker: its cache is the witness."""
    return router_for(0, flags=("--chat-template", str(templates.folder() / "qwen2_5.jinja")))


def update(router: str, version: str) -> None:
    assert call(f"{router}/update_weight_version", {"new_version": version, "abort_all_requests": False}).status == 200


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
    path: str = ""
    messages: list[Json] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])
    known: int = 0
    cached: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)

    def turn(self, engine: Engine, text: str) -> None:
        if not self.path:
            self.path = f"{self.router}/sessions/{call(f'{self.router}/sessions', {}).json()['session_id']}"
        self.messages.append({"role": "user", "content": text})
        body = {"model": "m", "messages": self.messages, "max_tokens": 8, "temperature": 0}
        answer = call(f"{self.path}/v1/chat/completions", body, headers={"x-kv-salt": self.mode})
        assert answer.status == 200, answer.content
        found = answer.json()
        self.messages.append(found["choices"][0]["message"])
        usage = found["usage"]
        self.cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
        could = engine.cached(self.known) if self.known else 0
        self.again.append(max(0, could - self.cached[-1]))
        self.known = usage["prompt_tokens"] + usage["completion_tokens"]

    def kv_versions(self) -> list[str | None]:
        (only,) = call(f"{self.path}/finalize", {}).json()["trajectories"]
        assert only["exact"], only["reasons"]
        return [turn["kv_version"] for turn in only["turns"]]


@pytest.mark.parametrize("mode", ["off", "version", "rollout"])
def test_a_session_over_updates(engine: Engine, router: str, mode: str) -> None:
    assert call(f"{router}/flush_cache", {}).status == 200
    update(router, "1")
    talk, old = Talk(router, mode), [0] * TURNS
    computed_before = 0
    for number in range(TURNS):
        if number and number % EVERY == 0:
            update(router, str(1 + number // EVERY))
            computed_before = talk.known
        talk.turn(engine, f"Go into room {number}, please, and look around you.")
        # What the cache had not is computed again, by the weights of now.
        old[number] = computed_before = min(computed_before, talk.cached[number])
    first = list(range(EVERY, TURNS, EVERY))
    print(
        f"\n{engine.kit.name} {mode}: {talk.known} tokens, {sum(talk.again)} prefilled again, {sum(old)} from older caches"
    )
    steady = [again for at, again in enumerate(talk.again) if at not in first]
    assert sum(steady) == 0, "between updates the whole last turn is in the cache"
    versions = talk.kv_versions()
    if mode == "version":
        assert sum(old) == 0
        assert [talk.cached[at] for at in first] == [0, 0], "nothing of an older version is read"
        assert versions == ["1"] * EVERY + ["2"] * EVERY + ["3"] * EVERY
        return
    assert sum(talk.again) == 0
    assert all(old[EVERY:]), "it goes on with its cache"
    assert versions == [None if mode == "off" else "1"] * TURNS
    other = Talk(router, mode)
    other.turn(engine, "Go into room 0, please, and look around you.")
    assert (other.cached[0] > 0) == (mode == "off" and engine.cached(other.known) > 0), "a new one reads none of it"
