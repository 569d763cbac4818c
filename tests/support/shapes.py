"""Conversations as agents have them, in ten shapes: who goes on, who forgets its thoughts, who edits what was said."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from middleware_hub.dialects.openai import OpenAI
from middleware_hub.templates.chat_template import ChatTemplate
from tests.support import templates
from tests.support.agents import TOOLS, rewritten, system, user
from tests.support.chat_models import chat_model, markers_of

Message = dict[str, Any]
Messages = list[Message]

REQUESTS = 6


class Exchange(NamedTuple):
    """One request: what the client sent, the ids that the worker got, and the ids that it sampled."""

    messages: Messages
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]
    sent: list[int]
    sampled: list[int]


Ask = Callable[[Messages, list[dict[str, Any]] | None, dict[str, Any], list[int], int], tuple[Message, list[int]]]
"""Has a worker sample these ids, the last of which stops it: the reply's message, and the ids that the worker got."""


_HERMES = '<tool_call>\n{"name": "NAME", "arguments": ALL}\n</tool_call>'
CALLS = {
    "qwen2_5": _HERMES,
    "qwen3": _HERMES,
    "qwen3_5_think": "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    "llama3_1": '{"name": "NAME", "parameters": ALL}',
    "glm4moe": "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nALL\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ALL"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "mistral": "[TOOL_CALLS]NAME[ARGS]ALL",
    "seed_oss": "<seed:tool_call>\n<function=NAME>\n<parameter=KEY>VALUE</parameter>\n</function>\n</seed:tool_call>",
}


class ChatModel:
    """What a model with a published template would sample."""

    def __init__(self, name: str) -> None:
        special = {f"{key}_token": value for key in ("bos", "eos") if (value := getattr(markers_of(name), key))}
        self.name = name
        self.template = ChatTemplate(templates.source(name), special)
        self.tokenizer = Tokenizer.from_file(str(chat_model(name) / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def spell(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def says(self, messages: Sequence[Message], tools: Any, options: Mapping[str, Any], text: str, thought: str) -> str:
        """What is sampled for a text or a call to be said, with a thought in front of it or none."""
        prompt = self.template.whole(understood(messages), tools, options).rstrip()
        if prompt.endswith("</think>"):
            return text
        if prompt.endswith("<think>"):
            return f"{thought}\n</think>\n\n{text}"
        return f"<think>\n{thought}\n</think>\n\n{text}" if thought else text

    def calls(self, name: str, key: str, value: str) -> str:
        """A call of a tool, in the form that this model has learnt."""
        arguments = json.dumps({key: value})
        return (
            CALLS.get(self.name, _HERMES)
            .replace("NAME", name)
            .replace("KEY", key)
            .replace("VALUE", value)
            .replace("ALL", arguments)
        )

    def stop(self, reply: Message, behind: Sequence[Message], tools: Any = None) -> int:
        """The token that the model stops with, for this to come behind its turn."""
        return self.encode(self.template.tail(reply, behind, tools, {}, earlier=[user("a")]))[0]


def understood(messages: Sequence[Message]) -> Sequence[Message]:
    """A client's messages in the form that templates are shown."""
    return OpenAI().parse(json.dumps({"messages": messages}).encode()).messages


@dataclass(frozen=True)
class Shape:
    """A conversation of `REQUESTS` requests.

    Attributes:
        loop: every other reply calls a tool.
        thinks: the model thinks, and the client drops that.
        options: template options of a request.
        echo: how the client writes a reply when it sends it back.
        edits: what it does to its messages before a request.
    """

    loop: bool = False
    thinks: bool = False
    options: Callable[[int], dict[str, Any]] = lambda number: {}
    echo: Callable[[Message], Message] = lambda message: {"role": "assistant", "content": message["content"]}
    edits: Mapping[int, Callable[[Messages], Messages]] = field(default_factory=dict)


def _with_calls(message: Message) -> Message:
    calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
    return {"role": "assistant", "content": message["content"], **calls}


def _as_parts(message: Message) -> Message:
    return {"role": "assistant", "content": [{"type": "text", "text": message["content"]}]}


def _other(at: int) -> Callable[[Messages], Messages]:
    def edit(messages: Messages) -> Messages:
        return [*messages[:at], {**messages[at], "content": "Something else."}, *messages[at + 1 :]]

    return edit


def _condensed(messages: Messages) -> Messages:
    return [messages[0], user("So far: a greeting, and some replies."), *messages[-2:]]


SHAPES: dict[str, Shape] = {
    "plain chat": Shape(),
    "tool loop": Shape(loop=True, echo=_with_calls),
    "think on": Shape(thinks=True, options=lambda number: {"enable_thinking": True}),
    "think off": Shape(options=lambda number: {"enable_thinking": False}),
    "think switched": Shape(thinks=True, options=lambda number: {"enable_thinking": number % 2 == 0}),
    "edited user turn": Shape(edits={4: _other(3)}),
    "edited assistant turn": Shape(edits={4: _other(4)}),
    "condensed context": Shape(edits={4: _condensed}),
    "re-serialized arguments": Shape(loop=True, echo=rewritten),
    "list content": Shape(echo=_as_parts),
}
UNEDITED = [name for name, shape in SHAPES.items() if not shape.edits]


def converse(model: ChatModel, shape: Shape, ask: Ask, *, opening: str = "Hello") -> list[Exchange]:
    """One conversation of a shape. Without a session it is told from others by how the user opens it."""
    tools = TOOLS if shape.loop else None
    messages: Messages = [system("Be brief."), user(opening)]
    found = []
    for number in range(REQUESTS):
        messages = shape.edits.get(number, list)(messages)
        options = shape.options(number)
        if shape.loop and number % 2 == 0:
            call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"where": "here"}}}
            reply: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            behind: Message = {"role": "tool", "content": f"nothing {number}", "tool_call_id": "call_1"}
            text = model.calls("look", "where", f"here {number}")
        else:
            text = f"This is the reply number {number}, as well as it can be put."
            reply, behind = {"role": "assistant", "content": text}, user(f"And then, {number}?")
        thought = f"Let me see: {number}." if shape.thinks else ""
        ids = model.encode(model.says(messages, tools, options, text, thought))
        ids = _awkward(ids, model) if number % 3 == 1 else ids
        message, sent = ask(messages, tools, options, ids, model.stop(reply, [behind], tools))
        found.append(Exchange(messages, tools, options, sent, ids))
        if message.get("tool_calls"):
            behind = {**behind, "tool_call_id": message["tool_calls"][0]["id"]}
        messages = [*messages, shape.echo(message), behind]
    return found


