"""The way of one request through the code: `python -m tests.support.ways` prints which files it walks through.

A *run* is an unbroken stay in one file, a *call* a call of one of our own functions. `sys.setprofile` counts both on the
second turn of a text conversation and of a session's chat, in process, against the embedded engine. A resumed coroutine counts
as called again. What the router's own tasks do meanwhile, such as measuring the lag of its loop, is not counted.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import json
import selectors
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from starlette.types import Message

from router.app import RouterApp, create_app
from router.config import RadixConfig, RouterConfig, SessionsConfig, WorkersConfig
from router.http.disconnect import EXTENSION, ServedClient
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

ROOT = f"{Path(__file__).parents[2]}/"
OURS = (f"{ROOT}router/", f"{ROOT}middleware_hub/")
_measured = contextvars.ContextVar("measured", default=False)
"""Whether a task works for the request: those that it starts inherit this."""


@dataclass
class Way:
    """What one request went through.

    Attributes:
        runs: the files, in the order in which they were entered and come back to.
        calls: of our own functions.
    """

    runs: list[str] = field(default_factory=list)
    calls: int = 0

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(self.runs))

    def __call__(self, frame: FrameType | None, event: str, _: object) -> None:
        """Take an event of `sys.setprofile`."""
        if event not in ("call", "return") or frame is None or not _ours(frame) or not _measured.get():
            return
        self.calls += event == "call"
        if event == "return":  # to the nearest caller of ours
            frame = frame.f_back
            while frame is not None and not _ours(frame):
                frame = frame.f_back
        if frame is not None:
            here = frame.f_code.co_filename[len(ROOT) :]
            if not self.runs or self.runs[-1] != here:
                self.runs.append(here)

    def __str__(self) -> str:
        often = ", ".join(f"{file} {count}" for file, count in collections.Counter(self.runs).most_common(6))
        counts = f"{self.calls} calls, {len(self.files)} files, {len(self.runs)} runs"
        return f"{counts}\n{' -> '.join(self.files)}\nmost returned to: {often}"


def _ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OURS)


class _Whole(selectors.DefaultSelector):
    """Lets the router's loop read what a worker sends only when all of it is there: a reply in two pieces wakes it twice."""

    def __init__(self, worker: EmbeddedWorker) -> None:
        super().__init__()
        self._worker = worker

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not (found := super().select(timeout)):
            return found
        self._worker.wait_until_idle()  # asks the worker's loop, which writes both pieces in one turn
        return super().select(0)


async def _call(app: RouterApp, path: str, body: dict[str, Any], way: Way | None = None) -> Any:
    raw, sent = json.dumps(body).encode(), list[Message]()
    unread: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()
        return unread.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    client = ServedClient()  # as this project's server has it of a request that has come as a whole
    client.all_here = True
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(raw))],
        "extensions": {EXTENSION: client},
    }
    token = _measured.set(way is not None)
    sys.setprofile(way)
    try:
        await app(scope, receive, send)
    finally:
        sys.setprofile(None)
        _measured.reset(token)
    assert sent[0]["status"] < 300, sent
    return json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


@contextlib.asynccontextmanager
async def _running(app: RouterApp) -> AsyncIterator[None]:
    to_app, from_app = asyncio.Queue[Message](), asyncio.Queue[Message]()
    lifespan = asyncio.create_task(app({"type": "lifespan", "state": {}}, to_app.get, from_app.put))  # type: ignore[arg-type]
    for step in ("startup", "shutdown"):
        to_app.put_nowait({"type": f"lifespan.{step}"})
        assert (await from_app.get())["type"] == f"lifespan.{step}.complete"
        if step == "startup":
            yield
    await lifespan


async def _measure(url: str) -> dict[str, Way]:
    app = create_app(
        RouterConfig(
            workers=WorkersConfig(urls=(url,)),
            radix=RadixConfig(tokenizer_path=str(shipped_tokenizer()), max_tokens=100_000),
            sessions=SessionsConfig(max_tokens=100_000, verify_rate=0.0),
        )
    )
    ways = {"generate": Way(), "chat": Way()}
    async with _running(app):
        first = {"text": "Hello, how are you?", "sampling_params": {"max_new_tokens": 8, "sampling_seed": 1}}
        reply = await _call(app, "/generate", first)
        await _call(app, "/generate", {**first, "text": f"{first['text']}{reply['text']} And then"}, ways["generate"])
        session = await _call(app, "/sessions", {})
        path = f"/sessions/{session['session_id']}/v1/chat/completions"
        chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        reply = await _call(app, path, chat)
        chat["messages"] += [reply["choices"][0]["message"], {"role": "user", "content": "And?"}]
        await _call(app, path, chat, ways["chat"])
    return ways


def ways() -> dict[str, Way]:
    """Return the ways of the second turns: `generate`, `chat`."""
    with (
        EmbeddedWorker(token_delay=0) as worker,
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_Whole(worker))) as runner,
    ):
        return runner.run(_measure(worker.url))


if __name__ == "__main__":
    for name, way in ways().items():
        print(f"\n{name}: {way}")
