"""What a session, or a chat without one, lost is told in its trajectories and retrievals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.agents import AgentSession, Turn, ids_of, user
from tests.support.chat_models import chat_model
from tests.support.shapes import ChatModel
from tests.support.stack import Stack, stack
from worker.engine.script import Fault


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), folder=chat_model("qwen2_5")) as made:
        yield made


@pytest.fixture
def agent(served: Stack) -> AgentSession:
    return AgentSession.make(served)


def reasons(turn: Turn) -> set[str]:
    return set(filter(None, turn.answer.headers.get("x-radix-reasons", "").split(", ")))


def chat(served: Stack, *messages: Any, says: str, fault: Fault | None = None, **headers: str) -> Turn:
    """A turn without a session."""
    served.workers[0].script(text=says, fault=fault)
    body = {"model": "m", "messages": list(messages)}
    answer = served.post("/v1/chat/completions", body, headers={k.replace("_", "-"): v for k, v in headers.items()})
    assert answer.status == 200, answer.content
    return Turn(answer, served.workers[0].log[-1])


def spoilt(agent: AgentSession, *messages: Any) -> Turn:
    """A reply whose text is not what its ids spell."""
    agent.stack.workers[0].script(text="Goodbye.", fault="wrong_text")
    return agent.must(*messages)


class TestTurns:
    def test_every_reply_of_a_trajectory_is_listed(self, agent: AgentSession) -> None:
        first = agent.must(user("a"), says="one")
        second = agent.must(user("a"), first.message, user("b"), says="two")
        (found,) = agent.finalize()
        assert [(turn["request_id"], turn["finish"], turn["version"]) for turn in found["turns"]] == [
            (first.generation, "stop", "default"),
            (second.generation, "stop", "default"),
        ]
        for turn, said in zip(found["turns"], (first, second), strict=True):
            assert found["response_ids"][turn["start"] : turn["end"]] == said.sampled
            assert found["response_mask"][turn["start"] : turn["end"]] == [1] * len(said.sampled)

    def test_replies_that_are_listed_and_there_are_no_complaint(self, agent: AgentSession) -> None:
        first = agent.must(user("a"), says="one")
        names = [first.generation, first.answer.json()["id"]]
        answer = agent.stack.post(f"{agent.path}/finalize", {"expect_request_ids": names}).json()
        assert answer["missing"] == []
        assert answer["trajectories"][0]["exact"]


class TestLostTurns:
    def lost(self, served: Stack, **headers: str) -> tuple[AgentSession, Turn, Turn]:
        """A session that was lost with its process, and another one that goes on with its messages."""
        before, after = AgentSession.make(served), AgentSession.make(served)
        first = before.must(user("a"), says="one")
        named = dict.fromkeys(headers, first.generation)
        return after, first, after.must(user("a"), first.message, user("b"), says="two", headers=named)

    @pytest.mark.parametrize("header", ["x-parent-generation", "x-radix-parent"])
    def test_a_parent_that_is_unknown(self, served: Stack, header: str) -> None:
        after, _, second = self.lost(served, **{header: "FIRST"})
        assert reasons(second) == {"unknown_parent"}
        (found,) = after.finalize()
        assert (found["exact"], found["reasons"]) == (False, ["unknown_parent"])
        assert [turn["request_id"] for turn in found["turns"]] == [second.generation]

    def test_a_parent_whose_tokens_are_there_is_not_unknown(self, served: Stack) -> None:
        """Its message was edited, or the options changed: it is found in another way, and nothing is missing."""
        for text, options in (("one", {"chat_template_kwargs": {"x": 1}}), ("one.", {}), ("on", {})):
            agent = AgentSession.make(served)
            first = agent.must(user("a"), says="one")
            named = {"x-parent-generation": first.generation}
            echo = {"role": "assistant", "content": text}
            second = agent.must(user("a"), echo, user("b"), says="two", headers=named, **options)
            assert "unknown_parent" not in reasons(second) or text == "on"
            assert all(one["exact"] for one in agent.finalize(expect_request_ids=[first.generation]))

    def test_a_reply_that_is_listed_and_missing(self, served: Stack) -> None:
        after, first, second = self.lost(served)
        body = {"expect_request_ids": [first.generation, second.generation]}
        answer = served.post(f"{after.path}/finalize", body).json()
        assert answer["missing"] == [first.generation]
        (found,) = answer["trajectories"]
        assert (found["exact"], found["reasons"]) == (False, ["unknown_reply"])

    def test_a_trajectory_in_which_all_was_sampled_here_lacks_nothing(self, served: Stack) -> None:
        agent = AgentSession.make(served)
        agent.must(user("a"), says="one")
        answer = served.post(f"{agent.path}/finalize", {"expect_request_ids": ["of another branch"]}).json()
        assert answer["missing"] == ["of another branch"]
        assert answer["trajectories"][0]["exact"]

    def test_a_chat_without_a_session_names_its_parent_too(self, served: Stack) -> None:
        """By the id that OpenAI's clients see."""
        ask = partial(chat, served)
        spell = ChatModel("qwen2_5").spell
        first = ask(user("Who?"), says="one")
        name = first.answer.json()["id"]
        known = ask(user("Who?"), first.message, user("b"), says="two", x_radix_parent=name)
        assert not reasons(known)
        found = served.retrieve(spell(known.chain), expect_request_ids=[name, known.answer.json()["id"]])
        assert (found["exact"], len(found["turns"])) == (True, 2)
        headers = {"x_radix_parent": name, "x_radix_namespace": "restarted"}
        lost = ask(user("Who?"), first.message, user("b"), says="two", **headers)
        assert reasons(lost) == {"unknown_parent"}
        found = served.retrieve(spell(lost.chain), namespace="restarted")
        assert (found["exact"], found["reasons"]) == (False, ["unknown_parent"])
        third = ask(
            user("Who?"), first.message, user("b"), lost.message, user("c"), says="three", x_radix_namespace="restarted"
        )
        found = served.retrieve(spell(third.chain), namespace="restarted")
        assert (found["exact"], found["reasons"], len(found["turns"])) == (False, ["unknown_parent"], 2)


