"""An agent's side of a conversation, through the client libraries of OpenAI and of Anthropic.

Both know nothing of this router but a `base_url`: messages go out and come in as these libraries have them. What only a
demonstration does is in `extra_body` (see `script`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
    """The reply to one request.

    Attributes:
        agent: the name of the agent that asked.
        client: the library that it asked with.
        generation: the generation's id at the router.
        scripted: how many of its tokens were scripted.
        text: what it says.
        calls: its tool calls.
        message: the message as the library wants it back.
        number: the place of the request among all of the demonstration.
    """

    agent: str
    client: str
    generation: str
    scripted: int
    text: str
    calls: tuple[AgentCall, ...]
    message: Any
    number: int = 0


class Agent(ABC):
    """Keeps the messages of one conversation, and asks for turns."""

    library: ClassVar[str]

    def __init__(self, client: Any, name: str, system: str, tools: Sequence[Tool], prompter: Prompter) -> None:
        self.name = name
        self.messages: list[Any] = []
        self._client = client
        self._system = system
        self._tools = tools
        self._prompter = prompter

    def hear(self, said: str) -> None:
        self.messages.append({"role": "user", "content": said})

    def take(self, turn: AgentTurn) -> None:
        """Go on from this turn."""
        self.messages.append(turn.message)

    @abstractmethod
    def learn(self, results: Sequence[tuple[AgentCall, str]]) -> None:
        """Take the results of tool calls."""

    @abstractmethod
    async def ask(self, line: Line) -> AgentTurn:
        """Return a turn that is not taken yet: any number may be asked for at a time. Raises CallError."""

    def _turn(self, line: Line, generation: str, text: str, calls: Sequence[AgentCall], message: Any) -> AgentTurn:
        scripted = self._prompter.count(line)
        return AgentTurn(self.name, self.library, generation, scripted, text, tuple(calls), message)


class OpenAIAgent(Agent):
    """Asks `/v1/chat/completions`."""

    library = "openai"

    def __init__(self, client: openai.AsyncOpenAI, name: str, system: str, *rest: Any) -> None:
        super().__init__(client, name, system, *rest)
        self.messages.append({"role": "system", "content": system})

    def learn(self, results: Sequence[tuple[AgentCall, str]]) -> None:
        self.messages += [{"role": "tool", "tool_call_id": call.id, "content": result} for call, result in results]

    async def ask(self, line: Line) -> AgentTurn:
        tools = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.schema},
            }
            for tool in self._tools
        ]
        try:
            reply = await self._client.chat.completions.create(
                model=MODEL,
                messages=self.messages,
                tools=tools,
                max_completion_tokens=MAX_TOKENS,
                extra_body=self._prompter.fields(line),
            )
        except openai.OpenAIError as error:
            raise CallError(f"openai: {error}") from error
        message = reply.choices[0].message
        calls = [
            AgentCall(call.id, call.function.name, json.loads(call.function.arguments))
            for call in message.tool_calls or ()
        ]
        return self._turn(line, reply.id.removeprefix("chatcmpl-"), message.content or "", calls, message)


class AnthropicAgent(Agent):
    """Asks `/v1/messages`."""

    library = "anthropic"

    def learn(self, results: Sequence[tuple[AgentCall, str]]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": call.id, "content": result} for call, result in results]
        self.messages.append({"role": "user", "content": blocks})

    async def ask(self, line: Line) -> AgentTurn:
        tools = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.schema} for tool in self._tools
        ]
        try:
            reply = await self._client.messages.create(
                model=MODEL,
                system=self._system,
                messages=self.messages,
                tools=tools,
                max_tokens=MAX_TOKENS,
                extra_body=self._prompter.fields(line),
            )
        except anthropic.AnthropicError as error:
            raise CallError(f"anthropic: {error}") from error
        text = "".join(block.text for block in reply.content if block.type == "text")
        calls = [AgentCall(one.id, one.name, dict(one.input)) for one in reply.content if one.type == "tool_use"]
        message = {"role": "assistant", "content": reply.content}
        return self._turn(line, reply.id.removeprefix("msg_"), text, calls, message)
