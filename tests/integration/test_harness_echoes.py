"""What named harnesses send back, each the smallest case: which turn it is, and how many ids stay."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from router.config import StoreConfig
from tests.integration.conftest import Stacks
from tests.support import templates
from tests.support.agents import AgentSession, Turn, ids_of, tool, user
from tests.support.chat_models import chat_model
from tests.support.shapes import ChatModel
from tests.support.stack import Stack, stack

Said = dict[str, Any]
Serves = Callable[..., Stack]
EDIT = {
    "type": "function",
    "function": {
        "name": "Edit",
        "description": "Edits.",
        "parameters": {
            "type": "object",
            "properties": {
                "file": {"type": "string"},
                "replace_all": {"type": "boolean", "default": False},
                "where": {"$ref": "#/$defs/Where"},
            },
            "$defs": {"Where": {"type": "object", "properties": {"line": {"type": "integer", "default": 0}}}},
            "required": ["file"],
        },
    },
}
LOOK = '<tool_call>\n{"name": "Edit", "arguments": {"file": "/a"}}\n</tool_call>'
SEE = '<tool_call>\n{"name": "Edit", "arguments": {"file": "/b"}}\n</tool_call>'
XML_LOOK = "<tool_call>\n<function=Edit>\n<parameter=file>\n/a\n</parameter>\n</function>\n</tool_call>"
GLM_LOOK = "<tool_call>Edit\n<arg_key>file</arg_key>\n<arg_value>/a</arg_value>\n</tool_call>"
THOUGHT = "<think>\nhm\n</think>\n\n"


@cache
def model_of(name: str) -> ChatModel:
    return ChatModel(name)


@pytest.fixture(scope="module")
def serves(stacks: Stacks) -> Serves:
    return lambda name="qwen3", match="canonical": stacks(name, match=match, verify_rate=1.0)


def agent_of(served: Stack) -> AgentSession:
    return AgentSession.make(served, tools=[EDIT])


def reasons(turn: Turn) -> set[str]:
    return set(filter(None, turn.answer.headers.get("x-radix-reasons", "").split(", ")))


def reused(turn: Turn) -> int:
    return int(turn.answer.headers["x-radix-reused-tokens"])


def shown(message: Said, **changes: Any) -> Said:
    return {"role": "assistant", "content": message["content"], "tool_calls": message.get("tool_calls"), **changes}


def continued(agent: AgentSession, first: Turn, second: Turn) -> None:
    """The second turn goes on with all of the first one: one trajectory."""
    assert second.sent[: len(first.chain)] == first.chain
    assert reused(second) >= len(first.chain)
    assert not reasons(second) & {"edited_turn", "rewritten_turn", "template_mismatch"}
    (only,) = agent.finalize()
    assert (ids_of(only), only["exact"]) == (second.chain, True)


@pytest.mark.parametrize(
    "change",
    [
        lambda call: {**call, "arguments": '{"file": "/a", "replace_all": false}'},
        lambda call: {**call, "arguments": '{"replace_all": false, "file": "/a", "where": {}}'},
    ],
    ids=["Claude Code", "nested"],
)
def test_an_argument_with_its_default_is_no_edit(serves: Serves, change: Callable[[Said], Said]) -> None:
    agent = agent_of(serves())
    said = '<tool_call>\n{"name": "Edit", "arguments": {"file": "/a", "where": {"line": 0}}}\n</tool_call>'
    first = agent.must(user("a"), says=THOUGHT + (LOOK if "where" not in str(change({})) else said))
    (call,) = first.message["tool_calls"]
    echo = shown(first.message, tool_calls=[{**call, "function": change(call["function"])}])
    continued(agent, first, agent.must(user("a"), echo, tool(call, "done"), says="Done."))


def test_a_value_that_is_no_default_is_an_edit(serves: Serves) -> None:
    agent = agent_of(serves())
    first = agent.must(user("a"), says=THOUGHT + LOOK)
    (call,) = first.message["tool_calls"]
    other = {**call, "function": {**call["function"], "arguments": '{"file": "/a", "replace_all": true}'}}
    second = agent.must(user("a"), shown(first.message, tool_calls=[other]), tool(call, "done"), says="Done.")
    assert "edited_turn" in reasons(second)
    assert len(agent.finalize()) == 2


NAMED = "{{- '\\n<tool_response>\\n' ~ (message.name | default('')) ~ ': ' }}"


@pytest.mark.parametrize("written", [False, True], ids=["the template writes no name", "the template writes it"])
@pytest.mark.parametrize("names", [("Edit", None), (None, "Edit"), ("Edit", "edit")], ids=str)
def test_the_name_of_a_result_is_that_of_its_call(
    stacks: Stacks, tmp_path_factory: pytest.TempPathFactory, names: tuple[str | None, str | None], *, written: bool
) -> None:
    """Hermes Agent sends the name while it runs, and leaves it out when it resumes."""
    source = templates.source("qwen3")
    path = tmp_path_factory.getbasetemp() / f"named_{written}.jinja"
    path.write_text(source.replace("{{- '\\n<tool_response>\\n' }}", NAMED) if written else source)
    agent = agent_of(stacks("qwen3", chat_template=str(path), verify_rate=1.0))
    first = agent.must(user("a"), says=THOUGHT + LOOK)
    (call,) = first.message["tool_calls"]
    before, after = (tool(call, "done") | ({"name": name} if name else {}) for name in names)
    second = agent.must(user("a"), first.message, before, says=THOUGHT + "Done.")
    third = agent.must(user("a"), first.message, after, second.message, user("b"), says="So.")
    asked = Tokenizer.from_file(str(chat_model("qwen3") / "tokenizer.json")).decode(second.sent)
    assert ("Edit: done" in asked) == (written and names[0] == "Edit")
    continued(agent, second, third)


JOINED = [
    ("<|note|>", "<\u200d|note|>"),
    ("[/INST]", "[\u200d/INST]"),
    ("<\u200b|a|> [INST]", "<\u200d|a|> [\u200dINST]"),
]


@pytest.mark.parametrize(("said", "echoed"), JOINED)
def test_a_joiner_in_what_looks_like_a_special_token_is_no_edit(serves: Serves, said: str, echoed: str) -> None:
    """pydantic-ai writes it, in texts and in arguments, lest an encoder reads a special token."""
    agent = agent_of(serves())
    look = json.dumps({"name": "Edit", "arguments": {"file": said, "where": [{said: said}]}}, ensure_ascii=False)
    first = agent.must(user("a"), says=f"{THOUGHT}Use {said}: \n<tool_call>\n{look}\n</tool_call>")
    (call,) = first.message["tool_calls"]
    arguments = json.dumps({"file": echoed, "replace_all": False, "where": [{echoed: echoed}]})
    changed = {**call, "function": {**call["function"], "arguments": arguments}}
    echo = shown(first.message, content=first.message["content"].replace(said, echoed), tool_calls=[changed])
    continued(agent, first, agent.must(user("a"), echo, tool(call, "x"), says="Done."))


@pytest.mark.parametrize(("said", "echoed"), [("a b", "a\u200d b"), ("[INST]", "[/INST]"), ("<|a|>", "<\u200d|b|>")])
def test_a_joiner_elsewhere_is_an_edit(serves: Serves, said: str, echoed: str) -> None:
    agent = agent_of(serves())
    first = agent.must(user("a"), says=f"{THOUGHT}Use {said}.")
    second = agent.must(user("a"), shown(first.message, content=f"Use {echoed}."), user("b"), says="Done.")
    assert "edited_turn" in reasons(second)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think"])
def test_a_newline_before_the_text_that_the_template_strips_is_no_edit(serves: Serves, name: str) -> None:
    """inspect-ai writes it beside the reasoning."""
    agent = agent_of(serves(name))
    opened = "" if name == "qwen3_5_think" else "<think>\n"
    first = agent.must(user("a"), says=f"{opened}hm\n</think>\n\nI will look.")
    echo = shown(first.message, content="\nI will look.", reasoning_content=first.message["reasoning_content"])
    continued(agent, first, agent.must(user("a"), echo, user("b"), says=f"{opened}so\n</think>\n\nYes."))


@pytest.mark.parametrize("content", ["\n", " \n\n", [{"type": "text", "text": "\n"}]])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe"])
def test_white_space_for_a_turn_of_calls_alone_is_no_edit(serves: Serves, name: str, content: Any) -> None:
    """inspect-ai writes a newline before every text beside reasoning, and so for no text, too."""
    agent, call_of = agent_of(serves(name)), {"qwen3": LOOK, "qwen3_5_think": XML_LOOK, "glm4moe": GLM_LOOK}
    opened = "" if name == "qwen3_5_think" else "<think>\n"
    first = agent.must(user("a"), says=f"{opened}hm\n</think>\n\n{call_of[name]}")
    assert first.message["content"] is None
    (call,) = first.message["tool_calls"]
    echo = shown(first.message, content=content, reasoning_content=first.message["reasoning_content"])
    second = agent.must(user("a"), echo, tool(call, "done"), says=f"{opened}so\n</think>\n\nYes.")
    assert "edited_turn" not in reasons(second)
    assert second.sent[: len(first.chain) - 1] == first.chain[:-1]  # GLM's next turn begins with another end token
    (only,) = agent.finalize()
    assert (ids_of(only), only["exact"]) == (second.chain, True)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda message: {**message, "name": "coder"},
        lambda message: {
            **message,
            "content": f"<think>\nhm\n</think>\n\n{message['content']}",
            "reasoning_content": None,
        },
        lambda message: {**message, "reasoning_content": None},
    ],
    ids=["name", "reasoning in the content", "no reasoning"],
)
def test_a_change_of_any_earlier_message_keeps_the_branch(
    serves: Serves, change: Callable[[Said], Said], at: int
) -> None:
    agent = agent_of(serves())
    messages, turns = [user("a")], list[Turn]()
    for number in range(4):
        sent = [change(one) if place == 2 * at + 1 else one for place, one in enumerate(messages)]
        turns.append(agent.must(*sent, says=f"{THOUGHT}Reply {number}."))
        messages += [turns[-1].message, user("b")]
    assert all(later.sent[: len(one.chain)] == one.chain for one, later in itertools.pairwise(turns))
    (only,) = agent.finalize()
    assert (ids_of(only), only["exact"]) == (turns[-1].chain, True)


@pytest.mark.parametrize("ids", [None, "tool"], ids=["their ids", "other ids"])
def test_two_calls_that_are_written_one_after_the_other_are_one_turn(serves: Serves, ids: str | None) -> None:
    agent = agent_of(serves())
    first = agent.must(user("a"), says=f"{THOUGHT}I look.\n{LOOK}\n{SEE}")
    one, other = first.message["tool_calls"]
    if ids is not None:
        both = [{**one, "id": f"{ids}-1"}, {**other, "id": f"{ids}-2"}]
        echoes = [shown(first.message, tool_calls=both), tool(both[0], "x"), tool(both[1], "y")]
    else:
        echoes = [
            shown(first.message, tool_calls=[one]),
            tool(one, "x"),
            shown(first.message, content=None, tool_calls=[other]),
            tool(other, "y"),
        ]
    second = agent.must(user("a"), *echoes, says=f"{THOUGHT}{LOOK}")
    (call,) = second.message["tool_calls"]
    third = agent.must(user("a"), *echoes, shown(second.message), tool(call, "z"), says="Done.")
    assert second.sent[: len(first.chain)] == first.chain
    continued(agent, second, third)


def test_equal_calls_of_two_agents_have_ids_of_their_own(serves: Serves) -> None:
    agent = agent_of(serves())
    ids = []
    for role in ("plan", "code", "code"):
        turn = agent.must({"role": "system", "content": role}, user("a"), says=THOUGHT + LOOK)
        ids += [call["id"] for call in turn.message["tool_calls"]]
    assert len(set(ids)) == 3


def test_the_ids_of_its_calls_say_which_of_two_equal_samples_goes_on(serves: Serves) -> None:
    agent = agent_of(serves())
    twins = [agent.must(user("a"), says=f"<think>\n{thought}\n</think>\n\n{LOOK}") for thought in ("one", "two")]
    for twin in twins:
        (call,) = twin.message["tool_calls"]
        echo = shown(twin.message)
        echo.pop("reasoning_content", None)
        turn = agent.must(user("a"), echo, tool(call, f"for {call['id']}"), says="Done.")
        assert turn.sent[: len(twin.chain)] == twin.chain
        assert "ambiguous" not in reasons(turn)
    assert [one["num_turns"] for one in agent.finalize()] == [2, 2]


def test_a_default_more_does_not_make_one_sample_the_other(serves: Serves) -> None:
    agent = agent_of(serves())
    whole = '<tool_call>\n{"name": "Edit", "arguments": {"file": "/a", "replace_all": false}}\n</tool_call>'
    short, full = (agent.must(user("a"), says=THOUGHT + said) for said in (LOOK, whole))
    for first, other in ((short, full), (full, short)):
        (call,), (given,) = first.message["tool_calls"], other.message["tool_calls"]
        echo = shown(first.message, tool_calls=[{**given, "id": call["id"]}])
        turn = agent.must(user("a"), echo, tool(call, f"for {call['id']}"), says="Done.")
        assert turn.sent[: len(first.chain)] == first.chain
    assert [(one["num_turns"], one["exact"]) for one in agent.finalize()] == [(2, True), (2, True)]


@pytest.mark.parametrize("text", [None, "", "Other words."])
def test_under_calls_a_message_is_the_turn_of_its_ids(serves: Serves, text: str | None) -> None:
    """crewai, semantic-kernel, camel and agno drop the text beside calls."""
    agent = agent_of(serves(match="calls"))
    first = agent.must(user("a"), says=f"{THOUGHT}I look.\n{LOOK}")
    (call,) = first.message["tool_calls"]
    continued(agent, first, agent.must(user("a"), shown(first.message, content=text), tool(call, "x"), says="Done."))


def test_under_calls_other_arguments_are_an_edit(serves: Serves) -> None:
    agent = agent_of(serves(match="calls"))
    first = agent.must(user("a"), says=f"{THOUGHT}I look.\n{LOOK}")
    (call,) = first.message["tool_calls"]
    other = {**call, "function": {**call["function"], "arguments": '{"file": "/c"}'}}
    second = agent.must(user("a"), shown(first.message, tool_calls=[other]), tool(call, "x"), says="Done.")
    assert "edited_turn" in reasons(second)


def test_a_session_says_what_counts_as_the_same(serves: Serves, tmp_path: Path) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path / 'store.sqlite3'}")

    def router() -> contextlib.AbstractContextManager[Stack]:
        return stack("qwen", styles=("cumulative",), folder=chat_model("qwen3"), store=store)

    with router() as served:
        made = served.post("/sessions", {"session_id": "s", "match": "calls"})
        assert made.status == 201
        agent = AgentSession(served, "s", tools=[EDIT])
        assert agent.show()["match"] == "calls"
        first = agent.must(user("a"), says=f"{THOUGHT}I look.\n{LOOK}")
    with router() as served:  # restarted
        agent = AgentSession(served, "s", tools=[EDIT])
        (call,) = first.message["tool_calls"]
        continued(
            agent, first, agent.must(user("a"), shown(first.message, content=None), tool(call, "x"), says="Done.")
        )
        for wrong in ("exact", "pkg.mod:function", 3):
            refused = served.post("/sessions", {"match": wrong})
            assert refused.status == 400
            assert "`match`" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "echo",
    [
        lambda message, call: shown(message, content="I look again."),
        lambda message, call: shown(message, content="We look.", tool_calls=None),
        lambda message, call: shown(message, content=None),
        lambda message, call: shown(message, content="Oh."),
    ],
    ids=["text changed", "text changed, call dropped", "content null", "other text"],
)
def test_an_edit_keeps_the_reasoning(serves: Serves, echo: Callable[[Said, Said], Said]) -> None:
    agent = agent_of(serves())
    first = agent.must(user("a"), says=f"{THOUGHT}I look.\n{LOOK}")
    (call,) = first.message["tool_calls"]
    changed = echo(first.message, call)
    behind = [tool(call, "x")] if changed.get("tool_calls") else [user("and?")]
    second = agent.must(user("a"), changed, *behind, says="Done.")
    assert reused(second) >= len(first.sent) + len(model_of("qwen3").encode(THOUGHT))
    assert "edited_turn" in reasons(second)
    assert "left_out" not in reasons(second)


def test_an_odd_spelling_of_an_earlier_turn_costs_a_later_edit_nothing(serves: Serves) -> None:
    agent = agent_of(serves())
    first = agent.must(user("a"), says=f"{THOUGHT}\n\nI  look.\n\n\n{LOOK.replace(': ', ':  ')}")
    (call,) = first.message["tool_calls"]
    second = agent.must(user("a"), first.message, tool(call, "x"), says=f"{THOUGHT}One two three four.")
    echo = shown(second.message, content="One two three 4.")
    third = agent.must(user("a"), first.message, tool(call, "x"), echo, user("b"), says="Done.")
    assert third.sent[: len(second.sent)] == second.sent
    assert reused(third) >= len(second.chain) - 5


def test_a_beginning_that_was_rewritten_is_told(serves: Serves) -> None:
    agent = agent_of(serves())
    first = agent.must(user("a"), says=f"{THOUGHT}One.")
    resumed = agent.must(user("a, as before"), first.message, user("b"), says="Two.")
    assert "prefix_changed" in reasons(resumed)
    for fresh in ([user("c")], [{"role": "system", "content": "s"}, user("a")]):  # a sub-agent's first request
        assert "prefix_changed" not in reasons(agent.must(*fresh, says="Three."))
    imported = [user("d"), {"role": "assistant", "content": "Never sampled."}, user("e")]
    assert "prefix_changed" not in reasons(agent.must(*imported, says="Four."))


# Anthropic's dialect, and the Responses API ----------------------------------------------------------------------------


def anthropic(agent: AgentSession, *messages: Said, says: str, stream: bool = False) -> Turn:
    (worker,) = agent.stack.workers
    before = len(worker.log)
    worker.script(text=says, finish="eos")
    function = EDIT["function"]
    offered = {"name": "Edit", "description": "Edits.", "input_schema": function["parameters"]}  # type: ignore[index]
    body = {"model": "m", "max_tokens": 99, "messages": list(messages), "tools": [offered], "stream": stream}
    answer = agent.stack.post(f"{agent.path}/v1/messages", body)
    assert answer.status == 200, answer.content
    return Turn(answer, worker.log[before])


@pytest.mark.parametrize("stream", [False, True])
def test_a_placeholder_for_no_text_is_no_edit(serves: Serves, stream: bool) -> None:
    """Claude Code writes "(no content)" for a turn of reasoning only."""
    agent = AgentSession.make(serves())
    first = anthropic(agent, user("a"), says="<think>\nhm\n</think>\n\n", stream=stream)
    echo = {"role": "assistant", "content": [{"type": "text", "text": "(no content)"}]}
    continued(agent, first, anthropic(agent, user("a"), echo, user("b"), says="Yes.", stream=stream))


@pytest.mark.parametrize("stream", [False, True])
def test_a_default_is_no_edit_in_anthropics_dialect(serves: Serves, stream: bool) -> None:
    agent = AgentSession.make(serves())
    first = anthropic(agent, user("a"), says=THOUGHT + LOOK)
    (used,) = [one for one in first.answer.json()["content"] if one["type"] == "tool_use"]
    echo = {"role": "assistant", "content": [{**used, "input": {"file": "/a", "replace_all": False}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used["id"], "content": "x"}]}
    continued(agent, first, anthropic(agent, user("a"), echo, result, says="Done.", stream=stream))


def responses(agent: AgentSession, items: list[Said], says: str, *, stream: bool) -> tuple[Turn, list[Said]]:
    """Return a turn of the Responses API, and the items of its output."""
    (worker,) = agent.stack.workers
    before = len(worker.log)
    worker.script(text=says, finish="eos")
    tools = [{"type": "function", **EDIT["function"]}]  # type: ignore[dict-item]
    body = {"model": "m", "input": items, "tools": tools, "stream": stream}
    answer = agent.stack.post(f"{agent.path}/v1/responses", body)
    assert answer.status == 200, answer.content
    if stream:
        lines = [line[6:] for line in answer.content.decode().splitlines() if line.startswith("data: {")]
        output = json.loads(lines[-1])["response"]["output"]
    else:
        output = answer.json()["output"]
    return Turn(answer, worker.log[before]), output


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_are_written_apart_are_one_turn_in_the_responses_api(serves: Serves, stream: bool) -> None:
    agent = AgentSession.make(serves())
    first, output = responses(agent, [user("a")], f"{THOUGHT}I look.\n{LOOK}\n{SEE}", stream=stream)
    *front, one, other = output
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in (one, other)]
    echo = [*front, one, results[0], other, results[1]]
    continued(agent, first, responses(agent, [user("a"), *echo], "Done.", stream=stream)[0])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
def test_thoughts_that_come_back_as_text_are_no_edit(serves: Serves, stream: bool, resumed: bool) -> None:
    """Copilot CLI writes a message between thoughts and calls, whose text is the thoughts; it resumes without the thoughts."""
    agent = AgentSession.make(serves())
    first, (thought, call) = responses(agent, [user("a")], THOUGHT + LOOK, stream=stream)
    text = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "hm", "annotations": []}],
    }
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
    echo = [text, call, result] if resumed else [thought, text, call, result]
    continued(agent, first, responses(agent, [user("a"), *echo], "Done.", stream=stream)[0])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("added", ["", "\nCalling tools:\n[{'name': 'python_interpreter'}]"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe"])
def test_a_stop_string_that_the_client_writes_back_keeps_its_ids(
    serves: Serves, name: str, added: str, odd: bool, stream: bool
) -> None:
    """smolagents stops its code agent at `</code>`, writes that again, and what it did behind it: one trajectory."""
    served, model = serves(name), model_of(name)
    agent, opened = AgentSession.make(served), "" if name == "qwen3_5_think" else "<think>\n"
    chain, messages = list[int](), [user("a")]
    for number in range(3):
        said = f"{opened}hm\n</think>\n\nI look.\n<code>\nlook({number})\n"
        stop = (
            [one for piece in ("</", "co", "de", ">") for one in model.encode(piece)]
            if odd
            else model.encode("</code>")
        )
        served.workers[0].script(ids=[*model.encode(said), *stop])
        turn = agent.must(*messages, stop=["</code>"], stream=stream)
        assert turn.sent[: len(chain)] == chain
        assert turn.sampled[-len(stop) :] == stop
        chain = turn.chain
        messages += [
            {"role": "assistant", "content": f"I look.\n<code>\nlook({number})\n</code>{added}"},
            user("nothing"),
        ]
    (only,) = agent.finalize()
    assert (ids_of(only), only["exact"], only["num_turns"]) == (chain, True, 3)
    assert sum(only["response_mask"]) == sum(len(record.output_ids) for record in served.workers[0].log[-3:])


def test_of_a_stop_string_only_what_the_client_writes_back_is_kept(serves: Serves) -> None:
    """The rest of it was never seen: the turn forks there."""
    served, model = serves(), model_of("qwen3")
    agent, stop = AgentSession.make(served), [*model.encode("</"), *model.encode("code>")]
    served.workers[0].script(ids=[*model.encode(f"{THOUGHT}look()\n"), *stop])
    first = agent.must(user("a"), stop=["</code>"])
    kept = len(first.chain) - len(model.encode("code>"))
    second = agent.must(user("a"), {"role": "assistant", "content": "look()\n</end>"}, user("b"), says=f"{THOUGHT}Yes.")
    assert second.sent[:kept] == first.chain[:kept]
    assert second.sent[kept : len(first.chain)] != first.chain[kept:]
    found = agent.finalize()
    assert [ids_of(one) for one in found] == [first.chain, second.chain]
    assert all(one["exact"] for one in found)


def test_each_of_two_equal_samples_goes_on_at_another_router(tmp_path: Path) -> None:
    """Each has ids of its own for its calls, and the results name them."""
    store = StoreConfig(url=f"sqlite:{tmp_path / 'store.sqlite3'}")
    with contextlib.ExitStack() as entered:
        one, other = (
            entered.enter_context(stack("qwen", styles=("cumulative",), folder=chat_model("qwen3"), store=store))
            for _ in range(2)
        )
        agent, workers = agent_of(one), [*one.workers, *other.workers]  # routers of one store share their workers
        elsewhere = AgentSession(other, agent.name, tools=agent.tools)

        def ask(by: AgentSession, says: str, *messages: Said, **options: Any) -> Turn:
            before = [len(worker.log) for worker in workers]
            for worker in workers:
                worker.script(text=says, times=options.get("n", 1))
            answer = by.ask(*messages, **options).answer
            for worker in workers:
                worker.forget_scripts()
            return Turn(answer, next(each for at, worker in enumerate(workers) for each in worker.log[before[at] :]))

        choices = ask(agent, f"{LOOK}\n{SEE}", user("a"), n=2).answer.json()["choices"]
        for number, choice in enumerate(choices):
            message = choice["message"]
            messages = [user("a"), message, *(tool(call, f"found {number}") for call in message["tool_calls"])]
            second = ask(agent, "I see.", *messages)
            third = ask(elsewhere, "Done.", *messages, second.message, user("b"))
            assert third.sent[: len(second.chain) - 1] == second.chain[:-1]
            assert "prefix_changed" not in reasons(third)
        assert [each["num_turns"] for each in elsewhere.finalize()] == [3, 3]
