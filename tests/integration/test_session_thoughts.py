"""Turns that were cut within a thought, and are gone on with: what is sampled then is a thought, until it closes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import templates
from tests.support.agents import TOOLS, AgentSession, deltas, ids_of, system, tool, user
from tests.support.chat_models import chat_model
from tests.support.shapes import ChatModel
from tests.support.stack import Stack, stack

HUGGINGFACE = {"tokenizer_backend": "huggingface"}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_think"])
def thinking(request: pytest.FixtureRequest) -> Iterator[tuple[Stack, str]]:
    """A stack, and what its model samples to open a thought: nothing where the template does it."""
    template = {"chat_template": str(templates.folder() / f"{request.param}.jinja")}
    with stack("qwen", styles=("incremental",), sessions=template) as made:
        yield made, "<think>\n" if request.param == "qwen3" else ""
        assert made.idle()


@pytest.fixture
def opening(thinking: tuple[Stack, str]) -> str:
    return thinking[1]


@pytest.fixture
def agent(thinking: tuple[Stack, str]) -> Iterator[AgentSession]:
    made = AgentSession.make(thinking[0])
    yield made
    thinking[0].workers[0].forget_scripts()


def parts(message: dict[str, Any]) -> tuple[str, str]:
    return message.get("reasoning_content") or "", message["content"] or ""


def joined(*messages: dict[str, Any]) -> dict[str, Any]:
    """As a client puts pieces of one turn together."""
    reasoning, content = ("".join(pieces) for pieces in zip(*map(parts, messages), strict=True))
    return {"role": "assistant", "content": content, "reasoning_content": reasoning}


class TestCutInAThought:
    @pytest.mark.parametrize("stream", [False, True])
    def test_the_rest_of_the_reasoning_is_reasoning(self, agent: AgentSession, opening: str, stream: bool) -> None:
        cut = agent.must(user("a"), says=f"{opening}First I", finish="length")
        assert parts(cut.message) == ("First I", "")
        more = agent.must(
            user("a"), cut.message, says=" look.\n</think>\n\nHere.", continue_final_message=True, stream=stream
        )
        assert more.sent == cut.chain
        reply = deltas(more.answer) if stream else more.message
        assert parts(reply) == (" look.", "Here.")
        whole = joined(cut.message, reply)
        after = agent.must(user("a"), whole, user("b"), says=f"{opening}\n</think>\n\nYes.")
        assert after.sent[: len(more.chain)] == more.chain
        (only,) = agent.finalize()
        assert ids_of(only) == after.chain
        assert parts(only["messages"][1]) == ("First I look.", "Here.")
        assert only["num_turns"] == 3

    def test_it_may_be_cut_again_and_the_client_may_drop_it(self, agent: AgentSession, opening: str) -> None:
        """The tokens say where it stands, not the echo."""
        chain: list[int] = []
        says = [f"{opening}One\n\n", "two\n", "\nthree\n</think>\n\nFour", " five."]
        expected = [("One\n\n", ""), ("two\n", ""), ("\nthree", "Four"), ("", " five.")]
        content = ""
        for text, found in zip(says, expected, strict=True):
            behind = [{"role": "assistant", "content": content}] if chain else []
            turn = agent.must(
                user("a"), *behind, says=text, finish="length", **({"continue_final_message": True} if chain else {})
            )
            assert not chain or turn.sent == chain
            assert parts(turn.message) == found
            chain = turn.chain
            content += found[1]
        (only,) = agent.finalize()
        assert ids_of(only) == chain
        assert parts(only["messages"][1]) == ("One\n\ntwo\n\nthree", "Four five.")

    def test_it_is_cut_right_behind_the_tag_that_opens_it(self, agent: AgentSession, opening: str) -> None:
        cut = agent.must(user("a"), says=opening or "\n", finish="length")
        assert parts(cut.message) == ("", "")
        more = agent.must(user("a"), cut.message, says="Hm.\n</think>\n\nYes.", continue_final_message=True)
        assert more.sent == cut.chain
        assert parts(more.message) == ("Hm.", "Yes.")

    def test_it_is_cut_right_behind_the_tag_that_closes_it(self, agent: AgentSession, opening: str) -> None:
        cut = agent.must(user("a"), says=f"{opening}Hm.\n</think>", finish="length")
        assert parts(cut.message) == ("Hm.", "")
        more = agent.must(user("a"), cut.message, says="\n\nHm.", finish="length", continue_final_message=True)
        assert parts(more.message) == ("", "Hm.")
        last = agent.must(user("a"), joined(cut.message, more.message), says=" Yes.", continue_final_message=True)
        assert last.sent == more.chain
        assert parts(last.message) == ("", " Yes.")
        (only,) = agent.finalize()
        assert parts(only["messages"][1]) == ("Hm.", "Hm. Yes.")

    def test_a_call_behind_the_reasoning_is_a_call(self, agent: AgentSession, opening: str) -> None:
        agent.tools = TOOLS
        qwen = '<tool_call>\n{"name": "look", "arguments": {"where": "x"}}\n</tool_call>'
        coder = "<tool_call>\n<function=look>\n<parameter=where>\nx\n</parameter>\n</function>\n</tool_call>"
        cut = agent.must(user("a"), says=f"{opening}I call", finish="length")
        says = f" it: {qwen}\n</think>\n\n{qwen if opening else coder}"
        more = agent.must(user("a"), cut.message, says=says, continue_final_message=True)
        assert parts(more.message) == (f" it: {qwen}", "")
        (call,) = more.message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"where": "x"}
        (only,) = agent.finalize()
        assert parts(only["messages"][1])[0] == f"I call it: {qwen}"

    @pytest.mark.parametrize("closed", [False, True])
    def test_a_forced_call_waits_for_the_end_of_the_reasoning(
        self, agent: AgentSession, opening: str, closed: bool
    ) -> None:
        agent.tools = TOOLS
        cut = agent.must(user("a"), says=f"{opening}I call{'</think>' if closed else ''}", finish="length")
        more = agent.must(user("a"), cut.message, says=".", continue_final_message=True, tool_choice="required")
        assert more.record is not None
        tag = json.loads(more.record.body["sampling_params"]["structural_tag"])
        assert tag["format"]["type"] == ("tags_with_separator" if closed else "sequence")

    def test_several_samples_go_on_from_one_cut(self, agent: AgentSession, opening: str) -> None:
        cut = agent.must(user("a"), says=f"{opening}First", finish="length")
        for number in range(3):
            agent.stack.workers[0].script(text=f" {number}\n</think>\n\n{number}.")
        answer = agent.must(user("a"), cut.message, continue_final_message=True, n=3).answer
        found = [parts(choice["message"]) for choice in answer.json()["choices"]]
        assert sorted(found) == [(f" {number}", f"{number}.") for number in range(3)]


class TestPrefills:
    """Words of the client's own that end within a thought, or behind one."""

    def test_content_that_ends_within_reasoning(self, agent: AgentSession) -> None:
        prefill = {"role": "assistant", "content": "<think>\nFirst"}
        turn = agent.must(user("a"), prefill, says=" this.\n</think>\n\nYes.", continue_final_message=True)
        assert agent.stack.spelling.text_of_request(turn.sent).endswith("<think>\nFirst")
        assert parts(turn.message) == (" this.", "Yes.")

    def test_it_is_cut_once_more(self, agent: AgentSession) -> None:
        prefill = {"role": "assistant", "content": "<think>\nFirst"}
        cut = agent.must(user("a"), prefill, says=" this", finish="length", continue_final_message=True)
        assert parts(cut.message) == (" this", "")
        echo = joined(prefill, cut.message)
        more = agent.must(user("a"), echo, says=" and\n</think>\n\nYes.", continue_final_message=True)
        assert more.sent == cut.chain
        assert parts(more.message) == (" and", "Yes.")
        (only,) = agent.finalize()
        assert parts(only["messages"][1])[0] == " this and"

    def test_reasoning_that_the_template_closes(self, agent: AgentSession) -> None:
        prefill = {"role": "assistant", "content": "The answer", "reasoning_content": "Easy."}
        turn = agent.must(user("a"), prefill, says=" is 4.", continue_final_message=True)
        assert parts(turn.message) == ("", " is 4.")
        (only,) = agent.finalize()
        assert parts(only["messages"][1]) == ("Easy.", "The answer is 4.")

    def test_content_without_reasoning(self, agent: AgentSession) -> None:
        prefill = {"role": "assistant", "content": "The answer"}
        turn = agent.must(user("a"), prefill, says=" is <think> or 4.", continue_final_message=True)
        assert parts(turn.message) == ("", " is <think> or 4.")


