"""Tools with `defer_loading`: no prompt shows them before a result refers to them, and the conversation stays one chain."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.integration.conftest import Stacks
from tests.integration.test_tool_types import ENDS, WRITES, script, writes
from tests.support.agents import AgentSession, ids_of
from tests.support.chat_models import chat_model

SEARCH = {
    "name": "ToolSearch",
    "description": "Finds tools.",
    "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}},
}
LATER = {
    "name": "later",
    "description": "DEFINITION",
    "input_schema": {"type": "object", "properties": {"count": {"type": "integer"}}},
    "defer_loading": True,
}
OTHER = {**LATER, "name": "other", "description": "OTHER"}
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
PLACES = pytest.mark.parametrize("place", ["session", "chat"])


@pytest.fixture(params=WRITES)
def agent(request: pytest.FixtureRequest, stacks: Stacks) -> AgentSession:
    made = AgentSession.make(stacks(request.param))
    made.options["model_name"] = request.param
    return made


class Conversation:
    """A client of Anthropic's dialect, in a session or without one."""

    def __init__(self, agent: AgentSession, place: str, *, streamed: bool) -> None:
        self.agent, self.streamed = agent, streamed
        self.start = agent.path if place == "session" else ""
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": f"{place} {streamed} {agent.name}"}]
        self.chain: list[int] = []

    def ask(self, says: str, tools: list[dict[str, Any]], *, goes_on: bool = True) -> list[dict[str, Any]]:
        """One turn, which has to go on behind all turns before; returns its calls."""
        end = script(self.agent, says)
        body = {"model": "m", "max_tokens": 400, "stop_token_ids": end, "stream": self.streamed}
        answer = self.agent.stack.post(f"{self.start}/v1/messages", {**body, "messages": self.messages, "tools": tools})
        assert answer.status == 200, answer.content
        record = self.agent.stack.workers[0].log[-1]
        if goes_on:
            assert list(record.input_ids)[: len(self.chain)] == self.chain
        self.chain = [*record.input_ids, *record.output_ids]
        content = blocks(answer.content) if self.streamed else answer.json()["content"]
        self.messages.append({"role": "assistant", "content": content})
        return [block for block in content if block["type"] == "tool_use"]

    def result(self, call: dict[str, Any], content: Any) -> None:
        block = {"type": "tool_result", "tool_use_id": call["id"], "content": content}
        self.messages.append({"role": "user", "content": [block]})

    @property
    def prompt(self) -> str:
        tokenizer = Tokenizer.from_file(str(chat_model(self.agent.options["model_name"]) / "tokenizer.json"))
        sent = self.agent.stack.workers[0].log[-1].input_ids
        return str(tokenizer.decode(list(sent), skip_special_tokens=False))


def blocks(content: bytes) -> list[dict[str, Any]]:
    """The content of a streamed message."""
    found: list[dict[str, Any]] = []
    written: list[str] = []
    for event in [json.loads(line[6:]) for line in content.split(b"\n") if line.startswith(b"data: ")]:
        if event["type"] == "content_block_start":
            found.append(event["content_block"])
            written.append("")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            written[-1] += delta.get("partial_json") or ""
            for key in ("text", "thinking", "signature"):
                if key in delta:
                    found[-1][key] = found[-1].get(key, "") + delta[key]
        elif event["type"] == "content_block_stop" and found[-1]["type"] == "tool_use":
            found[-1]["input"] = json.loads(written[-1])
    return found


REFERENCE = [{"type": "tool_reference", "tool_name": "later"}]


@PLACES
@STREAMED
def test_a_reference_becomes_the_definition_and_the_chain_goes_on(
    agent: AgentSession, place: str, streamed: bool
) -> None:
    talk, tools = Conversation(agent, place, streamed=streamed), [SEARCH, LATER, OTHER]
    (call,) = talk.ask(writes(agent, "ToolSearch", {"query": "q"}), tools)
    assert "DEFINITION" not in talk.prompt
    assert "later" not in talk.prompt
    talk.result(call, REFERENCE)
    (call,) = talk.ask(writes(agent, "later", {"count": 2}), tools)
    assert talk.prompt.count("DEFINITION") == 1
    assert "OTHER" not in talk.prompt
    assert (call["name"], call["input"]) == ("later", {"count": 2})
    talk.result(call, "done")
    talk.ask(f"Done.{ENDS[agent.options['model_name']]}", tools)
    if place == "session":
        (only,) = agent.finalize()
        assert (only["exact"], only["num_turns"], ids_of(only)) == (True, 3, talk.chain)


