"""The drift study's loops and rollouts, played through a whole router: what it counts is what was sampled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from benchmarks.drift.loops import LOOPS
from benchmarks.drift.prompts import PROMPTS
from benchmarks.drift.report import by_kind, by_loop
from benchmarks.drift.sampling import TURNS, Played, Rollout, conversations, rollouts
from middleware_hub.client import AsyncClient
from middleware_hub.tokenizer.loaded import load
from tests.support.stack import Stack, stack
from tests.support.vocabularies import vocabulary

LENGTH = 12


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    """Noise of a real vocabulary: much of it is encoded to other ids again."""
    with stack("qwen", server={"max_batch": 64}) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load(str(vocabulary("qwen")), trust_remote_code=False)[1]


def test_rollouts_are_what_the_engine_sampled(served: Stack, tokenizer: Tokenizer) -> None:
    told: list[int] = []

    async def sample() -> list[Rollout]:
        async with AsyncClient(served.url) as client:
            return await rollouts(client, 1, LENGTH, time.monotonic() + 60, told.append)

    found = asyncio.run(sample())
    assert [(one["kind"], one["temperature"]) for one in found] == [(kind, t) for kind in PROMPTS for t in (0.7, 1.0)]
    sampled = [(list(one.input_ids), list(one.output_ids)) for worker in served.workers for one in worker.log]
    for one in found:
        assert (one["prompt_ids"], one["ids"]) in sampled
        assert len(one["ids"]) == len(one["logprobs"]) > 0
    assert sorted(told) == sorted(len(one["ids"]) for one in found)
    (everything,) = [row for row in by_kind(found, tokenizer) if (row["kind"], row["temperature"]) == ("all", 1.0)]
    assert everything["tokens"]["part"] > 0


def test_loops_lose_what_they_edit_and_the_router_has_all_of_it(served: Stack, tokenizer: Tokenizer) -> None:
    async def sample() -> list[Played]:
        async with AsyncClient(served.url) as client:
            return await conversations(client, LOOPS, 1, time.monotonic() + 60, lambda tokens: None)

    rows = {row["loop"]: row for row in by_loop(asyncio.run(sample()), tokenizer)}
    assert list(rows) == [loop.name for loop in LOOPS]
    for row in rows.values():
        assert row["next_requests"] == TURNS - 1
        assert row["covered"]["part"] == row["covered"]["whole"] > 0
    for name in ("chat, the reply as it is", "tool calls, as they are", "ReAct by hand, the reply as it is"):
        assert rows[name]["verbatim"] == TURNS - 1
        # Noise ends inside characters, and a stop string inside tokens: these tokens alone may be missing.
        assert rows[name]["last"]["part"] > 0.8 * rows[name]["last"]["whole"]
    for name in ("chat, ConversationChain", "tool calls, as they are"):
        assert (rows[name]["sequences"] == TURNS) == (rows[name]["verbatim"] == 0)
    moved = rows["chat, ConversationChain"]
    assert moved["verbatim"] == 0
    assert moved["last"]["part"] < 0.6 * moved["last"]["whole"]


def test_nothing_begins_after_its_time(served: Stack) -> None:
    async def sample() -> list[Rollout]:
        async with AsyncClient(served.url) as client:
            return await rollouts(client, 1, LENGTH, time.monotonic() - 1, lambda tokens: None)

    assert asyncio.run(sample()) == []
