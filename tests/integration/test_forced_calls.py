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
