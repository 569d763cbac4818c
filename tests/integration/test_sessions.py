"""Agent sessions over HTTP: every kind of fork, with the worker's log as the truth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow
import pyarrow.ipc
import pytest
import safetensors.numpy

from tests.support import templates
from tests.support.agents import (
    TOOLS,
    AgentSession,
    call_text,
    deltas,
    ids_of,
    rewritten,
    system,
    tool,
    user,
)
from tests.support.asking import Asking
from tests.support.client import Answer
from tests.support.fleet import until
from tests.support.stack import Stack, events, stack
from worker.options import StreamStyle


@pytest.fixture(scope="module")
def whole() -> Iterator[Stack]:
    """One worker, Qwen's vocabulary, Qwen 2.5's template."""
    with stack(
        "qwen",
        styles=("incremental",),
        sessions={"chat_template": str(templates.folder() / "qwen2_5.jinja"), "orphan_grace": 0.4},
    ) as made:
        yield made
        assert made.idle()


@pytest.fixture
def agent(whole: Stack) -> Iterator[AgentSession]:
    """A session of its own."""
    made = AgentSession.make(whole)
    yield made
    whole.workers[0].forget_scripts()
    whole.workers[0].release()


LEFT = 'status="client_left"'


def metric(stack: Stack, name: str) -> float:
    """The sum of the series whose line has this in it."""
    lines = stack.get("/metrics").content.decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if name in line and not line.startswith("#"))


class TestForks:
    """The rows of the contract's table."""

    def test_a_conversation_is_one_chain(self, agent: AgentSession) -> None:
        first = agent.must(user("Hello"), says="Hi.")
        second = agent.must(user("Hello"), first.message, user("How are you?"), says="Well.")
        third = agent.must(user("Hello"), first.message, user("How are you?"), second.message, user("Bye"), says="Bye.")
        assert second.sent[: len(first.chain)] == first.chain
        assert third.sent[: len(second.chain)] == second.chain
        (only,) = agent.finalize()
        assert ids_of(only) == third.chain
        sampled = [t for t, mask in zip(only["response_ids"], only["response_mask"], strict=True) if mask]
        assert sampled == [*first.sampled, *second.sampled, *third.sampled]
        assert (only["num_turns"], only["exact"], only["reasons"]) == (3, True, [])

    def test_sub_agents_have_roots_of_their_own(self, agent: AgentSession) -> None:
        planner = agent.must(system("You plan."), user("Go"), says="Plan.")
        coder = agent.must(system("You code."), user("Go"), says="Code.")
        found = agent.finalize()
        assert [ids_of(one) for one in found] == [planner.chain, coder.chain]
        assert [one["parent_branch"] for one in found] == [None, None]

    def test_a_condensed_context_goes_on_from_the_checkpoint_before_it(self, agent: AgentSession) -> None:
        first = agent.must(user("a"), says="one")
        long = agent.must(user("a"), first.message, user("much text"), says="two")
        short = agent.must(user("a"), first.message, user("in short"), says="three")
        assert short.sent[: len(first.chain)] == first.chain
        found = agent.finalize()
        assert [ids_of(one) for one in found] == [long.chain, short.chain]
        assert found[1]["parent_branch"] == found[0]["branch"]
        count = len(first.sampled)
        assert found[0]["response_mask"][:count] == [1] * count
        assert found[1]["response_mask"][:count] == [0] * count, "no sampled token is trained twice"
        assert sum(found[1]["response_mask"]) == len(short.sampled)

    def test_every_branch_has_the_mask_of_shared_turns_if_so_asked(self, agent: AgentSession) -> None:
        first = agent.must(user("a"), says="one")
        agent.must(user("a"), first.message, user("b"), says="two")
        agent.must(user("a"), first.message, user("c"), says="three")
        found = agent.finalize(shared_turns="every")
        assert all(one["response_mask"][: len(first.sampled)] == [1] * len(first.sampled) for one in found)

    @pytest.mark.parametrize("form", ["json", "arrow", "safetensors"])
    def test_the_turns_that_a_winner_shares_are_trained_if_the_others_are_left_out(
        self, agent: AgentSession, form: str
    ) -> None:
        first = agent.must(user("a"), says="one")
        loser = agent.must(user("a"), first.message, user("b"), says="two")
        winner = agent.must(user("a"), first.message, user("c"), says="three")
        path = f"{agent.path}/reward_info"
        assert agent.stack.post(path, {"branch": winner.generation, "reward_info": {"score": 1}}).status == 200
        masks = {loser.generation: len(loser.sampled), winner.generation: len(first.sampled) + len(winner.sampled)}
        answer = agent.stack.post(f"{agent.path}/finalize", {"format": form})
        assert answer.status == 200, answer.content
        if form == "json":
            found = {one["branch"]: sum(one["response_mask"]) for one in answer.json()["trajectories"]}
        elif form == "arrow":
            rows = pyarrow.ipc.open_stream(answer.content).read_all().to_pylist()
            found = {json.loads(row["json"])["branch"]: sum(row["response_mask"]) for row in rows}
        else:
            tensors = safetensors.numpy.load(answer.content)
            found = dict(zip(masks, (int(tensors[f"{n}.response_mask"].sum()) for n in range(2)), strict=True))
        assert found == masks

    def test_best_of_n_is_siblings_and_equal_samples_are_not_joined(self, agent: AgentSession) -> None:
        turns = [agent.must(user("a"), says=says) for says in ("b", "c", "b")]
        tree = agent.show(tree=True)["tree"]
        assert sorted(len(node["samples"]) for node in tree if node["role"] == "assistant") == [1, 2]
        found = agent.finalize()
        assert [ids_of(one) for one in found] == [turn.chain for turn in turns]
        assert [one["branch"] for one in found] == [turn.generation for turn in turns]

    def test_n_samples_of_one_request(self, agent: AgentSession) -> None:
        worker = agent.stack.workers[0]
        before = len(worker.log)
        for says in ("b", "c", "d"):
            worker.script(text=says)
        answer = agent.ask(user("a"), n=3).answer
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        truth = {record.rid: [*record.input_ids, *record.output_ids] for record in worker.log[before:]}
        found = agent.finalize()
        assert {one["branch"]: ids_of(one) for one in found} == truth

    @pytest.mark.parametrize("seed", [None, 7, 2**63 - 2])
    def test_the_samples_of_one_request_have_seeds_of_their_own(self, agent: AgentSession, seed: int | None) -> None:
        """With one seed for all, an engine would sample the same n times."""
        log = agent.stack.workers[0].log
        before = len(log)
        assert agent.ask(user("a"), n=3, seed=seed, max_tokens=2).answer.status == 200
        seeds = [record.body["sampling_params"].get("sampling_seed") for record in log[before:]]
        if seed is None:
            assert seeds == [None] * 3
        else:
            assert sorted(one % 2**64 for one in seeds) == [seed, seed + 1, seed + 2]

    def test_warm_start_turns_are_context(self, agent: AgentSession) -> None:
        shots = [user("2+2"), {"role": "assistant", "content": "4"}, user("3+3")]
        turn = agent.must(*shots, says="6")
        (only,) = agent.finalize()
        assert ids_of(only) == turn.chain
        assert sum(only["response_mask"]) == len(turn.sampled)
        assert only["prompt_ids"] == turn.sent

    def test_a_rewritten_turn_forks_and_what_was_sampled_stays(self, agent: AgentSession) -> None:
        first = agent.must(user("a"), says="one")
        second = agent.must(user("a"), first.message, user("b"), says="two")
        edited = {"role": "assistant", "content": "2"}
        third = agent.must(user("a"), first.message, user("b"), edited, user("c"), says="three")
        assert third.sent[: len(first.chain)] == first.chain
        assert [ids_of(one) for one in agent.finalize()] == [second.chain, third.chain]

    def test_a_turn_that_was_cut_goes_on(self, agent: AgentSession) -> None:
        cut = agent.must(user("a"), says="one two three four", max_tokens=2)
        assert cut.answer.json()["choices"][0]["finish_reason"] == "length"
        following = agent.must(user("a"), cut.message, user("go on"), says="five")
        assert following.sent[: len(cut.chain)] == cut.chain
        (only,) = agent.finalize()
        assert ids_of(only) == following.chain

    def test_the_last_message_can_be_continued(self, agent: AgentSession) -> None:
        cut = agent.must(user("a"), says="one two three four", max_tokens=2)
        more = agent.must(user("a"), cut.message, says=" three", continue_final_message=True)
        assert more.sent == cut.chain
        joined = {"role": "assistant", "content": cut.message["content"] + more.message["content"]}
        following = agent.must(user("a"), joined, user("and?"), says="four")
        assert following.sent[: len(more.chain)] == more.chain
        assert [ids_of(one) for one in agent.finalize()] == [following.chain]

    def test_going_back_to_an_older_branch(self, agent: AgentSession) -> None:
        first = agent.must(user("a"), says="one")
        old = agent.must(user("a"), first.message, user("b"), says="two")
        agent.must(user("a"), first.message, user("c"), says="three")
        back = agent.must(user("a"), first.message, user("b"), old.message, user("d"), says="four")
        assert back.sent[: len(old.chain)] == old.chain

    def test_other_tools_begin_a_branch_and_lose_no_token(self, whole: Stack) -> None:
        agent = AgentSession.make(whole, tools=TOOLS)
        first = agent.must(user("a"), says="one")
        agent.tools = None
        second = agent.must(user("a"), first.message, user("b"), says="two")
        agent.tools = TOOLS
        third = agent.must(user("a"), first.message, user("c"), says="three")
        assert third.sent[: len(first.chain)] == first.chain
        found = agent.finalize()
        assert [ids_of(one) for one in found] == [second.chain, third.chain]
        assert sum(sum(one["response_mask"]) for one in found) == sum(
            len(turn.sampled) for turn in (first, second, third)
        )

    def test_all_checkpoints_are_exported_if_so_asked(self, agent: AgentSession) -> None:
        first = agent.must(user("a"), says="one")
        second = agent.must(user("a"), first.message, user("b"), says="two")
        assert [ids_of(one) for one in agent.trajectories("?export_all_checkpoints=1")] == [first.chain, second.chain]
        assert [ids_of(one) for one in agent.trajectories()] == [second.chain]
        exported = agent.finalize(export_all_checkpoints=True)
        assert agent.finalize(export_all_checkpoints=True) == exported

    def test_fields_without_a_meaning_are_named_wherever_they_stand(self, agent: AgentSession) -> None:
        agent.must(user("a"), says="one")
        misspelt = agent.stack.get(f"{agent.path}/trajectories?export_all_checkpoint=1&shared_turns=once").json()
        assert misspelt["ignored"] == ["export_all_checkpoint"]
        both = agent.stack.post(f"{agent.path}/finalize?formatt=tree", {"shared_turn": "each"}).json()
        assert both["ignored"] == ["formatt", "shared_turn"]


