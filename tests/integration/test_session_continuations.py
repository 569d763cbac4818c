"""Turns that were cut and are gone on with, in published templates: what is asked behind, what is spliced, what is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.conftest import Stacks
from tests.support.agents import TOOLS, AgentSession, deltas, ids_of, tool, user
from tests.support.shapes import ChatModel

Opens = Callable[..., AgentSession]
SAME = {"chat_template_kwargs": {"x": 1}}
"""Options that change nothing that is rendered, and yet begin a branch of their own."""


@pytest.fixture(scope="module")
def opens(stacks: Stacks) -> Opens:
    """Opens sessions: one stack for each model and way with histories."""
    radix = {"tokenizer_backend": "huggingface"}
    return lambda name, history="keep", **given: AgentSession.make(stacks(name, radix, history=history), **given)


def said(message: dict[str, Any]) -> dict[str, Any]:
    """A reply whose thought the client dropped."""
    return {"role": "assistant", "content": message["content"] or ""}


def reasons(answer: Any) -> set[str]:
    return set(filter(None, answer.headers.get("x-radix-reasons", "").split(", ")))


def trained(agent: AgentSession) -> int:
    found = agent.finalize()
    assert all(one["exact"] for one in found), [one["reasons"] for one in found]
    return sum(sum(one["response_mask"]) for one in found)


@pytest.mark.parametrize(
    ("name", "history", "options"),
    [("qwen3", "template", {}), ("qwen2_5", "keep", SAME), ("llama3_1", "template", {})],
    ids=["rewritten", "other options", "append-only"],
)
def test_a_turn_that_was_continued_in_place_is_spliced(
    opens: Opens, name: str, history: str, options: dict[str, Any]
) -> None:
    """It was sampled in two turns, and is one message: it keeps all of its ids, and so does every turn behind it."""
    agent = opens(name, history)
    thought = "<think>\nHm.\n</think>\n\n" if name == "qwen3" else ""
    cut = agent.must(user("a"), says=thought + "Hello", finish="length")
    more = agent.must(user("a"), said(cut.message), says=" there", continue_final_message=True)
    assert more.sent == cut.chain
    whole = {"role": "assistant", "content": cut.message["content"] + more.message["content"]}
    messages, turns = [user("a"), whole, user("b")], [cut, more]
    agent.options = options
    for number in range(3):
        turns.append(agent.must(*messages, says=f"{thought}Reply {number}"))
        assert turns[-1].sent[: len(turns[-2].chain)] == turns[-2].chain
        assert "sentinel_collision" not in reasons(turns[-1].answer)
        messages += [said(turns[-1].message), user("c")]
    assert trained(agent) == sum(len(turn.sampled) for turn in turns)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
LOOKING = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"where": "there", "times": 2}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("first", "rest", "message"),
    [
        (
            f"{ANALYSIS}first I think",
            f" more.<|end|><|start|>assistant{FINAL}Done.",
            {"reasoning_content": " more.", "content": "Done."},
        ),
        (f"{ANALYSIS}hm<|end|><|start|>assistant{FINAL}Do", "ne.", {"content": "ne."}),
        (f"{FINAL}one tw", "o three", {"content": "o three"}),
        (
            "<|channel|>ana",
            f"lysis<|message|>hm<|end|><|start|>assistant{FINAL}Done.",
            {"reasoning_content": "hm", "content": "Done."},
        ),
        (f"{ANALYSIS}hm", f"<|end|><|start|>assistant{LOOKING}", {"tool_calls": ["look"]}),
        (f"{ANALYSIS}hm<|end|><|start|>assistant{LOOKING[:-7]}", LOOKING[-7:], {"tool_calls": ["look"]}),
    ],
    ids=["reasoning", "text", "text alone", "header", "before a call", "call"],
)
def test_a_reply_in_channels_is_read_on_where_it_was_cut(
    opens: Opens, first: str, rest: str, message: dict[str, Any], stream: bool
) -> None:
    agent = opens("gptoss", tools=TOOLS)
    cut = agent.must(user("q"), says=first, finish="length")
    answer = agent.ask(user("q"), cut.message, says=rest, continue_final_message=True, stream=stream).answer
    assert answer.status == 200, answer.content
    found = deltas(answer) if stream else answer.json()["choices"][0]["message"]
    calls = [call["function"]["name"] for call in found.get("tool_calls") or ()]
    shown = {"content": found.get("content"), "reasoning_content": found.get("reasoning_content"), "tool_calls": calls}
    assert {name: value for name, value in shown.items() if value} == message
    (only,) = agent.finalize()
    assert only["exact"]


def test_a_message_that_the_template_drops_is_continued(opens: Opens) -> None:
    """Gemma's template writes nothing of a thought that has only begun: there is no rendering to be compared with."""
    agent = opens("gemma4", "template")
    agent.stack.workers[0].script(ids=ChatModel("gemma4").encode("<|channel>"), finish="length")
    cut = agent.must(user("a"))
    more = agent.must(user("a"), cut.message, says="thought\nI see.<channel|>Yes", continue_final_message=True)
    assert more.sent == cut.chain
    assert trained(agent) == len(cut.sampled) + len(more.sampled)


