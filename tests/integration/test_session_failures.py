"""What goes wrong around a session, over HTTP: it is told in the client's own words, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.support.agents import AgentSession, ids_of, user
from tests.support.stack import Stack, events, stack
from worker.engine.script import Fault
from worker.options import StreamStyle


@pytest.fixture(scope="module", params=["incremental", "cumulative"])
def whole(request: pytest.FixtureRequest) -> Iterator[Stack]:
    style: StreamStyle = request.param
    with stack("qwen", styles=(style,)) as made:
        yield made
        assert made.idle()


@pytest.mark.parametrize("fault", ["dies", "no_done", "error_event"])
def test_a_worker_that_breaks_off_a_stream_leaves_nothing(whole: Stack, fault: Fault) -> None:
    agent = AgentSession.make(whole)
    first = agent.must(user("a"), says="one")
    before = agent.show(tree=True)
    whole.workers[0].fault(fault)
    broken = agent.ask(user("a"), first.message, user("b"), says="two three four five", stream=True)
    assert b"[DONE]" not in broken.answer.content
    assert broken.record is not None
    assert broken.record.output_ids, "it had begun"
    assert agent.show(tree=True) == before
    again = agent.must(user("a"), first.message, user("b"), says="two")
    (only,) = agent.finalize()
    assert ids_of(only) == again.chain


def test_a_reply_that_cannot_be_read_is_the_workers_fault_and_says_so(whole: Stack) -> None:
    agent = AgentSession.make(whole)
    whole.workers[0].fault("not_json")
    answer = agent.ask(user("a"), says="one").answer
    assert answer.status == 502
    assert answer.json()["error"]["message"].startswith("the worker's reply is not what /generate answers: ")
    assert agent.show()["nodes"] == 0


def test_a_reply_that_could_not_be_kept_is_missed_where_its_text_is_context(whole: Stack) -> None:
    """The session answered it, so it knows that its tokens are missing; a branch without it is exact."""
    agent = AgentSession.make(whole)
    whole.workers[0].fault("no_logprobs")
    first = agent.must(user("a"), says="one")
    assert first.answer.headers["x-radix-recorded"].startswith("no; engine_mismatch")
    second = agent.must(user("a"), first.message, user("b"), says="two")
    assert "unknown_reply" in second.answer.headers["x-radix-reasons"]
    other = agent.must(user("c"), says="three")
    assert "x-radix-reasons" not in other.answer.headers
    assert agent.show()["lost_turns"] == [first.generation]
    found = {one["branch"]: (one["exact"], one["reasons"]) for one in agent.finalize()}
    assert found == {second.generation: (False, ["unknown_reply"]), other.generation: (True, [])}


@pytest.mark.parametrize("stream", [False, True])
def test_a_logprob_that_is_null_is_told_as_that_of_an_impossible_token(whole: Stack, stream: bool) -> None:
    """Workers print an infinite one as null: that of a candidate that a grammar forbids, for example."""
    agent = AgentSession.make(whole)
    whole.workers[0].fault("null_logprob")
    answer = agent.ask(user("a"), says="one", stream=stream, logprobs=True).answer
    assert answer.status == 200
    choices = (
        [event["choices"][0] for event in events(answer) if event["choices"]] if stream else answer.json()["choices"]
    )
    told = [one["logprob"] for choice in choices if choice.get("logprobs") for one in choice["logprobs"]["content"]]
    assert told
    assert told[-1] == -9999.0


def test_a_chat_without_a_session_hears_nothing_of_what_others_lost(whole: Stack) -> None:
    """All of them share one memory, and nobody exports it."""
    body = {"model": "m", "max_tokens": 4, "messages": [user("a")]}
    whole.workers[0].fault("wrong_completion_tokens")
    first = whole.post("/v1/chat/completions", body)
    assert first.headers["x-radix-recorded"].startswith("no; engine_mismatch")
    few_shot = [user("b"), {"role": "assistant", "content": "c"}, user("d")]
    other = whole.post("/v1/chat/completions", {**body, "messages": few_shot})
    assert (other.status, other.headers.get("x-radix-reasons")) == (200, None)


@pytest.mark.parametrize("fault", ["dies", "error_event"])
def test_one_sample_that_fails_ends_none_of_the_others(whole: Stack, fault: Fault) -> None:
    agent = AgentSession.make(whole)
    before = len(whole.workers[0].log)
    whole.workers[0].fault(fault)
    answer = agent.must(user("a"), n=3, stream=True, max_tokens=5).answer
    assert answer.content.rstrip().endswith(b"data: [DONE]")
    truth = [[*record.input_ids, *record.output_ids] for record in whole.workers[0].log[before:]]
    ends = [
        choice["finish_reason"] for event in events(answer) for choice in event["choices"] if choice["finish_reason"]
    ]
    assert sorted(ends) == ["abort", "length", "length"], "the one that failed does not look complete"
    found = [ids_of(one) for one in agent.finalize()]
    assert len(found) == 2
    assert all(chain in truth for chain in found)


def test_of_several_samples_the_header_names_those_that_came(whole: Stack) -> None:
    """In the order of the choices: who rewards a branch finds it by its place."""
    agent, worker = AgentSession.make(whole), whole.workers[0]
    for says in ("one", "two", "three"):
        worker.script(text=says, fault="http_503" if says == "two" else None)
    answer = agent.must(user("a"), n=3).answer
    choices = {one["index"]: one["message"]["content"] for one in answer.json()["choices"]}
    assert sorted(choices) == [0, 1]
    named = answer.headers["x-generation-id"].split(", ")
    sampled = {record.rid: record.text for record in worker.log}
    assert [sampled[name] for name in named] == [choices[0], choices[1]]
    assert {one["branch"] for one in agent.finalize()} == set(named)


def test_the_choices_of_a_stream_have_the_places_that_its_header_gives_them(whole: Stack) -> None:
    """The header is sent before any of them can fail: one that did is named, and leaves its place empty."""
    agent, worker = AgentSession.make(whole), whole.workers[0]
    for says in ("one", "two", "three"):
        worker.script(text=says, fault="http_503" if says == "two" else None)
    answer = agent.must(user("a"), n=3, stream=True).answer
    named = answer.headers["x-generation-id"].split(", ")
    found = dict.fromkeys(range(3), "")
    for event in events(answer):
        for choice in event["choices"]:
            found[choice["index"]] += choice["delta"].get("content") or ""
    sampled = {record.rid: record.text for record in worker.log}
    assert [found[index] for index in range(3)] == [sampled.get(name, "") for name in named]
    assert sorted(found.values()) == ["", "one", "three"]


def test_a_stream_that_a_worker_refuses_keeps_its_status() -> None:
    with stack("qwen", styles=("incremental",), context_length=64) as small:
        agent = AgentSession.make(small)
        answer = agent.ask(user("word " * 100), stream=True).answer
        assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        small.workers[0].fault("abort_503")
        assert agent.ask(user("a"), stream=True).answer.status == 503
        assert agent.show()["nodes"] == 0


def test_anthropics_client_reads_of_a_wrong_key_in_its_own_words() -> None:
    with stack("qwen", styles=("incremental",), server={"api_keys": ("a:key-a",)}) as made:
        headers = {"authorization": "Bearer key-a"}
        assert made.post("/sessions", {"session_id": "s"}, headers=headers).status == 201
        url = f"{made.url}/sessions/s"
        wrong = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError) as raised:
            wrong.messages.create(model="m", max_tokens=4, messages=[{"role": "user", "content": "a"}])
        assert raised.value.type == "authentication_error"
        right = anthropic.Anthropic(base_url=url, api_key="key-a", max_retries=0)
        assert right.messages.create(model="m", max_tokens=4, messages=[{"role": "user", "content": "a"}]).content


def test_metadata_is_a_note_and_no_store(whole: Stack) -> None:
    """It is kept with the session, in no budget, and in every list."""
    answer = whole.post("/sessions", {"metadata": {"a": "x" * 300_000}})
    assert answer.status == 400
    assert "metadata" in answer.json()["error"]["message"]


def test_a_switch_in_a_query_is_true_or_false_and_nothing_else_means_either(whole: Stack) -> None:
    agent = AgentSession.make(whole)
    first = agent.must(user("a"), says="one")
    agent.must(user("a"), first.message, user("b"), says="two")
    for word, count in (("True", 2), ("1", 2), ("false", 1)):
        assert len(agent.trajectories(f"?export_all_checkpoints={word}")) == count
    for path in (f"{agent.path}/trajectories?export_all_checkpoints=yes", f"{agent.path}?tree=yes"):
        answer = whole.get(path)
        assert answer.status == 400
        assert "must be true or false, not 'yes'" in answer.json()["error"]["message"]


def test_a_call_that_sessions_do_not_serve_is_told_what_they_do_serve(whole: Stack) -> None:
    """A library that uses another API shows its user only this message."""
    agent = AgentSession.make(whole)
    client = openai.OpenAI(base_url=f"{whole.url}{agent.path}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="v1/chat/completions, v1/messages, v1/responses"):
        client.embeddings.create(model="m", input="a")