class TestSeveralSamples:
    """Which one a node with several is continued from, and that it is told."""

    def test_the_newest_unless_the_request_names_one(self, agent: AgentSession) -> None:
        one, other = (agent.must(user("a"), says="b") for _ in range(2))
        newest = agent.must(user("a"), one.message, user("c"), says="d")
        assert newest.sent[: len(other.chain)] == other.chain
        assert newest.answer.headers["x-radix-reasons"] == "ambiguous"
        named = agent.must(user("a"), one.message, user("c"), says="d", headers={"x-parent-generation": one.generation})
        assert named.sent[: len(one.chain)] == one.chain
        assert "x-radix-reasons" not in named.answer.headers
        unknown = agent.must(user("a"), one.message, user("c"), says="d", headers={"x-parent-generation": "nobody"})
        assert unknown.answer.headers["x-radix-reasons"] == "ambiguous, unknown_parent"

    def test_none_if_the_request_says_so(self, agent: AgentSession) -> None:
        """The text of a few-shot example may equal a sample's: without its tokens, it is context."""
        one = agent.must(user("a"), says="b")
        other = agent.must(user("a"), one.message, user("c"), says="d", headers={"x-radix-parent": "none"})
        assert other.answer.headers["x-radix-reused-tokens"] == "0"
        assert "x-radix-reasons" not in other.answer.headers
        first, second = agent.finalize()
        assert (ids_of(first), ids_of(second)) == (one.chain, other.chain)
        assert second["exact"]
        assert [turn["request_id"] for turn in second["turns"]] == [other.generation]


