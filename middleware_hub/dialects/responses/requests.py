"""Bodies of OpenAI's `POST /v1/responses`, which may also have SGLang's own fields.

A conversation is a list of *items* here. What the model says in one turn is several of them: its reasoning, a message, and
calls. They are one message inside.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from middleware_hub.chat.memo import AnsweredTurns, Memo
from middleware_hub.chat.messages import FUNCTION, ChatRequest, KeyedMessage, Message, ToolCall, ToolForm
from middleware_hub.dialects.fields import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    OBJECT,
    OBJECTS,
    STRING,
    STRINGS,
    Fields,
    Kind,
    check_depth,
    read_arguments,
    set_in,
    string,
    unsupported,
    wrong,
)
from middleware_hub.dialects.messages import assistant_message, rejoined, said, told, tool_call, without_billing
from middleware_hub.dialects.responses.tools import (
    CALLS,
    PREFIXES,
    RESULTS,
    as_texts,
    call_item,
    chosen,
    found_tools,
    offer_all,
    read_call,
    read_result,
)
from middleware_hub.dialects.sampling import LARGEST, add_format, finish, form_field, read_sampling
from middleware_hub.dialects.template_variables import read_variables
from middleware_hub.dialects.tools import OfferedTools, read_choice
from router.errors import BadRequestError, NotFoundError

_DROPPED = "stream_options prompt_cache_options client_metadata background_options access_programs".split()
"""Fields for OpenAI's own use."""
_HINTS = ("moderation", "context_management", "image")
"""Fields that have no effect here, which the reply says."""

_KEPT_ELSEWHERE = {
    "conversation": "conversations are not kept by name: send the whole conversation in `input`",
    "prompt": "prompts are not kept by name: send `instructions` and `input`",
    "background": "a response is made while its client waits: ask for a stream if that takes long",
}
"""Fields that need a server which keeps responses. Leaving them out would answer another question."""

_OTHER_NAMES = {
    "messages": "input",
    "contents": "input",
    "system": "instructions",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "stop_sequences": "stop",
}
"""Fields of other dialects, and their names here. A worker would take them for something else, or for nothing."""

_ITEM_ID = re.compile(rf"({'|'.join(('rs', 'msg', *PREFIXES.values()))})_(.+)_([0-9]{{1,9}})")
"""The ids of items as replies write them: the kind, the reply, and the number among the reply's items of this kind."""
_LOGPROBS = "message.output_text.logprobs"
_SYSTEM = ("system", "developer")

_INPUT: Kind[str | list[Any]] = Kind(str | list[Any], "a string, or a list of items")
_CHOICE: Kind[str | dict[str, Any]] = Kind(str | dict[str, Any], "a string, or an object that names a function")
_METADATA: Kind[dict[str, str]] = Kind(dict[str, str], "an object of strings")
_REPEATED: dict[str, Kind[Any]] = {
    "metadata": _METADATA,
    "store": BOOLEAN,
    "service_tier": STRING,
    "truncation": STRING,
    "max_tool_calls": INTEGER,
    "prompt_cache_key": STRING,
    "prompt_cache_retention": STRING,
    "safety_identifier": STRING,
    "user": STRING,
}
"""Fields for OpenAI's own use, which a response repeats. No conversation is ever cut, and no calls are counted."""


