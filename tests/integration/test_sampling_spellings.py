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


LIMIT = {"/v1/completions": "max_tokens", "/sessions/NAME/v1/responses": "max_output_tokens"}


@pytest.mark.parametrize("path", [path for path in DOORS if path != "/generate"])
def test_whole_numbers_may_be_written_as_floats(served: Stack, path: str) -> None:
    """As by clients whose numbers are all doubles; engines take them, too. No number is read out of a string."""
    limit, url = LIMIT.get(path, "max_tokens"), path
    if "NAME" in path:
        url = path.replace("NAME", served.post("/sessions", {}).json()["session_id"])
    floats = {limit: 3.0, "min_tokens": 1e0, "seed": 7.0, "stop_token_ids": [9.0], "top_k": 5.0}
    answer = served.post(url, {**DOORS[path], **floats})
    assert answer.status == 200, answer.content
    sent = served.workers[0].log[-1].body
    sampling = sent.get("sampling_params", sent)
    names = ("max_new_tokens", "max_tokens"), ("min_new_tokens", "min_tokens"), ("sampling_seed", "seed")
    found = [next(sampling[name] for name in pair if name in sampling) for pair in names]
    found += [sampling["top_k"], *sampling["stop_token_ids"]]
    assert (found, {type(one) for one in found}) == ([3, 1, 7, 5, 9], {int})
    for wrong in ({limit: 3.5}, {limit: "3"}, {"seed": True}, {"stop_token_ids": [9.5]}, {"stop_token_ids": ["9"]}):
        assert served.post(url, {**DOORS[path], **wrong}).status == 400, wrong
