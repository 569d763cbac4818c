"""Tools of all types, as functions that a prompt can show, and their calls on the way back.

Chat templates know functions only. A tool of another type that the client runs is shown as a function; its calls are answered
in the form of its own type (`ChatRequest.forms`). A tool that a provider's own servers run is left out, because nobody runs it
here, and its type is reported (`ChatRequest.ignored_tools`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from middleware_hub.chat.messages import FUNCTION, Tool, ToolForm
from middleware_hub.dialects.fields import check_depth, wrong
from router.engines.json import JSON_ERRORS, decode_any
from router.errors import BadRequestError

ANY = "required"
NONE = "none"
AUTO = "auto"

_ABOUT_CUSTOM = "Takes a text."
"""Some templates (gpt-oss) refuse a tool without a description."""

_SHOWN = 100
"""Characters of a client's value in a message."""

_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_encode = msgspec.json.encode


class OfferedTools:
    """Collects the tools of a request.

    Attributes:
        shown: the tools that the prompt shows.
        deferred: the tools that it does not show (`defer_loading`), and whose calls are read.
        forms: by their names in the prompt, the tools that the client writes in another form.
        ignored: the types of the tools that were left out.
        ignored_fields: the fields of tools that have no effect here.
    """

    def __init__(self) -> None:
        self.shown: list[Tool] = []
        self.deferred: list[Tool] = []
        self.forms: dict[str, ToolForm] = {}
        self.ignored: list[str] = []
        self.ignored_fields: list[str] = []
        self._plain: set[str] = set()

    def add(self, place: str, tool: Tool, form: ToolForm | None = None, *, deferred: bool = False) -> None:
        """Add a tool in OpenAI's form. Raises BadRequestError."""
        tool = checked_tool(place, tool)
        name: str = tool["function"]["name"]
        if (form is None and name in self.forms) or (form is not None and name in self._plain | self.forms.keys()):
            raise BadRequestError(f"`{place}` has the name {name!r}, which another tool has too", param=f"{place}.name")
        if form is None:
            self._plain.add(name)
        else:
            self.forms[name] = form
        (self.deferred if deferred else self.shown).append(tool)

    def add_custom(
        self,
        place: str,
        custom: dict[str, Any],
        grammar: dict[str, Any],
        name: str,
        *,
        form: ToolForm,
        deferred: bool = False,
    ) -> None:
        """Add a custom tool: a function whose only argument, `input`, is a text. Raises BadRequestError.

        Args:
            custom: the tool, with its `description`.
            grammar: the `definition` and `syntax` of the text; empty if it may be any text. It is shown and not enforced.
            name: its name in the prompt.
        """
        text: dict[str, Any] = {"type": "string"}
        if grammar:
            text["description"] = f"Text of this grammar ({grammar.get('syntax')}):\n{grammar.get('definition')}"
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        self.add(place, function(name, custom.get("description") or _ABOUT_CUSTOM, schema), form, deferred=deferred)

    def ignore(self, place: str, kind: str) -> None:
        """Leave out a tool that nobody runs here. Raises BadRequestError for a type that is no word: a header will have it."""
        if not _WORD.fullmatch(kind):
            raise wrong(f"{place}.type", kind, "a word")
        if kind not in self.ignored:
            self.ignored.append(kind)

    def pass_over(self, tool: Tool, *keys: str) -> None:
        """Note which of the keys a tool has that have no effect here; and `allowed_callers`, if it wants none but programs.

        No program that calls tools runs here, so the model itself is offered such a tool.
        """
        callers = tool.get("allowed_callers")
        passed = [key for key in keys if tool.get(key)]
        passed += ["allowed_callers"] if type(callers) is list and callers and "direct" not in callers else []
        self.ignored_fields += [name for key in passed if (name := f"tools.{key}") not in self.ignored_fields]

    @property
    def all(self) -> Sequence[Tool]:
        return [*self.shown, *self.deferred]

    def named(self, name: str) -> str:
        """Return the name in the prompt of a tool that a call names by its own name: clients drop namespaces."""
        own = [shown for shown, form in self.forms.items() if form.name == name]
        return own[0] if len(own) == 1 and name not in self._plain | self.forms.keys() else name

    def called(self, kind: str, name: str) -> str:
        """Return the name in the prompt of a tool that a choice names by its type and by its own name or that of the prompt.

        Raises BadRequestError.
        """
        for tool in self.all:
            shown = tool["function"]["name"]
            form = self.forms.get(shown, ToolForm(FUNCTION, shown))
            if form.kind == kind and name in (shown, form.name):
                return str(shown)
        if not self.all:
            raise BadRequestError("`tool_choice` asks for a call, and there are no `tools`", param="tool_choice")
        raise BadRequestError(f"`tool_choice` names {name!r}, which is not among the `tools`", param="tool_choice")