def parse(body: bytes, memo: Memo | None = None) -> ChatRequest:
    """Read a body. Raises BadRequestError with `param`, the wrong field.

    The memo is asked for turns only, and remembers no body: items have no message each. A body that names a response, or an
    item, that the memo does not know raises NotFoundError.
    """
    fields = Fields(body)
    for key in fields.present(_KEPT_ELSEWHERE):
        if fields.take(key, ANYTHING):
            raise unsupported(f"`{key}` is not supported: {_KEPT_ELSEWHERE[key]}", key)
    for key in fields.present(_OTHER_NAMES):
        raise BadRequestError(f"`{key}` is `{_OTHER_NAMES[key]}` in the Responses API", param=key)
    if (fields.take_within("n", 1, LARGEST) or 1) > 1:
        raise BadRequestError("a response is one sample: for `n` use /v1/chat/completions", param="n")
    include = fields.take("include", STRINGS) or ()
    wanted = {
        "include": _LOGPROBS in include,
        "top_logprobs": fields.take_within("top_logprobs", 0, LARGEST),
        "logprobs": fields.take("logprobs", BOOLEAN),
    }
    for key, value in wanted.items():
        if value:
            raise BadRequestError("logprobs have no place in this dialect: use /v1/chat/completions", param=key)
    offered = OfferedTools()
    echoed: dict[str, Any] = {key: fields.take(key, kind) for key, kind in _REPEATED.items()}
    if echoed["truncation"] not in (None, "auto", "disabled"):
        raise wrong("truncation", echoed["truncation"], '"auto" or "disabled"')
    echoed["tools"] = _tools(fields, offered) or None
    instructions = fields.take("instructions", STRING)
    previous = fields.take("previous_response_id", STRING)
    read = _Input(None if memo is None else memo.turns, offered)
    read.begin(previous, instructions)
    read.take(fields.need("input", _INPUT))
    messages = [message for turn in rejoined([[one] for one in read.messages]) for message in turn]
    continues = fields.take("continue_final_message", BOOLEAN) or False
    if continues and (messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]):
        raise BadRequestError(
            "`continue_final_message` needs a message of the assistant's at the end of `input`, without calls",
            param="continue_final_message",
        )
    sampling = read_sampling(fields)
    text = fields.take("text", OBJECT) or {}
    shaped = form_field(sampling)
    add_format(sampling, "text.format", text.get("format"))
    reasoning = fields.peek("reasoning", OBJECT)
    fields.drop(_DROPPED)
    ignored = (
        *fields.ignored(_HINTS),
        *set_in("text", text, verbosity=""),
        *set_in("reasoning", reasoning or {}, context="auto", mode="standard", summary="", generate_summary=""),
        *offered.ignored_fields,
    )
    choice = fields.take("tool_choice", _CHOICE)
    shaped = shaped or ("text.format" if form_field(sampling) else None)
    called, allowed = read_choice(choice, "tool_choice", offered, partial(chosen, offered), form=shaped)
    for key, shown in {"text": text, "reasoning": reasoning or {}, "tool_choice": choice}.items():
        if isinstance(shown, dict):  # a response repeats it
            check_depth(key, shown)
    echoed |= {
        "instructions": instructions,
        "previous_response_id": previous,
        "text": {**text, "format": _format(text.get("format"))} if text else None,
        "reasoning": reasoning,
        "tool_choice": choice,
        "include": include or None,
    }
    return ChatRequest(
        messages=messages,
        tools=offered.shown or None,
        deferred=tuple(offered.deferred),
        forms=offered.forms,
        ignored_tools=tuple(offered.ignored),
        ignored_fields=ignored,
        template=read_variables(fields),
        sampling=finish(sampling, fields.take_within("max_output_tokens", 1, LARGEST)),
        stream=fields.take("stream", BOOLEAN) or False,
        stream_usage=True,
        continue_final=continues,
        parallel_calls=fields.take("parallel_tool_calls", BOOLEAN) is not False,
        call_choice=called,
        allowed=allowed,
        reply=read.reply,
        echoed={key: value for key, value in echoed.items() if value is not None},
        model=fields.take("model", STRING) or "",
        extra=fields.rest(),
    )


def _format(given: Any) -> dict[str, Any]:
    """Return `text.format` as a response repeats it. `given` has been read."""
    if given is None:
        return {"type": "text"}
    if given["type"] != "json_schema":
        return dict(given)
    flat = {**given, **given["json_schema"]} if type(given.get("json_schema")) is dict else given
    named = {"name": "schema", "description": None, "strict": False, **flat}
    return {key: value for key, value in named.items() if key != "json_schema"}


