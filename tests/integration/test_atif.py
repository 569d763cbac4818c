"""Trajectories in ATIF: every generation as the worker had it, every message in its place, and the same from a store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.config import StoreConfig
from tests.integration.test_store_export import command
from tests.support import templates
from tests.support.agents import TOOLS, AgentSession, Turn, call_text, system, tool, user
from tests.support.atif import assert_valid
from tests.support.stack import Stack, stack


def sessions(**more: Any) -> dict[str, Any]:
    return {"chat_template": str(templates.folder() / "qwen2_5.jinja"), **more}


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), sessions=sessions(reasoning_parser="think")) as made:
        yield made


def documents(agent: AgentSession, query: str = "", **body: Any) -> list[dict[str, Any]]:
    """What `finalize` gives in this format; it is the same in the query."""
    answer = agent.stack.post(f"{agent.path}/finalize", {"format": "atif", **body})
    assert answer.status == 200, answer.content
    found: list[dict[str, Any]] = answer.json()["trajectories"]
    for one in found:
        assert_valid(one)
    return found


def assert_sampled(step: dict[str, Any], turn: Turn) -> None:
    """A step has the ids and logprobs of the worker."""
    assert turn.record is not None
    metrics = step["metrics"]
    assert metrics["prompt_token_ids"] == list(turn.record.input_ids)
    assert metrics["completion_token_ids"] == list(turn.record.output_ids)
    assert metrics["logprobs"] == list(turn.record.logprobs)
    assert (metrics["prompt_tokens"], metrics["completion_tokens"]) == (len(turn.sent), len(turn.sampled))
    assert metrics["extra"]["request_id"] == turn.generation
    assert step["llm_call_count"] == 1


def tool_loop(served: Stack, **made: Any) -> tuple[AgentSession, list[Turn]]:
    """Two calls, of which the second result comes without a name, and an answer."""
    agent = AgentSession.make(served, tools=TOOLS, **made)
    opening = [system("Look."), user("Where?")]
    says = f"<think>\nhm\n</think>\n\nFirst.\n{call_text('here')}\n{call_text('there', 2)}"
    first = agent.must(*opening, says=says)
    one, two = first.message["tool_calls"]
    results = [tool(one, "nothing"), tool(two, "a cat")]
    second = agent.must(*opening, first.message, *results, says="There.")
    return agent, [first, second]


class TestSteps:
    def test_a_tool_loop(self, served: Stack) -> None:
        agent, turns = tool_loop(served, metadata={"agent": {"name": "looker", "version": "3"}})
        agent_id = agent.name
        assert served.post(f"{agent.path}/reward_info", {"reward_info": {"score": 1.5}}).status == 200
        (found,) = documents(agent)
        assert [step["source"] for step in found["steps"]] == ["system", "user", "agent", "agent"]
        assert [step["message"] for step in found["steps"]] == ["Look.", "Where?", "First.", "There."]
        called, answered = found["steps"][2:]
        assert_sampled(called, turns[0])
        assert_sampled(answered, turns[1])
        assert called["reasoning_content"].strip() == "hm"
        names = [(call["function_name"], call["arguments"]) for call in called["tool_calls"]]
        assert names == [("look", {"where": "here", "times": 1}), ("look", {"where": "there", "times": 2})]
        ids = [call["id"] for call in turns[0].message["tool_calls"]]
        assert [call["tool_call_id"] for call in called["tool_calls"]] == ids
        results = called["observation"]["results"]
        assert [(one["source_call_id"], one["content"]) for one in results] == list(
            zip(ids, ("nothing", "a cat"), strict=True)
        )
        assert not any("is_copied_context" in step for step in found["steps"])
        assert found["session_id"] == agent_id
        assert found["trajectory_id"] == turns[1].generation
        assert found["agent"] == {"name": "looker", "version": "3"}
        assert found["extra"]["reward_info"] == {"score": 1.5}
        assert found["extra"]["exact"] is True
        assert found["final_metrics"]["total_completion_tokens"] == sum(len(turn.sampled) for turn in turns)
        assert found["final_metrics"]["total_prompt_tokens"] == sum(len(turn.sent) for turn in turns)

    def test_a_turn_that_is_trained_elsewhere_is_copied_context(self, served: Stack) -> None:
        agent = AgentSession.make(served)
        first = agent.must(user("a"), says="one")
        left = agent.must(user("a"), first.message, user("b"), says="two")
        right = agent.must(user("a"), first.message, user("c"), says="three")
        found = documents(agent)
        assert [[step.get("is_copied_context", False) for step in one["steps"]] for one in found] == [
            [False, False, False, False],
            [False, True, False, False],
        ]
        for one, turn in zip(found, (left, right), strict=True):
            assert_sampled(one["steps"][1], first)
            assert_sampled(one["steps"][3], turn)
        assert found[1]["extra"]["parent_branch"] == left.generation
        every = documents(agent, shared_turns="every")
        assert not any("is_copied_context" in step for one in every for step in one["steps"])

    def test_words_that_were_never_sampled_have_no_metrics(self, served: Stack) -> None:
        agent = AgentSession.make(served)
        opening = [user("1 + 1"), {"role": "assistant", "content": "2"}, user("1 + 2")]
        turn = agent.must(*opening, says="3")
        (found,) = documents(agent)
        warm, sampled = found["steps"][1], found["steps"][3]
        assert warm["is_copied_context"] is True
        assert not {"metrics", "llm_call_count"} & warm.keys()
        assert_sampled(sampled, turn)

    def test_an_edited_turn_is_told(self, served: Stack) -> None:
        """Its tokens were sampled, and its message is another one now."""
        agent = AgentSession.make(served)
        first = agent.must(user("a"), says="One and two and three and four.")
        edited = {"role": "assistant", "content": "One and two and three."}
        second = agent.must(user("a"), edited, user("b"), says="Yes.")
        found = {one["trajectory_id"]: one for one in documents(agent)}
        whole, told = found[first.generation], found[second.generation]
        assert_sampled(whole["steps"][-1], first)
        assert told["steps"][1]["message"] == "One and two and three."
        assert "metrics" not in told["steps"][1]
        assert told["extra"]["edited_generation_ids"] == [first.generation]
        assert_sampled(told["steps"][-1], second)

    def test_what_a_later_prompt_left_out_is_in_the_step(self, served: Stack) -> None:
        """It was sampled: the step is what the engine did, and the next prompt shows what became of it."""
        agent = AgentSession.make(served)
        first = agent.must(user("a"), says="one two END", stop=["END"], finish="length")
        second = agent.must(user("a"), first.message, user("b"), says="three")
        assert "left_out" in second.answer.headers["x-radix-reasons"]
        (found,) = documents(agent)
        assert_sampled(found["steps"][1], first)
        assert_sampled(found["steps"][3], second)

    def test_a_result_without_its_call(self, served: Stack) -> None:
        """A context that was cut: it is kept, and names no call of a step."""
        agent = AgentSession.make(served)
        agent.must(user("a"), {"role": "tool", "tool_call_id": "gone", "content": "found"}, user("b"), says="Yes.")
        (found,) = documents(agent)
        (result,) = found["steps"][0].get("observation", found["steps"][1].get("observation"))["results"]
        assert result == {"content": "found", "extra": {"tool_call_id": "gone"}}

    def test_a_turn_without_logprobs(self) -> None:
        with stack("qwen", styles=("cumulative",), sessions=sessions(), radix={"force_logprobs": False}) as bare:
            agent = AgentSession.make(bare)
            agent.must(user("a"), says="one")
            (found,) = documents(agent)
        assert "logprobs" not in found["steps"][1]["metrics"]
        assert found["extra"]["reasons"] == ["no_logprobs"]

    def test_the_query_of_trajectories(self, served: Stack) -> None:
        agent, _ = tool_loop(served)
        found = served.get(f"{agent.path}/trajectories?format=atif").json()
        assert found["session_id"] == agent.name
        assert found["trajectories"] == documents(agent)
        assert documents(agent, expect_request_ids=["lost"])
        assert served.get(f"{agent.path}/trajectories?format=ATIF").status == 400


class TestStore:
    def test_a_store_has_the_same(self, tmp_path: Path) -> None:
        """Of all sessions, one line for each trajectory; texts are counted as left out."""
        store = StoreConfig(url=f"sqlite:{tmp_path / 'store'}")
        with stack("qwen", styles=("cumulative",), sessions=sessions(), store=store) as served:
            agent, _ = tool_loop(served, metadata={"agent": "looker"})
            forked = AgentSession.make(served)
            first = forked.must(user("a"), says="one")
            forked.must(user("a"), first.message, user("b"), says="two")
            last = forked.must(user("a"), first.message, user("c"), says="three")
            body = {"reward_info": {"score": 2.0}, "branch": last.generation}
            assert served.post(f"{forked.path}/reward_info", body).status == 200
            gone = AgentSession.make(served)
            gone.must(user("a"), says="gone")
            assert served.exchange("DELETE", gone.path).status == 200
            served.generate({"text": "beside them", "sampling_params": {"max_new_tokens": 4}})
            expected = {one["trajectory_id"]: one for one in (*documents(agent), *documents(forked))}
        path = tmp_path / "all.jsonl"
        assert command(tmp_path, "export", "--out", str(path), "--format", "atif") == 0
        found = [json.loads(line) for line in path.read_text().splitlines()]
        for one in found:
            assert_valid(one)
        assert {one["trajectory_id"]: one for one in found} == expected
        assert len(found) == 3

    def test_it_says_what_it_leaves_out(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        store = StoreConfig(url=f"sqlite:{tmp_path / 'store'}")
        with stack("qwen", styles=("cumulative",), store=store) as served:
            served.generate({"text": "a text", "sampling_params": {"max_new_tokens": 4}})
        path = tmp_path / "all.jsonl"
        assert command(tmp_path, "export", "--out", str(path), "--format", "atif") == 0
        assert path.read_bytes() == b""
        assert "0 branches, 1 could not be read" in capsys.readouterr().err