class TestWarmStarts:
    def test_what_a_key_leaves_out_is_still_rendered(self) -> None:
        """Two few-shot turns that differ in their thoughts only are one message, and two prompts."""
        template = {"chat_template": str(templates.folder() / "qwen3.jinja")}
        with stack("qwen", styles=("incremental",), sessions=template) as made:
            agent = AgentSession.make(made)
            for thought in ("first", "second"):
                shot = {"role": "assistant", "content": "4", "reasoning_content": thought}
                messages = [user("2+2"), shot, {"role": "tool", "content": "ok", "tool_call_id": "x"}]
                turn = agent.must(*messages, says="6")
                assert thought in made.spelling.text_of_request(turn.sent)


class TestToolLoops:
    """Calls whose arguments come back printed differently."""

    def test_a_hundred_turns_keep_every_id(self, whole: Stack) -> None:
        agent = AgentSession.make(whole, tools=TOOLS)
        messages = [system("You look at things."), user("Begin.")]
        chain: list[int] = []
        sampled = 0
        for number in range(100):
            says = f"I look at {number}.\n{call_text(f'room {number}', number)}" if number % 4 else f"Seen {number}."
            turn = agent.must(*messages, says=says, stream=number % 3 == 0)
            assert turn.sent[: len(chain)] == chain, f"turn {number}"
            chain = turn.chain
            sampled += len(turn.sampled)
            message = deltas(turn.answer) if number % 3 == 0 else turn.message
            messages.append(rewritten(message))
            calls = message.get("tool_calls") or ()
            assert len(calls) == bool(number % 4)
            messages += [tool(call, f"it is {number}") for call in calls] or [user("More.")]
        (only,) = agent.finalize()
        assert ids_of(only) == chain
        assert sum(only["response_mask"]) == sampled
        assert only["exact"], only["reasons"]

    def test_a_linear_session_sends_what_generate_sends_for_the_same_texts(self, whole: Stack) -> None:
        agent = AgentSession.make(whole, tools=TOOLS)
        spell = whole.spelling
        messages = [user("Begin.")]
        for number in range(6):
            turn = agent.must(*messages, says=call_text("here", number))
            text = spell.text_of_request(turn.sent)
            whole.workers[0].script(ids=turn.sampled, finish=None)
            parallel = whole.generate(
                {"text": text, "sampling_params": {"max_new_tokens": len(turn.sampled)}},
                headers={"x-radix-namespace": agent.name},
            )
            assert list(parallel.record.input_ids) == turn.sent, f"turn {number}"
            messages += [turn.message, *(tool(call, f"{number}") for call in turn.message["tool_calls"])]


