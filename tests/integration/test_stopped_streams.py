"""A client reads the beginning of a stream, leaves, and goes on at once with the words that it has read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import templates
from tests.support.agents import TOOLS, AgentSession, Turn, call_text, tool, user
from tests.support.asking import Asking, until
from tests.support.stack import Stack, stack

READS = "Hello there,"


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    """An orphan would go on for a minute."""
    sessions = {"chat_template": str(templates.folder() / "qwen2_5.jinja"), "orphan_grace": 60.0}
    with stack("qwen", styles=("incremental",), sessions=sessions) as made:
        yield made
        assert made.idle()


@pytest.fixture
def agent(served: Stack) -> Iterator[AgentSession]:
    yield AgentSession.make(served, tools=TOOLS)
    served.workers[0].forget_scripts()
    served.workers[0].release()


def letters(stack: Stack, text: str) -> list[int]:
    """A text in ids that no encoder would make of it."""
    return [id for letter in text for id in stack.spelling.encode_tail(letter)]


def read(
    agent: AgentSession, begins: str, *, rest: str = " my friend", **options: Any
) -> tuple[dict[str, Any], list[int]]:
    """Read the stream of a reply to "a" up to where the worker stops, and leave. Return the reply and its ids."""
    worker, ids = agent.stack.workers[0], letters(agent.stack, begins)
    worker.script(ids=[*ids, *letters(agent.stack, rest)], finish=None)
    worker.hold(after=len(ids))
    body = {"messages": [user("a")], "stream": True, "max_tokens": 1000, "tools": TOOLS, **options}
    asking = Asking(agent.stack.url, body, path=f"{agent.path}/v1/chat/completions")
    reply: dict[str, Any] = {"role": "assistant", "content": ""}
    while reply["content"] != begins and not reply.get("tool_calls"):
        event = asking.event()
        assert event is not None
        delta = event["choices"][0]["delta"]
        reply["content"] += delta.get("content") or ""
        if "tool_calls" in delta:
            reply["tool_calls"] = [
                {key: call[key] for key in ("id", "type", "function")} for call in delta["tool_calls"]
            ]
    worker.forget_scripts()
    asking.leave()
    return reply, ids


def begun(agent: AgentSession, turn: Turn) -> list[int]:
    """The prompt of the request before a turn."""
    (found,) = (one for one in agent.stack.workers[0].log[-2:] if one.input_ids != turn.sent)
    return found.input_ids


@pytest.mark.parametrize(
    ("echo", "kept"),
    [(READS, len(READS)), (f"{READS}\n", len(READS)), ("Hello", 5)],
    ids=["as it was", "padded", "cut"],
)
def test_what_was_read_keeps_its_ids(agent: AgentSession, echo: str, kept: int) -> None:
    _, ids = read(agent, READS)
    turn = agent.must(user("a"), {"role": "assistant", "content": echo}, user("b"), says="Yes.")
    chain = [*begun(agent, turn), *ids[:kept]]
    assert turn.sent[: len(chain)] == chain
    assert all(one["exact"] for one in agent.finalize())


def test_what_was_read_of_a_turn_that_is_continued_keeps_its_ids(agent: AgentSession) -> None:
    first = agent.must(user("a"), says="Well,", finish="length", stream=False)
    begun = {"role": "assistant", "content": first.message["content"]}
    _, ids = read(agent, READS, messages=[user("a"), begun], continue_final_message=True)
    echo = {"role": "assistant", "content": f"{begun['content']}{READS}"}
    turn = agent.must(user("a"), echo, user("b"), says="Yes.")
    chain = [*first.chain, *ids]
    assert turn.sent[: len(chain)] == chain
    assert all(one["exact"] for one in agent.finalize())


def test_a_call_that_was_read_keeps_its_ids(agent: AgentSession) -> None:
    reply, ids = read(agent, f"Look.{call_text('x')}")
    turn = agent.must(user("a"), reply, tool(reply["tool_calls"][0], "found"), says="Yes.")
    chain = [*begun(agent, turn), *ids]
    assert turn.sent[: len(chain)] == chain
    assert all(one["exact"] for one in agent.finalize())


@pytest.mark.parametrize(
    ("template", "before"), [("qwen2_5", None), ("qwen3", None), ("qwen3", "<think>\nOh.\n</think>\n\nWell.")]
)
def test_reasoning_that_was_read_keeps_its_ids(template: str, before: str | None) -> None:
    """More has been sampled when the client leaves: of that nothing is in what follows, nor of a reply with other reasoning."""
    sessions = {"chat_template": str(templates.folder() / f"{template}.jinja"), "reasoning_parser": "think"}
    with stack("qwen", styles=("incremental",), sessions=sessions) as made:
        agent, worker = AgentSession.make(made), made.workers[0]
        if before is not None:
            agent.must(user("a"), says=before)
        thought, rest = letters(made, "<think>\nHm.\n</think>\n\n"), letters(made, "Hello")
        worker.script(ids=[*thought, *rest, *letters(made, " my friend")], finish=None)
        worker.hold(after=len(thought) + len(rest))
        body = {"messages": [user("a")], "stream": True, "max_tokens": 1000}
        asking = Asking(made.url, body, path=f"{agent.path}/v1/chat/completions")
        said = ""
        while said != "Hello":
            event = asking.event()
            assert event is not None
            said += event["choices"][0]["delta"].get("content") or ""
        worker.forget_scripts()
        asking.leave()
        echo = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
        turn = agent.must(user("a"), echo, user("b"), says="Yes.")
        chain = [*begun(agent, turn), *thought]
        assert turn.sent[: len(chain)] == chain
        assert made.spelling.spell(turn.sent[len(chain) :], skip_special=False).text.startswith("<|im_end|>\n")
        assert all(one["exact"] for one in agent.finalize())


def test_an_orphan_is_kept_where_the_words_are_those_of_another_sample(agent: AgentSession) -> None:
    """Two clients want the best of two. One has its whole sample, and goes on; the other asks for the orphan again."""
    worker = agent.stack.workers[0]
    own = agent.must(user("a"), says="Hello", stream=False)
    read(agent, READS)
    agent.must(user("a"), own.message, user("b"), says="Yes.")
    agent.must(user("a"), {"role": "assistant", "content": "Hello\n"}, user("b"), says="Yes.")
    assert agent.show()["num_inflight_generations"] == 1
    worker.release()
    until(lambda: agent.show()["num_inflight_generations"] == 0, "the orphan never ended")
    assert {one["finish_reason"] for one in agent.finalize()} == {"stop", "length"}


@pytest.mark.parametrize(
    "messages",
    [
        [user("a"), {"role": "assistant", "content": "Other words."}, user("b")],
        [user("a"), {"role": "assistant", "content": ""}, user("b")],
        [user("b"), {"role": "assistant", "content": READS}, user("b")],
        [user("a"), user(READS)],
        [user("a")],
    ],
    ids=["other words", "no words", "another conversation", "said by the user", "the same prompt"],
)
def test_an_orphan_of_which_nothing_was_read_goes_on(agent: AgentSession, messages: list[dict[str, Any]]) -> None:
    read(agent, READS)
    agent.must(*messages, says="Yes.")
    assert agent.show()["num_inflight_generations"] == 1
    agent.stack.workers[0].release()
    until(lambda: agent.show()["num_inflight_generations"] == 0, "the orphan never ended")
    assert len(agent.finalize()) == 2