@pytest.mark.parametrize("thought", ["think", "n", ">", "</", "Hm"])
def test_short_reasoning_is_not_found_in_the_tag_that_closes_it(opens: Opens, thought: str) -> None:
    agent = opens("qwen3")
    cut = agent.must(user("a"), says=f"<think>\n{thought}\n</think>\n\nIt is", finish="length")
    more = agent.must(user("a"), cut.message, says=" 42.", continue_final_message=True)
    assert more.sent == cut.chain
    assert (more.message["content"], more.message.get("reasoning_content")) == (" 42.", None)
    (only,) = agent.finalize()
    assert (only["messages"][-1]["reasoning_content"], only["messages"][-1]["content"]) == (thought, "It is 42.")


def test_nothing_but_short_reasoning_was_said(opens: Opens) -> None:
    agent = opens("qwen3")
    cut = agent.must(user("a"), says="<think>\n>\n</think>\n\n", finish="length")
    more = agent.must(user("a"), cut.message, says="Yes.", continue_final_message=True)
    assert (more.message["content"], more.message.get("reasoning_content")) == ("Yes.", None)


@pytest.mark.parametrize(
    ("history", "options"), [("keep", {}), ("template", {}), ("keep", SAME)], ids=["kept", "rewritten", "other options"]
)
def test_a_reply_that_ended_by_itself_is_continued_in_front_of_its_end(
    opens: Opens, history: str, options: dict[str, Any]
) -> None:
    """Whether its chain is appended to or spliced: the model is never asked behind `<|im_end|>`."""
    agent = opens("qwen3", history)
    done = agent.must(user("a"), says="<think>\nHm.\n</think>\n\nIt is")
    agent.options = options
    more = agent.must(user("a"), said(done.message), says=" 42.", continue_final_message=True)
    assert more.sent == done.chain[:-1]
    apart = history == "template" or bool(options)  # then the reply has a trajectory of its own, with that token
    assert ("left_out" in reasons(more.answer)) is not apart
    assert len(agent.finalize()) == 1 + apart


class TestCutBehindASpecialToken:
    """It vanishes from the text. What tells whether it ended the turn is which one it is, and why the model stopped."""

    MODEL = "llama3_1"

    def cut(self, agent: AgentSession, token: str) -> Any:
        model = ChatModel(self.MODEL)
        ids = [*model.encode("Hello"), *model.encode(token)]
        assert model.spell(ids[-1:]) == token
        agent.stack.workers[0].script(ids=ids, finish="length")
        found = agent.must(user("a"))
        assert (found.sampled, found.message["content"]) == (ids, "Hello")
        return found

    def test_the_turn_goes_on_behind_it(self, opens: Opens) -> None:
        agent = opens(self.MODEL)
        cut = self.cut(agent, "<|python_tag|>")
        more = agent.must(user("a"), said(cut.message), says="print(1)", continue_final_message=True)
        assert more.sent == cut.chain
        assert trained(agent) == len(cut.sampled) + len(more.sampled)

    def test_the_next_turn_stands_behind_it(self, opens: Opens) -> None:
        agent = opens(self.MODEL)
        cut = self.cut(agent, "<|python_tag|>")
        behind = agent.must(user("a"), said(cut.message), user("b"), says="x")
        assert behind.sent[: len(cut.chain)] == cut.chain
        assert (
            ChatModel(self.MODEL).spell(behind.sent[len(cut.chain) :]).startswith("<|eot_id|><|start_header_id|>user")
        )
        assert trained(agent) == len(cut.sampled) + len(behind.sampled)

    def test_the_one_that_ends_turns_is_left_out_at_a_limit_too(self, opens: Opens) -> None:
        agent = opens(self.MODEL)
        cut = self.cut(agent, "<|eot_id|>")
        more = agent.must(user("a"), said(cut.message), says=" there", continue_final_message=True)
        assert more.sent == cut.chain[:-1]


