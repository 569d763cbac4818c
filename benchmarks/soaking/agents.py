"""The agents: they have sessions, talk in three dialects, finalize, and check the trajectories; some just leave."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp

from benchmarks.soaking.clients import BROKEN
from worker.models.ngram import shipped_corpus

_TURNS = (2, 8)
_TOKENS = (8, 48)
_SAID = (20, 200)  # characters
_THINKING = (0.05, 0.6)  # seconds between two turns
_ABANDONS = 0.1  # of the sessions: never finalized, never deleted
_WITHOUT_SESSION = 0.2  # of the conversations
_SYSTEMS = 50  # prompts, which conversations share
_TOOL = {"name": "look", "description": "Look something up.", "parameters": {"type": "object", "properties": {}}}

Message = dict[str, Any]


class Agents:
    """All agents, in one event loop.

    Attributes:
        counts: actions and outcomes; `turns` counts the generations that they asked for, `chats` those without a session.
        wrong: descriptions of outcomes that must not happen.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._url = url
        self._random = random.Random(seed)
        self._corpus = shipped_corpus().replace("<|im_start|>", "").replace("<|im_end|>", "")
        self._session: aiohttp.ClientSession

    async def run(self, agents: int, over: asyncio.Event) -> None:
        """Have this many agents at work until the event is set; then finish what they do."""
        timeout = aiohttp.ClientTimeout(total=120)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as self._session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(agents):
                group.create_task(self._work(random.Random(self._random.random()), over))

    async def _work(self, rng: random.Random, over: asyncio.Event) -> None:
        while not over.is_set():
            try:
                await self._task(rng, over)
            except BROKEN as error:
                self.counts[f"an agent's call broke off: {type(error).__name__}"] += 1
            await asyncio.sleep(rng.uniform(*_THINKING))

    async def _task(self, rng: random.Random, over: asyncio.Event) -> None:
        dialect = rng.choice((self._openai, self._anthropic, self._responses))
        if rng.random() < _WITHOUT_SESSION and dialect != self._responses:
            await self._talk(dialect, "", rng, over)
            return
        made = await self._ask("/sessions", {})
        if made is None:
            return
        name = f"/sessions/{made['session_id']}"
        self.counts["sessions"] += 1
        sampled = await self._talk(dialect, name, rng, over)
        if rng.random() < _ABANDONS:
            self.counts["sessions left alone"] += 1
            return
        found = await self._ask(f"{name}/finalize", {})
        if found is not None and sampled is not None:
            self._check(found["trajectories"], sampled)
        async with self._session.delete(self._url + name) as response:
            await response.read()

    def _check(self, trajectories: Sequence[dict[str, Any]], sampled: Sequence[int]) -> None:
        """Check that the one trajectory has as many sampled tokens as each reply said."""
        self.counts["sessions checked"] += 1
        if len(trajectories) != 1 or not trajectories[0]["exact"]:
            told = [(one["num_turns"], one["exact"], one["reasons"]) for one in trajectories]
            self.wrong.append(f"a session of {len(sampled)} turns has the trajectories {told}")
        elif sum(trajectories[0]["response_mask"]) != sum(sampled):
            self.wrong.append(f"{sum(trajectories[0]['response_mask'])} sampled tokens in the place of {sum(sampled)}")

    async def _talk(self, dialect: Any, name: str, rng: random.Random, over: asyncio.Event) -> list[int] | None:
        """Return how many tokens each reply had; None if a reply is missing."""
        messages: list[Message] = []
        system = f"You are agent {rng.randrange(_SYSTEMS)}."
        sampled = []
        for _ in range(rng.randint(*_TURNS)):
            messages.append({"role": "user", "content": f"{rng.getrandbits(64):x} {self._said(rng)}"})
            count = await dialect(name, system, messages, rng)
            if count is None:
                return None
            sampled.append(count)
            if over.is_set():
                break
            await asyncio.sleep(rng.uniform(*_THINKING))
        return sampled

    async def _openai(self, name: str, system: str, messages: list[Message], rng: random.Random) -> int | None:
        body = {
            "model": "default",
            "messages": [{"role": "system", "content": system}, *messages],
            "max_tokens": rng.randint(*_TOKENS),
            "tools": [{"type": "function", "function": _TOOL}],
        }
        if rng.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        reply = await self._ask(f"{name}/v1/chat/completions", body, turn=True)
        if reply is None:
            return None
        if "events" not in reply:
            messages.append(reply["choices"][0]["message"])
            return int(reply["usage"]["completion_tokens"])
        messages.append(_joined([choice["delta"] for event in reply["events"] for choice in event.get("choices", ())]))
        return next((event["usage"]["completion_tokens"] for event in reply["events"] if event.get("usage")), None)

    async def _anthropic(self, name: str, system: str, messages: list[Message], rng: random.Random) -> int | None:
        body = {"model": "default", "system": system, "messages": messages, "max_tokens": rng.randint(*_TOKENS)}
        reply = await self._ask(f"{name}/v1/messages", body, turn=True)
        if reply is None:
            return None
        messages.append({"role": "assistant", "content": reply["content"]})
        return int(reply["usage"]["output_tokens"])

    async def _responses(self, name: str, system: str, messages: list[Message], rng: random.Random) -> int | None:
        """Each turn names the one before: `messages` keeps its id."""
        body = {
            "model": "default",
            "instructions": system,
            "input": messages[-1]["content"],
            "max_output_tokens": rng.randint(*_TOKENS),
        }
        if len(messages) > 1:
            body["previous_response_id"] = messages[-2]["id"]
        reply = await self._ask(f"{name}/v1/responses", body, turn=True)
        if reply is None:
            return None
        messages.append(reply)
        return int(reply["usage"]["output_tokens"])

    def _said(self, rng: random.Random) -> str:
        begin = rng.randrange(len(self._corpus) - _SAID[1])
        return self._corpus[begin : begin + rng.randint(*_SAID)]

    async def _ask(self, path: str, body: dict[str, Any], *, turn: bool = False) -> dict[str, Any] | None:
        """Return what came: of a stream, its `events`. None if there is no whole reply, as after an abort."""
        self.counts["turns"] += turn
        self.counts["chats"] += turn and path.startswith("/v1/")
        async with self._session.post(self._url + path, json=body) as response:
            content = await response.read()
            kind = path.rpartition("/")[2]
            self.counts[f"{kind} {response.status}"] += 1
            if response.status not in (200, 201):
                if response.status not in (502, 503):
                    self.wrong.append(f"{path}: {response.status} {content[:300]!r}")
                return None
            if response.content_type != "text/event-stream":
                found: dict[str, Any] = json.loads(content)
                return found
            lines = [line.removeprefix(b"data: ") for line in content.split(b"\n\n") if line.startswith(b"data: {")]
            events = [json.loads(line) for line in lines]
            if any("error" in event for event in events):
                return None
            return {"events": events}


def _joined(deltas: Sequence[dict[str, Any]]) -> Message:
    """Return the message of a stream, with its thoughts and its calls."""
    message: Message = {"role": "assistant"}
    for name in ("content", "reasoning_content"):
        if text := "".join(delta.get(name) or "" for delta in deltas):
            message[name] = text
    calls: list[Message] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls") or ()):
        if part["index"] == len(calls):
            calls.append({"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}})
        for name in ("name", "arguments"):
            calls[part["index"]]["function"][name] += part["function"].get(name) or ""
    return {**message, "tool_calls": calls} if calls else message
