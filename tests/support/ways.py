"""The way of one request through the code: `python -m tests.support.ways` prints which files it walks through.

A *run* is an unbroken stay in one file, a *call* a call of one of our own functions. `sys.setprofile` counts both on a turn
of a text conversation and of a session's chat, as they are served: from the bytes of the request, which the server's protocol
gets, to the bytes of the reply. They are warm, because a first turn imports modules and fills caches. A resumed coroutine
counts as called again. What the router's own tasks do meanwhile, such as measuring the lag of its loop, is not counted.
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

import httptools
import uvicorn
from starlette.types import Message
from uvicorn.server import ServerState

from router.app import RouterApp, create_app
from router.config import RadixConfig, RouterConfig, SessionsConfig, WorkersConfig
from router.serving.connection import Limits, limited_by
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

ROOT = f"{Path(__file__).parents[2]}/"
OURS = (f"{ROOT}router/", f"{ROOT}middleware_hub/")
TURNS = 4
"""Of each conversation. The last one is counted."""

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


class _Client(asyncio.Transport):
    """A client's connection to the router: the server's own protocol, on a transport in memory."""

    def __init__(self, app: RouterApp) -> None:
        super().__init__({"peername": ("127.0.0.1", 50000)})
        limits = Limits(max_header_bytes=65536, max_connections=1)
        protocol = limited_by(limits)
        config = uvicorn.Config(app, http=protocol, ws="none", log_config=None, access_log=False)
        config.load()
        self._server = ServerState()
        self._protocol = protocol(config, self._server, {})
        self._protocol.connection_made(self)
        self._reply = httptools.HttpResponseParser(self)
        self._body = bytearray()

    async def ask(self, path: str, body: dict[str, Any], way: Way | None = None) -> Any:
        """Send a request, wait until nothing works for it any more, and return the reply."""
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
        self._body.clear()
        token = _measured.set(way is not None)
        sys.setprofile(way)
        try:
            self._protocol.data_received(head.encode() + raw)
            await asyncio.gather(*self._server.tasks)
        finally:
            sys.setprofile(None)
            _measured.reset(token)
        assert self._reply.get_status_code() < 300, self._body
        return json.loads(self._body)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._reply.feed_data(data)

    def on_body(self, data: bytes) -> None:
        """Take a piece of the reply's body; a callback of the parser."""
        self._body += data

    def is_closing(self) -> bool:
        return False

    def resume_reading(self) -> None: ...

    def pause_reading(self) -> None: ...


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
            # `auto` comes to it some seconds after the start.
            radix=RadixConfig(str(shipped_tokenizer()), tokenizer_backend="fastokens", max_tokens=100_000),
            sessions=SessionsConfig(max_tokens=100_000, verify_rate=0.0),
        )
    )
    ways = {"generate": Way(), "chat": Way()}
    async with _running(app):
        client = _Client(app)
        session = await client.ask("/sessions", {})
        path = f"/sessions/{session['session_id']}/v1/chat/completions"
        generate: dict[str, Any] = {
            "text": "Hello, how are you?",
            "sampling_params": {"max_new_tokens": 8, "sampling_seed": 1},
        }
        chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        for turn in range(1, TURNS + 1):
            reply = await client.ask("/generate", generate, ways["generate"] if turn == TURNS else None)
            generate["text"] += f"{reply['text']} And then"
            reply = await client.ask(path, chat, ways["chat"] if turn == TURNS else None)
            chat["messages"] += [reply["choices"][0]["message"], {"role": "user", "content": "And?"}]
    return ways


def ways() -> dict[str, Way]:
    """Return the ways of the turns that are counted: `generate`, `chat`."""
    with (
        EmbeddedWorker(token_delay=0) as worker,
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_Whole(worker))) as runner,
    ):
        return runner.run(_measure(worker.url))


if __name__ == "__main__":
    for name, way in ways().items():
        print(f"\n{name}: {way}")
