"""Fields that have no effect here, and might have one elsewhere, are named in the reply, whole or streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.agents import user
from tests.support.stack import Stack, stack
from tests.support.templates import folder

SAFETY = {"safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}]}
TURN: dict[str, Any] = {"model": "m", "max_tokens": 4, "messages": [user("Hello")]}
CONTENTS: dict[str, Any] = {"contents": [{"parts": [{"text": "Hello"}]}], "generationConfig": {"maxOutputTokens": 4}}
DIALECTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        TURN,
        {"verbosity": "low", "web_search_options": {}},
        "verbosity, web_search_options",
    ),
    "messages": (
        "/v1/messages",
        TURN,
        {"context_management": {"edits": [{"type": "x"}]}, "output_config": {"task_budget": {"total": 9}}},
        "context_management, output_config.task_budget",
    ),
    "responses": (
        "/v1/responses",
        {"model": "m", "max_output_tokens": 4, "input": "Hello"},
        {"moderation": {"model": "x"}, "text": {"verbosity": "low"}, "reasoning": {"summary": "auto"}},
        "moderation, text.verbosity, reasoning.summary",
    ),
    "gemini": ("/v1beta/models/m:generateContent", CONTENTS, SAFETY, "safetySettings"),
}


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    template = {"chat_template": str(folder() / "qwen2_5.jinja"), "implicit": True}
    with stack("qwen", styles=("incremental",), sessions=template) as made:
        yield made


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_has_no_effect_is_named_in_a_header(served: Stack, dialect: str, streamed: bool) -> None:
    path, body, added, named = DIALECTS[dialect]
    if streamed and dialect == "gemini":
        path = path.replace("generateContent", "streamGenerateContent")
    elif streamed:
        body = {**body, "stream": True}
    headers = {"x-session-id": f"{dialect}-{streamed}"}
    plain = served.post(path, body, headers=headers)
    assert plain.status == 200, plain.content
    assert "x-radix-ignored-fields" not in plain.headers
    told = served.post(path, {**body, **added}, headers=headers)
    assert told.status == 200, told.content
    assert told.headers["x-radix-ignored-fields"] == named


def test_what_a_reply_of_an_engine_would_show_besides_is_named(served: Stack) -> None:
    shown = {"return_prompt_text": True, "return_output_ids_in_sglext": True, "return_cached_tokens_details": False}
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = served.post("/v1/chat/completions", {**TURN, **shown, "stream": True, "stream_options": options})
    assert told.status == 200, told.content
    named = "return_prompt_text, return_output_ids_in_sglext, stream_options.continuous_usage_stats"
    assert told.headers["x-radix-ignored-fields"] == named


@pytest.mark.parametrize(
    "field",
    [
        {"add_generation_prompt": False},
        {"add_special_tokens": True},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"logprob_token_ids": [5], "logprobs": True},
    ],
    ids=str,
)
def test_what_would_give_another_prompt_or_reply_is_refused(served: Stack, field: dict[str, Any]) -> None:
    """An engine's own endpoint does as it is told; here these would have no effect, and nobody would see it."""
    answer = served.post("/v1/chat/completions", {**TURN, **field})
    assert (answer.status, answer.json()["error"]["param"]) == (400, next(iter(field))), answer.content
    unset: dict[str, Any] = {"add_generation_prompt": True, "add_special_tokens": False, "echo": False}
    unset |= {"prompt_logprobs": None, "logprob_token_ids": []}
    assert served.post("/v1/chat/completions", {**TURN, **unset}).status == 200


def test_a_text_without_its_bos_is_refused_where_it_would_get_one(served: Stack) -> None:
    body = {"prompt": "Hello", "max_tokens": 2, "add_special_tokens": False}
    assert served.post("/v1/completions", body).status == 200  # this vocabulary has none
    with stack("mistral-v1", styles=("incremental",)) as other:
        answer = other.post("/v1/completions", body)
        assert (answer.status, answer.json()["error"]["param"]) == (400, "add_special_tokens"), answer.content
        assert other.post("/v1/completions", {**body, "prompt": [5, 6]}).status == 200
        assert other.post("/v1/completions", {**body, "add_special_tokens": True}).status == 200