def _awkward(ids: list[int], model: ChatModel) -> list[int]:
    """The same text in other tokens: a word is sampled letter by letter, as models do now and then. (Of two thousand replies
    that the embedded engine sampled, encoding gave other ids for one in seven.)"""
    word = model.encode(" as")
    if len(word) != 1 or word[0] not in ids:
        return ids
    at = ids.index(word[0])
    return [*ids[:at], *model.encode(" "), *model.encode("a"), *model.encode("s"), *ids[at + 1 :]]


class Kept(NamedTuple):
    """What reached a worker of what was sampled before, over the requests of a conversation behind the first one."""

    ids: int
    earlier: int
    prefixes: int
    requests: int


def kept(exchanges: Sequence[Exchange], sent: Callable[[Exchange], list[int]] = lambda one: one.sent) -> Kept:
    """Count: ids of earlier replies that stand unchanged and in order in what was sent, and prompts that begin with all
    that the worker had seen and said in the request before."""
    ids = earlier = prefixes = 0
    for number, exchange in enumerate(exchanges[1:], 1):
        now, at = sent(exchange), 0
        for before in exchanges[:number]:
            earlier += len(before.sampled)
            place = _find(now, before.sampled, at)
            if place >= 0:
                ids += len(before.sampled)
                at = place + len(before.sampled)
        last = [*sent(exchanges[number - 1]), *exchanges[number - 1].sampled]
        prefixes += now[: len(last)] == last
    return Kept(ids, earlier, prefixes, len(exchanges) - 1)


def _find(ids: list[int], part: list[int], start: int) -> int:
    return next((at for at in range(start, len(ids) - len(part) + 1) if ids[at : at + len(part)] == part), -1)