@PLACES
def test_deferred_tools_that_come_and_go_change_nothing(agent: AgentSession, place: str) -> None:
    talk = Conversation(agent, place, streamed=False)
    (call,) = talk.ask(writes(agent, "ToolSearch", {"query": "q"}), [SEARCH])
    talk.result(call, REFERENCE)
    (call,) = talk.ask(writes(agent, "later", {"count": 2}), [SEARCH, LATER])
    talk.result(call, "done")
    talk.ask("Done.", [LATER, OTHER, SEARCH])
    if place == "session":
        assert len(agent.finalize()) == 1


def test_a_deferred_tool_that_was_never_shown_is_called_by_its_schema(agent: AgentSession) -> None:
    talk = Conversation(agent, "session", streamed=False)
    (call,) = talk.ask(writes(agent, "later", {"count": 2}), [SEARCH, LATER])
    assert call["input"] == {"count": 2}


def test_only_deferred_tools(agent: AgentSession) -> None:
    talk = Conversation(agent, "session", streamed=False)
    (call,) = talk.ask(writes(agent, "later", {"count": 2}), [LATER])
    assert call["name"] == "later"
    assert "DEFINITION" not in talk.prompt


@PLACES
def test_the_same_messages_and_another_definition(agent: AgentSession, place: str) -> None:
    """What was read of an earlier body does not answer for the tools of this one."""
    talk = Conversation(agent, place, streamed=False)
    (call,) = talk.ask(writes(agent, "ToolSearch", {"query": "q"}), [SEARCH, LATER])
    talk.result(call, REFERENCE)
    before = [*talk.messages]
    talk.ask("One.", [SEARCH, LATER])
    talk.messages = before
    talk.ask("Two.", [SEARCH, {**LATER, "description": "CHANGED"}], goes_on=False)
    assert "CHANGED" in talk.prompt
    assert "DEFINITION" not in talk.prompt


@PLACES
def test_a_prompt_is_counted_as_it_will_be_sent(agent: AgentSession, place: str) -> None:
    talk, tools = Conversation(agent, place, streamed=False), [SEARCH, LATER]
    (call,) = talk.ask(writes(agent, "ToolSearch", {"query": "q"}), tools)
    talk.result(call, REFERENCE)
    body = {"model": "m", "messages": talk.messages, "tools": tools}
    counted = agent.stack.post(f"{talk.start}/v1/messages/count_tokens", body)
    assert counted.status == 200, counted.content
    talk.ask("One.", tools)
    sent = len(agent.stack.workers[0].log[-1].input_ids)
    assert abs(counted.json()["input_tokens"] - sent) <= (0 if place == "session" else 8)


@PLACES
def test_a_reference_to_no_tool(agent: AgentSession, place: str) -> None:
    talk = Conversation(agent, place, streamed=False)
    (call,) = talk.ask(writes(agent, "ToolSearch", {"query": "q"}), [SEARCH, LATER])
    talk.result(call, [{"type": "tool_reference", "tool_name": "nobody"}])
    body = {"model": "m", "max_tokens": 9, "messages": talk.messages, "tools": [SEARCH, LATER]}
    answer = agent.stack.post(f"{talk.start}/v1/messages", body)
    assert (answer.status, "'nobody'" in answer.json()["error"]["message"]) == (400, True)
    assert answer.json()["error"]["param"] == "messages[2].content[0].content[0].tool_name"


def test_what_anthropics_servers_run_is_left_out_and_said(agent: AgentSession) -> None:
    tools = [SEARCH, {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "tools": tools}
    answer = agent.stack.post(f"{agent.path}/v1/messages", body)
    assert (answer.status, answer.headers["x-radix-ignored-tools"]) == (200, "web_search_20250305")
    streamed = agent.stack.post(f"{agent.path}/v1/messages", {**body, "stream": True})
    assert streamed.headers["x-radix-ignored-tools"] == "web_search_20250305"


def test_the_clients_own_bash(agent: AgentSession) -> None:
    tools = [{"type": "bash_20250124", "name": "bash"}]
    talk = Conversation(agent, "session", streamed=False)
    (call,) = talk.ask(writes(agent, "bash", {"command": "ls", "restart": False}), tools)
    assert (call["name"], call["input"]) == ("bash", {"command": "ls", "restart": False})
    talk.result(call, "done")
    talk.ask("Done.", tools)
    assert len(agent.finalize()) == 1
