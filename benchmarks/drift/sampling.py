"""Samples through a router: rollouts of one reply for what encoding again changes, and conversations of the loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypedDict, TypeVar

from benchmarks.drift.loops import Loop
from benchmarks.drift.prompts import PROMPTS, QUESTIONS
from middleware_hub.client import AsyncClient

TEMPERATURES: Final = (0.7, 1.0)
GROUP: Final = 4
"""Rollouts of one prompt, as GRPO compares them."""
TURNS: Final = 5
REPLY: Final = 64
"""The most tokens of a reply in a loop."""


_T = TypeVar("_T")


class Rollout(TypedDict):
    """A prompt and its reply, as the router remembers them: `ids` were sampled, `logprobs` are the engine's of them."""

    kind: str
    temperature: float
    prompt: str
    text: str
    finish: str
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]


class Played(TypedDict):
    """A conversation of a loop.

    Attributes:
        sampled: tokens of all replies.
        last: how many of them are in the sequence of the last one, with mask 1.
        next_requests, verbatim: how many requests followed a reply, and how many of them began with its text.
        sequences: how many the router needs to give back every reply.
        covered: sampled tokens in all of these.
        replies: the texts and ids of the replies, each with its request's text.
    """

    loop: str
    sampled: int
    last: int
    next_requests: int
    verbatim: int
    sequences: int
    covered: int
    replies: list[dict[str, Any]]


async def rollouts(
    client: AsyncClient, number: int, length: int, until: float, done: Callable[[int], None]
) -> list[Rollout]:
    """Sample `number` rollouts of each kind at each temperature, four of a prompt. None begins after `until`, monotonic."""

    async def one(kind: str, prompt: str, temperature: float) -> Rollout:
        params = {"max_new_tokens": length, "temperature": temperature}
        reply = await client.generate(prompt, params, return_trajectory=True)
        found = reply.trajectory
        if found is None or not found.logprobs or found.sampled != len(reply.output_ids):
            raise ValueError(f"the router has no whole sequence of a reply to {prompt!r}")
        done(len(reply.output_ids))
        first = found.prompt_length
        return {
            "kind": kind,
            "temperature": temperature,
            "prompt": prompt,
            "text": reply.text,
            "finish": reply.finish,
            "prompt_ids": found.tokens[:first],
            "ids": found.tokens[first:],
            "logprobs": found.logprobs[first:],
        }

    # The first of every kind come first, so that a run that is cut short has some of each.
    wanted = [
        (kind, prompts[turn // GROUP % len(prompts)], temperature)
        for turn in range(number)
        for kind, prompts in PROMPTS.items()
        for temperature in TEMPERATURES
    ]
    return await _side_by_side([partial(one, *each) for each in wanted], until)


async def conversations(
    client: AsyncClient, loops: Sequence[Loop], number: int, until: float, done: Callable[[int], None]
) -> list[Played]:
    """Play `number` conversations of each loop. None begins after `until`, monotonic."""
    wanted = [(loop, turn) for turn in range(number) for loop in loops]
    return await _side_by_side([partial(play, client, *each, done) for each in wanted], until)


async def play(client: AsyncClient, loop: Loop, number: int, done: Callable[[int], None]) -> Played:
    """Play one conversation. It begins with its own number, so that it shares no text with others."""
    text = f"[{loop.name}, {number}]\n\n{loop.prompt.format(QUESTIONS[number % len(QUESTIONS)])}"
    names: list[str] = []
    replies: list[dict[str, Any]] = []
    verbatim, recorded = 0, text
    for turn in range(TURNS):
        verbatim += bool(replies) and text.startswith(recorded)
        reply = await client.generate(text, {"max_new_tokens": REPLY, "temperature": 1.0, **loop.params})
        done(len(reply.output_ids))
        replies.append({"prompt": text, "text": reply.text, "output_ids": reply.output_ids})
        names.append(reply.id)
        recorded = text + reply.text
        text = loop.follow(text, reply.text, turn)
    last = await client.retrieve(recorded, expect_request_ids=names, request_id=names[-1])
    cover = await client.cover(recorded, names, request_id=names[-1])
    return {
        "loop": loop.name,
        "sampled": sum(len(one["output_ids"]) for one in replies),
        "last": last.sampled,
        "next_requests": TURNS - 1,
        "verbatim": verbatim,
        "sequences": len(cover.trajectories),
        "covered": sum(one.sampled for one in cover),
        "replies": replies,
    }


async def _side_by_side(tasks: Sequence[Callable[[], Awaitable[_T]]], until: float, most: int = 16) -> list[_T]:
    """Run these, at most so many at a time; return the results, in order, of those that began in time."""
    free = asyncio.Semaphore(most)

    async def one(task: Callable[[], Awaitable[_T]]) -> list[_T]:
        async with free:
            return [await task()] if time.monotonic() < until else []

    return [result for results in await asyncio.gather(*map(one, tasks)) for result in results]
