"""Bodies of Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`, which may also have SGLang's own fields."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from middleware_hub.chat.memo import Memo
from middleware_hub.chat.messages import CUSTOM, FUNCTION, ChatRequest, Message
from middleware_hub.dialects.fields import (
    BOOLEAN,
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
from middleware_hub.dialects.messages import (
    OpenedBody,
    assistant_message,
    each_message,
    open_body,
    part_text,
    told,
    tool_call,
    whole_request,
    without_billing,
    written,
)
from middleware_hub.dialects.sampling import LARGEST, add_stops, finish, form_field, read_sampling, schema_text
from middleware_hub.dialects.template_variables import read_variables
from middleware_hub.dialects.tools import (
    ANY,
    AUTO,
    NONE,
    OfferedTools,
    check_forced,
    check_name,
    checked_choice,
    definitions,
    function,
)
from middleware_hub.media.part import is_image
from router.errors import BadRequestError

# The tools that Anthropic defines and the client runs. A request gives their types only; models of others need their schemas.
# The types end in dates, by which Anthropic's own models know them: `bash_20250124`. The fields are those of
# https://docs.claude.com/en/docs/agents-and-tools/tool-use (bash tool, text editor tool, memory tool).


class ClientTool(NamedTuple):
    """A tool as a prompt shows it."""

    description: str
    parameters: dict[str, Any]


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "The first and the last line to view, from 1; -1 is the end of the file.",
}
_EDITS = {
    "path": _text("The path of a file or a directory."),
    "file_text": _text("For `create`: the content of the new file."),
    "old_str": _text("For `str_replace`: the text to replace, which must be there exactly once."),
    "new_str": _text("For `str_replace`: the text in its place."),
    "insert_line": {
        "type": "integer",
        "description": "For `insert`: the line behind which to insert; 0 is the beginning.",
    },
    "insert_text": _text("For `insert`: the text to insert."),
    "view_range": _RANGE,
}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


CLIENT_TOOLS = {
    "bash": ClientTool(
        "Runs a command in a shell that stays open between calls.",
        {
            "type": "object",
            "properties": {
                "command": _text("The command to run; required unless `restart` is true."),
                "restart": {"type": "boolean", "description": "Whether to start the shell again."},
            },
        },
    ),
    "text_editor": ClientTool(
        "Views, creates and edits files.",
        {
            "type": "object",
            "properties": {"command": _commands("view", "create", "str_replace", "insert", "undo_edit"), **_EDITS},
            "required": ["command", "path"],
        },
    ),
    "memory": ClientTool(
        "Views and edits the files of a memory that outlives the conversation.",
        {
            "type": "object",
            "properties": {
                "command": _commands("view", "create", "str_replace", "insert", "delete", "rename"),
                **_EDITS,
                "old_path": _text("For `rename`: the path before."),
                "new_path": _text("For `rename`: the path behind."),
            },
            "required": ["command"],
        },
    ),
}
"""By their types without the date."""

_BOOKKEEPING = (
    "metadata service_tier betas cache_control inference_geo speed billing_policy fallback_credit_token"
    " user_profile_id workspace_id".split()
)
"""Fields for Anthropic's own use, and for what a reply costs in time and money there."""
_HINTS = ("container", "context_management", "diagnostics", "fallbacks")
"""Fields that have no effect here, which the reply says."""
_CONVERSATION = "`messages` has the whole conversation"
_LIMIT = "the limit is `max_tokens`"
_OTHER_NAMES = {
    "instructions": "the system prompt is `system`",
    "input": _CONVERSATION,
    "prompt": _CONVERSATION,
    "contents": _CONVERSATION,
    "conversation": _CONVERSATION,
    "previous_response_id": _CONVERSATION,
    "max_completion_tokens": _LIMIT,
    "max_output_tokens": _LIMIT,
}
"""Fields of other dialects, which a worker would pass over."""
_NO_THREADS: Final = "thread_unsupported_request"
"""The word by which Anthropic's libraries (2.14 for Python) go on without a thread, with all messages in each request."""

_ELSEWHERE = {"n": 1, "logprobs": False, "top_logprobs": 0}
"""Fields whose results have no place in a message of this dialect, and the values they may have."""

