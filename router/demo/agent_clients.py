"""An agent's side of a conversation, through the client libraries of OpenAI and of Anthropic.

Both know nothing of this router but a `base_url`: messages go out and come in as these libraries have them. What only a
demonstration does is in `extra_body` (see `agent_lines`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import anthropic
import openai

from router.demo.agent_lines import MAX_TOKENS, Line, Prompter
from router.demo.conversations import CallError

MODEL = "demo"


@dataclass(frozen=True)
class Tool:
    """A tool whose arguments are all strings."""

    name: str
    description: str
    arguments: tuple[str, ...]

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        properties = {name: {"type": "string"} for name in self.arguments}
        return {"type": "object", "properties": properties, "required": list(self.arguments)}


@dataclass(frozen=True)
class Called:
    """A tool call, as a client library hands it over."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What came of one request.

    Attributes:
        agent: whose it is.
        client: the library that asked.
        generation: its id at the router.
        told: how many of its tokens were told beforehand.
        text: for the reader.
        calls: of tools.
        message: as the library wants it back.
        number: the how-manyth request it was.
    """

    agent: str
    client: str
    generation: str
    told: int
    text: str
    calls: tuple[Called, ...]
    message: Any
    number: int = 0


class Agent(ABC):
    """Keeps its messages, and asks.

    Args:
        name: in this demonstration.
        system: its system prompt.
        tools: what it may call.
        prompter: tells the model what to begin with.
    """

    library: ClassVar[str]

    def __init__(self, name: str, system: str, tools: Sequence[Tool], prompter: Prompter) -> None:
        self.name = name
        self._system = system
        self._tools = tools
        self._prompter = prompter
        self._messages: list[Any] = []

    def hear(self, said: str) -> None:
        """The user says something."""
        self._messages.append({"role": "user", "content": said})

    def take(self, turn: Turn) -> None:
        """This turn is the one that the conversation goes on from."""
        self._messages.append(turn.message)

    @abstractmethod
    def learn(self, results: Sequence[tuple[Called, str]]) -> None:
        """What the tools say."""

    @abstractmethod
    async def ask(self, line: Line) -> Turn:
        """One turn, which is not taken yet: several may be asked for at a time. Raises CallError."""

    def _turn(self, line: Line, generation: str, text: str, calls: Sequence[Called], message: Any) -> Turn:
        told = self._prompter.told(line)
        return Turn(self.name, self.library, generation, told, text, tuple(calls), message)


class OpenAIAgent(Agent):
    """Asks with `openai`."""

    library = "openai"

    def __init__(self, client: openai.AsyncOpenAI, name: str, system: str, *rest: Any) -> None:
        super().__init__(name, system, *rest)
        self._client = client
        self._messages.append({"role": "system", "content": system})

    def learn(self, results: Sequence[tuple[Called, str]]) -> None:
        """A message for each."""
        self._messages += [{"role": "tool", "tool_call_id": call.id, "content": said} for call, said in results]

    async def ask(self, line: Line) -> Turn:
        """Of `/v1/chat/completions`."""
        tools: list[Any] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.schema},
            }
            for tool in self._tools
        ]
        try:
            reply = await self._client.chat.completions.create(
                model=MODEL,
                messages=self._messages,
                tools=tools,
                max_completion_tokens=MAX_TOKENS,
                extra_body=self._prompter.fields(line),
            )
        except openai.OpenAIError as error:
            raise CallError(f"openai: {error}") from error
        message = reply.choices[0].message
        calls = [
            Called(call.id, call.function.name, json.loads(call.function.arguments))
            for call in message.tool_calls or ()
            if call.type == "function"
        ]
        return self._turn(line, reply.id.removeprefix("chatcmpl-"), message.content or "", calls, message)


class AnthropicAgent(Agent):
    """Asks with `anthropic`."""

    library = "anthropic"

    def __init__(self, client: anthropic.AsyncAnthropic, name: str, system: str, *rest: Any) -> None:
        super().__init__(name, system, *rest)
        self._client = client

    def learn(self, results: Sequence[tuple[Called, str]]) -> None:
        """One message with all of them."""
        blocks = [{"type": "tool_result", "tool_use_id": call.id, "content": said} for call, said in results]
        self._messages.append({"role": "user", "content": blocks})

    async def ask(self, line: Line) -> Turn:
        """Of `/v1/messages`."""
        tools: list[Any] = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.schema} for tool in self._tools
        ]
        try:
            reply = await self._client.messages.create(
                model=MODEL,
                system=self._system,
                messages=self._messages,
                tools=tools,
                max_tokens=MAX_TOKENS,
                extra_body=self._prompter.fields(line),
            )
        except anthropic.AnthropicError as error:
            raise CallError(f"anthropic: {error}") from error
        text = "".join(block.text for block in reply.content if block.type == "text")
        calls = [Called(block.id, block.name, dict(block.input)) for block in reply.content if block.type == "tool_use"]
        message = {"role": "assistant", "content": reply.content}
        return self._turn(line, reply.id.removeprefix("msg_"), text, calls, message)
