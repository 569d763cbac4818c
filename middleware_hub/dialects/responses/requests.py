"""Bodies of OpenAI's `POST /v1/responses`, which may also have SGLang's own fields.

A conversation is a list of *items* here. What the model says in one turn is several of them: its reasoning, a message, and
calls. They are one message inside.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from middleware_hub.chat.memo import Memo
from middleware_hub.chat.messages import ChatRequest, Message, Tool
from middleware_hub.dialects.fields import (
    ANYTHING,
    BOOLEAN,
    OBJECT,
    OBJECTS,
    STRING,
    STRINGS,
    Fields,
    Kind,
    check_depth,
    unsupported,
    wrong,
)
from middleware_hub.dialects.messages import (
    ANY,
    AUTO,
    NONE,
    assistant_message,
    checked_choice,
    checked_tool,
    read_arguments,
    said,
    string,
    told,
    tool_call,
    without_billing,
    written,
)
from middleware_hub.dialects.sampling import LARGEST, add_format, finish, read_sampling
from middleware_hub.dialects.template_variables import read_variables
from router.errors import BadRequestError

_BOOKKEEPING = (
    "user metadata store service_tier prompt_cache_key prompt_cache_retention prompt_cache_options safety_identifier "
    "truncation max_tool_calls stream_options moderation context_management".split()
)
"""Fields for OpenAI's own use, and hints that may be ignored: nothing is stored, and no conversation is ever cut."""

_KEPT_ELSEWHERE = {
    "previous_response_id": "responses are not kept by name: send the whole conversation in `input`",
    "conversation": "conversations are not kept by name: send the whole conversation in `input`",
    "prompt": "prompts are not kept by name: send `instructions` and `input`",
    "background": "a response is made while its client waits: ask for a stream if that takes long",
}
"""Fields that need a server which keeps responses. Leaving them out would answer another question."""

_OTHER_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}
"""Fields of chat completions, and their names here. A worker would take them for something else, or for nothing."""

_ITEM_ID = re.compile(r"(?:rs|msg|fc)_(.+)_[0-9]+")
_LOGPROBS = "message.output_text.logprobs"
_PARTS = ("input_text", "output_text")
_SYSTEM = ("system", "developer")

_INPUT: Kind[str | list[Any]] = Kind(str | list[Any], "a string, or a list of items")
_CHOICE: Kind[str | dict[str, Any]] = Kind(str | dict[str, Any], "a string, or an object that names a function")


def parse(body: bytes, memo: Memo | None = None) -> ChatRequest:
    """Read a body. Raises BadRequestError with `param`, the wrong field. No memo is kept: items have no message each."""
    fields = Fields(body)
    for key in fields.present(_KEPT_ELSEWHERE):
        if fields.take(key, ANYTHING):
            raise unsupported(f"`{key}` is not supported: {_KEPT_ELSEWHERE[key]}", key)
    for key in fields.present(_OTHER_NAMES):
        raise BadRequestError(f"`{key}` is `{_OTHER_NAMES[key]}` in the Responses API", param=key)
    if (fields.take_within("n", 1, LARGEST) or 1) > 1:
        raise BadRequestError("a response is one sample: for `n` use /v1/chat/completions", param="n")
    wanted = {
        "include": _LOGPROBS in (fields.take("include", STRINGS) or ()),
        "top_logprobs": fields.take_within("top_logprobs", 0, LARGEST),
        "logprobs": fields.take("logprobs", BOOLEAN),
    }
    for key, value in wanted.items():
        if value:
            raise BadRequestError("logprobs have no place in this dialect: use /v1/chat/completions", param=key)
    instructions = without_billing(fields.take("instructions", STRING) or "")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    messages += _messages(fields.need("input", _INPUT))
    continues = fields.take("continue_final_message", BOOLEAN) or False
    if continues and (messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]):
        raise BadRequestError(
            "`continue_final_message` needs a message of the assistant's at the end of `input`, without calls",
            param="continue_final_message",
        )
    tools = _tools(fields)
    sampling = read_sampling(fields)
    add_format(sampling, "text.format", (fields.take("text", OBJECT) or {}).get("format"))
    fields.drop(_BOOKKEEPING)
    return ChatRequest(
        messages=messages,
        tools=tools,
        template=read_variables(fields),
        sampling=finish(sampling, fields.take_within("max_output_tokens", 1, LARGEST)),
        stream=fields.take("stream", BOOLEAN) or False,
        stream_usage=True,
        continue_final=continues,
        parallel_calls=fields.take("parallel_tool_calls", BOOLEAN) is not False,
        call_choice=_choice(fields, tools),
        model=fields.take("model", STRING) or "",
        extra=fields.rest(),
    )


class _Turn:
    """Collects the items of one turn of the model's, in the order in which they come."""

    def __init__(self) -> None:
        self._reply = ""
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._last = ""

    def takes(self, kind: str, item: dict[str, Any]) -> bool:
        """Return whether the next item belongs to the same turn: by the reply that its id names, if it has one of ours.

        Without ids, two messages in a row are two turns. All else goes on: something follows a turn's calls before the next.
        """
        reply = _reply_of(item)
        return reply == self._reply if reply and self._reply else (kind, self._last) != ("message", "message")

    def add(self, kind: str, place: str, item: dict[str, Any]) -> None:
        """Read an item. Raises BadRequestError."""
        self._last, self._reply = kind, _reply_of(item) or self._reply
        if kind == "message":
            self._texts.append(said(f"{place}.content", _as_texts(item.get("content"))))
        elif kind == "reasoning":
            self._reasoning.append(_reasoning(place, item))
        else:
            self._calls.append(_call(place, item))

    def message(self) -> Message:
        return assistant_message("".join(self._texts), "".join(self._reasoning), self._calls)


