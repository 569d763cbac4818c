"""The grammars of forced calls: what stands around the arguments, as each family of models writes it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from middleware_hub.sessions.turn.forced_calls import structural_tag
from router.errors import BadRequestError

SCHEMA = {"type": "object", "properties": {"where": {"type": "string"}}}


def tool(name: str, parameters: Any = SCHEMA) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("look"), tool("see", None)]


def grammar(parser: str, choice: str = "required", allowed: tuple[str, ...] = (), **given: Any) -> Any:
    found = structural_tag(parser, TOOLS, choice, allowed, **{"parallel": True, "reasoning": False, **given})
    return json.loads(found)["format"]


@pytest.mark.parametrize(
    ("parser", "begin", "style", "end"),
    [
        ("hermes", '<tool_call>\n{"name": "look", "arguments": ', None, "}\n</tool_call>"),
        ("qwen-coder", "<tool_call>\n<function=look>\n", "qwen_xml", "</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=look>\n", "qwen_xml", "</function>\n</tool_call>"),
        ("glm", "<tool_call>look", "glm_xml", "</tool_call>"),
    ],
)
def test_a_call_is_written_as_the_parser_reads_it(parser: str, begin: str, style: str | None, end: str) -> None:
    look, see = grammar(parser)["tags"]
    assert (look["begin"], look["end"]) == (begin, end)
    assert (look["content"]["json_schema"], look["content"].get("style")) == (SCHEMA, style)
    assert see["begin"] == begin.replace("look", "see")
    assert see["content"]["json_schema"] == {"type": "object"}, "a tool without a schema takes any arguments"


def test_a_name_is_json_where_the_call_is_json() -> None:
    (named,) = json.loads(structural_tag("hermes", [tool('a"b')], "required", parallel=True, reasoning=False))[
        "format"
    ]["tags"]
    assert named["begin"] == '<tool_call>\n{"name": "a\\"b", "arguments": '


@pytest.mark.parametrize("parser", ["hermes", "qwen-coder", "glm"])
def test_a_name_or_a_list_leaves_out_the_other_tools(parser: str) -> None:
    for found in (grammar(parser, "see"), grammar(parser, "auto", ("see",)), grammar(parser, "required", ("see",))):
        (only,) = found["tags"]
        assert "see" in only["begin"]


@pytest.mark.parametrize(("parser", "gap"), [("hermes", []), ("qwen-coder", ["\n\n"]), ("glm", ["\n"])])
def test_open_reasoning_ends_first_and_the_call_follows_as_the_model_writes_it(parser: str, gap: list[str]) -> None:
    found = grammar(parser, reasoning=True)
    thought, *between, calls = found["elements"]
    assert thought["end"] == "</think>"
    assert [one["value"] for one in between] == gap
    assert calls == grammar(parser)


def test_one_call_where_several_are_not_allowed() -> None:
    assert [grammar("glm", parallel=one)["stop_after_first"] for one in (True, False)] == [False, True]


def test_other_forms_are_refused() -> None:
    with pytest.raises(BadRequestError, match="cannot be enforced with the tool call parser 'harmony'"):
        grammar("harmony")
