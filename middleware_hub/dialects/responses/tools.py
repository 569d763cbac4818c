"""The tools of OpenAI's Responses API: how the prompt shows each type, and the items of its calls and results.

    type          in the prompt                    a call is                 a result is
    function      the function                     function_call             function_call_output
    custom        a function of one text, `input`  custom_tool_call          custom_tool_call_output
    namespace     its tools, as NAMESPACE__NAME    of the tool's own type, with `namespace` and the tool's own `name`
    local_shell   a function, as shell             local_shell_call          local_shell_call_output
    and apply_patch; tool_search if the client executes it

An item `additional_tools` adds to them: Codex has all of its tools in one, in front of its messages.

All other types are run by OpenAI's servers, or show the model images: they are left out. The forms of items are those of
OpenAI's own library (openai.types.responses).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from middleware_hub.chat.messages import CUSTOM, FUNCTION, ToolCall, ToolForm
from middleware_hub.dialects.fields import check_depth, read_arguments, string, unsupported, wrong
from middleware_hub.dialects.messages import written
from middleware_hub.dialects.tools import OfferedTools, check_name, custom_input, definition, function
from router.errors import BadRequestError

NAMESPACE = "namespace"
SEARCH = "tool_search"
_SEPARATOR = "__"
_RUN_BY_OPENAI = frozenset(
    "file_search code_interpreter image_generation mcp programmatic_tool_calling computer computer_use_preview".split()
)
"""`computer` tools are run by the client, who answers with images: this model takes text only."""
_WEB_SEARCH = "web_search"
"""Its types are this, and this with `_preview` and dates."""
_DEFERRED = "defer_loading"

_encode = msgspec.json.encode
_TEXT = {"type": "string"}
_NUMBER = {"type": "integer"}
_TEXTS = {"type": "array", "items": _TEXT}


class _ClientTool(NamedTuple):
    """A tool of OpenAI's that the client runs: its function, and the field of its calls.

    Attributes:
        description, parameters: of the function.
        field: the field of a call's item in place of `arguments`.
        written: the value of this field for given arguments; it fits the type whatever the model sampled.
    """

    description: str
    parameters: dict[str, Any]
    field: str
    written: Callable[[dict[str, Any]], Any]

    def read(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, without absent ones, and without those that only the type demands."""
        return {
            key: one
            for key, one in value.items()
            if one is not None and not (key == "env" and not one) and not (key == "type" and one == "exec")
        }


def _listed(value: Any) -> list[str]:
    """Return a sampled value as the list of texts that it stands for."""
    if isinstance(value, list):
        return [one if isinstance(one, str) else _encode(one).decode() for one in value]
    return [] if value is None else [value if isinstance(value, str) else _encode(value).decode()]


def _only(arguments: dict[str, Any], kinds: dict[str, type]) -> dict[str, Any]:
    return {key: arguments[key] for key, kind in kinds.items() if type(arguments.get(key)) is kind}


def _exec(arguments: dict[str, Any]) -> dict[str, Any]:
    given = arguments.get("env")
    env = {key: value for key, value in given.items() if isinstance(value, str)} if isinstance(given, dict) else {}
    rest = _only(arguments, {"timeout_ms": int, "user": str, "working_directory": str})
    return {"type": "exec", "command": _listed(arguments.get("command")), "env": env, **rest}


def _commands(arguments: dict[str, Any]) -> dict[str, Any]:
    rest = _only(arguments, {"timeout_ms": int, "max_output_length": int})
    return {"commands": _listed(arguments.get("commands")), **rest}


def _operation(arguments: dict[str, Any]) -> dict[str, Any]:
    kind = arguments.get("type")
    kind = kind if kind in _OPERATIONS else "update_file"
    texts = ("path",) if kind == "delete_file" else ("path", "diff")
    return {"type": kind, **{key: "".join(_listed(arguments.get(key))) for key in texts}}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