class TestManyAtOnce:
    """Any number of generations of a session."""

    @pytest.mark.parametrize("deep", [False, True])
    def test_sixty_four(self, agent: AgentSession, asks: list[Asking], deep: bool) -> None:
        worker = agent.stack.workers[0]
        messages = [user("a")]
        if deep:
            first = agent.must(*messages, says="one")
            messages += [first.message, user("b")]
        before = len(worker.log)
        worker.hold(after=1)
        body = {"messages": messages, "max_tokens": 4}
        asks += [Asking(agent.stack.url, body, path=f"{agent.path}/v1/chat/completions") for _ in range(64)]
        worker.wait_for_arrivals(64)
        assert agent.show()["num_inflight_generations"] == 64
        worker.release()
        assert all(asking.answer().status == 200 for asking in asks)
        truth = sorted([*record.input_ids, *record.output_ids] for record in worker.log[before:])
        found = agent.finalize()
        assert sorted(ids_of(one) for one in found) == truth
        assert agent.show()["num_inflight_generations"] == 0


class TestSentAgain:
    """The same request another time: after a time-out, or by another client."""

    def test_an_orphan_is_adopted(self, agent: AgentSession, asks: list[Asking]) -> None:
        worker = agent.stack.workers[0]
        before = len(worker.log)
        body = {"messages": [user("a")], "max_tokens": 6}
        path = f"{agent.path}/v1/chat/completions"
        worker.hold(after=2)
        first = Asking(agent.stack.url, body, path=path)
        worker.wait_for_arrivals(1)
        first.leave()
        again = Asking(agent.stack.url, body, path=path, headers={"x-stainless-retry-count": "1"})
        asks.append(again)
        until(lambda: metric(agent.stack, 'resent_requests_total{kind="adopted"}') > 0, "it was never adopted")
        worker.release()
        assert again.answer().status == 200
        assert len(worker.log) == before + 1
        assert len(agent.finalize()) == 1

    def test_a_reply_that_did_not_arrive_is_given_again(self, agent: AgentSession) -> None:
        worker = agent.stack.workers[0]
        before = len(worker.log)
        body = {"messages": [user("a")], "max_tokens": 6}
        path = f"{agent.path}/v1/chat/completions"
        worker.hold(after=2)
        headers = {"idempotency-key": "k1"}
        left = metric(agent.stack, LEFT)
        first = Asking(agent.stack.url, body, path=path, headers=headers)
        worker.wait_for_arrivals(1)
        first.leave()
        until(lambda: metric(agent.stack, LEFT) > left, "the router never saw that the client left")
        worker.release()
        worker.wait_until_idle()
        until(lambda: agent.show()["num_generations"] == 1, "it was never committed")
        answer = agent.stack.post(path, body, headers=headers)
        assert answer.status == 200
        assert len(worker.log) == before + 1
        (only,) = agent.finalize()
        assert answer.json()["choices"][0]["meta_info"]["generation_id"] == only["branch"]

    def test_an_error_is_not_given_again(self, agent: AgentSession) -> None:
        """A library sends again what was answered with 502: by then there may be a worker."""
        worker = agent.stack.workers[0]
        body = {"messages": [user("a")], "max_tokens": 6}
        path = f"{agent.path}/v1/chat/completions"
        worker.kill()
        assert agent.stack.post(path, body, headers={"idempotency-key": "k"}).status in (502, 503)
        worker.restart()
        again = {"idempotency-key": "k", "x-stainless-retry-count": "1"}
        until(lambda: agent.stack.post(path, body, headers=again).status == 200, "the worker was never asked again")
        assert len(agent.finalize()) == 1

    def test_a_call_whose_client_is_there_is_never_joined(self, agent: AgentSession, asks: list[Asking]) -> None:
        worker = agent.stack.workers[0]
        body = {"messages": [user("a")], "max_tokens": 6}
        worker.hold(after=2)
        for _ in range(3):
            headers = {"x-stainless-retry-count": "1", "idempotency-key": "same"}
            asks.append(Asking(agent.stack.url, body, path=f"{agent.path}/v1/chat/completions", headers=headers))
        worker.wait_for_arrivals(3)
        worker.release()
        assert [asking.answer().status for asking in asks] == [200, 200, 200]
        assert len(agent.finalize()) == 3

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_orphan_that_nobody_adopts_is_aborted_and_its_tokens_stay(
        self, agent: AgentSession, stream: bool
    ) -> None:
        worker = agent.stack.workers[0]
        before = len(worker.log)
        worker.hold(after=3)
        body = {"messages": [user("a")], "max_tokens": 50, "stream": stream}
        asking = Asking(agent.stack.url, body, path=f"{agent.path}/v1/chat/completions")
        worker.wait_for_arrivals(1)
        asking.leave()
        worker.wait_until_idle()
        worker.release()
        until(lambda: agent.show()["num_inflight_generations"] == 0, "it never ended")
        (only,) = agent.trajectories()
        (record,) = worker.log[before:]
        assert ids_of(only) == [*record.input_ids, *record.output_ids]
        assert only["finish_reason"] == "abort"


