"""Tools of all types that clients offer: shown as functions, answered in their own form, and one chain when they come back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from tests.integration.conftest import Stacks
from tests.middleware_hub.parsers.formats import write_glm, write_harmony, write_hermes, write_qwen_coder
from tests.support.agents import TOOLS, AgentSession, ids_of
from tests.support.chat_models import chat_model
from tests.support.client import Answer
from tests.support.stack import events

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WRITES: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "qwen3": lambda name, given: f"<think>\nhm\n</think>\n\nI go.\n{write_hermes(name, given)}",
    "qwen3_5_think": lambda name, given: f"hm\n</think>\n\nI go.\n\n{write_qwen_coder(name, given)}",
    "glm4moe": lambda name, given: f"\n<think>hm</think>\nI go.\n{write_glm(name, given)}",
    "gptoss": lambda name, given: f"<|channel|>analysis<|message|>hm<|end|>{write_harmony(name, given)}",
}
ENDS = {"qwen3": "<|im_end|>", "qwen3_5_think": "<|im_end|>", "glm4moe": "<|observation|>", "gptoss": "<|call|>"}
"""The token behind a call, with which the template goes on, too."""
SPAWN = {
    "type": "function",
    "name": "spawn",
    "description": "Spawns.",
    "parameters": {"type": "object", "properties": {"task": {"type": "string"}}},
}
NOTE = {"type": "custom", "name": "note", "description": "Notes a text."}
OFFERED: list[dict[str, Any]] = [
    {"type": "function", **TOOLS[0]["function"]},  # type: ignore[dict-item]
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
    {"type": "namespace", "name": "agents", "description": "Other agents.", "tools": [SPAWN, NOTE]},
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
    {"type": "tool_search", "execution": "client"},
    {"type": "web_search", "external_web_access": False},
    {"type": "file_search", "vector_store_ids": ["v"]},
]


@dataclass(frozen=True)
class Use:
    """A call as it is sampled, the item that the client gets, and the result that it sends."""

    name: str
    arguments: dict[str, Any]
    item: dict[str, Any]
    result: dict[str, Any]
    shown: str = "done"


USES = {
    "function": Use(
        "look",
        {"where": "here", "times": 2},
        {"type": "function_call", "name": "look"},
        {"type": "function_call_output", "output": [{"type": "input_text", "text": "done"}]},
    ),
    "custom": Use(
        "patch",
        {"input": "*** Begin\n- a\n+ b"},
        {"type": "custom_tool_call", "name": "patch", "input": "*** Begin\n- a\n+ b"},
        {"type": "custom_tool_call_output", "output": "done"},
    ),
    "custom_listed": Use(
        "patch",
        {"input": "x"},
        {"type": "custom_tool_call", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "done"}]},
    ),
    "custom_wrong": Use(
        "patch",
        {"text": "x"},
        {"type": "custom_tool_call", "name": "patch"},
        {"type": "custom_tool_call_output", "output": "done"},
    ),
    "namespace": Use(
        "agents__spawn",
        {"task": "t"},
        {"type": "function_call", "name": "spawn", "namespace": "agents"},
        {"type": "function_call_output", "output": "done"},
    ),
    "namespace_custom": Use(
        "agents__note",
        {"input": "n"},
        {"type": "custom_tool_call", "name": "note", "namespace": "agents", "input": "n"},
        {"type": "custom_tool_call_output", "output": "done"},
    ),
    "local_shell": Use(
        "local_shell",
        {"command": ["ls", "-l"], "timeout_ms": 100},
        {
            "type": "local_shell_call",
            "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 100},
        },
        {"type": "local_shell_call_output", "output": "done"},
    ),
    "local_shell_odd": Use(
        "local_shell",
        {"command": "ls -l", "env": {}},
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls -l"], "env": {}}},
        {"type": "local_shell_call_output", "output": "done"},
    ),
    "shell": Use(
        "shell",
        {"commands": ["ls"]},
        {"type": "shell_call", "action": {"commands": ["ls"]}},
        {
            "type": "shell_call_output",
            "output": [{"stdout": "done", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
    ),
    "apply_patch": Use(
        "apply_patch",
        {"type": "create_file", "path": "a", "diff": "+b"},
        {"type": "apply_patch_call", "operation": {"type": "create_file", "path": "a", "diff": "+b"}},
        {"type": "apply_patch_call_output", "status": "completed", "output": "done"},
    ),
    "tool_search": Use(
        "tool_search",
        {"query": "files"},
        {"type": "tool_search_call", "arguments": {"query": "files"}, "execution": "client"},
        {
            "type": "tool_search_output",
            "execution": "client",
            "tools": [{"type": "namespace", "name": "late", "description": "D", "tools": [SPAWN]}],
        },
        shown='"late__spawn"',
    ),
}


@pytest.fixture(params=WRITES)
def agent(request: pytest.FixtureRequest, stacks: Stacks) -> Iterator[AgentSession]:
    made = AgentSession.make(stacks(request.param))
    made.options["model_name"] = request.param
    yield made
    made.stack.workers[0].forget_scripts()


def writes(agent: AgentSession, name: str, given: dict[str, Any]) -> str:
    return WRITES[agent.options["model_name"]](name, given)


def script(agent: AgentSession, says: str) -> list[int]:
    """Let the worker sample this, and the token behind a call. Returns that token, which the request has to stop at."""
    name = agent.options["model_name"]
    tokenizer = Tokenizer.from_file(str(chat_model(name) / "tokenizer.json"))
    end = [tokenizer.token_to_id(ENDS[name])]
    text = says.removesuffix(ENDS[name])
    agent.stack.workers[0].script(ids=[*tokenizer.encode(text, add_special_tokens=False).ids, *end], finish=None)
    return end


def respond(agent: AgentSession, says: str, *, streamed: bool, **fields: Any) -> tuple[dict[str, Any], Answer]:
    """A response that is valid for OpenAI's library, with all of its events."""
    end = script(agent, says)
    body = {"model": "m", "stream": streamed, "max_output_tokens": 400, "stop_token_ids": end, **fields}
    answer = agent.stack.post(f"{agent.path}/v1/responses", body)
    assert answer.status == 200, answer.content
    if not streamed:
        Response.model_validate_json(answer.content)
        return answer.json(), answer
    found = [json.loads(line[6:]) for line in answer.content.split(b"\n") if line.startswith(b"data: ")]
    for event in found:
        EVENT.validate_python(event)
    assert found[-1]["type"] == "response.completed", found[-1]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"]
    return found[-1]["response"], answer


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("named", [True, False], ids=["with ids", "without ids"])
def test_calls_of_all_types_are_one_chain(agent: AgentSession, streamed: bool, named: bool) -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    worker, chain = agent.stack.workers[0], list[int]()
    for kind, use in USES.items():
        if not named and kind in ("custom_wrong", "local_shell_odd"):
            continue  # what the model sampled beside the schema is known by the item's id
        reply, answer = respond(
            agent, writes(agent, use.name, use.arguments), streamed=streamed, input=items, tools=OFFERED
        )
        assert answer.headers["x-radix-ignored-tools"] == "web_search, file_search"
        *_, call = reply["output"]
        assert call.items() >= use.item.items(), kind
        record = worker.log[-1]
        assert list(record.input_ids)[: len(chain)] == chain, kind
        chain = [*record.input_ids, *record.output_ids]
        output = reply["output"]
        if not named:
            output = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in output]
        result = {"id": "x", **use.result, "call_id": call["call_id"]}
        if kind == "local_shell" and named:  # its type has no other name of its call
            result = {"id": call["id"], **use.result}
        items += [*output, result]
    respond(agent, writes(agent, "late__spawn", {"task": "t"}), streamed=streamed, input=items, tools=OFFERED)
    assert list(worker.log[-1].input_ids)[: len(chain)] == chain
    (only,) = agent.finalize()
    turns = worker.log[-only["num_turns"] :]
    assert (only["exact"], sum(only["response_mask"])) == (True, sum(len(one.output_ids) for one in turns))
    assert ids_of(only) == [*worker.log[-1].input_ids, *worker.log[-1].output_ids]


