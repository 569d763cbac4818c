"""`x-router-affinity`: one word for a conversation, by which a load balancer may keep it at one router."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub import affinity
from router.config import StoreConfig
from tests.support.chat_models import chat_model
from tests.support.stack import Stack, stack

HEADER = "x-router-affinity"


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), folder=chat_model("qwen3")) as made:
        yield made


def generate(served: Stack, text: str, headers: dict[str, str] | None = None, **more: Any) -> tuple[str, str]:
    """The text with the reply behind it, and the word."""
    body = {"text": text, "sampling_params": {"max_new_tokens": 6}, **more}
    reply = served.generate(body, headers=headers)
    last = reply.body[-1] if more.get("stream") else reply.body
    return text + last["text"], reply.answer.headers[HEADER]


def chat(served: Stack, messages: list[Any], path: str = "/v1/chat/completions", **headers: str) -> tuple[Any, str]:
    body = {"model": "m", "messages": messages, "max_tokens": 6}
    answer = served.post(path, body, headers=headers)
    assert answer.status == 200, answer.content
    found = answer.json()
    said = found["choices"][0]["message"]["content"] if "choices" in found else found["content"]
    return {"role": "assistant", "content": said or "."}, answer.headers[HEADER]


class TestTexts:
    def test_all_turns_have_one_word_although_the_client_does_not_echo_it(self, served: Stack) -> None:
        """Also in streams, of which only the head can have it, for edited replies, ids and retrievals."""
        text, word = generate(served, "one conversation: ")
        for turn in range(4):
            text, again = generate(served, f"{text}\nobservation {turn}\n", stream=turn % 2 == 1)
            assert again == word
        _, edited = generate(served, text[:-1] + "#, and on")
        assert edited == word
        assert served.post("/retrieve_from_text", {"text": text}).headers[HEADER] == word
        ids = served.retrieve(text)["tokens"]
        reply = served.generate({"input_ids": [*ids, 20], "sampling_params": {"max_new_tokens": 2}})
        assert reply.answer.headers[HEADER] == word

    def test_samples_of_one_prompt_have_one_word_and_other_prompts_others(self, served: Stack) -> None:
        words = [generate(served, "a group: ")[1] for _ in range(4)]
        assert len(set(words)) == 1
        assert len({generate(served, f"task {number}: ")[1] for number in range(20)}) == 20
        system = "You are helpful. " * 200  # what all share does not make them one
        assert len({generate(served, f"{system}task {number}: ")[1] for number in range(5)}) == 5

    def test_it_stays_as_sent_if_it_is_one_word(self, served: Stack) -> None:
        own = generate(served, "mine: ")[1]
        assert generate(served, "mine: ", {HEADER: "rollout-17.a_b~c"})[1] == "rollout-17.a_b~c"
        for odd in ("", "x" * 129, "two words", "a,b", "a;b", "\xe9"):
            assert generate(served, "mine: ", {HEADER: odd})[1] == own

    def test_another_namespace_has_another_word(self, served: Stack) -> None:
        """Else a tenant could see whether another one asks the same."""
        here = generate(served, "asked by two: ")[1]
        assert generate(served, "asked by two: ", {"x-radix-namespace": "other"})[1] != here

    def test_completions_have_that_of_their_text(self, served: Stack) -> None:
        word = generate(served, "a completion: ")[1]
        answer = served.post("/v1/completions", {"model": "m", "prompt": "a completion: ", "max_tokens": 3})
        assert answer.headers[HEADER] == word


def test_another_router_over_the_same_store_answers_the_same_word(tmp_path: Path) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path}")
    with stack("qwen", styles=("cumulative",), store=store) as first:
        text, word = generate(first, "a long way: ")
        text, _ = generate(first, text + "\nmore\n")
    with stack("qwen", styles=("cumulative",), store=store) as second:
        assert generate(second, text + "\nmore\n")[1] == word
        assert second.post("/retrieve_from_text", {"text": text}).headers[HEADER] == word


class TestChats:
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
    def test_without_a_session_all_turns_have_one_word(self, served: Stack, path: str) -> None:
        messages = [{"role": "user", "content": f"Hello at {path}"}]
        reply, word = chat(served, messages, path)
        for turn in range(2):
            messages += [reply, {"role": "user", "content": f"more {turn}"}]
            reply, again = chat(served, messages, path)
            assert again == word
        assert chat(served, [{"role": "user", "content": "Another"}], path)[1] != word
        assert chat(served, messages, path, **{HEADER: "mine"})[1] == "mine"
        assert chat(served, messages, path, **{"x-radix-namespace": "other"})[1] != word

    def test_in_a_session_it_is_the_sessions_id_which_the_url_has_too(self, served: Stack) -> None:
        made = served.post("/sessions", {})
        session = made.json()["session_id"]
        root = f"/sessions/{session}"
        assert made.headers[HEADER] == session
        messages = [{"role": "user", "content": "Hello"}]
        assert chat(served, messages, f"{root}/v1/chat/completions")[1] == session
        assert chat(served, messages, f"{root}/v1/messages")[1] == session
        assert chat(served, messages, "/v1/chat/completions", **{"x-session-id": session})[1] == session
        assert chat(served, messages, f"{root}/v1/chat/completions", **{HEADER: "mine"})[1] == "mine"
        stream = served.post(
            f"{root}/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 4, "stream": True}
        )
        assert stream.headers[HEADER] == session
        assert served.get(root).headers[HEADER] == session
        assert served.post(f"{root}/finalize", {}).headers[HEADER] == session


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


@given(st.lists(ROLES, min_size=1, max_size=6), st.lists(ROLES, max_size=6))
def test_what_is_said_behind_the_first_reply_does_not_count(opening: list[str], more: list[str]) -> None:
    def said(roles: list[str]) -> list[dict[str, Any]]:
        return [{"role": role, "content": str(number)} for number, role in enumerate(roles)]

    opening.append("user")
    begun = said([*opening, "assistant"])
    word = affinity.of_chat(("t",), begun)
    assert affinity.of_chat(("t",), said([*opening, "assistant", *more])) == word
    assert affinity.of_chat(("u",), begun) != word
