"""Tools as chat templates are shown them, and whether one has to be called."""

from __future__ import annotations

from collections.abc import Sequence

from middleware_hub.chat.messages import Tool
from middleware_hub.dialects.fields import check_depth, wrong
from router.errors import BadRequestError

ANY = "required"
NONE = "none"
AUTO = "auto"


def checked_tool(place: str, tool: Tool) -> Tool:
    """A tool in OpenAI's form, all of it kept as it was written. Raises BadRequestError."""
    if "type" not in tool:
        # In front, as everybody writes it: templates show tools as JSON, and another order is other tokens.
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


def checked_choice(choice: str, named: bool, tools: Sequence[Tool] | None) -> str:
    """`call_choice` of a request, as far as it fits its tools: without any, nothing is a call. Raises BadRequestError.

    Args:
        choice: `auto`, `none`, `required`, or a name.
        named: whether it is a name.
        tools: what can be chosen from.
    """
    if not tools:
        if named or choice == ANY:
            raise BadRequestError("`tool_choice` asks for a call, and there are no `tools`", param="tool_choice")
        return NONE
    if named and all(tool["function"]["name"] != choice for tool in tools):
        raise BadRequestError(f"`tool_choice` names {choice!r}, which is not among the `tools`", param="tool_choice")
    return choice