class TestTheEnd:
    """Completing, finalizing, deleting, and what comes too late."""

    def test_finalizing_ends_what_is_in_flight(self, agent: AgentSession, asks: list[Asking]) -> None:
        worker = agent.stack.workers[0]
        first = agent.must(user("a"), says="one")
        worker.hold(after=1)
        asks.append(Asking(agent.stack.url, {"messages": [user("b")]}, path=f"{agent.path}/v1/chat/completions"))
        worker.wait_for_arrivals(1)
        found = agent.finalize()
        assert [ids_of(one) for one in found] == [first.chain]
        late = asks[0].answer()
        assert (late.status, late.headers["x-should-retry"]) == (409, "false")
        refused = agent.ask(user("c")).answer
        assert refused.status == 409
        assert "POST /sessions makes a new one" in refused.json()["error"]["message"]
        assert agent.finalize() == found
        assert agent.show()["phase"] == "finalized"

    def test_deleting_ends_what_is_in_flight_and_forgets(self, agent: AgentSession, asks: list[Asking]) -> None:
        worker = agent.stack.workers[0]
        worker.hold(after=1)
        asks.append(Asking(agent.stack.url, {"messages": [user("b")]}, path=f"{agent.path}/v1/chat/completions"))
        worker.wait_for_arrivals(1)
        answer = agent.stack.exchange("DELETE", agent.path)
        assert answer.status == 200, answer.content
        assert asks[0].answer().status == 409
        worker.wait_until_idle()
        assert agent.stack.get(agent.path).status == 404
        assert agent.stack.post("/sessions", {"session_id": agent.name}).status == 201

    def test_waiting_for_the_agent_to_be_done(self, agent: AgentSession) -> None:
        assert agent.stack.get(f"{agent.path}/complete?timeout_s=0").json()["completed"] is False
        done = agent.stack.post(f"{agent.path}/complete", {"reward_info": {"score": 1.5}})
        assert (done.status, done.json()["phase"]) == (200, "complete")
        assert agent.stack.get(f"{agent.path}/complete?timeout_s=5").json()["completed"] is True

    def test_rewards_go_to_the_session_and_to_branches(self, agent: AgentSession) -> None:
        one, other = agent.must(user("a"), says="b"), agent.must(user("a"), says="c")
        url = f"{agent.path}/reward_info"
        assert agent.stack.post(url, {"reward_info": {"task": "x", "score": 0}}).status == 200
        assert agent.stack.post(url, {"reward_info": {"score": 1}, "branch": other.generation}).status == 200
        assert agent.stack.post(url, {"reward_info": {}, "branch": "nobody"}).status == 404
        assert agent.stack.post(url, {}).status == 400
        assert [found["reward_info"] for found in agent.finalize()] == [
            {"task": "x", "score": 0},
            {"task": "x", "score": 1},
        ]
        assert one.answer.status == 200

    def test_a_response_budget_is_shown(self, whole: Stack) -> None:
        """As all that was given: it is why a branch ends."""
        for given in ({"response_budget": 12}, {"sampling_params": {"response_budget": 12}}):
            made = whole.post("/sessions", given).json()["session_id"]
            assert whole.get(f"/sessions/{made}").json()["response_budget"] == 12
        made = whole.post("/sessions", {}).json()["session_id"]
        assert "response_budget" not in whole.get(f"/sessions/{made}").json()

    def test_a_response_budget_ends_a_branch(self, whole: Stack) -> None:
        agent = AgentSession.make(whole, response_budget=12)
        first = agent.must(user("a"), says="one two three four five six seven eight nine ten")
        assert len(first.sampled) <= 12
        spent = agent.must(user("a"), first.message, user("b" * 50))
        choice = spent.answer.json()["choices"][0]
        assert (choice["finish_reason"], spent.record) == ("length", None)
        (only,) = agent.finalize()
        assert (ids_of(only), only["finish_reason"]) == (first.chain, "length")


