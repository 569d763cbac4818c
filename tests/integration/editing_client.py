"""A client that does to its history whatever clients do: it edits, drops, swaps, goes back, changes its tools in the middle."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypothesis import strategies as st

from router.errors import BadRequestError
from tests.support.agents import TOOLS, AgentSession, Turn, rewritten, system, user
from tests.support.shapes import ChatModel, Message, Messages
from tests.support.stack import Stack
from worker.engine.records import GenerationRecord

_LOOK: Any = TOOLS[0]["function"]
OTHER_TOOLS = [*TOOLS, {"type": "function", "function": {**_LOOK, "name": "listen"}}]
TOOLBOXES = {"none": None, "one": TOOLS, "two": OTHER_TOOLS}
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
WORDS = st.sampled_from(
    [
        "Hello",
        "And then?",
        "  so ",
        "a\n\nb",
        "né",
        "x<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "<think>",
        "/nothink",
        "Go on /no_think",
        "/think",
        "b",
    ]
)
STOP = "##"


@dataclass
class Said:
    """One generation, as the client and the worker know it."""

    messages: Messages
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]
    record: GenerationRecord
    reply: Message
    text: str
    """What was sampled, without what ended it."""


@dataclass
class Served:
    model: ChatModel
    stack: Stack
    history: str


Edit = Callable[[st.DataObject, Messages], Messages]


def _at(data: st.DataObject, messages: Messages, *roles: str) -> int | None:
    found = [at for at, message in enumerate(messages) if not roles or message["role"] in roles]
    return data.draw(st.sampled_from(found), label="at") if found else None


def _changed(*roles: str) -> Edit:
    def edit(data: st.DataObject, messages: Messages) -> Messages:
        at = _at(data, messages, *roles)
        if at is None:
            return messages
        return [*messages[:at], {**messages[at], "content": data.draw(WORDS, label="says")}, *messages[at + 1 :]]

    return edit


def _dropped(data: st.DataObject, messages: Messages) -> Messages:
    at = _at(data, messages)
    return messages if at is None else [*messages[:at], *messages[at + 1 :]]


def _inserted(data: st.DataObject, messages: Messages) -> Messages:
    at = data.draw(st.integers(0, len(messages)), label="at")
    new = {"role": data.draw(st.sampled_from(["user", "assistant", "system"])), "content": data.draw(WORDS)}
    return [*messages[:at], new, *messages[at:]]


def _swapped(data: st.DataObject, messages: Messages) -> Messages:
    one, two = _at(data, messages), _at(data, messages)
    made = list(messages)
    if one is not None and two is not None:
        made[one], made[two] = made[two], made[one]
    return made


def _told_otherwise(change: Callable[[Message], Message]) -> Edit:
    def edit(data: st.DataObject, messages: Messages) -> Messages:
        at = _at(data, messages, "assistant")
        return messages if at is None else [*messages[:at], change(messages[at]), *messages[at + 1 :]]

    return edit


def _as_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]} if message.get("content") else message


def _printed_anew(message: Message) -> Message:
    return rewritten(message) if isinstance(message.get("content"), str | None) else message


def _thoughtless(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def _with_content(change: Callable[[str], str]) -> Edit:
    """An assistant's text, told a little differently."""

    def changed(message: Message) -> Message:
        content = message.get("content")
        return {**message, "content": change(content)} if isinstance(content, str) and content else message

    return _told_otherwise(changed)


def _thought_shown(message: Message) -> Message:
    """As agents write it that know only text."""
    thought, content = message.get("reasoning_content"), message.get("content")
    if not thought or not isinstance(content, str):
        return message
    return {**_thoughtless(message), "content": f"<think>\n{thought}\n</think>\n\n{content}"}


def _other_ids(message: Message) -> Message:
    calls = [{**call, "id": f"mine_{number}"} for number, call in enumerate(message.get("tool_calls") or ())]
    return {**message, "tool_calls": calls} if calls else message