def checked_tool(place: str, tool: Tool) -> Tool:
    """Return a tool in OpenAI's form, kept as it was written. Raises BadRequestError."""
    if "type" not in tool:
        # First, the usual order: templates show tools as JSON, and another order makes other tokens.
        tool = {"type": "function", **tool}
    if tool["type"] != "function":
        raise wrong(f"{place}.type", tool["type"], '"function": no other tools can be called here')
    function = tool.get("function")
    if type(function) is not dict:
        raise wrong(f"{place}.function", function, "an object with the `name` and `parameters` of the function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise wrong(f"{place}.function.name", function.get("name"), "the function's name")
    if function.get("parameters") is not None and type(function["parameters"]) is not dict:
        raise wrong(f"{place}.function.parameters", function["parameters"], "a JSON schema, an object")
    check_depth(place, tool)
    return tool


def function(name: Any, description: Any, parameters: Any) -> Tool:
    """Return a function in OpenAI's form, without the fields that are None."""
    described = {"name": name, "description": description, "parameters": parameters}
    return {"type": FUNCTION, "function": {key: value for key, value in described.items() if value is not None}}


def definition(tool: Tool) -> str:
    """Return the definition of a tool as the text of a result, in the form in which most templates show tools."""
    return _encode(tool).decode()


def definitions(tools: Sequence[Tool]) -> dict[str, str]:
    """Return the definitions of tools, by name."""
    return {tool["function"]["name"]: definition(tool) for tool in tools}


def check_forced(choice: str, allowed: Sequence[str], place: str, written: Any, *, form: str | None) -> None:
    """Raise BadRequestError if calls need a grammar although the reply must have another form.

    Args:
        choice, allowed: as `ChatRequest.call_choice` and `ChatRequest.allowed`.
        place, written: the client's own choice, and its field.
        form: the field that sets the form of the reply; None if there is none.
    """
    if form is None or (choice in (AUTO, NONE) and not allowed):
        return
    shown = _encode(written).decode()[:_SHOWN]
    raise BadRequestError(
        f"`{place}` {shown} needs a grammar of calls, and `{form}` another form of the reply: leave out one of them",
        param=place,
    )


def checked_choice(choice: str, offered: OfferedTools) -> str:
    """Return `call_choice` for `auto`, `none` or `required`: without tools, nothing is a call. Raises BadRequestError."""
    if offered.all:
        return choice
    if choice == ANY:
        raise BadRequestError("`tool_choice` asks for a call, and there are no `tools`", param="tool_choice")
    return NONE


def read_choice(
    wanted: str | dict[str, Any] | None,
    place: str,
    offered: OfferedTools,
    named: Callable[[dict[str, Any], str], str],
    *,
    form: str | None,
    nested: bool = False,
) -> tuple[str, tuple[str, ...]]:
    """Return OpenAI's `tool_choice`, and the names in the prompt of the tools that are allowed; none if all are.

    Args:
        named: returns the name in the prompt of the tool that an object names, given its place.
        form: the field that sets the form of the reply; None if there is none.
        nested: whether a choice of the type `allowed_tools` has its fields in an object of that name.

    Raises:
        BadRequestError: the choice does not fit the tools, or the form of the reply.
    """
    allowed: tuple[str, ...] = ()
    if isinstance(wanted, dict) and wanted.get("type") == "allowed_tools":
        inner, inside = (wanted.get("allowed_tools"), f"{place}.allowed_tools") if nested else (wanted, place)
        choice, allowed = _allowed_tools(inner if type(inner) is dict else {}, inside, offered, named)
    elif isinstance(wanted, dict):
        choice = named(wanted, place)
    elif wanted not in (None, NONE, AUTO, ANY):
        raise wrong(place, wanted, f'"{NONE}", "{AUTO}", "{ANY}", or an object that names a function')
    else:
        choice = checked_choice(wanted or AUTO, offered)
    check_forced(choice, allowed, place, wanted, form=form)
    return choice, allowed


def _allowed_tools(
    wanted: dict[str, Any], place: str, offered: OfferedTools, named: Callable[[dict[str, Any], str], str]
) -> tuple[str, tuple[str, ...]]:
    mode, tools = wanted.get("mode"), wanted.get("tools")
    if mode not in (AUTO, ANY):
        raise wrong(f"{place}.mode", mode, f'"{AUTO}" or "{ANY}"')
    if not isinstance(tools, list) or not tools or not all(isinstance(one, dict) for one in tools):
        raise wrong(f"{place}.tools", tools, "a list of at least one tool")
    names = {named(one, f"{place}.tools[{at}]") for at, one in enumerate(tools)}
    kept = tuple(name for tool in offered.all if (name := tool["function"]["name"]) in names)
    return mode, kept if len(kept) < len(offered.all) else ()


def check_name(place: str, name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise wrong(place, name, "the tool's name")
    return name


def custom_input(arguments: str) -> str:
    """Return the text of a call of a custom tool. A call without one gives its arguments as they were sampled."""
    try:
        found = decode_any(arguments)
    except JSON_ERRORS:
        return arguments
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
