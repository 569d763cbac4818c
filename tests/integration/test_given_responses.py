"""Responses, and their items, that a request names in place of repeating them: it goes on behind that sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from router.config import StoreConfig
from tests.integration.conftest import Stacks
from tests.integration.test_tool_types import OFFERED, WRITES, respond, writes
from tests.support.agents import AgentSession, ids_of
from tests.support.chat_models import chat_model
from tests.support.stack import Stack, stack

RESULT = {"type": "function_call_output", "output": "done"}
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


def agent_of(stack: Stack, name: str, **given: Any) -> AgentSession:
    made = AgentSession.make(stack, **given)
    made.options["model_name"] = name
    return made


@pytest.fixture(params=WRITES)
def agent(request: pytest.FixtureRequest, stacks: Stacks) -> AgentSession:
    return agent_of(stacks(request.param), request.param)


def last(agent: AgentSession) -> list[int]:
    """All that the worker consumed and produced in its last generation."""
    record = agent.stack.workers[-1].log[-1]
    return [*record.input_ids, *record.output_ids]


def sent(agent: AgentSession) -> list[int]:
    return list(agent.stack.workers[-1].log[-1].input_ids)


def spelled(agent: AgentSession) -> str:
    """The last prompt."""
    tokenizer = Tokenizer.from_file(str(chat_model(agent.options["model_name"]) / "tokenizer.json"))
    return str(tokenizer.decode(sent(agent), skip_special_tokens=False))


def references(reply: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "item_reference", "id": item["id"]} for item in reply["output"]]


def look(agent: AgentSession) -> str:
    return writes(agent, "look", {"where": "here", "times": 1})


@STREAMED
@pytest.mark.parametrize("instructions", [None, "You look."])
def test_a_conversation_by_its_last_response(agent: AgentSession, streamed: bool, instructions: str | None) -> None:
    asked: dict[str, Any] = {"streamed": streamed, "tools": OFFERED, "instructions": instructions}
    reply, _ = respond(agent, look(agent), input="Go.", **asked)
    for _ in range(3):
        chain = last(agent)
        result = {**RESULT, "call_id": reply["output"][-1]["call_id"]}
        before = reply["id"]
        reply, answer = respond(agent, look(agent), input=[result], previous_response_id=before, **asked)
        assert (reply["previous_response_id"], reply["instructions"]) == (before, instructions)
        assert sent(agent)[: len(chain)] == chain
        assert "x-radix-reasons" not in answer.headers
    (only,) = agent.finalize()
    assert (only["exact"], only["num_turns"], ids_of(only)) == (True, 4, last(agent))


@STREAMED
def test_a_conversation_by_references_to_its_items(agent: AgentSession, streamed: bool) -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for number in range(3):
        chain = last(agent) if number else []
        reply, answer = respond(agent, look(agent), input=items, streamed=streamed, tools=OFFERED)
        assert sent(agent)[: len(chain)] == chain
        assert "x-radix-reasons" not in answer.headers
        items += [*references(reply), {**RESULT, "call_id": reply["output"][-1]["call_id"]}]
    (only,) = agent.finalize()
    assert (only["exact"], only["num_turns"], ids_of(only)) == (True, 3, last(agent))


def test_a_reference_may_lack_its_type(agent: AgentSession) -> None:
    reply, _ = respond(agent, look(agent), input="Go.", streamed=False, tools=OFFERED)
    chain = last(agent)
    items = [{"role": "user", "content": "Go."}, *({"id": item["id"]} for item in reply["output"])]
    items.append({**RESULT, "call_id": reply["output"][-1]["call_id"]})
    respond(agent, look(agent), input=items, streamed=False, tools=OFFERED)
    assert sent(agent)[: len(chain)] == chain


def test_one_of_two_calls_can_be_named(stacks: Stacks) -> None:
    """A reference to the second call of a turn is that call, wherever it stood among the items."""
    agent = agent_of(stacks("qwen3"), "qwen3")
    text = look(agent) + "\n" + writes(agent, "patch", {"input": "SECOND"}).partition("I go.\n")[2]
    reply, _ = respond(agent, text, input="Go.", streamed=False, tools=OFFERED)
    *_, first, second = reply["output"]
    assert (first["type"], second["type"]) == ("function_call", "custom_tool_call")
    items = [{"role": "user", "content": "Go."}, {"type": "item_reference", "id": second["id"]}]
    items.append({"type": "custom_tool_call_output", "call_id": second["call_id"], "output": "done"})
    respond(agent, "x", input=items, streamed=False, tools=OFFERED)
    conversation = spelled(agent).rpartition("Go.")[2]
    assert "SECOND" in conversation
    assert '"name": "look"' not in conversation


@pytest.mark.parametrize("way", ["previous", "references", "items"])
def test_of_equal_samples_the_named_one_is_continued(agent: AgentSession, way: str) -> None:
    chains, replies = [], []
    for _ in range(3):
        reply, _ = respond(agent, look(agent), input="Go.", streamed=False, tools=OFFERED)
        chains.append(last(agent))
        replies.append(reply)
    for reply in replies:
        result = {**RESULT, "call_id": reply["output"][-1]["call_id"]}
        asked: dict[str, Any] = {"input": [result], "previous_response_id": reply["id"]}
        if way != "previous":
            turn = references(reply) if way == "references" else reply["output"]
            asked = {"input": [{"role": "user", "content": "Go."}, *turn, result]}
        _, answer = respond(agent, look(agent), streamed=False, tools=OFFERED, **asked)
        assert "x-radix-reasons" not in answer.headers, "the id says which"
    rows = agent.finalize()
    assert len(rows) == 3
    assert {row["parent_branch"] for row in rows} == {None}, "each goes on behind a sample of its own"
    assert {one for row in rows for one in _generations(row)} >= {reply["generation_id"] for reply in replies}


def _generations(row: dict[str, Any]) -> list[str]:
    return [turn["generation_id"] for turn in row["extra_fields"]["turns"]]


@STREAMED
def test_reasoning_that_comes_back_sealed_is_recognised(agent: AgentSession, streamed: bool) -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    include = ["reasoning.encrypted_content"]
    asked: dict[str, Any] = {"streamed": streamed, "store": False, "include": include, "tools": OFFERED}
    for number in range(3):
        chain = last(agent) if number else []
        reply, answer = respond(agent, look(agent), input=items, **asked)
        assert reply["store"] is False
        assert sent(agent)[: len(chain)] == chain
        assert "x-radix-reasons" not in answer.headers
        thought, *rest = reply["output"]
        assert isinstance(thought["encrypted_content"], str)
        sealed = {key: thought[key] for key in ("type", "id", "summary", "encrypted_content")}
        items += [sealed, *rest, {**RESULT, "call_id": rest[-1]["call_id"]}]
    (only,) = agent.finalize()
    assert (only["exact"], only["num_turns"]) == (True, 3)


@pytest.mark.parametrize("edited", [False, True])
def test_sealed_reasoning_is_in_a_prompt_that_is_rendered_again(stacks: Stacks, edited: bool) -> None:
    """Under other tools nothing is appended to: the template writes the reasoning, which only the session knows."""
    agent = agent_of(stacks("qwen3"), "qwen3")
    include = ["reasoning.encrypted_content"]
    reply, _ = respond(agent, look(agent), input="Go.", streamed=False, tools=OFFERED, include=include)
    thought, *rest = reply["output"]
    if edited:
        rest[0]["content"][0]["text"] = "Something else."
    sealed = {key: thought[key] for key in ("type", "id", "summary", "encrypted_content")}
    items = [{"role": "user", "content": "Go."}, sealed, *rest, {**RESULT, "call_id": rest[-1]["call_id"]}]
    respond(agent, "x", input=items, streamed=False, tools=OFFERED[:2])
    assert "<think>\nhm\n</think>" in spelled(agent)


class TestInstructions:
    def test_others_take_the_place_of_those_before(self, agent: AgentSession) -> None:
        asked: dict[str, Any] = {"streamed": False, "tools": OFFERED}
        reply, _ = respond(agent, look(agent), input="Go.", instructions="Be brief.", **asked)
        result = {**RESULT, "call_id": reply["output"][-1]["call_id"]}
        asked["previous_response_id"] = reply["id"]
        respond(agent, look(agent), input=[result], instructions="Be long.", **asked)
        assert "Be long." in spelled(agent)
        assert "Be brief." not in spelled(agent)

    def test_without_any_those_before_stay(self, agent: AgentSession) -> None:
        asked: dict[str, Any] = {"streamed": False, "tools": OFFERED}
        reply, _ = respond(agent, look(agent), input="Go.", instructions="Be brief.", **asked)
        chain, result = last(agent), {**RESULT, "call_id": reply["output"][-1]["call_id"]}
        respond(agent, look(agent), input=[result], previous_response_id=reply["id"], **asked)
        assert sent(agent)[: len(chain)] == chain


class TestUnknown:
    @pytest.mark.parametrize("stream", [False, True])
    def test_ids_of_another_session(self, agent: AgentSession, stream: bool) -> None:
        other = agent_of(agent.stack, agent.options["model_name"])
        reply, _ = respond(other, look(agent), input="Go.", streamed=False, tools=OFFERED)
        before = len(agent.stack.workers[0].log)
        for fields, param in (
            ({"input": "a", "previous_response_id": reply["id"]}, "previous_response_id"),
            ({"input": [{"role": "user", "content": "Go."}, *references(reply)]}, "input[1].id"),
        ):
            answer = agent.stack.post(f"{agent.path}/v1/responses", {"model": "m", "stream": stream, **fields})
            assert (answer.status, answer.json()["error"]["param"]) == (404, param)
        assert len(agent.stack.workers[0].log) == before

    @pytest.mark.parametrize(
        "name", ["msg_1", "rs_x_0", "", "fc_x_" + "9" * 5000, "msg_79d35046-fe79-52f4-b644-0e7520dfeb72", "a" * 5000]
    )
    def test_ids_that_nobody_gave(self, stacks: Stacks, name: str) -> None:
        agent = agent_of(stacks("qwen3"), "qwen3")
        items = [{"role": "user", "content": "Go."}, {"type": "item_reference", "id": name}]
        answer = agent.stack.post(f"{agent.path}/v1/responses", {"model": "m", "input": items})
        assert answer.status == 404
        assert len(answer.content) < 1000

    def test_an_item_that_a_response_does_not_have(self, stacks: Stacks) -> None:
        agent = agent_of(stacks("qwen3"), "qwen3")
        reply, _ = respond(agent, look(agent), input="Go.", streamed=False, tools=OFFERED)
        name = reply["output"][-1]["id"][:-1] + "7"
        items = [{"role": "user", "content": "Go."}, {"type": "item_reference", "id": name}]
        answer = agent.stack.post(f"{agent.path}/v1/responses", {"model": "m", "input": items})
        assert (answer.status, name in answer.json()["error"]["message"]) == (404, True)

    def test_without_a_session_it_is_the_workers_own(self, stacks: Stacks) -> None:
        made = stacks("qwen3")
        body = {"model": "m", "input": "a", "previous_response_id": "resp_1"}
        assert "this session has not given" not in made.post("/v1/responses", body).content.decode()


@pytest.mark.parametrize("way", ["previous", "references"])
@pytest.mark.parametrize("name", ["qwen3", "gptoss"])
def test_after_a_restart_and_at_another_router(name: str, way: str, tmp_path: Path) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path / 'store.sqlite3'}")
    folder = chat_model(name)
    with stack("qwen", styles=("cumulative",), folder=folder, store=store) as first:
        here = agent_of(first, name, session_id="s")
        reply, _ = respond(here, look(here), input="Go.", streamed=False, tools=OFFERED)
        chain = last(here)
        result = {**RESULT, "call_id": reply["output"][-1]["call_id"]}
        asked: dict[str, Any] = {"input": [result], "previous_response_id": reply["id"]}
        if way == "references":
            asked = {"input": [{"role": "user", "content": "Go."}, *references(reply), result]}
        with stack("qwen", styles=("cumulative",), folder=folder, store=store) as other:
            assert prompt_at(other, [first, other], asked)[: len(chain)] == chain
    with stack("qwen", styles=("cumulative",), folder=folder, store=store) as again:
        assert prompt_at(again, [again], asked)[: len(chain)] == chain
        rows = AgentSession(again, "s").finalize()
        assert [(row["exact"], row["num_turns"]) for row in rows] == [(True, 2), (True, 2)]


def prompt_at(router: Stack, stacks: list[Stack], asked: dict[str, Any]) -> list[int]:
    """What a worker, of whichever of these stacks, was sent for a turn at this router."""
    body = {"model": "m", "tools": OFFERED, "max_output_tokens": 9, **asked}
    answer = router.post("/sessions/s/v1/responses", body)
    assert answer.status == 200, answer.content
    rid = answer.headers["x-generation-id"]
    (found,) = (record for one in stacks for worker in one.workers for record in worker.log if record.rid == rid)
    return list(found.input_ids)
