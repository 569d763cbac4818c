"""One conversation in the three dialects of chats: as a client of each would write it, and the message that comes back."""

from __future__ import annotations

import json
from typing import Any

from tests.support.client import Answer
from tests.support.stack import events

Message = dict[str, Any]

PLACES = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}
"""Each dialect's name here, and its place below `/v1`."""


ENDS = ("response.completed", "response.incomplete")


def body(dialect: str, messages: list[Message], *, stream: bool = False, tools: Any = None) -> dict[str, Any]:
    """A request. Messages are in the form of chats; a `system` that comes first is where the dialect has it."""
    made: dict[str, Any] = {"model": "m", "stream": stream}
    if dialect == "chat":
        return {**made, "messages": messages, **({"tools": tools} if tools else {})}
    functions = [tool["function"] for tool in tools or ()]
    front = messages[0]["content"] if messages[0]["role"] == "system" else None
    rest = messages[1:] if front is not None else messages
    if dialect == "messages":
        made |= {"max_tokens": 400, "messages": [_anthropic(message) for message in rest]}
        shown = [
            {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
            for one in functions
        ]
        return {**made, **({"system": front} if front is not None else {}), **({"tools": shown} if shown else {})}
    made["input"] = [item for message in rest for item in _items(message)]
    shown = [{"type": "function", **one} for one in functions]
    return {**made, **({"instructions": front} if front is not None else {}), **({"tools": shown} if shown else {})}


def _anthropic(message: Message) -> Message:
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [result]}
    calls = [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": _read(call)}
        for call in message.get("tool_calls") or ()
    ]
    if not calls:
        return {"role": message["role"], "content": message["content"]}
    text = [{"type": "text", "text": message["content"]}] if message["content"] else []
    return {"role": "assistant", "content": [*text, *calls]}


def _read(call: Message) -> Any:
    """The arguments of a call as a client reads them; as it got them if it cannot."""
    try:
        return json.loads(call["function"]["arguments"])
    except json.JSONDecodeError:
        return call["function"]["arguments"]


def _items(message: Message) -> list[Message]:
    if message["role"] == "tool":
        found = {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
        return [found]
    role = "developer" if message["role"] == "system" else message["role"]
    said = [{"role": role, "content": message["content"]}] if message["content"] or role != "assistant" else []
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()
    ]
    return [*said, *calls]


def reply(dialect: str, answer: Answer, *, stream: bool = False) -> Message:
    """The message of the assistant's, in the form of chats, without its reasoning."""
    found = _streamed(dialect, answer) if stream else answer.json()
    if dialect == "chat":
        message = found["choices"][0]["message"]
        return {key: value for key, value in message.items() if value and key in ("role", "content", "tool_calls")} | {
            "content": message.get("content") or ""
        }
    blocks = found["content"] if dialect == "messages" else found["output"]
    texts: list[str] = []
    calls: list[Message] = []
    for one in blocks:
        if one["type"] == "text":
            texts.append(one["text"])
        elif one["type"] == "message":
            texts += [part["text"] for part in one["content"]]
        elif one["type"] == "tool_use":
            calls.append(_call(one["id"], one["name"], json.dumps(one["input"])))
        elif one["type"] == "function_call":
            calls.append(_call(one["call_id"], one["name"], one["arguments"]))
    return {"role": "assistant", "content": "".join(texts), **({"tool_calls": calls} if calls else {})}


def _call(name: str, function: str, arguments: str) -> Message:
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


def _streamed(dialect: str, answer: Answer) -> Any:
    """The reply of a stream in the form of one that came whole."""
    if dialect == "chat":
        message: Message = {"role": "assistant", "content": ""}
        for event in events(answer):
            for choice in event["choices"]:
                message["content"] += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls") or ():
                    message.setdefault("tool_calls", []).append({key: call[key] for key in ("id", "type", "function")})
        return {"choices": [{"message": message}]}
    told = [json.loads(line[6:]) for line in answer.content.decode().split("\n") if line.startswith("data: {")]
    if dialect == "responses":
        return next(one["response"] for one in told if one["type"] in ENDS)
    blocks: list[Message] = []
    inputs: dict[int, str] = {}
    for one in told:
        if one["type"] == "content_block_start":
            blocks.append(dict(one["content_block"]))
        elif one["type"] == "content_block_delta" and one["delta"]["type"] == "text_delta":
            blocks[one["index"]]["text"] += one["delta"]["text"]
        elif one["type"] == "content_block_delta" and one["delta"]["type"] == "input_json_delta":
            inputs[one["index"]] = inputs.get(one["index"], "") + one["delta"]["partial_json"]
    for at, text in inputs.items():
        blocks[at]["input"] = json.loads(text or "{}")
    return {"content": blocks}