class TestExact:
    """What assistants wrote may differ from what a template makes of it: the ids are what the engine saw."""

    def test_reasoning_in_a_channel_that_the_template_drops(self, opens: Opens) -> None:
        agent, model = opens("gptoss"), ChatModel("gptoss")
        (stop,) = model.encode("<|return|>")
        hidden = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        messages: list[dict[str, Any]] = [user("a")]
        for text in (f"{hidden}<|channel|>final<|message|>Hello", "<|channel|>final<|message|>Yes"):
            agent.stack.workers[0].script(ids=[*model.encode(text), stop], finish=None)
            turn = agent.must(*messages, stop_token_ids=[stop])
            messages += [turn.message, user("b")]
        (only,) = agent.finalize()
        assert (only["exact"], only["num_turns"], ids_of(only)) == (True, 2, turn.chain)

    def test_reasoning_between_special_tokens_that_the_template_drops(self, opens: Opens) -> None:
        agent = opens("gemma4")
        first = agent.must(user("a"), says="<|channel>thought\nHm.<channel|>Hello")
        last = agent.must(user("a"), first.message, user("b"), says="Yes")
        (only,) = agent.finalize()
        assert (only["exact"], only["num_turns"], ids_of(only)) == (True, 2, last.chain)

    def test_reasoning_of_a_turn_that_was_never_sampled(self, opens: Opens) -> None:
        """A warm start in a loop of tools: the template writes that turn's thought at first, and drops it later."""
        agent = opens("qwen3", tools=TOOLS)
        function = {"name": "look", "arguments": "{}"}
        call = {"id": "c1", "type": "function", "function": function}
        warm = {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [call]}
        base = [user("a"), warm, tool(call, "nothing")]
        first = agent.must(*base, says="<think>\nOh.\n</think>\n\nNothing.")
        last = agent.must(*base, said(first.message), user("b"), says="<think>\nOh.\n</think>\n\nYes.")
        (only,) = agent.finalize()
        assert (only["exact"], only["num_turns"], ids_of(only)) == (True, 2, last.chain)

    def test_the_visible_part_of_the_only_token(self, opens: Opens) -> None:
        """A stop string cut it in the middle: its beginning is encoded again, and the turn goes on behind it."""
        agent = opens("qwen3")
        cut = agent.must(user("a"), says=" answer", stop=["wer"])
        assert (cut.message["content"], len(cut.sampled)) == (" ans", 1)
        more = agent.must(user("a"), said(cut.message), says="x", continue_final_message=True)
        assert more.sent[: len(cut.sent)] == cut.sent
        last = agent.finalize()[-1]
        assert (last["exact"], last["reasons"], ids_of(last)) == (True, ["cut_in_token"], more.chain)


@pytest.mark.parametrize("begun", ["<think>\nHm", "<think>\n", "<think>"])
def test_a_thought_that_a_client_begins_twice_is_begun_twice(opens: Opens, begun: str) -> None:
    """Best of N from one beginning: no sample is asked with what another one has thought."""
    agent = opens("qwen3")
    prefill = {"role": "assistant", "content": begun}
    cut = agent.must(user("a"), prefill, says=", maybe", finish="length", continue_final_message=True)
    assert (cut.message["content"] or "", cut.message["reasoning_content"].strip()) == ("", ", maybe")
    again = agent.must(user("a"), prefill, says=", no.\n</think>\n\nYes.", continue_final_message=True)
    assert again.sent == cut.sent
    echo = {**prefill, "reasoning_content": cut.message["reasoning_content"]}
    more = agent.must(user("a"), echo, says=" so.", continue_final_message=True)
    assert more.sent == cut.chain
    after = agent.must(user("a"), {**prefill, "content": f"{begun}Yes."}, user("b"), says="Well.")
    assert after.sent[: len(again.chain)] == again.chain
    found = agent.finalize()
    turns = (cut, again, more, after)
    assert sum(sum(one["response_mask"]) for one in found) == sum(len(turn.sampled) for turn in turns)
    assert {tuple(ids_of(one)) for one in found} == {tuple(more.chain), tuple(after.chain)}
    assert all(one["exact"] for one in found)


def test_the_same_without_a_session(opens: Opens) -> None:
    stack = opens("qwen3").stack
    prefill = {"role": "assistant", "content": "<think>\nHm"}
    body = {"messages": [user("begun twice"), prefill], "max_tokens": 4, "continue_final_message": True}
    sent = []
    for thought in (", maybe", ", no"):
        stack.workers[0].script(text=thought, finish="length")
        assert stack.post("/v1/chat/completions", body).status == 200
        sent.append(stack.workers[0].log[-1].input_ids)
    assert sent[0] == sent[1]
