"""An agent's side of a conversation, through the client libraries of OpenAI and of Anthropic.

Both know nothing of this router but a `base_url`. Only `extra_body` is special to the demonstration (see `script`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import anthropic
import openai

from worker.demo.agent.script import Line, Prompter
from worker.demo.rollout import CallError

MODEL = "demo"
MAX_TOKENS = 160


@dataclass(frozen=True)
class AgentCall:
    """A tool call, as a client library returns it."""

    id: str
    name: str
    arguments: dict[str, Any]


class ToolResult(NamedTuple):
    """What a tool answers: a text, and perhaps a PNG file."""

    text: str
    photo: bytes | None = None


@dataclass(frozen=True)
class AgentTurn:
    """The reply to one request: who asked, with which library, what came back."""

    agent: str
    client: str
    generation: str
    scripted: int  # tokens
    text: str
    calls: tuple[AgentCall, ...]
    message: Any  # as the library wants it back
    number: int  # of the request, among all of the demonstration


def tool(name: str, description: str, *arguments: str) -> dict[str, Any]:
    """Return a tool whose arguments are all strings, as OpenAI describes a function."""
    properties = {argument: {"type": "string"} for argument in arguments}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"name": name, "description": description, "parameters": schema}


@dataclass
class Agent(ABC):
    """Keeps the messages of one conversation, and asks for turns."""

    client_name: ClassVar[str]
    client: Any
    name: str
    system: str
    tools: Sequence[dict[str, Any]]
    prompter: Prompter
    messages: list[Any] = field(default_factory=list)

    async def ask(self, line: Line, number: int) -> AgentTurn:
        """Return a turn that is not among the messages yet: any number may be asked for at a time. Raises CallError."""
        fields, scripted = self.prompter.fields(line)
        try:
            generation, text, calls, message = await self._send(fields)
        except (openai.OpenAIError, anthropic.AnthropicError) as error:
            raise CallError(f"{self.client_name}: {error}") from error
        return AgentTurn(self.name, self.client_name, generation, scripted, text, calls, message, number)

    @abstractmethod
    async def _send(self, extra: dict[str, Any]) -> tuple[str, str, tuple[AgentCall, ...], Any]:
        """Return the id of a generation, its text, its tool calls, and the message to send back."""

    @abstractmethod
    def add_results(self, results: Sequence[tuple[AgentCall, ToolResult]]) -> None:
        """Append the results of tool calls to the messages."""


class OpenAIAgent(Agent):
    """Asks `/v1/chat/completions`."""

    client_name = "openai"

    async def _send(self, extra: dict[str, Any]) -> tuple[str, str, tuple[AgentCall, ...], Any]:
        messages = [{"role": "system", "content": self.system}, *self.messages]
        tools = [{"type": "function", "function": function} for function in self.tools]
        reply = await self.client.chat.completions.create(
            model=MODEL, messages=messages, tools=tools, max_completion_tokens=MAX_TOKENS, extra_body=extra
        )
        message = reply.choices[0].message
        made = message.tool_calls or ()
        calls = tuple(AgentCall(one.id, one.function.name, json.loads(one.function.arguments)) for one in made)
        return reply.id.removeprefix("chatcmpl-"), message.content or "", calls, message

    def add_results(self, results: Sequence[tuple[AgentCall, ToolResult]]) -> None:
        for call, (text, photo) in results:
            content: Any = text
            if photo is not None:
                url = f"data:image/png;base64,{b64encode(photo).decode()}"
                content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


class AnthropicAgent(Agent):
    """Asks `/v1/messages`."""

    client_name = "anthropic"

    async def _send(self, extra: dict[str, Any]) -> tuple[str, str, tuple[AgentCall, ...], Any]:
        tools = [{"input_schema" if key == "parameters" else key: one[key] for key in one} for one in self.tools]
        asked = {"system": self.system, "messages": self.messages, "tools": tools, "max_tokens": MAX_TOKENS}
        reply = await self.client.messages.create(model=MODEL, **asked, extra_body=extra)
        text = "".join(block.text for block in reply.content if block.type == "text")
        calls = tuple(AgentCall(one.id, one.name, dict(one.input)) for one in reply.content if one.type == "tool_use")
        return reply.id.removeprefix("msg_"), text, calls, {"role": "assistant", "content": reply.content}

    def add_results(self, results: Sequence[tuple[AgentCall, ToolResult]]) -> None:
        blocks = []
        for call, (text, photo) in results:
            content: Any = text
            if photo is not None:
                source = {"type": "base64", "media_type": "image/png", "data": b64encode(photo).decode()}
                content = [{"type": "image", "source": source}, {"type": "text", "text": text}]
            blocks.append({"type": "tool_result", "tool_use_id": call.id, "content": content})
        self.messages.append({"role": "user", "content": blocks})