def test_a_tool_that_a_search_found_is_called_by_its_own_name(agent: AgentSession) -> None:
    items = [
        {"role": "user", "content": "Go."},
        {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "q"}, "execution": "client"},
        {"call_id": "c", **USES["tool_search"].result},
    ]
    reply, _ = respond(agent, writes(agent, "late__spawn", {"task": "t"}), streamed=False, input=items, tools=OFFERED)
    *_, call = reply["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "spawn", "late")


def test_tools_among_the_items_are_offered(agent: AgentSession) -> None:
    """In front of all messages they are the tools of the prompt; behind some, a message shows them, and the chain goes on."""
    front = {"type": "additional_tools", "role": "developer", "tools": OFFERED[2:3]}
    items = [front, {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Go."}]
    reply, _ = respond(agent, writes(agent, "agents__note", {"input": "n"}), streamed=False, input=items)
    *_, call = reply["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("custom_tool_call", "note", "agents")
    record = agent.stack.workers[0].log[-1]
    chain = [*record.input_ids, *record.output_ids]
    items += [*reply["output"], {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}]
    items.append({"type": "additional_tools", "role": "developer", "tools": OFFERED[1:2]})
    reply, _ = respond(agent, writes(agent, "patch", {"input": "x"}), streamed=False, input=items)
    assert list(agent.stack.workers[0].log[-1].input_ids)[: len(chain)] == chain
    assert reply["output"][-1]["type"] == "custom_tool_call"
    assert len(agent.finalize()) == 1


def test_the_stream_of_a_custom_call(agent: AgentSession) -> None:
    end = script(agent, writes(agent, "patch", {"input": "*** Begin"}))
    body = {"model": "m", "stream": True, "input": "Go.", "tools": OFFERED, "stop_token_ids": end}
    answer = agent.stack.post(f"{agent.path}/v1/responses", body)
    found = [json.loads(line[6:]) for line in answer.content.split(b"\n") if line.startswith(b"data: ")]
    delta, done = (event for event in found if event["type"].startswith("response.custom_tool_call_input."))
    assert (delta["type"], delta["delta"]) == ("response.custom_tool_call_input.delta", "*** Begin")
    assert (done["type"], done["input"]) == ("response.custom_tool_call_input.done", "*** Begin")
    (added,) = (
        event["item"]
        for event in found
        if event["type"] == "response.output_item.added" and event["item"]["type"] == "custom_tool_call"
    )
    assert (added["id"], added["input"]) == (delta["item_id"], "")


CHAT_TOOLS: list[dict[str, Any]] = [*TOOLS, {"type": "custom", "custom": {"name": "patch", "description": "Patches."}}]


@pytest.mark.parametrize("place", ["session", "chat"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_custom_tool_of_a_chat(agent: AgentSession, place: str, streamed: bool) -> None:
    path = f"{agent.path}/v1/chat/completions" if place == "session" else "/v1/chat/completions"
    worker, chain = agent.stack.workers[0], list[int]()
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Go {streamed}."}]
    for number in range(2):
        end = script(agent, writes(agent, "patch", {"input": f"*** {number}"}))
        body = {"model": "m", "messages": messages, "tools": CHAT_TOOLS, "stream": streamed, "max_tokens": 400}
        body["stop_token_ids"] = end
        answer = agent.stack.post(path, body)
        assert answer.status == 200, answer.content
        if streamed:
            deltas = [event["choices"][0]["delta"] for event in events(answer)]
            calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
            content = "".join(delta.get("content") or "" for delta in deltas)
            assert [call.pop("index") for call in calls] == [0]
            message = {"role": "assistant", "content": content, "tool_calls": calls}
        else:
            ChatCompletion.model_validate_json(answer.content)
            message = answer.json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": f"*** {number}"})
        record = worker.log[-1]
        assert list(record.input_ids)[: len(chain)] == chain
        chain = [*record.input_ids, *record.output_ids]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "done"}]


def callable_names(agent: AgentSession) -> list[str]:
    """The tools that the grammar of the last generation allows to call."""
    tag = agent.stack.workers[0].log[-1].body["sampling_params"]["structural_tag"]
    return re.findall(r'<tool_call>\\n{\\"name\\": \\"(\w+)', tag)


class TestChoices:
    @pytest.mark.parametrize(
        ("wanted", "name"),
        [
            ({"type": "custom", "name": "patch"}, "patch"),
            ({"type": "function", "name": "agents__spawn"}, "agents__spawn"),
            ({"type": "function", "name": "spawn", "namespace": "agents"}, "agents__spawn"),
            ({"type": "function", "name": "spawn"}, "agents__spawn"),
            ({"type": "shell"}, "shell"),
            ({"type": "apply_patch"}, "apply_patch"),
            ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]}, "patch"),
        ],
    )
    def test_only_the_chosen_tool_can_be_called(self, stacks: Stacks, wanted: Any, name: str) -> None:
        made = AgentSession.make(stacks("qwen3"))
        made.options["model_name"] = "qwen3"
        reply, _ = respond(made, "x", streamed=False, input="Go.", tools=OFFERED, tool_choice=wanted)
        assert reply["tool_choice"] == wanted
        assert callable_names(made) == [name]

    def test_allowed_tools_that_need_not_be_called(self, stacks: Stacks) -> None:
        made = AgentSession.make(stacks("qwen3"))
        made.options["model_name"] = "qwen3"
        wanted = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
        respond(made, "x", streamed=False, input="Go.", tools=OFFERED, tool_choice=wanted)
        assert callable_names(made) == ["look"]

    @pytest.mark.parametrize(
        ("wanted", "words"),
        [
            ({"type": "web_search"}, "OpenAI's servers run"),
            ({"type": "custom", "name": "look"}, "not among the `tools`"),
            ({"type": "allowed_tools", "mode": "auto", "tools": []}, "at least one tool"),
            ({"type": "allowed_tools", "mode": "all", "tools": [{"type": "local_shell"}]}, "mode"),
        ],
    )
    def test_a_choice_that_cannot_be(self, stacks: Stacks, wanted: Any, words: str) -> None:
        made = AgentSession.make(stacks("qwen3"))
        body = {"model": "m", "input": "Go.", "tools": OFFERED, "tool_choice": wanted}
        answer = made.stack.post(f"{made.path}/v1/responses", body)
        assert (answer.status, words in answer.json()["error"]["message"]) == (400, True), answer.content


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("place", ["session", "chat"])
@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (
            "chat/completions",
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ("chat/completions", {"tool_choice": "required", "regex": "a+"}, "regex"),
        (
            "chat/completions",
            {"tool_choice": {"type": "function", "function": {"name": "look"}}, "ebnf": 'root ::= "a"'},
            "ebnf",
        ),
        ("responses", {"tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ("responses", {"tool_choice": "required", "regex": "a+"}, "regex"),
        ("responses", {"tool_choice": {"type": "function", "name": "look"}, "regex": "a+"}, "regex"),
        (
            "messages",
            {
                "tool_choice": {"type": "any"},
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            },
            "output_config.format",
        ),
        ("messages", {"tool_choice": {"type": "tool", "name": "look"}, "regex": "a+"}, "regex"),
    ],
)
def test_a_forced_call_and_another_form_of_the_reply(
    agent: AgentSession, path: str, fields: dict[str, Any], words: str, place: str, stream: bool
) -> None:
    if (path, place) == ("responses", "chat"):
        pytest.skip("a worker's own")
    function = TOOLS[0]["function"]
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS},
        "responses": {"input": "a", "tools": OFFERED[:1]},
        "messages": {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 9,
            "tools": [{"name": "look", "input_schema": function["parameters"]}],  # type: ignore[index]
        },
    }
    worker = agent.stack.workers[0]
    before = len(worker.log)
    start = agent.path if place == "session" else ""
    answer = agent.stack.post(f"{start}/v1/{path}", {"model": "m", "stream": stream, **bodies[path], **fields})
    message = answer.json()["error"]["message"]
    assert (answer.status, len(worker.log)) == (400, before)
    assert "`tool_choice`" in message
    assert f"`{words}`" in message


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_forced_call_in_a_session_whose_replies_have_a_form(stacks: Stacks, stream: bool) -> None:
    made = AgentSession.make(stacks("qwen3"), sampling_params={"regex": "a+"})
    before = len(made.stack.workers[0].log)
    body = {"model": "m", "input": "a", "tools": OFFERED[:1], "tool_choice": "required", "stream": stream}
    answer = made.stack.post(f"{made.path}/v1/responses", body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "tool_choice")
    assert "the session's `regex`" in answer.json()["error"]["message"]
    assert len(made.stack.workers[0].log) == before