class TestBadInput:
    """A refused request changes nothing."""

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            ({}, 400),
            ({"messages": []}, 400),
            ({"messages": "hello"}, 400),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400),
            ({"messages": [user("a")], "n": 0}, 400),
            ({"messages": [user("a")], "temperature": "hot"}, 400),
            ({"messages": [user("a")], "stop_regex": "("}, 400),
            ({"messages": [user("a")], "min_tokens": 3, "stop_token_ids": [10**9]}, 400),
            ({"messages": [user("a")], "token_ids_logprob": [[1], [2]]}, 400),
        ],
    )
    def test_it_is_a_400_in_openais_shape(self, agent: AgentSession, body: object, status: int) -> None:
        before = agent.show(tree=True)
        answer = agent.stack.post(f"{agent.path}/v1/chat/completions", body)
        assert answer.status == status, answer.content
        error = answer.json()["error"]
        assert error["message"]
        assert "type" in error
        assert "code" in error
        assert agent.show(tree=True) == before

    def test_a_context_that_is_too_long(self) -> None:
        with stack("qwen", styles=("incremental",), sessions={"max_context": 64}) as small:
            agent = AgentSession.make(small)
            answer = agent.ask(user("word " * 100)).answer
            assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert agent.show()["nodes"] == 0
            clipped = agent.must(user("word"), says="a " * 100)
            assert len(clipped.chain) == 64

    def test_a_worker_says_that_it_is_too_long(self) -> None:
        with stack("qwen", styles=("incremental",), context_length=64) as small:
            agent = AgentSession.make(small)
            answer = agent.ask(user("word " * 100)).answer
            assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert agent.show()["nodes"] == 0

    def test_unknown_sessions_and_places(self, agent: AgentSession) -> None:
        stack = agent.stack
        assert stack.post("/sessions/nobody/v1/chat/completions", {"messages": [user("a")]}).status == 404
        answer = stack.post("/sessions/nobody/v1/messages", {"messages": [user("a")], "max_tokens": 5})
        assert (answer.status, answer.json()["type"]) == (404, "error")
        assert stack.get("/sessions/nobody").status == 404
        assert stack.get(f"{agent.path}/nothing").status == 404
        assert stack.post("/sessions", {"session_id": agent.name}).status == 409
        assert stack.post("/sessions", {"session_id": "a/b"}).status == 400
        assert stack.post("/sessions", {"ttl_s": -1}).status == 400
        assert stack.get(f"{agent.path}/finalize").status == 405

    def test_worker_failures_are_reported_and_change_nothing(self, agent: AgentSession) -> None:
        worker = agent.stack.workers[0]
        worker.kill()
        answer = agent.ask(user("a")).answer
        worker.restart()
        assert answer.status in (502, 503)
        assert agent.show()["nodes"] == 0


class TestLargeExports:
    def test_probes_are_answered_meanwhile(self, agent: AgentSession) -> None:
        """A hundred branches of a long prompt; while they are sent, the router goes on doing other things."""
        prompt = user("word " * 20_000)
        first = agent.must(prompt, says="one")
        for number in range(60):
            agent.must(prompt, first.message, user(str(number)), says="x")
        exporting = Asking(agent.stack.url, {}, path=f"{agent.path}/finalize")
        probes = 0
        head = exporting.response  # it has begun, and most of it is still to be made
        while probes < 5:
            assert agent.stack.get("/liveness").status == 200
            probes += 1
        content = head.read()
        exporting.close()
        assert len(content) > 5_000_000
        assert len(json.loads(content)["trajectories"]) == 60