_OPERATIONS = ("create_file", "update_file", "delete_file")
_CLIENT_TOOLS = {
    "local_shell": _ClientTool(
        "Runs a command on the user's machine, and returns its output.",
        _object(
            {
                "command": {**_TEXTS, "description": "The program and its arguments."},
                "env": {"type": "object", "additionalProperties": _TEXT, "description": "Environment variables."},
                "timeout_ms": _NUMBER,
                "user": _TEXT,
                "working_directory": _TEXT,
            },
            "command",
        ),
        "action",
        _exec,
    ),
    "shell": _ClientTool(
        "Runs shell commands on the user's machine, and returns their output.",
        _object({"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER}, "commands"),
        "action",
        _commands,
    ),
    "apply_patch": _ClientTool(
        "Creates, updates or deletes a file.",
        _object(
            {
                "type": {"type": "string", "enum": list(_OPERATIONS)},
                "path": _TEXT,
                "diff": {"type": "string", "description": "A unified diff; not for delete_file."},
            },
            "type",
            "path",
        ),
        "operation",
        _operation,
    ),
    SEARCH: _ClientTool("Searches for tools.", _object({"query": _TEXT}, "query"), "arguments", dict),
}

CALLS = {
    "function_call": FUNCTION,
    "custom_tool_call": CUSTOM,
    **{f"{kind}_call": kind for kind in _CLIENT_TOOLS},
}
"""The types of items that are calls, and the types of their tools."""
RESULTS = {
    "function_call_output": FUNCTION,
    "custom_tool_call_output": CUSTOM,
    **{f"{kind}_call_output": kind for kind in _CLIENT_TOOLS if kind != SEARCH},
    "tool_search_output": SEARCH,
}
"""The same for the types of results."""
_ITEMS = {kind: item for item, kind in CALLS.items()}
PREFIXES = {FUNCTION: "fc", CUSTOM: "ctc", "local_shell": "lsh", "shell": "sh", "apply_patch": "apc", SEARCH: "tsc"}
"""How the ids of the calls of each type begin."""


# What is offered --------------------------------------------------------------------------------------------------------


def offer_all(offered: OfferedTools, place: str, tools: Any, *, deferred: bool = False) -> None:
    """Add a list of tools to those that are offered. Raises BadRequestError.

    `deferred`: whether they are loaded by a search, and no prompt shows them.
    """
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise wrong(place, tools, "a list of objects")
    for at, tool in enumerate(tools):
        _offer(offered, f"{place}[{at}]", tool, deferred=deferred)


def _offer(offered: OfferedTools, place: str, tool: dict[str, Any], *, deferred: bool = False) -> None:
    kind = tool.get("type", FUNCTION)
    if not isinstance(kind, str):
        raise wrong(f"{place}.type", kind, "a string")
    check_depth(place, tool)
    if kind == NAMESPACE:
        _offer_namespace(offered, place, tool, deferred=deferred)
    elif kind in (FUNCTION, CUSTOM):
        _offer_named(offered, place, tool, "", deferred=deferred)
    elif kind in _RUN_BY_OPENAI or kind.startswith(_WEB_SEARCH) or not _runs_here(kind, tool):
        offered.ignore(place, kind)
    elif kind in _CLIENT_TOOLS:
        own = _CLIENT_TOOLS[kind]
        shown, parameters = tool.get("description") or own.description, tool.get("parameters") or own.parameters
        offered.add(place, function(kind, shown, parameters), ToolForm(kind, kind), deferred=deferred)
    else:
        known = ", ".join((FUNCTION, CUSTOM, NAMESPACE, *_CLIENT_TOOLS))
        message = f'`{place}` is of the type "{kind[:40]}": the types of tools that can be called here are {known}'
        raise unsupported(message, f"{place}.type")


def _runs_here(kind: str, tool: dict[str, Any]) -> bool:
    """Return whether a tool that can run in two places is run by the client."""
    if kind == SEARCH:
        return tool.get("execution") == "client"
    environment = tool.get("environment") if kind == "shell" else None
    return not isinstance(environment, dict) or environment.get("type") == "local"


def _offer_namespace(offered: OfferedTools, place: str, tool: dict[str, Any], *, deferred: bool) -> None:
    namespace, tools = check_name(f"{place}.name", tool.get("name")), tool.get("tools")
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise wrong(f"{place}.tools", tools, "a list of objects")
    about = tool.get("description")
    for at, one in enumerate(tools):
        if one.get("type", FUNCTION) not in (FUNCTION, CUSTOM):
            raise wrong(f"{place}.tools[{at}].type", one.get("type"), '"function" or "custom"')
        if at == 0 and about:  # templates have no place for a namespace: its first tool says what it is
            one = {**one, "description": "\n\n".join(filter(None, (str(about), one.get("description"))))}
        later = deferred or tool.get(_DEFERRED) is True
        _offer_named(offered, f"{place}.tools[{at}]", one, namespace, deferred=later)


def _offer_named(offered: OfferedTools, place: str, tool: dict[str, Any], namespace: str, *, deferred: bool) -> None:
    kind, name = tool.get("type", FUNCTION), check_name(f"{place}.name", tool.get("name"))
    deferred = deferred or tool.get(_DEFERRED) is True
    offered.pass_over(tool, "output_schema")
    shown = prompt_name(name, namespace)
    if kind == CUSTOM:
        given = tool.get("format")
        grammar = given if isinstance(given, dict) and given.get("type") == "grammar" else {}
        offered.add_custom(place, tool, grammar, shown, form=ToolForm(CUSTOM, name, namespace), deferred=deferred)
        return
    if tool.get("parameters") is not None and type(tool["parameters"]) is not dict:
        raise wrong(f"{place}.parameters", tool["parameters"], "a JSON schema, an object")
    form = ToolForm(FUNCTION, name, namespace) if namespace else None
    offered.add(place, function(shown, tool.get("description"), tool.get("parameters")), form, deferred=deferred)


def prompt_name(name: str, namespace: Any) -> str:
    """Return the name of a tool in the prompt."""
    return f"{namespace}{_SEPARATOR}{name}" if isinstance(namespace, str) and namespace else name


# Calls and results ------------------------------------------------------------------------------------------------------


def call_item(call: ToolCall, form: ToolForm | None) -> dict[str, Any]:
    """Return a call as an item, without `id` and `status`."""
    kind = FUNCTION if form is None else form.kind
    item: dict[str, Any] = {"type": _ITEMS[kind], "call_id": call.id}
    if kind in _CLIENT_TOOLS:
        tool, arguments = _CLIENT_TOOLS[kind], read_arguments("arguments", call.arguments)
        item[tool.field] = tool.written(arguments if isinstance(arguments, dict) else {})
        return {**item, "execution": "client"} if kind == SEARCH else item
    item["name"] = call.name if form is None else form.name
    if form is not None and form.namespace:
        item["namespace"] = form.namespace
    if kind == CUSTOM:
        return {**item, "input": custom_input(call.arguments)}
    return {**item, "arguments": call.arguments}


def read_call(place: str, item: dict[str, Any]) -> tuple[str, dict[str, Any] | str]:
    """Return the name in the prompt, and the arguments, of a call. Raises BadRequestError."""
    kind = CALLS[item["type"]]
    if kind in _CLIENT_TOOLS:
        tool = _CLIENT_TOOLS[kind]
        value = item.get(tool.field)
        if kind == SEARCH:
            return kind, read_arguments(f"{place}.arguments", value)
        if not isinstance(value, dict):
            raise wrong(f"{place}.{tool.field}", value, "an object")
        check_depth(f"{place}.{tool.field}", value)
        return kind, tool.read(value)
    name = prompt_name(string(f"{place}.name", item.get("name")), item.get("namespace"))
    if kind == CUSTOM:
        return name, {"input": string(f"{place}.input", item.get("input"))}
    return name, read_arguments(f"{place}.arguments", item.get("arguments", ""))


def read_result(place: str, item: dict[str, Any], offered: OfferedTools) -> Any:
    """Return the content of a result. The tools that a search has found are offered from then on. Raises BadRequestError."""
    kind, output = RESULTS[item["type"]], item.get("output")
    if kind == SEARCH:
        return found_tools(f"{place}.tools", item.get("tools"), offered)
    if kind == "shell" and isinstance(output, list):
        return _encode(output).decode()
    if kind == "apply_patch" and not output:
        return str(item.get("status") or "")
    return written(f"{place}.output", as_texts(output)) or ""


def found_tools(place: str, tools: Any, offered: OfferedTools) -> str:
    """Offer tools that are found in the middle of a conversation, and return their definitions. Raises BadRequestError."""
    found = OfferedTools()
    offer_all(found, place, tools, deferred=True)
    known = {tool["function"]["name"] for tool in offered.all}
    for tool in found.deferred:
        name = tool["function"]["name"]
        if name not in known:  # it may be one of `tools` that is deferred
            offered.add(place, tool, found.forms.get(name), deferred=True)
            known.add(name)
    return "\n".join(map(definition, found.deferred))


def as_texts(content: Any) -> Any:
    """Return content whose parts have the names of text that all dialects share."""
    if type(content) is not list:
        return content
    return [
        {"type": "text", "text": part.get("text")} if type(part) is dict and part.get("type") in _PARTS else part
        for part in content
    ]


_PARTS = ("input_text", "output_text")


# The choice among them --------------------------------------------------------------------------------------------------


def chosen(offered: OfferedTools, wanted: dict[str, Any], place: str) -> str:
    """Return the name in the prompt of the tool that an object names. Raises BadRequestError."""
    kind = wanted.get("type")
    if kind in (FUNCTION, CUSTOM):
        name = string(f"{place}.name", wanted.get("name"))
        return offered.called(kind, prompt_name(name, wanted.get("namespace")))
    if isinstance(kind, str) and kind in _CLIENT_TOOLS and kind not in offered.ignored:
        return offered.called(kind, kind)
    if isinstance(kind, str) and (kind in _RUN_BY_OPENAI or kind.startswith(_WEB_SEARCH) or kind in offered.ignored):
        raise BadRequestError(
            f'`{place}` asks for "{kind}", which OpenAI\'s servers run: choose a tool of your own',
            param=place,
            code="unsupported_tool_choice",
        )
    known = ", ".join(f'"{one}"' for one in (FUNCTION, CUSTOM, "allowed_tools", *_CLIENT_TOOLS))
    raise wrong(f"{place}.type", kind, f'one of {known}; or choose "none", "auto" or "required"')
