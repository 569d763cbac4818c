"""Streams through the whole router: pieces go on in the calls in which they come, and the client sees what it always saw."""

from __future__ import annotations

import contextlib
import http.client
import re
from typing import Any, ClassVar

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.serving.connection import LimitedConnection
from tests.support.asking import Asking, until
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


@pytest.mark.parametrize("path", WAYS)
def test_a_stream_that_its_worker_breaks_off_counts_as_broken(path: str) -> None:
    """Also where an event tells the error, behind which the connection ends as it should."""
    with stack("qwen", styles=("incremental",)) as served:
        worker, at = served.workers[0], path
        if path not in ("/generate", "/v1/completions"):
            at = f"/sessions/{_session(served)}{path}"
        worker.hold(after=FEW)
        with contextlib.closing(Asking(served.url, {**WAYS[path], "stream": True}, path=at)) as asking:
            assert asking.response.read1()
            worker.kill()
            with contextlib.suppress(OSError, http.client.HTTPException):
                asking.response.read()
        until(lambda: "broken" in _outcomes(served), "the request is counted")
        assert _outcomes(served) == {"broken": 1.0}


def _outcomes(served: Stack) -> dict[str, float]:
    """How many generations ended in which way, as the metrics count it."""
    lines = served.get("/metrics").content.decode().splitlines()
    asked = re.compile(r'tito_router_requests_total\{route="(?:generate|turn)",status="(\w+)"\} (\S+)').fullmatch
    return {found[1]: float(found[2]) for found in map(asked, lines) if found is not None}


def test_a_stream_may_last_longer_than_its_worker_may_be_silent(written: list[bytes]) -> None:
    with stack("qwen", styles=("incremental",), token_delay=0.03, workers={"stream_idle_timeout": 0.6}) as served:
        assert _asked(served, "/generate").endswith(b"data: [DONE]\n\n")
        assert written