def _reply_of(item: dict[str, Any]) -> str:
    """Return the id of the reply that an item is of; empty if its id is not one that this router gave it."""
    found = _ITEM_ID.fullmatch(item["id"]) if isinstance(item.get("id"), str) else None
    return found[1] if found else ""


def _messages(given: str | list[Any]) -> list[Message]:
    """Return the messages of all items. Raises BadRequestError."""
    if isinstance(given, str):
        return [{"role": "user", "content": told("input", given)}]
    if not given:
        raise BadRequestError("`input` is empty: give a text, or at least one item", param="input")
    found: list[Message] = []
    turn: _Turn | None = None
    for at, item in enumerate(given):
        place = f"input[{at}]"
        if type(item) is not dict:
            raise wrong(place, item, "an object")
        kind = _kind(place, item)
        if kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant"):
            if turn is None or not turn.takes(kind, item):
                found += _ended(turn)
                turn = _Turn()
            turn.add(kind, place, item)
        else:
            found += _ended(turn)
            turn = None
            found.append(_result(place, item) if kind == "function_call_output" else _told(place, item))
    return [*found, *_ended(turn)]


def _ended(turn: _Turn | None) -> Sequence[Message]:
    return () if turn is None else (turn.message(),)


def _kind(place: str, item: dict[str, Any]) -> str:
    """Return the type of an item. Raises BadRequestError for those that this server cannot read."""
    kind = item.get("type", "message" if "role" in item else None)
    if not isinstance(kind, str):
        raise wrong(f"{place}.type", kind, "a string")
    if kind not in ("message", "reasoning", "function_call", "function_call_output"):
        message = (
            f'`{place}` is of the type "{kind[:40]}": this model takes messages, reasoning, and calls of functions'
        )
        raise unsupported(message, f"{place}.type")
    return kind


def _told(place: str, item: dict[str, Any]) -> Message:
    """Return a message that the model did not say."""
    role, content = item.get("role"), told(f"{place}.content", _as_texts(item.get("content")))
    if role in _SYSTEM:
        return {"role": "system", "content": content or ""}
    if role != "user":
        raise wrong(f"{place}.role", role, '"system", "developer", "user" or "assistant"')
    if content is None:
        raise BadRequestError(f"`{place}.content` is missing: it must be a string", param=f"{place}.content")
    return {"role": "user", "content": content}


def _result(place: str, item: dict[str, Any]) -> Message:
    message: Message = {"role": "tool", "content": written(f"{place}.output", _as_texts(item.get("output"))) or ""}
    return {**message, "tool_call_id": string(f"{place}.call_id", item.get("call_id"))}


def _as_texts(content: Any) -> Any:
    """Return content whose parts have the names of text that all dialects share."""
    if type(content) is not list:
        return content
    return [
        {"type": "text", "text": part.get("text")} if type(part) is dict and part.get("type") in _PARTS else part
        for part in content
    ]


def _reasoning(place: str, item: dict[str, Any]) -> str:
    """Return the text of reasoning. A client that keeps only a summary, or only what OpenAI encrypted, has none."""
    parts = item.get("content") or ()
    if not isinstance(parts, list | tuple) or not all(type(part) is dict for part in parts):
        raise wrong(f"{place}.content", parts, "a list of parts of text")
    return "".join(string(f"{place}.content[{at}].text", part.get("text")) for at, part in enumerate(parts))


def _call(place: str, item: dict[str, Any]) -> dict[str, Any]:
    arguments = read_arguments(f"{place}.arguments", item.get("arguments", ""))
    call_id, name = string(f"{place}.call_id", item.get("call_id")), string(f"{place}.name", item.get("name"))
    return tool_call(call_id, name, arguments)


def _tools(fields: Fields) -> list[Tool] | None:
    """Return the tools in the form of chats, without `strict`, which templates would show to the model."""
    listed: list[Tool] = []
    tools = fields.take("tools", OBJECTS) or []
    for at, tool in enumerate(tools):
        place = f"tools[{at}]"
        if tool.get("type", "function") != "function":
            message = f"`{place}` is a tool that OpenAI's servers run: offer a function of your own"
            raise unsupported(message, f"{place}.type")
        if "parameters" in tool and type(tool["parameters"]) is not dict and tool["parameters"] is not None:
            raise wrong(f"{place}.parameters", tool["parameters"], "a JSON schema, an object")
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise wrong(f"{place}.name", tool.get("name"), "the function's name")
        check_depth(place, tool)
        function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        listed.append(checked_tool(place, {"type": "function", "function": function}))
    return listed or None


def _choice(fields: Fields, tools: list[Tool] | None) -> str:
    wanted = fields.take("tool_choice", _CHOICE)
    if isinstance(wanted, dict):
        if wanted.get("type") != "function":
            raise wrong("tool_choice.type", wanted.get("type"), f'"function"; or choose "{NONE}", "{AUTO}" or "{ANY}"')
        return checked_choice(string("tool_choice.name", wanted.get("name")), True, tools)
    if wanted not in (None, NONE, AUTO, ANY):
        raise wrong("tool_choice", wanted, f'"{NONE}", "{AUTO}", "{ANY}", or an object that names a function')
    return checked_choice(wanted or AUTO, False, tools)
