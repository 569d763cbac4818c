"""Streams through the whole router: pieces go on in the calls in which they come, and the client sees what it always saw."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.serving.connection import LimitedConnection
from tests.support.stack import Stack, stack

TOKENS = 40
FEW = 3
"""Pieces that come one by one on a busy machine, where most tokens come together with others."""
TRIES = 5
"""On the busiest machine all of a stream may come at once."""
SAMPLING = {"max_new_tokens": TOKENS, "ignore_eos": True, "sampling_seed": 3}
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": MESSAGES, "max_tokens": TOKENS, "ignore_eos": True, "seed": 3}
WAYS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "hi", "sampling_params": SAMPLING},
    "/v1/completions": {"model": "m", "prompt": "hi", "max_tokens": TOKENS, "ignore_eos": True, "seed": 3},
    "/v1/chat/completions": CHAT,
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": TOKENS},
    "/v1/responses": {"model": "m", "input": "hi", "max_output_tokens": TOKENS},
}


class Seeing:
    """A user's middleware that sees each message of a reply."""

    seen: ClassVar[list[bytes]] = []

    def __init__(self, app: ASGIApp, _: object) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def seen(message: Message) -> None:
            Seeing.seen.append(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, seen)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is written past `send`, by any connection."""
    found: list[bytes] = []
    write = LimitedConnection._write_chunk

    def noted(self: LimitedConnection, cycle: Any, piece: bytes) -> bool:
        done = write(self, cycle, piece)
        if done:
            found.append(piece)
        return done

    monkeypatch.setattr(LimitedConnection, "_write_chunk", noted)
    return found


def _session(served: Stack) -> str:
    sampling = {"ignore_eos": True, "sampling_seed": 3}
    return str(served.post("/sessions", {"sampling_params": sampling}).json()["session_id"])


def _asked(served: Stack, path: str) -> bytes:
    """Ask for a stream, in a session if it is a chat, and return the whole of it."""
    body = {**WAYS[path], "stream": True}
    at = path
    if path not in ("/generate", "/v1/completions"):
        at = f"/sessions/{(session := _session(served))}{path}"
    answer = served.post(at, body)
    assert answer.status == 200, answer.content
    if at != path:
        (found,) = served.post(f"/sessions/{session}/finalize", {}).json()["trajectories"]
        assert found["exact"]
        assert found["response_ids"] == served.workers[0].log[-1].output_ids
    return answer.content


@pytest.mark.parametrize("style", ["incremental", "cumulative"])
@pytest.mark.parametrize("path", WAYS)
def test_no_task_wakes_for_a_token(path: str, style: Any, written: list[bytes]) -> None:
    with stack("qwen", styles=(style,), token_delay=0.005) as served:
        for _ in range(TRIES):
            written.clear()
            content = _asked(served, path)
            assert b"".join(written) in content
            if len(written) > FEW:
                return
    pytest.fail(f"{len(written)} pieces were written past `send`")


@pytest.mark.parametrize("path", WAYS)
def test_a_users_middleware_sees_each_message(path: str, written: list[bytes]) -> None:
    with stack("qwen", styles=("incremental",), token_delay=0.005, middlewares=(f"{__name__}:Seeing",)) as served:
        Seeing.seen.clear()
        content = _asked(served, path)
        assert written == []
        assert content in b"".join(Seeing.seen)


def test_a_stream_may_last_longer_than_its_worker_may_be_silent(written: list[bytes]) -> None:
    with stack("qwen", styles=("incremental",), token_delay=0.03, workers={"stream_idle_timeout": 0.6}) as served:
        assert _asked(served, "/generate").endswith(b"data: [DONE]\n\n")
        assert written
