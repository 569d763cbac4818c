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
