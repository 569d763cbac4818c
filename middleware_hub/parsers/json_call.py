"""A call written as one JSON object: `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

import json
import re
from typing import Any

from middleware_hub.chat.messages import Call
from middleware_hub.parsers.json_text import FLAT_OBJECT, STRING, is_json, json_members
from middleware_hub.parsers.reader import WHITE, Malformed, Reader, Reading

ARGUMENTS = ("arguments", "parameters")
_BESIDES = ("type", "id")

_WHITE = r"[ \t\r\n]*+"
_USUAL = re.compile(
    rf'{_WHITE}"name"{_WHITE}:{_WHITE}({STRING}){_WHITE},{_WHITE}"({"|".join(ARGUMENTS)})"{_WHITE}:{_WHITE}({FLAT_OBJECT}){_WHITE}\}}'
)
"""Most calls, after their `{`, in one step: a name, and arguments that are a flat object."""


def json_call(reader: Reader, *, strict: bool, ids: re.Pattern[str] | None = None) -> Reading[Call]:
    """Return the call whose `{` has been read.

    `strict` is for formats in which nothing but this object marks a call: it must have an object of arguments and no unknown
    keys. Otherwise arguments may be missing, null, or an object in a string. `ids`: the call keeps an `id` of this form.
    """

    def allowed(key: str, first: str) -> bool:
        if key == "name":
            return first == '"'
        if key in ARGUMENTS:
            return first in ("{" if strict else '{"n')
        return not strict or key in _BESIDES

    usual = _USUAL.match(reader.text, reader.at)
    if usual is not None:
        reader.at = usual.end()
        members = {"name": usual[1], usual[2]: usual[3]}
    else:
        members = yield from json_members(reader, allowed)
    given = [members[key] for key in ARGUMENTS if key in members]
    if "name" not in members or len(given) > 1 or (strict and not given):
        raise Malformed
    name: str = json.loads(members["name"])
    if not name.strip():
        raise Malformed
    number: Any = json.loads(members["id"]) if ids is not None and "id" in members else ""
    known = isinstance(number, str) and ids is not None and ids.fullmatch(number)
    return Call(name, _arguments(given[0] if given else "null"), number if known else "")


def _arguments(value: str) -> str:
    if value.startswith('"'):
        inner: str = json.loads(value)
        value = inner.strip(WHITE) if is_json(inner) else ""
    if value == "null":
        return "{}"
    if not value.startswith("{"):
        raise Malformed
    return value
