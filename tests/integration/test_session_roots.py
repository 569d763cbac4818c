"""Which conversation of a session is the task's: what a harness asks beside it is told apart, and can be left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.ipc
import pytest

from middleware_hub.client import Client, Session
from router.config import StoreConfig
from tests.support.agents import TOOLS, AgentSession, ids_of, system, user
from tests.support.chat_models import chat_model
from tests.support.lives import Router
from tests.support.stack import Stack, stack
from worker.worker import EmbeddedWorker

Json = dict[str, Any]
OTHER = [
    {
        "type": "function",
        "function": {"name": "remember", "description": "Note it.", "parameters": {"type": "object", "properties": {}}},
    }
]
TASK, NOTES, NAMING = "You are an agent.", "You keep notes.", "Name the conversation."


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_think", "gptoss", "glm4moe"])
def served(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with stack("qwen", styles=("incremental",), folder=chat_model(request.param)) as made:
        yield made


@pytest.fixture
def agent(served: Stack) -> AgentSession:
    return AgentSession.make(served)


class Harness:
    """Asks in one dialect; `said` has the ids of its turns."""

    def __init__(self, agent: AgentSession, form: str, *, stream: bool = False) -> None:
        self.agent = agent
        self.form = form
        self.stream = stream
        self.said: list[str] = []

    def ask(self, content: str, *, prompt: str = "", tools: list[Json] | None = None, **more: Any) -> Json:
        messages = [user(content)] if isinstance(content, str) else content
        body: Json = {"model": "m", "stream": self.stream, **more}
        if self.form == "chat/completions":
            body |= {"messages": [*([system(prompt)] if prompt else []), *messages], "tools": tools}
        elif self.form == "responses":
            body |= {"input": messages, "instructions": prompt or None, "tools": [_flat(one) for one in tools or ()]}
        else:
            body |= {"messages": messages, "system": prompt, "max_tokens": 50}
            body["tools"] = [_anthropics(one) for one in tools or ()]
        stacked = self.agent.stack
        stacked.workers[0].script(text="Yes.")
        answer = stacked.post(f"{self.agent.path}/v1/{self.form}", body)
        assert answer.status == 200, answer.content
        self.said.append(answer.headers["x-generation-id"])
        return {"role": "assistant", "content": "Yes."}


def _flat(tool: Json) -> Json:
    return {"type": "function", **tool["function"]}


def _anthropics(tool: Json) -> Json:
    named = {name: tool["function"][name] for name in ("name", "description")}
    return {**named, "input_schema": tool["function"]["parameters"]}


def told(agent: AgentSession, query: str = "") -> list[tuple[str, int, bool]]:
    return [(one["branch"], one["root"], one["side_request"]) for one in agent.trajectories(query)]


def adapters(agent: AgentSession) -> list[str]:
    return [one["lora_path"] for one in agent.trajectories()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["chat/completions", "responses", "messages"])
class TestHarnesses:
    """As they were seen to ask."""

    def test_the_title_comes_first(self, agent: AgentSession, form: str, stream: bool) -> None:
        """opencode: until there are tools, the first root is the task's."""
        harness = Harness(agent, form, stream=stream)
        harness.ask("hi", prompt=NAMING)
        assert agent.show()["current_head"] == harness.said[0]
        assert told(agent) == [(harness.said[0], 0, False)]
        reply = harness.ask("hi", prompt=TASK, tools=TOOLS)
        harness.ask([user("hi"), reply, user("go on")], prompt=TASK, tools=TOOLS)
        assert agent.show()["current_head"] == harness.said[2]
        assert told(agent) == [(harness.said[0], 0, True), (harness.said[2], 1, False)]
        assert told(agent, "?roots=head") == [(harness.said[2], 1, False)]

    def test_a_sub_agent_comes_last(self, agent: AgentSession, form: str, stream: bool) -> None:
        """Qwen Code: it has tools of its own, and another system prompt."""
        harness = Harness(agent, form, stream=stream)
        reply = harness.ask("hi", prompt=TASK, tools=TOOLS)
        harness.ask("remember this", prompt=NOTES, tools=OTHER)
        assert agent.show()["current_head"] == harness.said[0]
        harness.ask([user("hi"), reply, user("go on")], prompt=TASK, tools=TOOLS)
        harness.ask("remember that", prompt=NOTES, tools=OTHER)
        assert agent.show()["current_head"] == harness.said[2]
        sides = [(harness.said[1], 1, True), (harness.said[3], 1, True)]
        assert told(agent) == [sides[0], (harness.said[2], 0, False), sides[1]]

    def test_a_quota_is_tried(self, agent: AgentSession, form: str, stream: bool) -> None:
        """Claude Code: a probe without a system prompt and tools, then a title, then the task; inspect-ai says hello."""
        harness = Harness(agent, form, stream=stream)
        harness.ask("quota")
        harness.ask("hi", prompt=NAMING)
        harness.ask("hi", prompt=TASK, tools=TOOLS)
        assert agent.show()["current_head"] == harness.said[2]
        assert told(agent) == [(harness.said[0], 0, True), (harness.said[1], 1, True), (harness.said[2], 2, False)]

    def test_without_tools_the_first_is_the_task(self, agent: AgentSession, form: str, stream: bool) -> None:
        harness = Harness(agent, form, stream=stream)
        harness.ask("hi", prompt=TASK)
        harness.ask("name it", prompt=NAMING)
        assert agent.show()["current_head"] == harness.said[0]
        assert told(agent) == [(harness.said[0], 0, False), (harness.said[1], 1, True)]


