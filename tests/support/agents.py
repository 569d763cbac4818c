"""An agent as a test writes one: it keeps its messages, asks in a session, and knows from the workers what is true."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.support.client import Answer
from tests.support.stack import Stack, events
from worker.engine.records import GenerationRecord

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look somewhere.",
            "parameters": {"type": "object", "properties": {"where": {"type": "string"}, "times": {"type": "integer"}}},
        },
    }
]


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool(call: dict[str, Any], content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def call_text(where: str, times: int = 1) -> str:
    """A tool call as the model samples it, in the manner of Hermes."""
    return f'<tool_call>\n{{"name": "look", "arguments": {{"where": "{where}", "times": {times}}}}}\n</tool_call>'


@dataclass
class Turn:
    """What came of one request."""

    answer: Answer
    record: GenerationRecord | None

    @property
    def message(self) -> dict[str, Any]:
        found: dict[str, Any] = self.answer.json()["choices"][0]["message"]
        return found

    @property
    def sent(self) -> list[int]:
        assert self.record is not None
        return list(self.record.input_ids)

    @property
    def chain(self) -> list[int]:
        """All that the engine consumed and produced."""
        assert self.record is not None
        return [*self.record.input_ids, *self.record.output_ids]

    @property
    def sampled(self) -> list[int]:
        assert self.record is not None
        return list(self.record.output_ids)

    @property
    def generation(self) -> str:
        return self.answer.headers["x-generation-id"]


@dataclass
class AgentSession:
    """One session of a stack with one worker."""

    stack: Stack
    name: str
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, stack: Stack, **given: Any) -> AgentSession:
        body = {
            key: given.pop(key)
            for key in ("session_id", "sampling_params", "metadata", "ttl_s", "response_budget", "match")
            if key in given
        }
        answer = stack.post("/sessions", body)
        assert answer.status == 201, answer.content
        return cls(stack, answer.json()["session_id"], **given)

    @property
    def path(self) -> str:
        return f"/sessions/{self.name}"

    def ask(
        self,
        *messages: dict[str, Any],
        says: str | None = None,
        headers: dict[str, str] | None = None,
        finish: Any = "eos",
        **options: Any,
    ) -> Turn:
        """One turn; `says` is what the worker samples."""
        (worker,) = self.stack.workers
        before = len(worker.log)
        if says is not None:
            worker.script(text=says, finish=finish)
        body = {"model": "m", "messages": list(messages), **self.options, **options}
        if self.tools is not None:
            body.setdefault("tools", self.tools)
        answer = self.stack.post(f"{self.path}/v1/chat/completions", body, headers=headers)
        records = worker.log[before:]
        return Turn(answer, records[0] if records else None)

    def must(self, *messages: dict[str, Any], says: str | None = None, **options: Any) -> Turn:
        turn = self.ask(*messages, says=says, **options)
        assert turn.answer.status == 200, turn.answer.content
        return turn

    def show(self, *, tree: bool = False) -> dict[str, Any]:
        answer = self.stack.get(f"{self.path}{'?tree=1' if tree else ''}")
        assert answer.status == 200, answer.content
        found: dict[str, Any] = answer.json()
        return found

    def trajectories(self, query: str = "") -> list[dict[str, Any]]:
        answer = self.stack.get(f"{self.path}/trajectories{query}")
        assert answer.status == 200, answer.content
        found: list[dict[str, Any]] = answer.json()["trajectories"]
        for one in found:
            aligned = {len(one[key]) for key in ("response_ids", "response_mask", "response_logprobs")}
            assert aligned == {len(one["response_ids"])}
        return found

    def finalize(self, **body: Any) -> list[dict[str, Any]]:
        answer = self.stack.post(f"{self.path}/finalize", body)
        assert answer.status == 200, answer.content
        found: list[dict[str, Any]] = answer.json()["trajectories"]
        return found


def ids_of(trajectory: dict[str, Any]) -> list[int]:
    return [*trajectory["prompt_ids"], *trajectory["response_ids"]]


def deltas(answer: Answer) -> dict[str, Any]:
    """A streamed chat completion, put together again."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: list[Any] = []
    for event in events(answer):
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            calls += delta.get("tool_calls") or ()
    if calls:
        message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
    return message


def rewritten(message: dict[str, Any]) -> dict[str, Any]:
    """A message as agents send it back: arguments printed differently, reasoning dropped, empty fields added."""
    calls = [
        {
            **call,
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(dict(reversed(json.loads(call["function"]["arguments"]).items())), indent=1),
            },
        }
        for call in message.get("tool_calls") or ()
    ]
    return {"role": "assistant", "content": message["content"] or None, "tool_calls": calls, "refusal": None}
