"""Bodies of Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`, which may also have SGLang's own fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from middleware_hub.chat.memo import Memo
from middleware_hub.chat.messages import ChatRequest, Message, Tool
from middleware_hub.dialects.fields import (
    BOOLEAN,
    OBJECT,
    OBJECTS,
    STRING,
    STRINGS,
    Fields,
    Kind,
    unsupported,
    wrong,
)
from middleware_hub.dialects.messages import (
    ANY,
    AUTO,
    NONE,
    OpenedBody,
    assistant_message,
    checked_choice,
    checked_tool,
    each_message,
    open_body,
    part_text,
    read_arguments,
    string,
    told,
    tool_call,
    whole_request,
    without_billing,
    written,
)
from middleware_hub.dialects.sampling import LARGEST, add_stops, finish, read_sampling, schema_text
from middleware_hub.dialects.template_variables import read_variables
from router.errors import BadRequestError

_BOOKKEEPING = "metadata service_tier betas cache_control container context_management inference_geo speed".split()
"""Fields for Anthropic's own use, and hints that may be ignored."""

_ELSEWHERE = {"n": 1, "logprobs": False, "top_logprobs": 0}
"""Fields whose results have no place in a message of this dialect, and the values they may have."""

_CHOICES = {"auto": AUTO, "any": ANY, "none": NONE}

_FLAG: Kind[bool | int] = Kind(bool | int, "left out")
_SYSTEM: Kind[str | list[Any]] = Kind(str | list[Any], "a string, or a list of blocks of text")


def parse(body: bytes, memo: Memo | None = None) -> ChatRequest:
    """Read a body. Raises BadRequestError with `param`, the wrong field."""
    opened = open_body(body, memo)
    if isinstance(opened.rest, ChatRequest):
        request, read = opened.rest, each_message(opened, _message)
    else:
        limit = opened.rest.take_within("max_tokens", 1, LARGEST)
        if limit is None:
            raise BadRequestError("`max_tokens` is missing: it must be an integer of at least 1", param="max_tokens")
        request, read = _read(opened.rest, opened, limit)
    last = read[-1][-1]
    if last["role"] == "assistant" and "tool_calls" in last:
        raise BadRequestError("`messages` ends with tool calls: their results have to follow", param="messages")
    return whole_request(body, opened, request, read, memo, continue_final=last["role"] == "assistant")


def parse_count(body: bytes) -> ChatRequest:
    """Read a body for which nothing is sampled: `max_tokens` may be missing. Raises BadRequestError."""
    opened = open_body(body, None)
    assert isinstance(opened.rest, Fields)
    request, read = _read(opened.rest, opened, opened.rest.take_within("max_tokens", 1, LARGEST))
    last = read[-1][-1]
    continues = last["role"] == "assistant" and "tool_calls" not in last
    return whole_request(body, opened, request, read, None, continue_final=continues)


def _read(fields: Fields, opened: OpenedBody, limit: int | None) -> tuple[ChatRequest, list[Sequence[Message]]]:
    """Read the fields, whose only message is the system prompt, and separately the listed messages."""
    system = _system(fields.take("system", _SYSTEM))
    front: list[Message] = [{"role": "system", "content": system}] if system else []
    read = each_message(opened, _message)
    tools = _tools(fields)
    sampling = read_sampling(fields)
    add_stops(sampling, "stop_sequences", fields.take("stop_sequences", STRINGS))
    template = read_variables(fields)
    _add_output(fields, template, sampling)
    choice, parallel = _choice(fields, tools)
    for key, only in _ELSEWHERE.items():
        if key in fields and fields.take(key, _FLAG) not in (None, only):
            raise BadRequestError(f"`{key}` has no place in this dialect: use /v1/chat/completions", param=key)
    if fields.take("mcp_servers", OBJECTS):
        raise unsupported("`mcp_servers` cannot be called from here: offer their tools in `tools`", "mcp_servers")
    fields.drop(_BOOKKEEPING)
    request = ChatRequest(
        messages=front,
        tools=tools,
        template=template,
        sampling=finish(sampling, limit),
        stream=fields.take("stream", BOOLEAN) or False,
        stream_usage=True,
        parallel_calls=parallel,
        call_choice=choice,
        model=fields.take("model", STRING) or "",
        extra=fields.rest(),
    )
    return request, read


def _message(place: str, wrote: dict[str, Any]) -> list[Message]:
    role, content = wrote.get("role"), wrote.get("content")
    if role == "user":
        return _user(place, content)
    if role == "assistant":
        return [_assistant(place, content)]
    if role == "system":
        return [{"role": "system", "content": told(f"{place}.content", content) or ""}]
    raise wrong(f"{place}.role", role, '"user" or "assistant"')