_REFERENCE = b'"tool_reference"'
_CHANGES = (b'"tool_addition"', b'"tool_removal"')
"""Blocks of system messages: tools that are offered, or not any more, from there on."""
_ANTHROPICS_OWN = re.compile(r"[a-z_]+_[0-9]{8}|mcp_toolset")
"""The types of tools that Anthropic defines: a name and a date. It runs those that the client does not run."""
_OWN = ", ".join(f"{name}_DATE" for name in CLIENT_TOOLS)

_CHOICES = {"auto": AUTO, "any": ANY, "none": NONE}

_FLAG: Kind[bool | int] = Kind(bool | int, "left out")
_SYSTEM: Kind[str | list[Any]] = Kind(str | list[Any], "a string, or a list of blocks of text")


def parse(body: bytes, memo: Memo | None = None) -> ChatRequest:
    """Read a body. Raises BadRequestError with `param`, the wrong field."""
    # Remembered messages may have offered tools, and would not be read.
    opened = open_body(body, None if any(block in body for block in _CHANGES) else memo)
    if opened.recalled is not None and isinstance(opened.rest, Fields) and _REFERENCE in body:
        # Remembered messages hold the definitions of the tools that their request offered.
        opened = open_body(body, None)
    if isinstance(opened.rest, ChatRequest):
        known = definitions(opened.rest.callable_tools) if _REFERENCE in body else {}
        request, read = opened.rest, each_message(opened, partial(_message, known))
    else:
        limit = opened.rest.take_within("max_tokens", 1, LARGEST)
        if limit is None:
            raise BadRequestError("`max_tokens` is missing: it must be an integer of at least 1", param="max_tokens")
        request, read = _read(opened.rest, opened, limit)
    last = read[-1][-1]
    if last["role"] == "assistant" and "tool_calls" in last:
        raise BadRequestError("`messages` ends with tool calls: their results have to follow", param="messages")
    return whole_request(body, opened, request, read, memo=memo, continue_final=last["role"] == "assistant")


def parse_count(body: bytes) -> ChatRequest:
    """Read a body for which nothing is sampled: `max_tokens` may be missing. Raises BadRequestError."""
    opened = open_body(body, None)
    assert isinstance(opened.rest, Fields)
    request, read = _read(opened.rest, opened, opened.rest.take_within("max_tokens", 1, LARGEST))
    last = read[-1][-1]
    continues = last["role"] == "assistant" and "tool_calls" not in last
    return whole_request(body, opened, request, read, memo=None, continue_final=continues)


