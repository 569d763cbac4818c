"""What does not fit the model's context is told in the words that agents match, in every dialect, whoever refuses it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import templates
from tests.support.stack import Stack, stack
from tests.support.vocabularies import vocabulary

LIMIT = 256
LONG, SHORT = "word " * 400, "word"
SESSIONS = {"chat_template": str(templates.folder() / "qwen3.jinja")}


REFUSERS: dict[str, dict[str, Any]] = {
    "the router": {"sessions": {**SESSIONS, "max_context": LIMIT}},
    "an SGLang worker": {"sessions": SESSIONS, "context_length": LIMIT},
    "a vLLM worker": {"sessions": SESSIONS, "context_length": LIMIT, "interface": "vllm", "scale_out": False},
}


@pytest.fixture(scope="module", params=REFUSERS)
def refuser(request: pytest.FixtureRequest) -> Iterator[tuple[str, Stack]]:
    options = REFUSERS[request.param]
    with stack("qwen", styles=("cumulative",), folder=vocabulary("qwen"), **options) as made:
        yield request.param, made
        assert made.idle()


BODIES: dict[str, Any] = {
    "chat/completions": lambda text, limit: {"messages": [{"role": "user", "content": text}], "max_tokens": limit},
    "messages": lambda text, limit: {"messages": [{"role": "user", "content": text}], "max_tokens": limit},
    "responses": lambda text, limit: {"input": text, "max_output_tokens": limit},
    "completions": lambda text, limit: {"prompt": text, "max_tokens": limit},
}
WAYS = [
    *((f"/sessions/NAME/v1/{name}", name) for name in ("chat/completions", "messages", "responses")),
    *((f"/v1/{name}", name) for name in ("chat/completions", "messages", "completions")),
]


def refused(made: Stack, path: str, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    if "NAME" in path:
        path = path.replace("NAME", made.post("/sessions", {}).json()["session_id"])
    answer = made.post(path, {"model": "m", **body, "stream": stream})
    assert answer.status == 400, answer.content
    error: dict[str, Any] = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "dialect"), WAYS)
def test_a_prompt_that_is_too_long(refuser: tuple[str, Stack], path: str, dialect: str, stream: bool) -> None:
    who, made = refuser
    if dialect == "completions" and who == "the router":
        pytest.skip("a completion's prompt is left to the worker")
    message = refused(made, path, BODIES[dialect](LONG, 9), stream)["message"]
    words = r"prompt is too long: (\d+) tokens > (\d+) maximum"
    if dialect != "messages":
        words = (
            r"This model's maximum context length is (\d+) tokens\. However, your messages resulted in (\d+) tokens\."
        )
    found = re.match(words, message)
    assert found, message
    many, most = sorted(map(int, found.groups()), reverse=True)
    assert LIMIT - 10 <= most <= LIMIT
    assert many > 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "dialect"), WAYS)
def test_a_reply_that_has_no_room(refuser: tuple[str, Stack], path: str, dialect: str, stream: bool) -> None:
    who, made = refuser
    if who == "the router" or (who == "a vLLM worker" and dialect == "completions"):
        pytest.skip("it clips the reply, or does not name the length of the prompt")
    message = refused(made, path, BODIES[dialect](SHORT, 900), stream)["message"]
    words = r"input length and `max_tokens` exceed context limit: \d+ \+ 900 > 256"
    if dialect != "messages":
        words = (
            r"This model's maximum context length is 256 tokens\. However, you requested \d+ tokens"
            r" \(\d+ in the messages, 900 in the completion\)\."
        )
    assert re.match(words, message), message