def test_allowed_tools_and_another_form_of_the_reply(stacks: Stacks) -> None:
    made = AgentSession.make(stacks("qwen3"))
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "a"}],
        "tools": CHAT_TOOLS,
        "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
    }
    assert made.stack.post(f"{made.path}/v1/chat/completions", {**body, "max_tokens": 5}).status == 200
    assert callable_names(made) == ["look"]
    answer = made.stack.post(f"{made.path}/v1/chat/completions", {**body, "regex": "a+"})
    assert (answer.status, "`regex`" in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("kind", ["web_search\r\nx-evil: 1", "web_search" + "a" * 100, "web_search é"])
def test_a_type_that_is_no_word_reaches_no_header(stacks: Stacks, kind: str) -> None:
    made = AgentSession.make(stacks("qwen3"))
    answer = made.stack.post(f"{made.path}/v1/responses", {"model": "m", "input": "a", "tools": [{"type": kind}]})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "tools[0].type")


def test_many_types_that_are_left_out(stacks: Stacks) -> None:
    made = AgentSession.make(stacks("qwen3"))
    tools = [{"type": f"web_search_{number}"} for number in range(2000)]
    body = {"model": "m", "input": "a", "tools": tools, "max_output_tokens": 3}
    answer = made.stack.post(f"{made.path}/v1/responses", body)
    assert answer.status == 200
    assert answer.headers["x-radix-ignored-tools"].endswith("web_search_31, ...")
