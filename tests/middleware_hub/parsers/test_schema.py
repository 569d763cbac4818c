"""Values without a type get the one that a tool's schema says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.parsers.schema import Schemas, spell_arguments
from tests.middleware_hub.parsers.formats import CHARACTERS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "string": {"type": "string"},
        "integer": {"type": "integer"},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "object": {"type": "object"},
        "list": {"items": {"type": "string"}},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "nullable": {"type": "string", "nullable": True},
        "either": {"type": ["integer", "string"]},
        "choice": {"enum": ["1", "2"]},
        "fixed": {"const": 1},
        "city": {"$ref": "#/$defs/City"},
        "loop": {"$ref": "#/$defs/Loop"},
        "all": {"allOf": [{"description": "x"}, {"$ref": "#/$defs/City"}]},
        "lost": {"$ref": "#/$defs/Nowhere"},
        "free": {},
    },
    "$defs": {"City": {"type": "string"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "string"}]}},
}
SCHEMAS = Schemas([{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("string", "5", "5"),
        ("string", "null", "null"),
        ("string", ' {"a": 1}\n', ' {"a": 1}\n'),
        ("integer", " 5 ", 5),
        ("integer", "5.0", 5.0),
        ("integer", "five", "five"),
        ("integer", "", ""),
        ("number", "1e3", 1000.0),
        ("number", "5", 5),
        ("flag", "true", True),
        ("flag", "False", False),
        ("flag", "1", 1),
        ("object", '{"a": [1]}', {"a": [1]}),
        ("object", "{'a': 1}", "{'a': 1}"),
        ("list", '["a"]', ["a"]),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "5", "5"),
        ("maybe", '"x"', '"x"'),
        ("nullable", "null", None),
        ("nullable", "x", "x"),
        ("either", "5", 5),
        ("either", "5.5", "5.5"),
        ("either", "x", "x"),
        ("choice", "1", "1"),
        ("fixed", "1", 1),
        ("city", "5", "5"),
        ("loop", "5", "5"),
        ("all", "5", "5"),
        ("lost", "5", 5),
        ("free", "5", 5),
        ("free", '"5"', "5"),
        ("free", "x y", "x y"),
        ("unknown", "[1]", [1]),
        ("unknown", "NaN", "NaN"),
    ],
)
def test_a_value_is_what_its_schema_says(key: str, value: str, expected: object) -> None:
    found = json.loads(SCHEMAS.spell("f", key, value))
    assert (found, type(found)) == (expected, type(expected))


def test_numbers_keep_their_characters() -> None:
    assert SCHEMAS.spell("f", "number", "\n1.50e+3\n") == "1.50e+3"
    assert SCHEMAS.spell("f", "integer", "9" * 40) == "9" * 40


@given(st.sampled_from([*SCHEMA["properties"], "unknown"]), CHARACTERS | st.text())
def test_whatever_stands_there_becomes_json(key: str, value: str) -> None:
    text = spell_arguments({key: SCHEMAS.spell("f", key, value), "é": "1"})
    found = json.loads(text)
    assert list(found) == [key, "é"]
    if key == "string":
        assert found[key] == value


@pytest.mark.parametrize(
    "tool",
    [
        {},
        {"function": None},
        {"function": {"name": "f"}},
        {"function": {"name": "f", "parameters": []}},
        {"function": {"name": "f", "parameters": {"properties": 5}}},
        {"function": {"name": "f", "parameters": {"properties": {"a": True}}}},
        {"function": {"name": "f", "parameters": {"properties": {"a": {"type": [], "$ref": 1}}}}},
        {"function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "elsewhere.json"}}}}},
    ],
)
def test_a_schema_need_not_be_well_formed(tool: dict[str, Any]) -> None:
    assert Schemas([tool]).spell("f", "a", "5") == "5"


def test_alternatives_that_multiply_are_looked_at_once() -> None:
    """Each level refers to the next one ten times: followed one by one that were 10 ** 30 ways."""
    levels = {f"L{n}": {"anyOf": [{"$ref": f"#/$defs/L{n + 1}"} for _ in range(10)]} for n in range(30)}
    schema = {"properties": {"a": {"$ref": "#/$defs/L0"}}, "$defs": {**levels, "L30": {"type": "string"}}}
    schemas = Schemas([{"function": {"name": "f", "parameters": schema}}])
    assert schemas.spell("f", "a", "x") == '"x"'