def _read(fields: Fields, opened: OpenedBody, limit: int | None) -> tuple[ChatRequest, list[Sequence[Message]]]:
    """Read the fields, whose only message is the system prompt, and separately the listed messages."""
    fields.refuse_others(_OTHER_NAMES, "Anthropic's API")
    system = _system(fields.take("system", _SYSTEM))
    front: list[Message] = [{"role": "system", "content": system}] if system else []
    offered = _tools(fields)
    read = each_message(opened, partial(_message, definitions(offered.all), offered=offered))
    sampling = read_sampling(fields)
    add_stops(sampling, "stop_sequences", fields.take("stop_sequences", STRINGS))
    template = read_variables(fields)
    shaped = form_field(sampling)
    budget = set_in("output_config", fields.peek("output_config", OBJECT) or {}, task_budget="")
    shaped = _add_output(fields, template, sampling) or shaped
    choice, parallel = _choice(fields, offered, shaped)
    for key, only in _ELSEWHERE.items():
        if key in fields and fields.take(key, _FLAG) not in (None, only):
            raise BadRequestError(f"`{key}` has no place in this dialect: use /v1/chat/completions", param=key)
    if fields.take("thread", OBJECT):
        raise BadRequestError(
            "`thread` is not supported: send all messages in each request, and the session goes on where they match. With "
            'Anthropic\'s own library: unsupported_request_behavior="continue_unthreaded"',
            param="thread",
            code=_NO_THREADS,
            details={"error_code": _NO_THREADS, "unsupported": ["thread"]},
        )
    if fields.take("compaction", OBJECT):
        raise unsupported("`compaction` is not done here: ask for a summary in a message of the user's", "compaction")
    if fields.take("mcp_servers", OBJECTS):
        raise unsupported("`mcp_servers` cannot be called from here: offer their tools in `tools`", "mcp_servers")
    fields.drop(_BOOKKEEPING)
    request = ChatRequest(
        messages=front,
        tools=offered.shown or None,
        deferred=tuple(offered.deferred),
        ignored_tools=tuple(offered.ignored),
        ignored_fields=(*fields.ignored(_HINTS), *budget, *offered.ignored_fields),
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


def _message(
    definitions: Mapping[str, str], place: str, wrote: dict[str, Any], offered: OfferedTools | None = None
) -> list[Message]:
    """Read one message.

    Args:
        definitions: the texts of tools, for results that refer to them.
        offered: gets the tools that messages offer; None if they offer none.
    """
    role, content = wrote.get("role"), wrote.get("content")
    if role == "user":
        return _user(definitions, place, content)
    if role == "assistant":
        return [_assistant(place, content)]
    if role == "system":
        if type(content) is list and offered is not None:
            content = [_change(f"{place}.content[{at}]", part, offered) for at, part in enumerate(content)]
        return [{"role": "system", "content": told(f"{place}.content", content) or ""}]
    raise wrong(f"{place}.role", role, '"user" or "assistant"')


def _change(place: str, block: Any, offered: OfferedTools) -> Any:
    """Return a block of a system message; one that changes the tools becomes a text. Raises BadRequestError."""
    kind = block.get("type") if type(block) is dict else None
    if kind not in ("tool_addition", "tool_removal"):
        return block
    tool = block.get("tool")
    if type(tool) is not dict:
        raise wrong(f"{place}.tool", tool, "an object")
    if kind == "tool_addition" and tool.get("type") == "tool_definition":
        added = OfferedTools()
        definition = tool.get("definition")
        if type(definition) is not dict:
            raise wrong(f"{place}.tool.definition", definition, "an object")
        _offer(added, f"{place}.tool.definition", {**definition, "defer_loading": True})
        known = definitions(offered.all)
        for one in added.deferred:
            if one["function"]["name"] not in known:
                offered.add(place, one, deferred=True)
        for own in added.ignored:
            offered.ignore(place, own)
        return {"type": "text", "text": "\n".join(definitions(added.deferred).values())}
    if tool.get("type") != "tool_reference":
        raise unsupported(
            f"`{place}.tool` is of another type than tool_definition and tool_reference", f"{place}.tool.type"
        )
    name, known = string(f"{place}.tool.name", tool.get("name")), definitions(offered.all)
    if name not in known:
        raise BadRequestError(f"`{place}` refers to {name!r}, which is not offered", param=f"{place}.tool.name")
    said = known[name] if kind == "tool_addition" else f"The tool {name} is not available any more."
    return {"type": "text", "text": said}


def _system(wrote: str | list[Any] | None) -> str | None:
    """Return the system prompt, with one line for each block, like SGLang."""
    if isinstance(wrote, str):
        return without_billing(wrote)
    if not wrote:
        return None
    texts = [without_billing(part_text(f"system[{at}]", block)) for at, block in enumerate(wrote)]
    return "\n".join(filter(None, texts))


def _user(definitions: Mapping[str, str], place: str, content: Any) -> list[Message]:
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
            results.append(_result(definitions, f"{place}[{at}]", block))
        else:
            # Checked in its own place, so that an error names it.
            if not is_image(block):
                part_text(f"{place}[{at}]", block)
            rest.append(block)
    said = told(place, rest)
    return results if results and not said else [*results, {"role": "user", "content": said or ""}]


def _result(definitions: Mapping[str, str], place: str, block: dict[str, Any]) -> Message:
    content = block.get("content")
    if type(content) is list:
        content = [_found(definitions, f"{place}.content[{at}]", part) for at, part in enumerate(content)]
    message: Message = {"role": "tool", "content": written(f"{place}.content", content) or ""}
    call_id = block.get("tool_use_id")
    if call_id is not None:
        message["tool_call_id"] = string(f"{place}.tool_use_id", call_id)
    if block.get("is_error") is True:
        message["is_error"] = True
    return message


def _found(definitions: Mapping[str, str], place: str, part: Any) -> Any:
    """Return a part of a result; a reference to a tool becomes the text of its definition. Raises BadRequestError."""
    if type(part) is not dict or part.get("type") != "tool_reference":
        return part
    name = string(f"{place}.tool_name", part.get("tool_name"))
    if name not in definitions:
        raise BadRequestError(
            f"`{place}` refers to {name!r}, which is not among the `tools`", param=f"{place}.tool_name"
        )
    return {"type": "text", "text": definitions[name]}


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


def _tools(fields: Fields) -> OfferedTools:
    offered = OfferedTools()
    tools = fields.take("tools", OBJECTS) or []
    for at, tool in enumerate(tools):
        _offer(offered, f"tools[{at}]", tool)
    return offered


def _offer(offered: OfferedTools, place: str, tool: dict[str, Any]) -> None:
    kind, schema, description = tool.get("type"), tool.get("input_schema"), tool.get("description")
    if kind is not None and kind != CUSTOM:
        if not isinstance(kind, str):
            raise wrong(f"{place}.type", kind, "a string")
        own = CLIENT_TOOLS.get(kind.rpartition("_")[0])
        if own is None and not _ANTHROPICS_OWN.fullmatch(kind):
            message = (
                f'`{place}` is of the type "{kind[:40]}": offer a tool with `input_schema`, or of the types {_OWN}'
            )
            raise unsupported(message, f"{place}.type")
        if own is None:
            offered.ignore(place, kind)
            return
        schema, description = own.parameters, description or own.description
    offered.pass_over(tool)
    if type(schema) is not dict:
        raise wrong(f"{place}.input_schema", schema, "a JSON schema, an object")
    examples = _examples(f"{place}.input_examples", tool.get("input_examples"))
    if examples:
        description = "\n\n".join(filter(None, (description, examples)))
    described = function(check_name(f"{place}.name", tool.get("name")), description, schema)
    offered.add(place, described, deferred=tool.get("defer_loading") is True)


def _examples(place: str, given: Any) -> str:
    """Return examples of a tool's input as a text, for which templates have no other place than the description."""
    if not given:
        return ""
    if type(given) is not list or not all(type(one) is dict for one in given):
        raise wrong(place, given, "a list of objects")
    check_depth(place, given)
    return "\n".join(("Examples of its input:", *(msgspec.json.encode(one).decode() for one in given)))


def _choice(fields: Fields, offered: OfferedTools, shaped: str | None) -> tuple[str, bool]:
    """Return the tool choice, and whether several calls are allowed. Raises BadRequestError.

    `shaped`: the field that sets the form of the reply; None if there is none.
    """
    wanted = fields.take("tool_choice", OBJECT)
    if wanted is None:
        return checked_choice(AUTO, offered), True
    kind = wanted.get("type")
    if kind == "tool":
        choice = offered.called(FUNCTION, string("tool_choice.name", wanted.get("name")))
    elif not isinstance(kind, str) or kind not in _CHOICES:
        raise wrong("tool_choice.type", kind, '"auto", "any", "tool" or "none"')
    else:
        choice = checked_choice(_CHOICES[kind], offered)
    check_forced(choice, (), "tool_choice", wanted, form=shaped)
    return choice, wanted.get("disable_parallel_tool_use") is not True


def _add_output(fields: Fields, template: dict[str, Any], sampling: dict[str, Any]) -> str | None:
    """Read `output_config`, with an effort for the template and a schema for the reply; `output_format` is its older form.

    Returns the field that has the schema; None if there is none.
    """
    config = fields.take("output_config", OBJECT) or {}
    effort = config.get("effort")
    if effort is not None:
        template.setdefault("reasoning_effort", string("output_config.effort", effort))
    older = fields.take("output_format", OBJECT)
    wanted = config.get("format") or older
    if wanted is None:
        return None
    if type(wanted) is not dict or wanted.get("type") != "json_schema":
        raise wrong("output_config.format", wanted, 'an object of the type "json_schema"')
    sampling["json_schema"] = schema_text("output_config.format.schema", wanted.get("schema"))
    return "output_config.format" if config.get("format") else "output_format"
