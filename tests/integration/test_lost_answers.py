"""A reply that went out and was lost on the way: a library sends its request again, and gets the same reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.config import StoreConfig
from tests.support.agents import AgentSession, user
from tests.support.chat_models import chat_model
from tests.support.client import Answer
from tests.support.lives import Router
from tests.support.stack import Stack, events, stack
from worker.worker import EmbeddedWorker

Json = dict[str, Any]

FORMS: dict[str, Json] = {
    "chat/completions": {"messages": [user("hi")]},
    "responses": {"input": "hi"},
    "messages": {"messages": [user("hi")], "max_tokens": 50},
}
CALLS = [("chat/completions", True), ("responses", True), ("messages", True)]
CALLS += [("chat/completions", False), ("messages", False)]
"""Each dialect, and whether in a session."""
AGAIN = {"x-stainless-retry-count": "1"}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_think", "gptoss", "glm4moe"])
def served(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with stack("qwen", styles=("incremental",), folder=chat_model(request.param)) as made:
        yield made


@pytest.fixture
def agent(served: Stack) -> AgentSession:
    served.workers[0].forget_scripts()
    return AgentSession.make(served)


class Asks:
    """One request of a client, sent once or again; the worker would say another word each time."""

    def __init__(self, stack: Stack, form: str, path: str = "", **fields: Any) -> None:
        self.stack = stack
        self.path = f"{path}/v1/{form}"
        plain = {"chat_template_kwargs": {"enable_thinking": False}}  # no template opens a thought
        self.body = {"model": "m", **FORMS[form], **plain, **fields}

    def __call__(self, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        (worker,) = self.stack.workers
        worker.script(text=f"Word {worker.received}.")
        answer = self.stack.post(self.path, {**self.body, **fields}, headers=headers)
        worker.forget_scripts()
        return answer

    @property
    def sampled(self) -> int:
        return len(self.stack.workers[0].log)


def same(one: Answer, other: Answer) -> bool:
    """Every byte, and every header of a session."""
    kept = {name for name in one.headers if name.startswith("x-") and name != "x-request-id"} | {"content-type"}
    return (one.status, one.content) == (other.status, other.content) and all(
        one.headers[name] == other.headers.get(name) for name in kept
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("form", "session"), CALLS)
class TestSentAgain:
    def asks(self, agent: AgentSession, form: str, session: bool, stream: bool, **fields: Any) -> Asks:
        if not session:
            fields["seed"] = id(fields) % 2**31  # chats without a session share a memory: no other test's request
        return Asks(agent.stack, form, agent.path if session else "", stream=stream, **fields)

    def test_the_same_body_gets_the_same_reply(
        self, agent: AgentSession, form: str, session: bool, stream: bool
    ) -> None:
        asks = self.asks(agent, form, session, stream)
        first = asks()
        assert first.status == 200, first.content
        before = asks.sampled
        for count in "123":
            assert same(first, asks({"x-stainless-retry-count": count}))
        assert asks.sampled == before, "one sample"
        assert not same(first, asks()), "without a word of a retry it is another request"
        assert not same(first, asks({"x-stainless-retry-count": "0"}))
        if session:
            assert agent.show()["num_generations"] == 3

    def test_the_same_idempotency_key_does(self, agent: AgentSession, form: str, session: bool, stream: bool) -> None:
        asks = self.asks(agent, form, session, stream)
        key = {"idempotency-key": f"key of {id(asks)}"}
        first = asks(key)
        before = asks.sampled
        assert same(first, asks(key))
        assert asks.sampled == before
        assert not same(first, asks({"idempotency-key": f"other of {id(asks)}"}))
        assert not same(first, asks(key, temperature=0.5)), "another body is another request"

    def test_what_was_continued_has_arrived(self, agent: AgentSession, form: str, session: bool, stream: bool) -> None:
        """The conversation went on, so the same request again means another sample."""
        asks = self.asks(agent, form, session, stream)
        first = asks()
        said = {"role": "assistant", "content": _text(form, stream, first)}
        listed = asks.body.get("messages") or [user("hi")]
        name = "input" if form == "responses" else "messages"
        onward = Asks(agent.stack, form, agent.path if session else "", **{name: [*listed, said, user("go on")]})
        second = onward()
        assert int(second.headers["x-radix-reused-tokens"]) > 0
        before = asks.sampled
        assert not same(first, asks(AGAIN))
        assert asks.sampled == before + 1
        assert same(second, onward(AGAIN)), "that one is the newest, and may be lost"

    def test_a_failure_has_no_reply(self, agent: AgentSession, form: str, session: bool, stream: bool) -> None:
        """Of two equal requests one failed: its repetition gets a sample of its own."""
        asks = self.asks(agent, form, session, stream)
        first = asks()
        (worker,) = agent.stack.workers
        worker.script(fault="http_503")
        assert agent.stack.post(asks.path, asks.body).status >= 500
        second = asks(AGAIN)
        assert (second.status, same(first, second)) == (200, False)
        assert same(first, asks(AGAIN)) or same(second, asks(AGAIN))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("session", [False, True])
def test_all_of_several_samples_come_again(agent: AgentSession, session: bool, stream: bool) -> None:
    path = agent.path if session else ""
    options: Json = {"n": 3, "max_tokens": 9, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    asks = Asks(agent.stack, "chat/completions", path, stream=stream, **options)
    first = asks()
    assert first.status == 200, first.content
    before = asks.sampled
    assert same(first, asks(AGAIN))
    assert asks.sampled == before


def _text(form: str, stream: bool, answer: Answer) -> str:
    if not stream:
        body = answer.json()
        if form == "chat/completions":
            found: str = body["choices"][0]["message"]["content"]
        elif form == "messages":
            found = body["content"][-1]["text"]
        else:
            found = body["output"][-1]["content"][0]["text"]
        return found
    if form == "chat/completions":
        return "".join(choice["delta"].get("content") or "" for one in events(answer) for choice in one["choices"])
    lines = [json.loads(line[6:]) for line in answer.content.split(b"\n") if line.startswith(b"data: {")]
    kind, key = ("content_block_delta", "text") if form == "messages" else ("response.output_text.delta", "")
    deltas = [one["delta"] for one in lines if one["type"] == kind]
    return "".join(one.get(key, "") if key else one for one in deltas)


def test_the_export_has_one_sample(agent: AgentSession) -> None:
    asks = Asks(agent.stack, "chat/completions", agent.path)
    first = asks()
    asks(AGAIN)
    (only,) = agent.finalize()
    assert only["branch"] == first.headers["x-generation-id"]
    assert asks(AGAIN).status == 409, "no turn of a session that is over"


def test_a_session_that_has_the_name_later_is_another(served: Stack) -> None:
    served.post("/sessions", {"session_id": "again"})
    asks = Asks(served, "chat/completions", "/sessions/again")
    first = asks()
    served.exchange("DELETE", "/sessions/again")
    served.post("/sessions", {"session_id": "again"})
    assert not same(first, asks(AGAIN))
    served.exchange("DELETE", "/sessions/again")


def test_another_session_and_another_namespace_have_their_own(agent: AgentSession) -> None:
    other = AgentSession.make(agent.stack)
    first = Asks(agent.stack, "chat/completions", agent.path)()
    assert not same(first, Asks(agent.stack, "chat/completions", other.path)(AGAIN))
    chat = Asks(agent.stack, "chat/completions", seed=99)
    open_one = chat({"x-radix-namespace": "one"})
    assert not same(open_one, chat({"x-radix-namespace": "two", **AGAIN}))
    assert same(open_one, chat({"x-radix-namespace": "one", **AGAIN}))


def test_a_reply_that_another_router_continued_has_arrived(tmp_path: Path) -> None:
    """Replies are kept in the memory of the router that sent them: another one, and a later life, sample again."""
    store = StoreConfig(url=f"sqlite:{tmp_path}/store.db")
    with EmbeddedWorker(chat_model("qwen3")) as worker:
        first, second = (Router(worker, store, folder=chat_model("qwen3")) for _ in range(2))
        try:
            agent = AgentSession.make(first.stack)
            here = Asks(first.stack, "chat/completions", agent.path)
            there = Asks(second.stack, "chat/completions", agent.path)
            reply = here()
            assert same(reply, here(AGAIN))
            said = reply.json()["choices"][0]["message"]
            there(messages=[user("hi"), said, user("go on")])
            assert not same(reply, here(AGAIN))
            newest = here(AGAIN)
            first.restart()
            here.stack = first.stack
            assert not same(newest, here(AGAIN))
        finally:
            for router in (first, second):
                router.stop()