class TestChanges:
    """What changes in the middle of a conversation."""

    def test_tools_that_come_late_stay_in_the_task(self, agent: AgentSession) -> None:
        first = agent.must(user("hi"), says="One.", tools=TOOLS)
        second = agent.must(user("hi"), first.message, user("b"), says="Two.", tools=[*TOOLS, *OTHER])
        third = agent.must(user("hi"), first.message, user("b"), second.message, user("c"), says="3.", tools=TOOLS)
        assert agent.show()["current_head"] == third.generation
        found = agent.trajectories("?roots=head")
        assert {one["root"] for one in found} == {0}
        assert len({one["tools_digest"] for one in found}) == 2
        assert third.generation in {one["branch"] for one in found}

    def test_a_new_context_under_the_late_tools_does_too(self, agent: AgentSession) -> None:
        """A condensed context begins with the system prompt and a summary."""
        both = [*TOOLS, *OTHER]
        first = agent.must(system(TASK), user("hi"), says="One.", tools=TOOLS)
        agent.must(system(TASK), user("hi"), first.message, user("b"), says="Two.", tools=both)
        condensed = agent.must(system(TASK), user("In short: hi."), says="Three.", tools=both)
        assert agent.show()["current_head"] == condensed.generation

    def test_another_agent_with_other_tools_does_not(self, agent: AgentSession) -> None:
        """The same system prompt: nothing says that it is beside the task, but it is not the task's root."""
        first = agent.must(system(TASK), user("hi"), says="One.", tools=TOOLS)
        second = agent.must(system(TASK), user("other"), says="Two.", tools=OTHER)
        assert agent.show()["current_head"] == first.generation
        assert told(agent) == [(first.generation, 0, False), (second.generation, 1, False)]
        assert told(agent, "?roots=head") == [(first.generation, 0, False)]

    def test_a_summary_without_tools_is_beside_the_task(self, agent: AgentSession) -> None:
        first = agent.must(user("hi"), says="One.", tools=TOOLS)
        summary = agent.must(user("hi"), first.message, user("Sum up."), says="Two.")
        assert agent.show()["current_head"] == first.generation
        assert (summary.generation, 1, True) in told(agent)

    def test_options_that_change_do_not_matter(self, agent: AgentSession) -> None:
        first = agent.must(user("hi"), says="One.", tools=TOOLS, chat_template_kwargs={"enable_thinking": True})
        changed = {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
        second = agent.must(user("hi"), first.message, user("b"), says="Two.", **changed)
        assert agent.show()["current_head"] == second.generation

    def test_another_system_prompt_is_another_root(self, agent: AgentSession) -> None:
        first = agent.must(system(TASK), user("hi"), says="One.", tools=TOOLS)
        agent.must(system(NOTES), user("hi"), first.message, user("b"), says="Two.", tools=TOOLS)
        assert agent.show()["current_head"] == first.generation
        assert [one["side_request"] for one in agent.trajectories()] == [False, True]

    def test_digests_are_equal_for_equal_beginnings(self, served: Stack) -> None:
        found = []
        for prompt, tools in ((TASK, TOOLS), (TASK, OTHER), (NOTES, TOOLS), ("", None), (TASK, TOOLS)):
            agent = AgentSession.make(served)
            agent.must(*([system(prompt)] if prompt else []), user("hi"), says="One.", tools=tools)
            (only,) = agent.trajectories()
            found.append((only["system_digest"], only["tools_digest"]))
        assert found[0] == found[4]
        assert found[0][0] == found[1][0] != found[2][0]
        assert found[0][1] == found[2][1] != found[1][1]
        assert found[3] == (None, None)


def both(agent: AgentSession) -> tuple[str, str]:
    """A title, and a task of two turns that fork: three branches."""
    title = agent.must(system(NAMING), user("hi"), says="Title.")
    first = agent.must(system(TASK), user("hi"), says="One.", tools=TOOLS)
    for says in ("Two.", "Three."):
        last = agent.must(system(TASK), user("hi"), first.message, user("b"), says=says, tools=TOOLS)
    return title.generation, last.generation


@pytest.mark.parametrize("form", ["json", "safetensors", "arrow", "tree"])
def test_every_format_takes_the_heads_root_alone(agent: AgentSession, form: str) -> None:
    _, last = both(agent)
    for query, count in (("", 3), ("roots=all", 3), ("roots=head", 2)):
        for answer in (
            agent.stack.get(f"{agent.path}/trajectories?format={form}&{query}"),
            agent.stack.post(f"{agent.path}/finalize?{query}", {"format": form}),
            agent.stack.post(f"{agent.path}/finalize", {"format": form, **_fields(query)}),
        ):
            assert answer.status == 200, answer.content
            found = _described(form, answer.content)
            assert len(found) == count
            assert found[-1]["branch"] == last
            assert [one["side_request"] for one in found] == [True, False, False][-count:]
            assert [one["root"] for one in found] == [0, 1, 1][-count:]


@pytest.mark.parametrize("form", ["json", "safetensors", "arrow", "tree"])
def test_every_format_says_which_adapter_sampled(agent: AgentSession, form: str) -> None:
    """Nobody trains an adapter on tokens that another one sampled, though both spoke in one session."""
    first = agent.must(user("hi"), says="One.", lora_path="a")
    agent.must(user("hi"), first.message, user("b"), says="Two.", lora_path="a")
    agent.must(user("hi"), first.message, user("b"), says="Three.", lora_path="b")
    agent.must(user("hi"), says="Four.")
    for answer in (
        agent.stack.get(f"{agent.path}/trajectories?format={form}"),
        agent.stack.post(f"{agent.path}/finalize", {"format": form}),
    ):
        assert [one["lora_path"] for one in _described(form, answer.content)] == ["a", "b", ""]


def _fields(query: str) -> Json:
    name, _, value = query.partition("=")
    return {name: value} if name else {}


def _described(form: str, content: bytes) -> list[Json]:
    if form == "arrow":
        return [json.loads(row["json"]) for row in pyarrow.ipc.open_stream(content).read_all().to_pylist()]
    if form == "safetensors":
        size = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + size])["__metadata__"]
        return [json.loads(metadata[str(number)]) for number in range(len(metadata) - 1)]
    found: list[Json] = json.loads(content)["leaves" if form == "tree" else "trajectories"]
    return found


