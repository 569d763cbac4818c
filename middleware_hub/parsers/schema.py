"""Values that a format writes without their type, which the tool's JSON schema has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from middleware_hub.chat.messages import Tool
from middleware_hub.parsers.json_text import is_json
from middleware_hub.parsers.reader import WHITE

_MOST_PARTS = 100
_INTEGER = re.compile(r"-?[0-9]+(?:\.0+)?")
_BY_FIRST = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_BY_TYPE = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
# Templates that print a value as Python does teach a model to write it like that.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class Schemas:
    """The parameters of tools, by name. They come from a client: nothing in them need be well-formed."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._parameters: dict[str, object] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping):
                self._parameters[str(function.get("name"))] = function.get("parameters")

    def types(self, name: str, key: str) -> frozenset[str] | None:
        """Return the JSON types that this argument may have; None if any."""
        root = self._parameters.get(name)
        properties = _at(root, "properties")
        return _types(_at(properties, key), root, set()) or None

    def spell(self, name: str, key: str, value: str) -> str:
        """Return the JSON text of an argument's value, whose own text is `value`.

        A string stays as it is. JSON of another allowed type keeps its exact characters; so does JSON of a wrong type, for the
        client to complain about. If the schema says nothing, valid JSON is JSON.
        """
        types, stripped = self.types(name, key), value.strip(WHITE)
        if types == frozenset(("string",)):
            return spell_string(value)
        if types is None:
            return spell_untyped(value)
        stripped = _PYTHON.get(stripped, stripped)
        kind = _kind(stripped)
        if kind is not None and kind != "string" and _fits(kind, stripped, types):
            return stripped
        if "string" in types or kind is None:
            return spell_string(value)
        return stripped


def spell_untyped(value: str) -> str:
    """Return the JSON text of a value of unknown type: valid JSON is JSON, all else a string."""
    stripped = value.strip(WHITE)
    return stripped if is_json(stripped) else spell_string(value)


def spell_arguments(values: Mapping[str, str]) -> str:
    """Return the JSON text of an object whose values are JSON texts already."""
    return "{" + ", ".join(f"{spell_string(key)}: {value}" for key, value in values.items()) + "}"


def spell_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _kind(text: str) -> str | None:
    """Return the type of a JSON text; None if it is not JSON."""
    return _BY_FIRST.get(text[0], "number") if text and is_json(text) else None


def _fits(kind: str, text: str, types: frozenset[str]) -> bool:
    return kind in types or (kind == "number" and "integer" in types and bool(_INTEGER.fullmatch(text)))


def _at(value: object, key: str) -> object:
    return value.get(key) if isinstance(value, Mapping) else None


def _types(schema: object, root: object, seen: set[int]) -> frozenset[str] | None:
    """Return the types that a schema plainly allows; None if any.

    Each part is read once: alternatives that refer to each other add nothing the second time, and cost nothing.
    """
    if not isinstance(schema, Mapping) or len(seen) > _MOST_PARTS:
        return None
    if id(schema) in seen:
        return frozenset()
    seen.add(id(schema))
    found = _declared(schema, root, seen)
    return found | {"null"} if found is not None and schema.get("nullable") is True else found


def _declared(schema: Mapping[str, object], root: object, seen: set[int]) -> frozenset[str] | None:
    reference, declared = schema.get("$ref"), schema.get("type")
    if isinstance(reference, str):
        return _types(_resolve(reference, root), root, seen)
    if isinstance(declared, str):
        return frozenset((declared,))
    if isinstance(declared, list):
        return frozenset(map(str, declared))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_BY_TYPE.get(type(value), "object") for value in values)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(keyword), list):
            return _union(_types(branch, root, seen) for branch in branches)
    if isinstance(branches := schema.get("allOf"), list):
        known = (_types(branch, root, seen) for branch in branches)
        return next((types for types in known if types is not None), None)
    for keyword, kind in (("properties", "object"), ("items", "array")):
        if keyword in schema:
            return frozenset((kind,))
    return None


def _union(branches: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    found: frozenset[str] = frozenset()
    for types in branches:
        if types is None:
            return None
        found |= types
    return found


def _resolve(reference: str, root: object) -> object:
    """Return the target of `#/$defs/City` within the same schema; None if it is missing."""
    found = root if reference.startswith("#") else None
    for part in reference[1:].split("/")[1:]:
        found = _at(found, part.replace("~1", "/").replace("~0", "~"))
    return found
