"""`tool_choice` that forces a call, on templates of three families: smolagents sends `required` with every request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.conftest import Stacks
from tests.support import three_dialects
from tests.support.agents import TOOLS, AgentSession, user

FORMS = {
    "qwen3": ('<tool_call>\n{"name": "look", "arguments": ', '{"where": "x"}', "}\n</tool_call>"),
    "qwen3_5_think": (
        "<tool_call>\n<function=look>\n",
        "<parameter=where>\nx\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "glm4moe": ("<tool_call>look", "\n<arg_key>where</arg_key>\n<arg_value>x</arg_value>\n", "</tool_call>"),
}
FORCED: dict[str, list[Any]] = {
    "chat": ["required", {"type": "function", "function": {"name": "look"}}],
    "responses": ["required", {"type": "function", "name": "look"}],
    "messages": [{"type": "any"}, {"type": "tool", "name": "look"}],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("dialect", "outside"), [*((one, False) for one in FORCED), ("chat", True), ("messages", True)]
)
@pytest.mark.parametrize("name", FORMS)
def test_the_worker_gets_a_grammar_in_the_model_s_own_form(
    stacks: Stacks, name: str, dialect: str, outside: bool, stream: bool
) -> None:
    served, (begin, arguments, end) = stacks(name), FORMS[name]
    (worker,) = served.workers
    path = "" if outside else AgentSession.make(served).path
    thought = "hm\n</think>\n\n" if name == "qwen3_5_think" else ""
    for forced in FORCED[dialect]:
        worker.script(text=f"{thought}{begin}{arguments}{end}")
        body = three_dialects.body(dialect, [user("a")], stream=stream, tools=TOOLS) | {"tool_choice": forced}
        answer = served.post(f"{path}/v1/{three_dialects.PLACES[dialect]}", body)
        assert answer.status == 200, answer.content
        (call,) = three_dialects.reply(dialect, answer, stream=stream)["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"where": "x"})
        grammar = json.loads(worker.log[-1].body["sampling_params"]["structural_tag"])["format"]
        if name == "qwen3_5_think":  # its prompt opens the reasoning
            thinking, gap, grammar = grammar["elements"]
            assert (thinking["end"], gap["value"]) == ("</think>", "\n\n")
        (only,) = grammar["tags"]
        assert (only["begin"], only["end"], grammar["at_least_one"]) == (begin, end, True)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
GRAMMARS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {"type": "json_schema", "json_schema": SCHEMA},
        "json_schema",
    ),
    (
        {"response_format": {"type": "json_object"}},
        {"type": "json_schema", "json_schema": {"type": "object"}},
        "json_schema",
    ),
    ({"regex": "a+"}, {"type": "regex", "pattern": "a+"}, "regex"),
    ({"ebnf": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}, "ebnf"),
]


@pytest.mark.parametrize("of_session", [False, True])
@pytest.mark.parametrize(("asked", "form", "name"), GRAMMARS, ids=str)
def test_a_grammar_holds_behind_reasoning_that_the_prompt_opens(
    stacks: Stacks, asked: dict[str, Any], form: dict[str, Any], name: str, of_session: bool
) -> None:
    """From the first token on it would make the model write the answer as its reasoning, and nothing behind it."""
    if of_session and "response_format" in asked:
        asked = {"json_schema": json.dumps(form["json_schema"])}
    given = {"sampling_params": asked} if of_session else {}
    agent = AgentSession.make(stacks("qwen3_5_think"), **given)
    turn = agent.must(user("a"), says='hm\n</think>\n\n{"n": 1}', **({} if of_session else asked))
    assert (turn.message["reasoning_content"], turn.message["content"]) == ("hm", '{"n": 1}')
    assert turn.record is not None
    sampling = turn.record.body["sampling_params"]
    thinking, then = json.loads(sampling["structural_tag"])["format"]["elements"]
    assert (thinking["content"], thinking["end"], then) == ({"type": "any_text"}, "</think>", form)
    assert name not in sampling
    switched_off = agent.must(user("b"), says="a", enable_thinking=False, **({} if of_session else asked))
    assert switched_off.record is not None
    assert "structural_tag" not in switched_off.record.body["sampling_params"]
    assert switched_off.record.body["sampling_params"][name]


@pytest.mark.parametrize("value", ["$$ANY$$", "{"])
def test_what_is_no_schema_is_left_to_the_worker(stacks: Stacks, value: str) -> None:
    agent = AgentSession.make(stacks("qwen3_5_think"), sampling_params={"json_schema": value})
    turn = agent.must(user("a"), says="hm\n</think>\n\nYes.")
    assert turn.record is not None
    assert turn.record.body["sampling_params"]["json_schema"] == value
