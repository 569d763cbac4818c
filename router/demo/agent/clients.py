"""An agent's side of a conversation, through the client libraries of OpenAI and of Anthropic.

Both know nothing of this router but a `base_url`: messages go out and come in as these libraries have them. What only a
demonstration does is in `extra_body` (see `script`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai

from router.demo.agent.script import Line, Prompter
from router.demo.rollout import CallError

MODEL = "demo"
MAX_TOKENS = 160


@dataclass(frozen=True)
class Tool:
    """A tool whose arguments are all strings."""

    name: str
    description: str
    arguments: tuple[str, ...]

    @property
    def schema(self) -> dict[str, Any]:
        properties = {name: {"type": "string"} for name in self.arguments}
        return {"type": "object", "properties": properties, "required": list(self.arguments)}


@dataclass(frozen=True)
class AgentCall:
    """A tool call, as a client library returns it."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class AgentTurn:
    """The reply to one request: who asked, with which library, what came back.

    `scripted` counts the tokens that were scripted, `message` is what the library wants back, and `number` is the place of
    the request among all of the demonstration.
    """

    agent: str
    client: str
    generation: str
    scripted: int
    text: str
    calls: tuple[AgentCall, ...]
    message: Any
    number: int = 0


@dataclass
class Agent(ABC):
    """Keeps the messages of one conversation, and asks for turns."""

    client: Any
    name: str
    system: str
    tools: Sequence[Tool]
    prompter: Prompter
    messages: list[Any] = field(default_factory=list)

    @abstractmethod
    def learn(self, results: Sequence[tuple[AgentCall, str]]) -> None:
        """Take the results of tool calls."""

    @abstractmethod
    async def ask(self, line: Line) -> AgentTurn:
        """Return a turn that is not among the messages yet: any number may be asked for at a time. Raises CallError."""


class OpenAIAgent(Agent):
    """Asks `/v1/chat/completions`."""

    def learn(self, results: Sequence[tuple[AgentCall, str]]) -> None:
        self.messages += [{"role": "tool", "tool_call_id": call.id, "content": result} for call, result in results]

    async def ask(self, line: Line) -> AgentTurn:
        functions = ({"name": one.name, "description": one.description, "parameters": one.schema} for one in self.tools)
        try:
            reply = await self.client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "system", "content": self.system}, *self.messages],
                tools=[{"type": "function", "function": function} for function in functions],
                max_completion_tokens=MAX_TOKENS,
                extra_body=self.prompter.fields(line),
            )
        except openai.OpenAIError as error:
            raise CallError(f"openai: {error}") from error
        message, name = reply.choices[0].message, reply.id.removeprefix("chatcmpl-")
        calls = [(one.id, one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or ()]
        made = tuple(AgentCall(*call) for call in calls)
        return AgentTurn(self.name, "openai", name, self.prompter.count(line), message.content or "", made, message)


class AnthropicAgent(Agent):
    """Asks `/v1/messages`."""

    def learn(self, results: Sequence[tuple[AgentCall, str]]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": call.id, "content": result} for call, result in results]
        self.messages.append({"role": "user", "content": blocks})

    async def ask(self, line: Line) -> AgentTurn:
        try:
            reply = await self.client.messages.create(
                model=MODEL,
                system=self.system,
                messages=self.messages,
                tools=[{"name": o.name, "description": o.description, "input_schema": o.schema} for o in self.tools],
                max_tokens=MAX_TOKENS,
                extra_body=self.prompter.fields(line),
            )
        except anthropic.AnthropicError as error:
            raise CallError(f"anthropic: {error}") from error
        text = "".join(block.text for block in reply.content if block.type == "text")
        made = tuple(AgentCall(one.id, one.name, dict(one.input)) for one in reply.content if one.type == "tool_use")
        message, name = {"role": "assistant", "content": reply.content}, reply.id.removeprefix("msg_")
        return AgentTurn(self.name, "anthropic", name, self.prompter.count(line), text, made, message)
