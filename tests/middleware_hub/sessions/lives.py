"""The random life of some sessions, lived twice: in one process that never dies, and in processes that share a store."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pytest

from middleware_hub.sessions import chats
from middleware_hub.sessions.turn import turns
from router.config import StoreConfig
from tests.middleware_hub.sessions.in_process import Client, Engine, Room
from tests.support.vocabularies import load

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Look.", "parameters": {"type": "object"}}}
    for name in ("look", "listen")
]
TEXTS = (
    "Yes.",
    "No, not at all. ",
    "It is 4.\n\n",
    "<think>\nHm.\n</think>\n\nWell.",
    'So: <tool_call>\n{"name": "look", "arguments": {"where": "there"}}\n</tool_call>',
    "Ünïcode 👩‍👩‍👧 all the way",
)
NAMES = ("s", "t")
MASKED = frozenset({"created", "created_at"})


class Answering(Protocol):
    """A call that was made."""

    async def answer(self) -> tuple[int, Any]:
        """The whole reply."""


Call = Callable[[Room], Answering]


class Ids:
    """Generation ids that count, for each side on its own."""

    def __init__(self) -> None:
        self._counts: dict[str, Iterator[int]] = {}
        self.side = ""

    def __call__(self) -> str:
        return f"{next(self._counts.setdefault(self.side, count())):032x}"


@pytest.fixture
def ids(monkeypatch: pytest.MonkeyPatch) -> Ids:
    found = Ids()
    for module in (chats, turns):
        monkeypatch.setattr(module, "new_rid", found)
    return found


@dataclass
class Side:
    """One process after the other, or some in turns, before one engine."""

    name: str
    ids: Ids
    url: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    engine: Engine = field(default_factory=Engine)
    rooms: list[Room] = field(default_factory=list)

    async def begin(self) -> Room:
        store = None if self.url is None else StoreConfig(url=self.url)
        room = Room(store=store, engine=self.engine, **self.options)
        if room.hub.store is not None and room.hub.versions is not None:
            await room.hub.store.open("t")
            await room.hub.versions.read()
        self.rooms.append(room)
        return room

    async def end(self, room: Room, *, killed: bool) -> None:
        self.rooms.remove(room)
        if not killed:
            await room.app.registry.close()
        if room.hub.store is not None:
            await room.hub.store.close()

    async def live(self, room: Room, call: Call) -> tuple[int, Any]:
        self.ids.side = self.name
        return await call(room).answer()


def masked(body: Any) -> Any:
    """What an answer says apart from the time."""
    if isinstance(body, dict):
        return {key: "" if key in MASKED else masked(value) for key, value in body.items()}
    if not isinstance(body, list):
        return body
    found = [masked(one) for one in body]
    # The samples of a stream may come in any order.
    if any(isinstance(one, dict) and one.get("object") == "chat.completion.chunk" for one in found):
        found.sort(key=_sample)
    return found


def _sample(event: Any) -> int:
    choices = event.get("choices") if isinstance(event, dict) else None
    return choices[0]["index"] if choices else 99


class Stopped:
    """A client that leaves a stream, and goes on with the words that it has read."""

    def __init__(self, room: Room, path: str, body: dict[str, Any], kept: int) -> None:
        """`kept`: the number of sampled tokens that it has certainly read, and that its next prompt has to begin with."""
        self._room, self._path, self._body, self._kept = room, path, body, kept

    async def answer(self) -> tuple[int, Any]:
        client = Client(self._room.app, "POST", self._path, self._body, {})
        held = asyncio.create_task(self._room.engine.arrived())
        await asyncio.wait([held, client._task], return_when=asyncio.FIRST_COMPLETED)
        held.cancel()
        if client._task.done():  # it was refused, or came to its limit before
            return await client.answer()
        sent, sampled = self._room.engine.log[-1]
        for _ in range(100):  # until it has read everything
            await asyncio.sleep(0)
        read = {"role": "assistant", "content": "", "reasoning_content": ""}
        for line in client.content.split(b"\n\n")[:-1]:
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                for key in ("content", "reasoning_content"):
                    read[key] += choice["delta"].get(key) or ""
        await client.leave()
        goes_on = {"messages": [*self._body["messages"], read, {"role": "user", "content": "Go on"}], "stream": False}
        status, answer = await Client(self._room.app, "POST", self._path, {**self._body, **goes_on}, {}).answer()
        then = self._room.engine.log[-1][0]
        if then is not sent and self._kept:  # else its session is over, or has no budget for more
            chain = [*sent["input_ids"], *sampled[: self._kept]]
            assert then["input_ids"][: len(chain)] == chain
        return status, answer


class Life:
    """What clients of some sessions do, as dice will have it. They know only what they were answered."""

    def __init__(self, dice: random.Random, *, appends: bool = False) -> None:
        """`appends`: whether prompts always begin with everything that was read before."""
        self._dice = dice
        self._appends = appends
        self._thoughts = 0
        self._talks: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in NAMES}
        self._generations: dict[str, list[str]] = {name: [] for name in NAMES}
        self._last: tuple[str, dict[str, Any], str] | None = None

    def next(self) -> tuple[Call, Callable[[Engine], None], Callable[[int, Any], None]]:
        """The next call, what the engine has to say in it, and who is to hear the answer."""
        name = self._dice.choice(NAMES)
        kinds = (
            [self._turn] * 12 + [self._again, self._stopped] * 2 + [self._reward, self._look, self._look, self._export]
        )
        kinds += (
            [self._make] * (1 if self._talks[name] else 6)
            + [self._complete]
            + [self._end] * self._dice.choice((0, 0, 1))
        )
        return self._dice.choice(kinds)(name)

    def _call(self, method: str, path: str, body: Any = None) -> tuple[Call, Any, Any]:
        return (
            lambda room: Client(room.app, method, path, {} if body is None else body, {}),
            lambda engine: None,
            lambda status, answer: None,
        )

    def _make(self, name: str) -> Any:
        body: dict[str, Any] = {"session_id": name, "metadata": {"of": [name, 1.5, None]}}
        if self._dice.random() < 0.3:
            body["response_budget"] = self._dice.randint(5, 60)
        if self._dice.random() < 0.3:
            body["sampling_params"] = {"temperature": 0.5, "max_tokens": 12}
        return self._call("POST", "/sessions", body)

    def _turn(self, name: str) -> Any:
        dice, talks = self._dice, self._talks[name]
        messages = list(dice.choice(talks)) if talks and dice.random() < 0.85 else []
        if not messages and dice.random() < 0.5:
            messages.append({"role": "system", "content": dice.choice(("Be brief.", "Be kind."))})
        messages = messages[: dice.randint(0, len(messages))] if dice.random() < 0.15 else messages
        messages = [self._echoed(message) for message in messages]
        body: dict[str, Any] = {"messages": messages, "max_tokens": dice.choice((3, 40, 40, 40))}
        if messages and messages[-1]["role"] == "assistant" and dice.random() < 0.2:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        elif messages and messages[-1].get("tool_calls"):
            messages.append({"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": "There."})
        else:
            messages.append({"role": "user", "content": dice.choice(("Hi", "And now?", "Count to 3"))})
        if dice.random() < 0.5:
            body["tools"] = TOOLS[: dice.choice((1, 1, 2))]
        if "tools" not in body and "continue_final_message" not in body and dice.random() < 0.5 and _plain(messages):
            return self._asked(name, {**body, "stream": dice.random() < 0.3}, "messages")
        body |= dice.choice(({}, {}, {"stream": True}, {"n": 3}, {"n": 2, "stream": True}))
        return self._asked(name, body)

    def _echoed(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as an agent sends it back: now and then it changes it."""
        content = message.get("content")
        if message["role"] != "assistant" or not isinstance(content, str) or self._dice.random() > 0.15:
            return message
        return {
            **message,
            "content": self._dice.choice((content.strip(), content + " Indeed.", content[: len(content) // 2])),
        }

    def _again(self, name: str) -> Any:
        return self._turn(name) if self._last is None else self._asked(*self._last)

    def _asked(self, name: str, body: dict[str, Any], dialect: str = "chat/completions") -> Any:
        self._last = name, body, dialect
        said = [self._dice.choice(TEXTS) for _ in range(body.get("n", 1))]
        experts = base64.b64encode(bytes(self._dice.choices(range(256), k=24))).decode()
        extra = self._dice.choice(({}, {}, {"routed_experts": experts}, {"other": [1, {"a": 2.5}]}))

        def speak(engine: Engine) -> None:
            for text in said:
                engine.says(text, extra=extra)

        def hear(status: int, answer: Any) -> None:
            if status != 200 or body.get("stream"):
                return
            kept = {"role", "content", "tool_calls", *(("reasoning_content",) if self._dice.random() < 0.5 else ())}
            if dialect == "messages":
                answer = {"id": answer["id"], "choices": [{"message": _as_openai(answer)}]}
            for choice in answer["choices"]:
                message = {k: v for k, v in choice["message"].items() if v and k in kept}
                before = body["messages"][:-1] if body.get("continue_final_message") else body["messages"]
                self._talks[name].append([*before, {"content": "", **message}])
            self._generations[name].append(answer["id"])

        call, _, _ = self._call("POST", f"/sessions/{name}/v1/{dialect}", body)
        return call, speak, hear

    def _stopped(self, name: str) -> Any:
        """A stream that the client stops in its reasoning, or behind it."""
        self._thoughts += 1
        messages = self._dice.choice([*self._talks[name][-3:], []])
        body = {"messages": [*messages, {"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 60}
        begins, text = (f"<think>\n{self._thoughts:03d}{rest}" for rest in ("", ", I think.\n</think>\n\nWell, well."))
        count = len(load("qwen").encode(begins).ids)
        hold = self._dice.choice((count + 1, count + 2, len(load("qwen").encode(text).ids) - 1))
        return (
            lambda room: Stopped(room, f"/sessions/{name}/v1/chat/completions", body, count if self._appends else 0),
            lambda engine: (engine.says(text, hold=hold), engine.says("Well.")),
            lambda status, answer: None,
        )

    def _reward(self, name: str) -> Any:
        body: dict[str, Any] = {"reward_info": {self._dice.choice("ab"): self._dice.randint(0, 9) / 2}}
        if self._generations[name] and self._dice.random() < 0.7:
            body["branch"] = self._dice.choice(self._generations[name])
        return self._call("POST", f"/sessions/{name}/reward_info", body)

    def _look(self, name: str) -> Any:
        return self._call("GET", self._dice.choice((f"/sessions/{name}", "/sessions")))

    def _export(self, name: str) -> Any:
        if self._dice.random() < 0.8:
            return self._call("GET", f"/sessions/{name}/trajectories")
        every = {"export_all_checkpoints": True, "shared_turns": "every"}
        return self._call("POST", f"/sessions/{name}/finalize", self._dice.choice(({}, every)))

    def _complete(self, name: str) -> Any:
        return self._call("POST", f"/sessions/{name}/complete", self._dice.choice(({}, {"reward_info": {"done": 1}})))

    def _end(self, name: str) -> Any:
        call, speak, _ = self._call("DELETE", f"/sessions/{name}")

        def hear(status: int, _: Any) -> None:
            if status == 200:
                self._talks[name], self._generations[name] = [], []

        return call, speak, hear


def _plain(messages: list[dict[str, Any]]) -> bool:
    """Whether these messages look alike in both dialects."""
    return all(one["role"] in ("user", "assistant") and one["content"] and len(one) == 2 for one in messages)


def _as_openai(answer: dict[str, Any]) -> dict[str, Any]:
    parts = answer["content"]
    thought = "".join(part["thinking"] for part in parts if part["type"] == "thinking")
    calls = [
        {
            "id": part["id"],
            "type": "function",
            "function": {"name": part["name"], "arguments": json.dumps(part["input"])},
        }
        for part in parts
        if part["type"] == "tool_use"
    ]
    text = "".join(part["text"] for part in parts if part["type"] == "text")
    return {"role": "assistant", "content": text, "reasoning_content": thought, "tool_calls": calls}


def shown(engine: Engine) -> list[dict[str, Any]]:
    """What the workers were asked, in order."""
    return [json.loads(json.dumps(body)) for body, _ in engine.log]


def url(folder: Path) -> str:
    return f"sqlite:{folder}"