def test_shared_turns_are_trained_once_among_those_that_are_exported(agent: AgentSession) -> None:
    both(agent)
    found = agent.trajectories("?roots=head&export_all_checkpoints=1")
    assert [one["root"] for one in found] == [1, 1, 1]
    assert [one["num_turns"] for one in found] == [1, 2, 2]
    sampled = [sum(one["response_mask"]) for one in found]
    assert all(sampled)
    assert len({tuple(ids_of(one)) for one in found}) == 3


def test_another_word_is_refused(agent: AgentSession) -> None:
    for answer in (
        agent.stack.get(f"{agent.path}/trajectories?roots=tail"),
        agent.stack.post(f"{agent.path}/finalize", {"roots": "tail"}),
        agent.stack.post(f"{agent.path}/finalize", {"roots": 1}),
    ):
        assert answer.status == 400
        assert "`roots` must be" in answer.json()["error"]["message"]
    assert agent.show()["phase"] == "active"


def test_a_session_without_a_turn_has_no_head(agent: AgentSession) -> None:
    assert agent.show()["current_head"] is None
    assert agent.trajectories("?roots=head") == []


def test_the_client_takes_it(agent: AgentSession) -> None:
    _, last = both(agent)
    with Client(agent.stack.url) as client:
        session = Session(client, session_id="by-the-client", pin=["temperature"], sampling_params={"temperature": 1})
        agent.stack.workers[0].script(text="One.")
        session.chat([system(NAMING), user("hi")])
        agent.stack.workers[0].script(text="Two.")
        kept = session.chat([system(TASK), user("hi")], tools=TOOLS)
        assert len(session.tree()["leaves"]) == 2
        assert len(session.tree(roots="head")["leaves"]) == 1
        assert len(session.finalize().trajectories) == 2
        (only,) = session.finalize(roots="head").trajectories
        assert only.details["side_request"] is False
        assert only.details["branch"] in kept["id"]
        session.delete()
    assert last


def test_other_routers_and_later_lives_say_the_same(tmp_path: Path) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path}/store.db")
    with EmbeddedWorker(chat_model("qwen3")) as worker:
        first, second = (Router(worker, store, folder=chat_model("qwen3")) for _ in range(2))
        try:
            agent = AgentSession.make(first.stack)
            elsewhere = AgentSession(second.stack, agent.name)
            title = agent.must(system(NAMING), user("hi"), says="Title.")
            one = elsewhere.must(system(TASK), user("hi"), says="One.", tools=TOOLS)
            late = [system(TASK), user("hi"), one.message, user("b")]
            two = agent.must(*late, says="Two.", tools=[*TOOLS, *OTHER])
            elsewhere.must(system(NOTES), user("c"), says="Three.", tools=OTHER, lora_path="a")
            expected = told(agent)
            assert (title.generation, 0, True) in expected
            assert agent.show()["current_head"] == elsewhere.show()["current_head"] == two.generation
            assert told(elsewhere) == expected
            assert adapters(elsewhere) == adapters(agent) == ["", "", "", "a"]
            first.restart()
            again = AgentSession(first.stack, agent.name)
            assert (told(again), again.show()["current_head"]) == (expected, two.generation)
            assert adapters(again) == ["", "", "", "a"]
            assert [name for name, root, _ in told(again, "?roots=head") if root == 1] == [
                name for name, root, _ in expected if root == 1
            ]
        finally:
            for router in (first, second):
                router.stop()