class TestAnthropics:
    def test_a_thinking_block_is_continued(self, agent: AgentSession, opening: str) -> None:
        worker, url = agent.stack.workers[0], f"{agent.path}/v1/messages"
        worker.script(text=f"{opening}First I", finish="length")
        body: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": [user("a")]}
        cut = agent.stack.post(url, body)
        assert cut.status == 200, cut.content
        (block,) = cut.json()["content"]
        assert (block["type"], block["thinking"]) == ("thinking", "First I")
        worker.script(text=" look.\n</think>\n\nHere.")
        body["messages"].append({"role": "assistant", "content": cut.json()["content"]})
        more = agent.stack.post(url, body)
        assert more.status == 200, more.content
        assert [block.get("thinking") or block.get("text") for block in more.json()["content"]] == [" look.", "Here."]
        (only,) = agent.finalize()
        assert parts(only["messages"][1]) == ("First I look.", "Here.")


class TestBehindATool:
    """There a template may write another end of the prompt than behind a greeting: what counts is the prompt that was sent."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_no_reasoning_is_begun_there(self, stream: bool) -> None:
        model = ChatModel("deepseekv3")
        with stack("qwen", styles=("incremental",), folder=chat_model("deepseekv3"), radix=HUGGINGFACE) as made:
            agent = AgentSession.make(made, tools=TOOLS)
            call = model.calls("look", "where", "here")
            asked = agent.must(user("a"), says=f"Hm.\n</think>\n\n{call}").message
            assert parts(asked) == ("Hm.", "")
            behind = [user("a"), asked, tool(asked["tool_calls"][0], "42")]
            for says, content, calls in (("It is 42.", "It is 42.", 0), (call, "", 1)):
                answer = agent.must(*behind, says=says, stream=stream).answer
                reply = deltas(answer) if stream else answer.json()["choices"][0]["message"]
                assert parts(reply) == ("", content)
                assert len(reply.get("tool_calls") or ()) == calls

    def test_reasoning_is_begun_there_and_nowhere_else(self) -> None:
        template = {"chat_template": str(templates.folder() / "gemma4_v5.jinja")}
        with stack(
            "qwen", styles=("incremental",), folder=chat_model("gemma4"), radix=HUGGINGFACE, sessions=template
        ) as made:
            thinks = {"chat_template_kwargs": {"enable_thinking": True}}
            agent = AgentSession.make(made, tools=TOOLS, options=thinks)
            asked = agent.must(user("a"), says='<|tool_call>call:look{where:<|"|>x<|"|>}<tool_call|>').message
            assert parts(asked) == ("", "")
            (call,) = asked["tool_calls"]
            reply = agent.must(user("a"), asked, tool(call, "42"), says="It says 42.<channel|>It is 42.").message
            assert parts(reply) == ("It says 42.", "It is 42.")


def test_a_template_that_refuses_a_conversation_without_a_system_prompt(tmp_path: Path) -> None:
    """Nobody is asked what it writes behind a greeting alone: a conversation that it takes is served."""
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{%- if messages[0].role != 'system' %}{{ raise_exception('a system prompt must come first') }}{% endif %}"
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
    )
    sessions = {"chat_template": str(template), "reasoning_parser": "think"}
    with stack("qwen", styles=("incremental",), sessions=sessions) as made:
        agent = AgentSession.make(made)
        opening = [system("s"), user("a")]
        first = agent.must(*opening, says="Hm.\n</think>\n\nHi")
        assert parts(first.message) == ("Hm.", "Hi")
        last = agent.must(*opening, first.message, user("b"), says="So.\n</think>\n\nYes")
        assert parts(last.message) == ("So.", "Yes")
        assert last.sent[: len(first.chain)] == first.chain
        (only,) = agent.finalize()
        assert (only["exact"], ids_of(only)) == (True, last.chain)
