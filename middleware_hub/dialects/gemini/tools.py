"""Functions as Gemini declares them, and the choice among them.

A declaration has a JSON schema (`parametersJsonSchema`), or Google's own form of one (`parameters`): types in capitals,
`nullable` in place of the type `null`, and integers in strings (https://ai.google.dev/api/caching#Schema).
"""

from __future__ import annotations

from typing import Any

from middleware_hub.dialects.fields import check_depth, string, wrong
from middleware_hub.dialects.gemini.spelling import camel, listed, spelled
from middleware_hub.dialects.tools import (
    ANY,
    AUTO,
    NONE,
    OfferedTools,
    check_forced,
    check_name,
    checked_choice,
    function,
)
from router.errors import BadRequestError

_CHOICE = "toolConfig.functionCallingConfig"
_MODES = {"AUTO": AUTO, "MODE_UNSPECIFIED": AUTO, "ANY": ANY, "NONE": NONE, "VALIDATED": AUTO}
"""`VALIDATED` lets the model choose between a text and a call."""
_INTEGERS = frozenset("maxItems minItems minProperties maxProperties minLength maxLength".split())
_MOST_DIGITS = 19
"""Digits of an int64, which Google's integers in strings are. Python converts only a few thousand."""
_OWN = frozenset("propertyOrdering example".split())
"""What only Google's schemas have: the order of properties is that in which they are written."""


def offered_tools(place: str, tools: Any) -> OfferedTools:
    """Return the tools of a request; those that Google's servers run are left out, and named. Raises BadRequestError."""
    offered = OfferedTools()
    tools = listed(tools) or []
    if type(tools) is not list:
        raise wrong(place, tools, "a list of objects")
    for at, tool in enumerate(tools):
        if type(tool) is not dict:
            raise wrong(f"{place}[{at}]", tool, "an object")
        check_depth(f"{place}[{at}]", tool)
        for kind, given in spelled(tool).items():
            if kind != "functionDeclarations":
                offered.ignore(f"{place}[{at}]", kind)
                continue
            declared = listed(given)
            if type(declared) is not list:
                raise wrong(f"{place}[{at}].{kind}", given, "a list of objects")
            for number, one in enumerate(declared):
                _offer(offered, f"{place}[{at}].{kind}[{number}]", one)
    return offered


def _offer(offered: OfferedTools, place: str, declared: Any) -> None:
    if type(declared) is not dict:
        raise wrong(place, declared, "an object with the `name` and `parameters` of the function")
    given = spelled(declared)
    name, description = check_name(f"{place}.name", given.get("name")), given.get("description")
    if description is not None:
        string(f"{place}.description", description)
    schema = given.get("parametersJsonSchema")
    if schema is None and given.get("parameters") is not None:
        schema = json_schema(f"{place}.parameters", given["parameters"])
    elif schema is not None and type(schema) is not dict:
        raise wrong(f"{place}.parametersJsonSchema", schema, "a JSON schema, an object")
    offered.pass_over(given, "response", "responseJsonSchema")
    offered.add(place, function(name, description, schema))


def json_schema(place: str, schema: Any) -> dict[str, Any]:
    """Return the JSON schema that a schema of Google's means. `check_depth` has let it in. Raises BadRequestError."""
    if type(schema) is not dict:
        raise wrong(place, schema, "a schema, an object")
    found: dict[str, Any] = {}
    nullable = schema.get("nullable") is True
    for key, value in schema.items():
        key = key if key.startswith("$") else camel(key)
        if value is None or key in _OWN or key == "nullable":
            continue
        if key == "type" and type(value) is str:
            if value == "TYPE_UNSPECIFIED":
                continue
            value = value.lower()
            value = [value, "null"] if nullable else value
        elif key == "properties" and type(value) is dict:
            value = {name: json_schema(f"{place}.properties.{name}", one) for name, one in value.items()}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and type(value) is list:
            value = [json_schema(f"{place}.{key}[{at}]", one) for at, one in enumerate(value)]
        elif key in ("items", "additionalProperties") and type(value) is dict:
            value = json_schema(f"{place}.{key}", value)
        elif key in ("$defs", "defs", "definitions") and type(value) is dict:
            value = {name: json_schema(f"{place}.{key}.{name}", one) for name, one in value.items()}
        elif key in _INTEGERS and type(value) is str and value.isascii() and value.isdigit():
            if len(value) > _MOST_DIGITS:
                raise wrong(f"{place}.{key}", value, f"an integer of at most {_MOST_DIGITS} digits")
            value = int(value)
        elif key == "enum" and nullable and type(value) is list and None not in value:
            value = [*value, None]
        elif key == "format" and value == "enum":
            continue
        found[key] = value
    if nullable and "type" not in found and type(found.get("anyOf")) is list:
        found["anyOf"] = [*found["anyOf"], {"type": "null"}]
    return found


def read_choice(config: Any, offered: OfferedTools, form: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the choice, and the names of the functions that may be called; none if all may.

    Args:
        config: `toolConfig`; None without one.
        form: the field that sets the form of the reply; None if there is none.

    Raises:
        BadRequestError: the choice does not fit the functions, or the form of the reply.
    """
    outer = spelled(config) if type(config) is dict else {}
    if config is not None and type(config) is not dict:
        raise wrong("toolConfig", config, "an object")
    inner = outer.get("functionCallingConfig")
    if inner is None:
        return checked_choice(AUTO, offered), ()
    if type(inner) is not dict:
        raise wrong(_CHOICE, inner, "an object")
    given = spelled(inner)
    mode = given.get("mode", "AUTO")
    if type(mode) is not str or mode.upper() not in _MODES:
        raise wrong(f"{_CHOICE}.mode", mode, '"AUTO", "ANY", "NONE" or "VALIDATED"')
    choice = _MODES[mode.upper()]
    if choice == ANY and not offered.all:
        raise BadRequestError(
            f"`{_CHOICE}.mode` asks for a call, and there are no `functionDeclarations`", param=f"{_CHOICE}.mode"
        )
    choice = checked_choice(choice, offered)
    names = given.get("allowedFunctionNames") or []
    place = f"{_CHOICE}.allowedFunctionNames"
    if type(names) is not list or not all(type(name) is str for name in names):
        raise wrong(place, names, "a list of strings")
    known = [tool["function"]["name"] for tool in offered.all]
    for name in names:
        if name not in known:
            raise BadRequestError(f"`{place}` names {name!r}, which is not among the functions", param=place)
    allowed = () if choice == NONE else tuple(name for name in known if name in names)
    allowed = allowed if len(allowed) < len(known) else ()
    check_forced(choice, allowed, _CHOICE, given, form=form)
    return choice, allowed