class _Turn:
    """Collects the items of one turn of the model's, in the order in which they come."""

    def __init__(self, turns: AnsweredTurns | None, offered: OfferedTools) -> None:
        self._turns = turns
        self._offered = offered
        self.reply = ""
        self._sampled: Message | None = None
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._last = ""

    def takes(self, kind: str, item: dict[str, Any]) -> bool:
        """Return whether the next item belongs to the same turn: by the reply that its id names, if it has one of ours.

        Without ids, two messages in a row are two turns. All else goes on: something follows a turn's calls before the next.
        """
        reply = _reply_of(item)
        return reply == self.reply if reply and self.reply else (kind, self._last) != ("message", "message")

    def add(self, kind: str, place: str, item: dict[str, Any]) -> None:
        """Read an item. Raises BadRequestError."""
        self._last = kind
        self._name(_reply_of(item))
        if kind == "message":
            self._texts.append(said(f"{place}.content", as_texts(item.get("content"))))
        elif kind == "reasoning":
            self._reasoning.append(_reasoning(place, item) or self._thought())
        else:
            self._calls.append(self._call(place, item))

    def refer(self, place: str, named: re.Match[str]) -> None:
        """Take an item of a turn that was given here. Raises NotFoundError."""
        kind, reply, number = named[1], named[2], int(named[3])
        self._name(reply)
        message = self._sampled
        if message is None:
            raise _unknown(place, named[0])
        if kind == "rs":
            self._last, piece = "reasoning", message.get("reasoning_content")
            found = bool(piece)
            self._reasoning = [piece] if piece else []
        elif kind == "msg":
            # The texts of a turn are one message inside, whatever stood between them.
            self._last, found = "message", True
            self._texts = [content_text(message)]
        else:
            self._last, calls = "function_call", message.get("tool_calls") or ()
            found = number < len(calls)
            self._calls += [_as_read(call) for call in calls[number : number + 1]]
        if not found:
            raise _unknown(place, named[0])

    def message(self) -> Message:
        """Return the turn: as it was sampled, if all of it is here."""
        reasoning = "".join(self._reasoning)
        message = assistant_message("".join(self._texts), reasoning, self._calls)
        sampled = self._sampled
        if sampled is not None and _same(sampled, message) and reasoning in ("", sampled.get("reasoning_content")):
            return sampled
        return message

    def _name(self, reply: str) -> None:
        if reply and reply != self.reply:
            self.reply = reply
            self._sampled = None if self._turns is None else self._turns.answered(reply)

    def _thought(self) -> str:
        """Return the reasoning of the turn, which a client without its text sends back encrypted."""
        if self._sampled is None or any(self._reasoning):
            return ""
        return self._sampled.get("reasoning_content") or ""

    def _call(self, place: str, item: dict[str, Any]) -> dict[str, Any]:
        """Return a call: with the arguments as they were sampled, if it is one of the turn's, unchanged."""
        name, arguments = read_call(place, item)
        name = self._offered.named(name)
        call_id = string(f"{place}.call_id", item.get("call_id"))
        for sampled in (self._sampled or {}).get("tool_calls") or ():
            if sampled.get("id") != call_id or sampled["function"]["name"] != name:
                continue
            shown = ToolCall(call_id, name, sampled["function"]["arguments"])
            if read_call(
                place, call_item(shown, self._offered.forms.get(name) or ToolForm(CALLS[item["type"]], name))
            ) == (name, arguments):
                return _as_read(sampled)
        return tool_call(call_id, name, arguments)


