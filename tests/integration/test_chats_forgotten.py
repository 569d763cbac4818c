"""Chats without a session of which a store forgets something, or the tree, while a router goes on with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.store.protocol import Batch
from tests.integration.test_chats_at_other_routers import Message, message_of, spelled, store_of, turn
from tests.middleware_hub.store_cli.running import status
from tests.support.agents import user
from tests.support.chat_models import chat_model
from tests.support.client import Answer
from tests.support.lives import Router
from worker.worker import EmbeddedWorker


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(chat_model("qwen3"), token_delay=0) as running:
        yield running


def forget_all(url: str) -> None:
    assert status("prune", "--store", url, "--unused-for", "0s", "--unretrieved") == 0


class Talk:
    """A conversation at a router."""

    def __init__(self, worker: EmbeddedWorker, router: Router) -> None:
        self.worker, self.router = worker, router
        self.messages: list[Message] = []
        self.chain: list[int] = []

    def say(self, text: str) -> Answer:
        self.messages.append(user(text))
        self.worker.script(spelled(self.worker, f"<think>\nhm\n</think>\n\nTo {text}."))
        answer = turn(self.router, self.messages)
        record = self.worker.log[-1]
        assert list(record.input_ids)[: len(self.chain)] == self.chain, answer.headers
        self.chain = [*record.input_ids, *record.output_ids]
        self.messages.append(message_of(answer, {}))
        return answer


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_chat_that_goes_on_after_it_was_forgotten_is_whole_at_other_routers(
    worker: EmbeddedWorker, tmp_path: Path, kind: str
) -> None:
    """Its router writes the earlier turns again, with what their messages were. Two forks of it were forgotten twice."""
    store = store_of(kind, tmp_path)
    assert store.url is not None
    router, other = (Router(worker, store, folder=chat_model("qwen3")) for _ in range(2))
    try:
        first = Talk(worker, router)
        first.say("one")
        first.say("two")
        fork = Talk(worker, router)
        fork.messages, fork.chain = [*first.messages], [*first.chain]
        fork.say("three")
        forget_all(store.url)
        first.say("four")
        first.router = other
        assert "x-radix-reasons" not in first.say("five").headers
        forget_all(store.url)
        fork.say("six")
        router.restart()
        assert "x-radix-reasons" not in fork.say("seven").headers
        first.say("eight")
        first.router = router
        assert "x-radix-reasons" not in first.say("nine").headers
    finally:
        router.stop()
        other.stop()


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_forgotten_chat_is_unknown_after_a_restart_and_the_store_is_not_blamed(
    worker: EmbeddedWorker, tmp_path: Path, kind: str
) -> None:
    store = store_of(kind, tmp_path)
    assert store.url is not None
    router = Router(worker, store, folder=chat_model("qwen3"))
    try:
        talk = Talk(worker, router)
        talk.say("one")
        router.stop()
        forget_all(store.url)
        router.start()
        talk.chain = []
        answer = talk.say("two")
        assert answer.headers["x-radix-reused-tokens"] == "0"
        assert "x-radix-reasons" not in answer.headers
        assert "x-radix-reasons" not in talk.say("three").headers
    finally:
        router.stop()


def test_replies_that_are_collected_while_other_notes_are_read_are_known(
    worker: EmbeddedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request names a reply whose messages it has edited, so what comes before that reply is read later than the reply."""
    router = Router(worker, store_of("sqlite", tmp_path), folder=chat_model("qwen3"))
    try:
        talk = Talk(worker, router)
        talk.say("one")
        named = talk.say("two").headers["x-generation-id"]
        router.restart()
        tree, memory = router.hub.tree, router.hub.memory
        assert tree is not None
        assert memory is not None
        notes, asked = memory.notes, []

        async def late(*args: Any, **options: Any) -> Any:
            asked.append(args)
            tree.max_tokens = 0
            tree.collect()
            return await notes(*args, **options)

        monkeypatch.setattr(memory, "notes", late)
        edited = [user("one"), {"role": "assistant", "content": "No."}, *talk.messages[2:], user("three")]
        answer = turn(router, edited, **{"x-parent-generation": named})
        assert len(asked) > 1
        assert "store_unreachable" not in answer.headers.get("x-radix-reasons", "")
    finally:
        router.stop()


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_chat_that_is_forgotten_between_a_reply_and_its_note_is_saved_whole(
    worker: EmbeddedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    store = store_of(kind, tmp_path)
    router, other = (Router(worker, store, folder=chat_model("qwen3")) for _ in range(2))
    try:
        talk = Talk(worker, router)
        talk.say("one")
        talk.say("two")
        append, forgotten = router.store.append, []

        async def late(batch: Batch) -> None:
            if any(record.note for record in batch.records) and not forgotten:
                forgotten.append(await router.store.forget(0))
            await append(batch)

        monkeypatch.setattr(router.store, "append", late)
        answer = talk.say("three")
        assert forgotten[0].records
        assert "x-radix-saved" not in answer.headers
        assert router.stack.get("/radix_tree/stats").json()["store"]["lost"] == 0
        talk.router = other
        assert "x-radix-reasons" not in talk.say("four").headers
    finally:
        router.stop()
        other.stop()
