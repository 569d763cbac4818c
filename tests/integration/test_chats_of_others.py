"""A chat without a session is known by its messages: to its own tenant, under its own adapter, and to nobody else.

The first turn is sampled in a spelling that no encoder would choose (`One` and `two` with two spaces as a token each), so ids
that come from another one's memory are known by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.support.agents import TOOLS, system, user
from tests.support.chat_models import chat_model
from tests.support.client import Answer
from tests.support.shapes import ChatModel
from tests.support.stack import Stack, stack
from worker.engine.records import GenerationRecord

OPENAI, ANTHROPIC = "/v1/chat/completions", "/v1/messages"
A, B, BS_TRAINER = ({"authorization": f"Bearer {key}"} for key in ("key-of-a", "key-of-b", "key-of-bs-trainer"))
SAID = "One  two."
ECHO = {"role": "assistant", "content": SAID}


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    server = {"api_keys": ("a:key-of-a", "b:key-of-b", "b:key-of-bs-trainer")}
    with stack("qwen", styles=("cumulative",), folder=chat_model("qwen3"), server=server) as made:
        yield made


@pytest.fixture
def opening(space: str) -> list[dict[str, Any]]:
    """A conversation that nobody has had."""
    return [system(f"You are {space}."), user("Hello")]


def odd_ids(model: ChatModel) -> list[int]:
    """What the first turn samples: one id for each character."""
    return [number for character in SAID for number in model.encode(character)]


def ask(
    served: Stack,
    messages: list[dict[str, Any]],
    key: Mapping[str, str],
    *,
    path: str = OPENAI,
    ids: list[int] | None = None,
    **options: Any,
) -> tuple[Answer, GenerationRecord]:
    (worker,) = served.workers
    worker.script(text="Yes.") if ids is None else worker.script(ids=ids, finish="eos")
    headers = {**key, "x-radix-namespace": messages[0]["content"]}  # a memory for each test
    body: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": 50, **options}
    if path == ANTHROPIC:
        first, *body["messages"] = messages
        body["system"] = first["content"]
    answer = served.post(path, body, headers=headers)
    assert answer.status == 200, answer.content
    return answer, worker.log[-1]


def chain(record: GenerationRecord) -> list[int]:
    return [*record.input_ids, *record.output_ids]


def begins_with(record: GenerationRecord, ids: list[int]) -> bool:
    return list(record.input_ids)[: len(ids)] == ids


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
class TestTenants:
    def test_another_tenants_chat_is_not_continued(
        self, served: Stack, opening: list[dict[str, Any]], path: str
    ) -> None:
        """The other tenant gets the tokenizer's own ids, and no sign that these words were sent before."""
        model = ChatModel("qwen3")
        _, first = ask(served, opening, A, path=path, ids=odd_ids(model))
        later = [*opening, ECHO, user("And?")]
        answer, others = ask(served, later, B, path=path)
        assert answer.headers["x-radix-reused-tokens"] == "0"
        assert "x-radix-reasons" not in answer.headers
        assert not begins_with(others, chain(first))
        own, record = ask(served, later, A, path=path)
        assert own.headers["x-radix-reused-tokens"] == str(len(chain(first)))
        assert begins_with(record, chain(first))

    def test_a_named_parent_of_another_tenant_is_not_known(
        self, served: Stack, opening: list[dict[str, Any]], path: str
    ) -> None:
        first, record = ask(served, opening, A, path=path, ids=odd_ids(ChatModel("qwen3")))
        named = {**B, "x-parent-generation": first.headers["x-generation-id"]}
        answer, others = ask(served, [*opening, ECHO, user("And?")], named, path=path)
        assert answer.headers["x-radix-reused-tokens"] == "0"
        assert not begins_with(others, chain(record))

    def test_two_keys_of_a_tenant_have_one_memory(
        self, served: Stack, opening: list[dict[str, Any]], path: str
    ) -> None:
        _, first = ask(served, opening, B, path=path, ids=odd_ids(ChatModel("qwen3")))
        _, second = ask(served, [*opening, ECHO, user("And?")], BS_TRAINER, path=path)
        assert begins_with(second, chain(first))


def generated(
    served: Stack, opening: list[dict[str, Any]], key: Mapping[str, str], **fields: Any
) -> tuple[list[int], list[dict[str, Any]]]:
    """A turn of the same conversation that went through `/generate`: its chain, and how the chat goes on."""
    model = ChatModel("qwen3")
    script = {"ids": odd_ids(model), "finish": "length"}
    body = {
        "text": model.template.whole(opening, None, {}),
        "sampling_params": {"custom_params": {"script": script}},
        **fields,
    }
    reply = served.generate(body, headers={**key, "x-radix-namespace": opening[0]["content"]})
    return chain(reply.record), [*opening, ECHO, user("And?")]


class TestTexts:
    """What `/generate` recorded serves a chat of the same words, as far as both are of one tenant and one adapter."""

    def test_another_tenants_text_does_not(self, served: Stack, opening: list[dict[str, Any]]) -> None:
        known, later = generated(served, opening, A)
        answer, others = ask(served, later, B)
        assert answer.headers["x-radix-reused-tokens"] == "0"
        assert not begins_with(others, known)
        _, own = ask(served, later, A)
        assert begins_with(own, known)

    @pytest.mark.parametrize(("generate", "chat"), [("x", None), (None, "x"), ("x", "y")])
    def test_another_adapters_text_does_not(
        self, served: Stack, opening: list[dict[str, Any]], generate: str | None, chat: str | None
    ) -> None:
        known, later = generated(served, opening, A, **adapter(generate))
        answer, others = ask(served, later, A, **adapter(chat))
        assert answer.headers["x-radix-reused-tokens"] == "0"
        assert not begins_with(others, known)
        _, own = ask(served, later, A, **adapter(generate))
        assert begins_with(own, known)


def adapter(name: str | None) -> dict[str, Any]:
    return {} if name is None else {"lora_path": name}


@pytest.mark.parametrize(("first", "second"), [("x", None), (None, "x"), ("x", "y")])
class TestAdapters:
    """The same tenant's messages under another adapter are another model's."""

    def test_another_adapters_chat_is_not_continued(
        self, served: Stack, opening: list[dict[str, Any]], first: str | None, second: str | None
    ) -> None:
        _, known = ask(served, opening, A, ids=odd_ids(ChatModel("qwen3")), **adapter(first))
        later = [*opening, ECHO, user("And?")]
        answer, others = ask(served, later, A, **adapter(second))
        assert answer.headers["x-radix-reused-tokens"] == "0"
        assert not begins_with(others, chain(known))
        _, own = ask(served, later, A, **adapter(first))
        assert begins_with(own, chain(known))

    def test_nor_with_other_tools(
        self, served: Stack, opening: list[dict[str, Any]], first: str | None, second: str | None
    ) -> None:
        """Other settings of one adapter splice what they can; those of another adapter give nothing."""
        _, known = ask(served, opening, A, ids=odd_ids(ChatModel("qwen3")), **adapter(first))
        later = [*opening, ECHO, user("And?")]
        answer, others = ask(served, later, A, tools=TOOLS, **adapter(second))
        assert answer.headers["x-radix-reused-tokens"] == "0"
        assert "x-radix-reasons" not in answer.headers
        sampled = list(known.output_ids)
        windows = (others.input_ids[at : at + len(sampled)] for at in range(len(others.input_ids)))
        assert sampled not in [list(window) for window in windows]