class TestTokensLeftOut:
    def test_the_end_of_a_turn_that_is_continued_in_place_is_reported(self, agent: AgentSession) -> None:
        first = agent.must(user("a"), says="One.")
        more = {"continue_final_message": True, "add_generation_prompt": False}
        second = agent.must(user("a"), first.message, says=" And two.", **more)
        (found,) = agent.finalize()
        assert sum(found["response_mask"]) == len(first.sampled) + len(second.sampled) - 1
        assert (found["exact"], found["reasons"]) == (True, ["left_out"])
        assert reasons(second) == {"left_out"}
        whole, _ = agent.finalize(export_all_checkpoints=True)
        assert sum(whole["response_mask"]) == len(first.sampled)


class TestMismatchedReplies:
    """A reply whose ids do not spell its text is not continued: the text that the client saw is rendered instead."""

    def test_its_text_is_rendered_and_ended_once(self, agent: AgentSession) -> None:
        first = spoilt(agent, user("a"))
        second = agent.must(user("a"), first.message, user("b"), says="two")
        model = ChatModel("qwen2_5")
        assert model.spell(second.sent).count("<|im_end|>") == model.spell(first.sent).count("<|im_end|>") + 2
        assert f"{first.message['content']}<|im_end|>\n<|im_start|>user\nb<|im_end|>" in model.spell(second.sent)
        assert "engine_mismatch" in reasons(second)
        own, other = agent.finalize()
        assert (ids_of(own), own["exact"], own["reasons"]) == (first.chain, False, ["engine_mismatch"])
        assert (ids_of(other), other["exact"]) == (second.chain, False)
        assert "engine_mismatch" in other["reasons"]
        assert sum(other["response_mask"]) == len(second.sampled)

    def test_earlier_turns_keep_their_ids(self, agent: AgentSession) -> None:
        first = agent.must(user("a"), says="one")
        second = spoilt(agent, user("a"), first.message, user("b"))
        third = agent.must(user("a"), first.message, user("b"), second.message, user("c"), says="three")
        assert third.sent[: len(first.chain)] == first.chain
        assert ChatModel("qwen2_5").spell(third.sent).count("<|im_end|>\n<|im_end|>") == 0
        assert f"{second.message['content']}<|im_end|>\n" in ChatModel("qwen2_5").spell(third.sent)

    def test_what_a_chat_without_a_session_goes_on_with_is_not_exact(self, served: Stack) -> None:
        first = chat(served, user("Spoil it."), says="Goodbye.", fault="wrong_text")
        second = chat(served, user("Spoil it."), first.message, user("b"), says="two")
        assert "engine_mismatch" in reasons(second)
        found = served.retrieve(ChatModel("qwen2_5").spell(second.chain))
        assert (found["exact"], found["reasons"]) == (False, ["engine_mismatch"])
        assert [turn["request_id"] for turn in found["turns"]] == [second.generation]
