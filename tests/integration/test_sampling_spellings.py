"""Options that engines spell in different ways mean the same at every door."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stack import Stack, stack


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def served(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), interface=request.param) as made:
        yield made
        assert made.idle()


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
DOORS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 3, "top_k": 0}},
    "/v1/completions": {"prompt": "a", "max_tokens": 3, "top_k": 0},
    "/v1/chat/completions": {**CHAT, "top_k": 0},
    "/v1/messages": {**CHAT, "top_k": 0},
    "/sessions/NAME/v1/chat/completions": {**CHAT, "top_k": 0},
    "/sessions/NAME/v1/messages": {**CHAT, "top_k": 0},
    "/sessions/NAME/v1/responses": {"input": "a", "max_output_tokens": 3, "top_k": 0},
}


def ask(served: Stack, path: str, body: dict[str, Any], **session: Any) -> Any:
    """The `top_k` that the worker got: -1, or nothing, for all."""
    if "NAME" in path:
        path = path.replace("NAME", served.post("/sessions", session).json()["session_id"])
    answer = served.post(path, body)
    assert answer.status == 200, answer.content
    sent = served.workers[0].log[-1].body
    return sent.get("sampling_params", sent).get("top_k", -1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", DOORS)
def test_a_top_k_of_0_is_all_tokens(served: Stack, path: str, stream: bool) -> None:
    assert ask(served, path, {**DOORS[path], "stream": stream}) in (-1, None)


def test_the_top_k_of_a_session_is_no_other(served: Stack) -> None:
    path = "/sessions/NAME/v1/chat/completions"
    assert ask(served, path, CHAT, sampling_params={"top_k": 0}) in (-1, None)
    assert ask(served, path, {**CHAT, "top_k": 5}, sampling_params={"top_k": 0}) == 5
