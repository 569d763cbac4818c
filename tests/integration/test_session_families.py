"""A tool loop with each family that writes calls in a form of its own: found in the template, read, and appended to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer

from tests.support.agents import TOOLS, AgentSession, ids_of, tool, user
from tests.support.chat_models import FAMILIES, chat_model
from tests.support.stack import Stack, stack

SAYS = {
    "kimi_k2": "<think>Here, or there?</think><|tool_calls_section_begin|>"
    '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"where": "here"}<|tool_call_end|>'
    '<|tool_call_begin|>functions.look:1<|tool_call_argument_begin|>{"where": "there", "times": 2}<|tool_call_end|>'
    "<|tool_calls_section_end|><|im_end|>",
    "minimax_m2": 'Here, or there?\n</think>\n\n<minimax:tool_call>\n<invoke name="look">\n'
    '<parameter name="where">here</parameter>\n</invoke>\n<invoke name="look">\n'
    '<parameter name="where">there</parameter>\n<parameter name="times">2</parameter>\n</invoke>\n'
    "</minimax:tool_call>[e~[",
    "mistral": '[THINK]Here, or there?[/THINK][TOOL_CALLS]look[ARGS]{"where": "here"}'
    '[TOOL_CALLS]look[ARGS]{"where": "there", "times": 2}</s>',
    "mistral_list": '[TOOL_CALLS] [{"name": "look", "arguments": {"where": "here"}, "id": "9Ae3bDc2F"}, '
    '{"name": "look", "arguments": {"where": "there", "times": 2}}]</s>',
    "deepseek_v32": "Here, or there?</think>\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="where" string="true">here</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="look">\n'
    '<｜DSML｜parameter name="where" string="true">there</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="times" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls><｜end▁of▁sentence｜>",
    "lfm2_v2": "<|tool_call_start|>[look(where='here'), look(where='there', times=2)]<|tool_call_end|><|im_end|>",
    "seed_oss": "<seed:think>Here, or there?</seed:think>\n<seed:tool_call>\n<function=look>\n"
    "<parameter=where>here</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=look>\n"
    "<parameter=where>there</parameter>\n<parameter=times>2</parameter>\n</function>\n</seed:tool_call><seed:eos>",
}
"""Two calls, and a thought in front of them where the family thinks."""

ENDS = {name: markers.eos for name, markers in FAMILIES.items()}
WHERE = [{"where": "here"}, {"where": "there", "times": 2}]


@dataclass
class Model:
    name: str
    stack: Stack
    tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def spell(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    folder = chat_model(request.param)
    with stack("qwen", styles=("cumulative",), folder=folder, radix={"tokenizer_backend": "huggingface"}) as made:
        yield Model(request.param, made, Tokenizer.from_file(str(folder / "tokenizer.json")))


def test_a_tool_loop_is_one_chain(model: Model) -> None:
    agent, (worker,) = AgentSession.make(model.stack, tools=TOOLS), model.stack.workers
    messages = [user("Where is it?")]
    chain: list[int] = []
    for number in range(3):
        worker.script(ids=model.encode(SAYS[model.name]), finish=None)
        turn = agent.must(*messages, max_tokens=800, stop_token_ids=model.encode(ENDS[model.name]))
        assert turn.sent[: len(chain)] == chain, f"turn {number}: the earlier ids go first"
        chain = turn.chain
        reply = turn.message
        assert [json.loads(call["function"]["arguments"]) for call in reply["tool_calls"]] == WHERE
        assert {call["function"]["name"] for call in reply["tool_calls"]} == {"look"}
        assert not reply["content"]
        if model.name not in ("mistral_list", "lfm2_v2"):
            assert reply["reasoning_content"] == "Here, or there?"
        results = [tool(call, f"nothing {number} {at}") for at, call in enumerate(reply["tool_calls"])]
        messages += [reply, *results]
    last = agent.must(*messages, says="Nowhere.")
    assert last.sent[: len(chain)] == chain
    seam = model.spell(last.sent[len(chain) :])
    assert seam.count("nothing 2 0") == 1
    assert seam.count("nothing 2 1") == 1
    assert ENDS[model.name] not in seam[: len(ENDS[model.name])], "the stop token was sampled: it is there once"
    (only,) = agent.finalize()
    assert only["exact"], only["reasons"]
    assert ids_of(only) == last.chain


@pytest.mark.parametrize("model", ["kimi_k2"], indirect=True)
def test_a_result_names_the_call_as_the_model_did(model: Model) -> None:
    agent, (worker,) = AgentSession.make(model.stack, tools=TOOLS), model.stack.workers
    worker.script(ids=model.encode(SAYS[model.name].replace("look:1", "look:0")), finish=None)
    turn = agent.must(user("Where?"), max_tokens=800, stop_token_ids=model.encode("<|im_end|>"))
    first, second = turn.message["tool_calls"]
    assert first["id"] == "functions.look:0"
    assert second["id"].startswith("call_"), "no two calls of a turn have one id"
    last = agent.must(user("Where?"), turn.message, tool(first, "a"), tool(second, "b"), says="There.")
    assert "## Return of functions.look:0\na<|im_end|>" in model.spell(last.sent)


@pytest.mark.parametrize("model", ["mistral_list"], indirect=True)
def test_ids_are_short_where_templates_take_no_others(model: Model) -> None:
    agent, (worker,) = AgentSession.make(model.stack, tools=TOOLS), model.stack.workers
    worker.script(ids=model.encode(SAYS[model.name]), finish=None)
    turn = agent.must(user("Where?"), max_tokens=800, stop_token_ids=model.encode("</s>"))
    ids = [call["id"] for call in turn.message["tool_calls"]]
    assert ids[0] == "9Ae3bDc2F", "as it was sampled"
    assert len(ids[1]) == 9
    assert ids[1].isalnum()
    assert ids[1] != ids[0]
