"""What the inspector advises for media is true."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from middleware_hub.inspector.api import advice
from tests.support.agents import AgentSession
from tests.support.chat_models import chat_model
from tests.support.stack import Stack, stack

IMAGE = "data:image/png;base64,AAAA"


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("incremental",), folder=chat_model("qwen3")) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_sessions_refuse_media_and_generations_with_media_are_not_recorded(served: Stack, stream: bool) -> None:
    (told,) = advice(["multimodal"])
    agent = AgentSession.make(served)
    parts = {
        "chat/completions": {"messages": [_user({"type": "image_url", "image_url": {"url": IMAGE}})]},
        "responses": {"input": [_user({"type": "input_image", "image_url": IMAGE})]},
        "messages": {
            "max_tokens": 9,
            "messages": [_user({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}})],
        },
    }
    for form, body in parts.items():
        answer = served.post(f"{agent.path}/v1/{form}", {"model": "m", "stream": stream, **body})
        assert answer.status == 400, answer.content
    assert "Sessions refuse media" in told["do"]
    reply = served.generate({"text": "Look:", "image_data": IMAGE, "stream": stream})
    assert reply.answer.headers["x-radix-recorded"] == "no; multimodal"
    assert "not recorded" in told["what"]


def _user(part: dict[str, object]) -> dict[str, object]:
    return {"role": "user", "content": [part]}