def _system(wrote: str | list[Any] | None) -> str | None:
    """Return the system prompt, with one line for each block, like SGLang."""
    if isinstance(wrote, str):
        return without_billing(wrote)
    if not wrote:
        return None
    texts = [without_billing(part_text(f"system[{at}]", block)) for at, block in enumerate(wrote)]
    return "\n".join(filter(None, texts))


def _user(place: str, content: Any) -> list[Message]:
    """Return a user's message, preceded by a separate message for each tool result in it."""
    place += ".content"
    if type(content) is str:
        return [{"role": "user", "content": told(place, content)}]
    if type(content) is not list or not content:
        raise wrong(place, content, "a string, or a list of at least one block")
    results: list[Message] = []
    rest: list[Any] = []
    for at, block in enumerate(content):
        if type(block) is dict and block.get("type") == "tool_result":
            results.append(_result(f"{place}[{at}]", block))
        else:
            # Checked in its own place, so that an error names it.
            part_text(f"{place}[{at}]", block)
            rest.append(block)
    said = told(place, rest)
    return results if results and not said else [*results, {"role": "user", "content": said or ""}]


def _result(place: str, block: dict[str, Any]) -> Message:
    message: Message = {"role": "tool", "content": written(f"{place}.content", block.get("content")) or ""}
    call_id = block.get("tool_use_id")
    if call_id is not None:
        message["tool_call_id"] = string(f"{place}.tool_use_id", call_id)
    if block.get("is_error") is True:
        message["is_error"] = True
    return message


def _assistant(place: str, content: Any) -> Message:
    place += ".content"
    if type(content) is str:
        return assistant_message(content)
    if type(content) is not list:
        raise wrong(place, content, "a string, or a list of blocks")
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(content):
        kind = block.get("type") if type(block) is dict else None
        if kind == "tool_use":
            calls.append(_call(f"{place}[{at}]", block))
        elif kind == "thinking":
            reasoning.append(string(f"{place}[{at}].thinking", block.get("thinking")))
        elif kind != "redacted_thinking":
            texts.append(part_text(f"{place}[{at}]", block))
    return assistant_message("".join(texts), "".join(reasoning), calls)


def _call(place: str, block: dict[str, Any]) -> dict[str, Any]:
    call_id, arguments = block.get("id"), read_arguments(f"{place}.input", block.get("input", ""))
    if call_id is not None:
        string(f"{place}.id", call_id)
    return tool_call(call_id, string(f"{place}.name", block.get("name")), arguments)


def _tools(fields: Fields) -> list[Tool] | None:
    listed: list[Tool] = []
    tools = fields.take("tools", OBJECTS) or []
    for at, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            message = (
                f"`tools[{at}]` is a tool that Anthropic's servers run: offer one of your own, with `input_schema`"
            )
            raise unsupported(message, f"tools[{at}].type")
        schema = tool.get("input_schema")
        if type(schema) is not dict:
            raise wrong(f"tools[{at}].input_schema", schema, "a JSON schema, an object")
        described = {} if tool.get("description") is None else {"description": tool["description"]}
        function = {"name": tool.get("name"), **described, "parameters": schema}
        listed.append(checked_tool(f"tools[{at}]", {"type": "function", "function": function}))
    return listed or None


def _choice(fields: Fields, tools: list[Tool] | None) -> tuple[str, bool]:
    """Return the tool choice, and whether several calls are allowed."""
    wanted = fields.take("tool_choice", OBJECT)
    if wanted is None:
        return checked_choice(AUTO, False, tools), True
    parallel = wanted.get("disable_parallel_tool_use") is not True
    kind = wanted.get("type")
    if kind == "tool":
        return checked_choice(string("tool_choice.name", wanted.get("name")), True, tools), parallel
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise wrong("tool_choice.type", kind, '"auto", "any", "tool" or "none"')
    return checked_choice(_CHOICES[kind], False, tools), parallel


def _add_output(fields: Fields, template: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Read `output_config`, with an effort for the template and a schema for the reply; `output_format` is its older form."""
    config = fields.take("output_config", OBJECT) or {}
    effort = config.get("effort")
    if effort is not None:
        template.setdefault("reasoning_effort", string("output_config.effort", effort))
    older = fields.take("output_format", OBJECT)
    wanted = config.get("format") or older
    if wanted is None:
        return
    if type(wanted) is not dict or wanted.get("type") != "json_schema":
        raise wrong("output_config.format", wanted, 'an object of the type "json_schema"')
    sampling["json_schema"] = schema_text("output_config.format.schema", wanted.get("schema"))