class TestTenants:
    def test_a_session_is_its_tenants_own(self) -> None:
        keys = ("a:key-a", "b:key-b")
        with stack("qwen", styles=("incremental",), server={"api_keys": keys, "admin_keys": ("root",)}) as made:

            def call(key: str, method: str, path: str, body: object = None) -> Answer:
                return made.exchange(method, path, body, {"authorization": f"Bearer {key}"})

            assert call("key-a", "POST", "/sessions", {"session_id": "s"}).status == 201
            asked = call("key-a", "POST", "/sessions/s/v1/chat/completions", {"messages": [user("a")], "max_tokens": 4})
            assert asked.status == 200, asked.content
            (record,) = made.workers[0].log
            assert record.rid == asked.headers["x-generation-id"], (
                "no other tenant can name it, so it needs no disguise"
            )
            for path in ("", "/trajectories", "/complete"):
                assert call("key-b", "GET", f"/sessions/s{path}").status == 404
            assert call("key-b", "DELETE", "/sessions/s").status == 404
            assert call("key-b", "POST", "/sessions/s/finalize", {}).status == 404
            assert call("key-b", "POST", "/sessions/s/v1/chat/completions", {"messages": [user("a")]}).status == 404
            assert call("key-b", "GET", "/sessions").json() == {"sessions": []}
            assert call("key-b", "POST", "/sessions", {"session_id": "s"}).status == 201
            assert made.exchange("GET", "/sessions/s", None, {}).status == 401
            anthropics = {"x-api-key": "key-a"}
            assert made.exchange("GET", "/sessions/s", None, anthropics).json()["num_generations"] == 1
            assert call("key-a", "GET", "/sessions/../workers").status in (403, 404)


