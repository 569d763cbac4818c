"""What a chat's answer has of a worker's reply."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw

from middleware_hub.chat.answer import answer_of
from router.engines.form.reply import read_reply


@pytest.mark.parametrize(
    ("counts", "known"),
    [
        ({"cached_tokens": 3, "reasoning_tokens": 1}, (3, 1)),
        ({"cached_tokens": None}, (0, 0)),
        ({"cached_tokens": 1.5}, (0, 0)),
        ({"reasoning_tokens": "many"}, (0, 0)),
        ({}, (0, 0)),
    ],
)
def test_a_strange_count_of_the_engine_does_not_fail_the_turn(counts: dict[str, Any], known: tuple[int, int]) -> None:
    meta = {"id": "r", "prompt_tokens": 4, "completion_tokens": 1, "finish_reason": {"type": "stop"}, **counts}
    reply, _ = read_reply(json.dumps({"text": "a", "output_ids": [5], "meta_info": meta}).encode())
    answer = answer_of(reply, {name: Raw(json.dumps(value).encode()) for name, value in meta.items()})
    assert (answer.cached_tokens, answer.reasoning_tokens) == known
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish) == (4, 1, "stop")