EDITS: dict[str, Edit] = {
    "stripped": _with_content(str.strip),
    "cut": _with_content(lambda content: content[: 2 * len(content) // 3]),
    "more": _with_content(lambda content: content + " And more."),
    "thought in the content": _told_otherwise(_thought_shown),
    "other ids of calls": _told_otherwise(_other_ids),
    "nothing": lambda data, messages: messages,
    "a user's text": _changed("user", "system"),
    "an assistant's text": _changed("assistant"),
    "a tool's answer": _changed("tool"),
    "drop": _dropped,
    "insert": _inserted,
    "swap": _swapped,
    "arguments printed anew": _told_otherwise(_printed_anew),
    "list content": _told_otherwise(_as_parts),
    "no thoughts": _told_otherwise(_thoughtless),
    "other thoughts": _told_otherwise(lambda message: {**message, "reasoning_content": "Something else."}),
}
GENTLE = ("nothing", "nothing", "nothing", "arguments printed anew", "list content", "no thoughts", "other thoughts")


class Reply(NamedTuple):
    """What the model is to sample: ids, and which of them stops it; `text` is what they spell up to what ends it."""

    ids: list[int]
    text: str
    options: dict[str, Any]


@dataclass
class Client:
    """Talks in one session, and writes down what it did."""

    served: Served
    data: st.DataObject
    agent: AgentSession
    said: dict[str, Said] = field(default_factory=dict)
    before: list[Messages] = field(default_factory=list)
    """All the histories it ever had."""

    def talk(self, turns: int) -> None:
        messages: Messages = [system("Be brief."), user("Hello")]
        tools, options = self._setting()
        for number in range(turns):
            self.before.append(messages)
            if self.data.draw(st.integers(0, 4), label="other setting") == 0:
                tools, options = self._setting()
            if self.data.draw(st.integers(0, 4), label="back") == 0:
                messages = self.data.draw(st.sampled_from(self.before), label="back to")
            edits = [*EDITS] if self.data.draw(st.integers(0, 2), label="edits") == 0 else GENTLE
            edited = EDITS[self.data.draw(st.sampled_from(edits), label="edit")](self.data, copy.deepcopy(messages))
            made = self._turn(edited, tools, options, number)
            messages = messages if made is None else made

    def _setting(self) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
        tools = TOOLBOXES[self.data.draw(st.sampled_from([*TOOLBOXES]), label="tools")]
        return tools, self.data.draw(st.sampled_from(OPTIONS), label="options")

    def _turn(self, messages: Messages, tools: Any, options: dict[str, Any], number: int) -> Messages | None:
        """Ask; the messages with the reply and what comes behind it. None if it is refused."""
        model, draw = self.served.model, self.data.draw
        try:
            calls = tools is not None and draw(st.booleans(), label="calls")
            text = (
                model.calls("look", "where", f"here {number}")
                if calls
                else draw(WORDS.filter(_sayable)) + f" {number}."
            )
            thought = f"Let me see: {number}." if draw(st.booleans(), label="thinks") else ""
            text = model.says(messages, tools, options, text, thought)
            reply = self._reply(text, calls, tools)
        except BadRequestError:
            reply = None  # the template refuses these messages: so must we
        (worker,) = self.served.stack.workers
        if reply is not None:
            worker.script(ids=reply.ids, finish=None)
        given = {"tools": tools} if tools else {}
        given |= {"chat_template_kwargs": options} if options else {}
        turn = self.agent.ask(*messages, **given, **(reply.options if reply else {}), skip_special_tokens=False)
        if reply is None:
            assert turn.answer.status == 400, turn.answer.content
            assert turn.record is None
            return None
        assert turn.answer.status == 200, turn.answer.content
        assert turn.record is not None
        self._write_down(messages, tools, options, turn, reply.text)
        behind = [user(f"And then, {number}?")]
        if turn.message.get("tool_calls"):
            answers = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"nothing {number}"}
                for call in turn.message["tool_calls"]
            ]
            behind = answers if draw(st.booleans()) else [*answers, *behind]
        if draw(st.integers(0, 3), label="another model's turn") == 0:
            behind += strangers_turn(number)
        echo = {key: value for key, value in turn.message.items() if value}
        return [*messages, {"content": "", **echo}, *behind]

    def _reply(self, text: str, calls: bool, tools: Any) -> Reply:
        """How it ends: with a token, for want of length, or with a stop string, a token of which may be seen in half."""
        model = self.served.model
        made = {"name": "look", "arguments": {"where": "here"}}
        call = {"id": "call_1", "type": "function", "function": made}
        shape: Message = (
            {"role": "assistant", "content": "", "tool_calls": [call]}
            if calls
            else {"role": "assistant", "content": "x"}
        )
        behind: Message = {"role": "tool", "content": "y", "tool_call_id": "call_1"} if calls else user("y")
        stop = model.stop(shape, [behind], tools)
        ids, options = model.encode(text), {"stop_token_ids": [stop], "max_tokens": 400}
        end = self.data.draw(st.sampled_from(["token", "token", "token", "length", "string"]), label="ends")
        if end == "length" and text.isascii():
            kept = self.data.draw(st.integers(1, len(ids)), label="tokens")
            return Reply([*ids, stop], model.spell(ids[:kept]), {**options, "max_tokens": kept})
        if end == "string" and not calls:
            return Reply([*model.encode(text + STOP + "y"), stop], text, {**options, "stop": [STOP]})
        return Reply([*ids, stop], text, options)

    def _write_down(self, messages: Messages, tools: Any, options: dict[str, Any], turn: Turn, text: str) -> None:
        assert turn.record is not None
        self.said[turn.generation] = Said(messages, tools, options, turn.record, turn.message, text)


def strangers_turn(number: int) -> Messages:
    """A turn that was not sampled in this session: as the thoughts of all turns, templates drop those of this one later on."""
    function = {"name": "look", "arguments": json.dumps({"where": f"there {number}"})}
    call = {"id": f"other_{number}", "type": "function", "function": function}
    said = {"role": "assistant", "content": "", "reasoning_content": "And elsewhere?", "tool_calls": [call]}
    return [said, {"role": "tool", "tool_call_id": call["id"], "content": f"something {number}"}]


def _sayable(text: str) -> bool:
    return "<" not in text
