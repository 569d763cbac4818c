"""A stream whose last event has fewer logprobs than ids: its text is read once, and it is not recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stack import Stack, stack
from tests.support.templates import folder

SAID = "One two three four five"


@pytest.fixture(scope="module", params=["cumulative", "incremental"])
def served(request: pytest.FixtureRequest) -> Iterator[Stack]:
    template = {"chat_template": str(folder() / "qwen3.jinja")}
    with stack("qwen", styles=(request.param,), sessions=template) as made:
        yield made
        assert made.idle()


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 50}
DOORS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Count.", "max_tokens": 50},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/sessions/NAME/v1/chat/completions": CHAT,
    "/sessions/NAME/v1/messages": CHAT,
    "/sessions/NAME/v1/responses": {"input": "Count.", "max_output_tokens": 50},
}


def text_of(content: bytes) -> str:
    """All text of a stream of any dialect."""
    found = ""
    for line in content.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices", ()):
            found += choice.get("text") or choice.get("delta", {}).get("content") or ""
        delta = event.get("delta")
        if isinstance(delta, dict):
            found += delta.get("text", "")
        elif event.get("type") == "response.output_text.delta":
            found += delta
    return found


@pytest.mark.parametrize("path", DOORS)
def test_the_text_is_read_once_and_the_reply_not_kept(served: Stack, path: str) -> None:
    (worker,) = served.workers
    session = served.post("/sessions", {}).json()["session_id"] if "NAME" in path else ""
    worker.script(text=SAID, fault="missing_last_logprob")
    answer = served.post(path.replace("NAME", session), {"model": "m", **DOORS[path], "stream": True})
    assert answer.status == 200, answer.content
    assert text_of(answer.content) == SAID
    if session:
        assert served.post(f"/sessions/{session}/finalize", {}).json()["trajectories"] == []
    name = "tito_session_replies_total" if session else "tito_radix_replies_total"
    assert f'{name}{{reason="engine_mismatch",recorded="no"}}' in served.get("/metrics").content.decode()
