"""A function of the user's own for `--session-match` that fails: the error names it, and nothing is kept of the turn."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from router.config import StoreConfig
from tests.support.agents import AgentSession, ids_of, user
from tests.support.stack import Stack, stack

PLACE = f"{__name__}:picky"


def picky(message: dict[str, Any]) -> Hashable:
    if message["content"] == "odd":
        raise LookupError("this is odd")
    if message["content"] == "list":
        return [message["role"]]  # type: ignore[return-value]
    return message["role"], message["content"]


def shouting(message: dict[str, Any]) -> Hashable:
    return message["role"], message["content"].lower()


def router(folder: Path) -> AbstractContextManager[Stack]:
    store = StoreConfig(url=f"sqlite:{folder / 'store.sqlite3'}")
    return stack("qwen", styles=("incremental",), sessions={"match": PLACE}, store=store)


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[Stack]:
    with router(tmp_path) as made:
        yield made


def assert_it_names_the_function(error: dict[str, Any], log: str, kind: str) -> None:
    assert error["type"] == "session_match_failed"
    assert PLACE in error["message"]
    assert kind in error["message"]
    assert "Traceback" in log


@pytest.mark.parametrize(("says", "kind"), [("odd", "LookupError"), ("list", "TypeError")])
def test_a_message_for_which_it_fails_is_refused_before_a_worker_is_asked(
    whole: Stack, caplog: pytest.LogCaptureFixture, says: str, kind: str
) -> None:
    agent = AgentSession.make(whole)
    refused = agent.ask(user(says))
    assert refused.answer.status == 500
    assert refused.answer.headers["x-should-retry"] == "false"
    assert refused.record is None
    assert_it_names_the_function(refused.answer.json()["error"], caplog.text, kind)
    open_chat = whole.post("/v1/chat/completions", {"model": "m", "messages": [user(says)]})
    assert (open_chat.status, open_chat.json()["error"]["type"]) == (500, "session_match_failed")
    count = whole.post("/v1/messages/count_tokens", {"model": "m", "messages": [user(says)]})
    assert (count.status, count.json()["error"]["type"]) == (500, "api_error")
    assert agent.show()["nodes"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_for_which_it_fails_is_not_in_the_session_nor_in_its_log(
    whole: Stack, tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """Other routers replay the log: a turn in it that cannot be replayed would close the session to all of them."""
    agent = AgentSession.make(whole)
    first = agent.must(user("a"), says="one")
    failed = agent.ask(user("a"), first.message, user("b"), says="odd", stream=stream)
    if stream:
        assert b"session_match_failed" in failed.answer.content
        assert b"[DONE]" not in failed.answer.content
    else:
        assert failed.answer.status == 500
        assert_it_names_the_function(failed.answer.json()["error"], caplog.text, "LookupError")
    assert agent.show()["tokens"] == len(first.chain)
    with router(tmp_path) as other:
        (only,) = AgentSession(other, agent.name).finalize()
    assert ids_of(only) == first.chain


def test_an_open_chat_goes_on_after_a_reply_for_which_it_failed(whole: Stack) -> None:
    body = {"model": "m", "messages": [user("a")]}
    (worker,) = whole.workers
    worker.script(text="odd")
    assert whole.post("/v1/chat/completions", body).json()["error"]["type"] == "session_match_failed"
    worker.script(text="one")
    assert whole.post("/v1/chat/completions", body).status == 200


def test_a_prompt_has_the_words_of_its_own_request_whatever_counts_as_the_same() -> None:
    """What is new in a request is encoded from that request. An earlier one with the same keys may have had other words."""
    with stack("qwen", styles=("incremental",), sessions={"match": f"{__name__}:shouting"}) as made:
        agent = AgentSession.make(made)
        said: list[dict[str, Any]] = []
        for words in ("hello", "why"):
            for asked in (words, words.upper()):
                turn = agent.must(*said, user(asked), says="one")
                assert made.spelling.spell(turn.sent, skip_special=False).text.count(asked) == 1
            said += [user(words.upper()), turn.message]