class TestEveryField:
    """Ids, mask, logprobs and versions of a trajectory, each against the worker's log."""

    @pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
    @pytest.mark.parametrize("stream", [False, True])
    def test_they_are_the_workers_own(self, style: StreamStyle, stream: bool) -> None:
        with stack("qwen", styles=(style,)) as made:
            agent = AgentSession.make(made)
            messages: list[dict[str, Any]] = [user("Begin.")]
            ids: list[int] = []
            mask: list[int] = []
            logprobs: list[float] = []
            versions: list[str | None] = []
            for number in range(4):
                made.set_weight_version(str(number // 2))
                turn = agent.must(*messages, says=f"Reply {number}: naïve café 你好 🙂.", stream=stream)
                assert turn.record is not None
                assert turn.sent[: len(ids)] == ids
                context, sampled = len(turn.sent) - len(ids), turn.sampled
                ids = turn.chain
                mask += [0] * context + [1] * len(sampled)
                logprobs += [0.0] * context + list(turn.record.logprobs)
                versions += [None] * context + list(turn.record.versions)
                said = deltas(turn.answer)["content"] if stream else turn.message["content"]
                assert said == turn.record.text, "what a client reads is what the worker said"
                messages += [{"role": "assistant", "content": said}, user(f"And {number}?")]
            (only,) = agent.finalize()
            begin = len(only["prompt_ids"])
            assert ids_of(only) == ids
            assert only["response_mask"] == mask[begin:]
            assert only["response_logprobs"] == logprobs[begin:]
            spread: list[str | None] = [None] * len(only["response_ids"])
            for run in only["weight_versions"]:
                spread[run["start"] : run["end"]] = [run["version"]] * (run["end"] - run["start"])
            assert spread == versions[begin:]


class TestTokenIds:
    """`return_token_ids`, for clients that keep the ids themselves."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_they_are_what_the_worker_read_and_sampled(self, agent: AgentSession, stream: bool) -> None:
        first = agent.must(user("Hello"), says="Hi.", return_token_ids=True)
        assert self.told(first.answer.json()["choices"][0]) == (first.sent, first.sampled)
        options = {"stream": stream, "return_token_ids": True}
        second = agent.must(user("Hello"), first.message, user("How are you?"), says="Well.", **options)
        last = events(second.answer)[-1] if stream else second.answer.json()
        assert self.told(last["choices"][0]) == (second.sent, second.sampled)
        assert last["prompt_token_ids"] == second.sent
        assert second.sent[: len(first.chain)] == first.chain

    def test_each_sample_has_its_own(self, agent: AgentSession) -> None:
        turn = agent.must(user("Hello"), n=2, max_tokens=4, return_token_ids=True)
        found = [self.told(choice) for choice in turn.answer.json()["choices"]]
        records = agent.stack.workers[0].log[-2:]
        assert sorted(found) == sorted((list(one.input_ids), list(one.output_ids)) for one in records)

    def test_nothing_is_sampled_where_the_budget_is_spent(self, whole: Stack) -> None:
        agent = AgentSession.make(whole, response_budget=12)
        first = agent.must(user("a"), says="one two three four five six seven eight nine ten")
        spent = agent.must(user("a"), first.message, user("b" * 50), return_token_ids=True)
        sent, sampled = self.told(spent.answer.json()["choices"][0])
        assert (sent[: len(first.chain)], sampled) == (first.chain, [])

    @staticmethod
    def told(choice: dict[str, Any]) -> tuple[list[int], list[int]]:
        assert choice["token_ids"] == choice["response_token_ids"]
        return choice["prompt_token_ids"], choice["token_ids"]


class TestHistory:
    def test_what_a_template_rewrites_begins_a_branch_if_so_asked_and_loses_no_token(self) -> None:
        template = {"chat_template": str(templates.folder() / "qwen3.jinja"), "history": "template"}
        with stack("qwen", styles=("incremental",), sessions=template) as made:
            agent = AgentSession.make(made)
            first = agent.must(user("a"), says="<think>\nhm\n</think>\n\nOne.")
            second = agent.must(user("a"), first.message, user("b"), says="<think>\n\n</think>\n\nTwo.")
            # The template has dropped the thought: the turn is spliced, for all around it is what it was.
            assert second.sent[: len(first.chain)] == first.chain
            found = agent.finalize()
            assert [ids_of(one) for one in found] == [first.chain, second.chain]
            assert [sum(one["response_mask"]) for one in found] == [len(first.sampled), len(second.sampled)]
            assert found[1]["reasons"] == ["rewritten", "spliced"]
            assert found[1]["parent_branch"] == found[0]["branch"]

    def test_what_it_does_not_rewrite_goes_on(self) -> None:
        template = {"chat_template": str(templates.folder() / "qwen2_5.jinja"), "history": "template"}
        with stack("qwen", styles=("incremental",), sessions=template) as made:
            agent = AgentSession.make(made)
            first = agent.must(user("a"), says="One.")
            second = agent.must(user("a"), first.message, user("b"), says="Two.")
            assert second.sent[: len(first.chain)] == first.chain


class TestForcedCalls:
    def test_the_worker_gets_a_grammar_of_the_calls(self, whole: Stack) -> None:
        agent = AgentSession.make(whole, tools=TOOLS)
        turn = agent.must(user("a"), says=call_text("x"), tool_choice="required")
        assert turn.record is not None
        tag = json.loads(turn.record.body["sampling_params"]["structural_tag"])
        (only,) = tag["format"]["tags"]
        assert only["begin"] == '<tool_call>\n{"name": "look", "arguments": '
        assert tag["format"]["at_least_one"] is True
        assert tag["format"]["type"] == "tags_with_separator", "it allows no text beside the calls"
        assert tag["format"]["separator"] == "\n", "as the template writes several"
        assert turn.message["tool_calls"]

    def test_where_it_cannot_be_enforced_it_is_refused(self) -> None:
        with stack("qwen", styles=("incremental",), sessions={"tool_call_parser": "llama3"}) as made:
            agent = AgentSession.make(made, tools=TOOLS)
            answer = agent.ask(user("a"), tool_choice="required").answer
            assert (answer.status, answer.json()["error"]["param"]) == (400, "tool_choice")
            assert agent.show()["nodes"] == 0


class TestBinaryExports:
    """The same trajectories, as arrays."""

    def test_safetensors(self, agent: AgentSession) -> None:
        self._two_branches(agent)
        expected = agent.trajectories()
        answer = agent.stack.post(f"{agent.path}/finalize", {"format": "safetensors"})
        assert answer.status == 200, answer.content
        tensors = safetensors.numpy.load(answer.content)
        for number, one in enumerate(expected):
            for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs"):
                assert tensors[f"{number}.{name}"].tolist() == one[name]
        size = int.from_bytes(answer.content[:8], "little")
        metadata = json.loads(answer.content[8 : 8 + size])["__metadata__"]
        assert [json.loads(metadata[str(number)])["branch"] for number in range(2)] == [
            one["branch"] for one in expected
        ]

    def test_arrow(self, agent: AgentSession) -> None:
        self._two_branches(agent)
        expected = agent.trajectories()
        answer = agent.stack.get(f"{agent.path}/trajectories?format=arrow")
        assert answer.status == 200, answer.content
        table = pyarrow.ipc.open_stream(answer.content).read_all().to_pylist()
        for row, one in zip(table, expected, strict=True):
            assert {**json.loads(row.pop("json")), **row} == one

    def test_another_format_is_refused(self, agent: AgentSession) -> None:
        assert agent.stack.get(f"{agent.path}/trajectories?format=pickle").status == 400
        assert agent.stack.post(f"{agent.path}/finalize", {"format": "pickle"}).status == 400
        assert agent.show()["phase"] == "active"

    @staticmethod
    def _two_branches(agent: AgentSession) -> None:
        first = agent.must(user("a"), says="one")
        agent.must(user("a"), first.message, user("b"), says="two")
        agent.must(user("a"), first.message, user("c"), says="three")