def content_text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _as_read(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with the arguments as templates take them."""
    function = call["function"]
    arguments = function["arguments"]
    read = read_arguments("arguments", arguments)
    return {**call, "function": {**function, "arguments": read}}


def _same(sampled: Message, message: Message) -> bool:
    """Return whether two messages of the model's say the same, apart from reasoning."""
    calls = [_as_read(call) for call in sampled.get("tool_calls") or ()]
    return content_text(sampled) == content_text(message) and calls == message.get("tool_calls", [])


def _reply_of(item: dict[str, Any]) -> str:
    """Return the id of the reply that an item is of; empty if its id is not one that this router gave it."""
    found = _ITEM_ID.fullmatch(item["id"]) if isinstance(item.get("id"), str) else None
    return found[2] if found else ""


class _Input:
    """Reads the items of `input` into messages.

    Attributes:
        messages: all messages that have been read.
        reply: the id of the sample that the last turn of the assistant is, where that is known; else empty.
    """

    def __init__(self, turns: AnsweredTurns | None, offered: OfferedTools) -> None:
        self._turns = turns
        self._offered = offered
        self._turn: _Turn | None = None
        self._call_ids: dict[str, str] = {}
        self.messages: list[Message] = []
        self.reply = ""

    def begin(self, previous: str | None, instructions: str | None) -> None:
        """Begin with the conversation that the named response ended, and with the instructions. Raises NotFoundError.

        Instructions replace those before: as from OpenAI, a response does not inherit them. Without any, they stay.
        """
        if previous:
            before = None if self._turns is None else self._turns.conversation(previous)
            if before is None:
                raise _unknown("previous_response_id", previous, "previous_response_not_found")
            self.messages = [_rendered(message) for message in before]
            self.reply = previous
        if instructions and (instructions := without_billing(instructions)):
            system: Message = {"role": "system", "content": instructions}
            first = self.messages[0] if self.messages else {}
            if first.get("role") != "system":
                self.messages.insert(0, system)
            elif first.get("content") != instructions:
                self.messages[0] = system

    def take(self, given: str | list[Any]) -> None:
        """Read the items. Raises BadRequestError, NotFoundError."""
        if isinstance(given, str):
            self.messages.append({"role": "user", "content": told("input", given)})
            return
        if not given and not self.reply:
            raise BadRequestError("`input` is empty: give a text, or at least one item", param="input")
        for at, item in enumerate(given):
            self._item(f"input[{at}]", item)
        self._end_turn()

    def _item(self, place: str, item: Any) -> None:
        if type(item) is not dict:
            raise wrong(place, item, "an object")
        kind = _kind(place, item)
        if kind == "item_reference":
            name = string(f"{place}.id", item.get("id"))
            named = _ITEM_ID.fullmatch(name)
            if named is None:
                raise _unknown(f"{place}.id", name)
            self._turn_for("reference", item).refer(f"{place}.id", named)
        elif kind == "reasoning" or kind in CALLS or (kind == "message" and item.get("role") == "assistant"):
            if kind in CALLS and isinstance(item.get("id"), str):
                self._call_ids[item["id"]] = item.get("call_id") or item["id"]
            self._turn_for(kind, item).add(kind, place, item)
        else:
            self._end_turn()
            if kind in RESULTS:
                self.messages.append(self._result(place, item))
            elif kind == "additional_tools":
                self._more_tools(f"{place}.tools", item.get("tools"))
            else:
                self.messages.append(_told(place, item))

    def _more_tools(self, place: str, tools: Any) -> None:
        """Read tools that stand among the items: at the beginning the prompt shows them, later a system message does."""
        if all(message["role"] == "system" for message in self.messages):
            offer_all(self._offered, place, tools)
        else:
            self.messages.append({"role": "system", "content": found_tools(place, tools, self._offered)})

    def _turn_for(self, kind: str, item: dict[str, Any]) -> _Turn:
        if self._turn is None or not self._turn.takes(kind, item):
            self._end_turn()
            self._turn = _Turn(self._turns, self._offered)
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None:
            self.messages.append(_rendered(self._turn.message()))
            self.reply = self._turn.reply
            self._turn = None

    def _result(self, place: str, item: dict[str, Any]) -> Message:
        call_id = item.get("call_id")
        if call_id is None and item["type"] == "local_shell_call_output":  # its type has the id of the call's item only
            own = string(f"{place}.id", item.get("id"))
            named = _ITEM_ID.fullmatch(own)
            turn = None if named is None or self._turns is None else self._turns.answered(named[2])
            calls = (turn or {}).get("tool_calls") or ()
            number = 0 if named is None else int(named[3])
            call_id = self._call_ids.get(own) or (calls[number].get("id") if number < len(calls) else own)
        content = read_result(place, item, self._offered)
        return {"role": "tool", "content": content, "tool_call_id": string(f"{place}.call_id", call_id)}


def _rendered(message: Message) -> Message:
    """Return a message with the arguments of its calls as templates take them. It keeps its key."""
    if not message.get("tool_calls") or not isinstance(message, KeyedMessage):
        return message
    return KeyedMessage({**message, "tool_calls": [_as_read(call) for call in message["tool_calls"]]}, message.key)


def _unknown(place: str, name: str, code: str | None = None) -> NotFoundError:
    message = f"`{place}` names {name[:200]!r}, which this session has not given: send the items themselves"
    return NotFoundError(message, param=place, code=code)


def _kind(place: str, item: dict[str, Any]) -> str:
    """Return the type of an item. Raises BadRequestError for those that this server cannot read."""
    kind = item.get("type", "message" if "role" in item else "item_reference" if [*item] == ["id"] else None)
    if not isinstance(kind, str):
        raise wrong(f"{place}.type", kind, "a string")
    if kind not in _READ and kind not in CALLS and kind not in RESULTS:
        message = f'`{place}` is of the type "{kind[:40]}": this model takes messages, reasoning, and calls of tools'
        raise unsupported(message, f"{place}.type")
    return kind


_READ = ("message", "reasoning", "item_reference", "additional_tools")


def _told(place: str, item: dict[str, Any]) -> Message:
    """Return a message that the model did not say."""
    role, content = item.get("role"), told(f"{place}.content", as_texts(item.get("content")))
    if role in _SYSTEM:
        return {"role": "system", "content": content or ""}
    if role != "user":
        raise wrong(f"{place}.role", role, '"system", "developer", "user" or "assistant"')
    if content is None:
        raise BadRequestError(f"`{place}.content` is missing: it must be a string", param=f"{place}.content")
    return {"role": "user", "content": content}


def _reasoning(place: str, item: dict[str, Any]) -> str:
    """Return the text of reasoning. A client that keeps only a summary, or only what OpenAI encrypted, has none."""
    parts = item.get("content") or ()
    if not isinstance(parts, list | tuple) or not all(type(part) is dict for part in parts):
        raise wrong(f"{place}.content", parts, "a list of parts of text")
    return "".join(string(f"{place}.content[{at}].text", part.get("text")) for at, part in enumerate(parts))


def _tools(fields: Fields, offered: OfferedTools) -> list[dict[str, Any]]:
    """Read the tools into `offered`, and return them as a response repeats them. Raises BadRequestError."""
    tools = fields.take("tools", OBJECTS) or []
    offer_all(offered, "tools", tools)
    filled = {"description": None, "parameters": None, "strict": False}
    return [
        {"type": FUNCTION, **filled, **tool, "strict": tool.get("strict") is True}
        if tool.get("type", FUNCTION) == FUNCTION
        else tool
        for tool in tools
    ]
