"""A router with real workers behind it, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from router.app import RouterApp, create_app
from router.config import RouterConfig, ServerConfig, WorkersConfig
from tests.support.serving import serving

PROBED = frozenset({"/server_info", "/model_info", "/ping", "/version"})
"""Where a router asks a worker who it is, and how."""

MODEL = {"model_path": "m"}
ENGINE = msgspec.json.encode(MODEL)
"""What an engine says there, at least."""


DONE = b"data: [DONE]\n\n"


@dataclass
class Running:
    """A router that is being served, and a client whose base URL it is."""

    app: RouterApp
    url: str
    client: aiohttp.ClientSession

    def inflight(self) -> int:
        return sum(worker.inflight for worker in self.app.pool.list())

    async def idle(self) -> None:
        """Wait until no worker serves anything: the loop is let run, no time is assumed."""
        async with asyncio.timeout(30):
            while self.inflight():  # noqa: ASYNC110 - a pool is synchronous and tells nobody of its changes
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def running(
    urls: Sequence[str] = (), *, server: ServerConfig | None = None, middlewares: tuple[str, ...] = (), **workers: Any
) -> AsyncIterator[Running]:
    config = RouterConfig(
        server=server or ServerConfig(),
        workers=WorkersConfig(urls=tuple(urls), **workers),
        middlewares=middlewares,
    )
    app = create_app(config)
    async with (
        asyncio.timeout(60),  # a test that hangs is to fail by itself
        serving(app) as url,
        aiohttp.ClientSession(url, auto_decompress=False) as client,
    ):
        yield Running(app, url, client)


class EchoWorker:
    """Answers everything with what it was asked, as JSON, and remembers it. Of itself it tells nothing but that it is there."""

    def __init__(self, name: str = "echo") -> None:
        self.name = name
        self.seen: list[dict[str, Any]] = []
        self.reply_headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["path"] in PROBED:
            await answer(send, 200, ENGINE)
            return
        self.seen.append(
            {
                "method": scope["method"],
                "raw_path": scope["raw_path"].decode(),
                "query": scope["query_string"].decode(),
                "headers": [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]],
                "body": body.decode("latin-1"),
                "worker": self.name,
            }
        )
        await answer(send, 200, msgspec.json.encode(self.seen[-1]), self.reply_headers)


class GatedWorker:
    """Sends `first` of each reply at once and the rest when told; tells how many requests have arrived or were left."""

    def __init__(self, *, first: bytes = b"", status: int = 200) -> None:
        self.first = first
        self.status = status
        self.arrivals = 0
        self.disconnects = 0
        self._changed = asyncio.Condition()
        self._gate = asyncio.Event()

    def release(self) -> None:
        self._gate.set()

    async def wait_for_arrivals(self, count: int) -> None:
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: self.arrivals >= count)

    async def wait_for_disconnects(self, count: int) -> None:
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: self.disconnects >= count)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["path"] in PROBED:
            await answer(send, 200, ENGINE)
            return
        while (await receive()).get("more_body", False):
            pass
        async with self._changed:
            self.arrivals += 1
            self._changed.notify_all()
        if self.first:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
            await send({"type": "http.response.body", "body": self.first, "more_body": True})
        gone = asyncio.ensure_future(receive())
        opened = asyncio.ensure_future(self._gate.wait())
        done, pending = await asyncio.wait({gone, opened}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if opened not in done:
            async with self._changed:
                self.disconnects += 1
                self._changed.notify_all()
            return
        if not self.first:
            await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": DONE if self.first else b"rest", "more_body": False})


def json_app(replies: dict[str, Any]) -> ASGIApp:
    """A worker that answers GET calls by path, and everything else with 404."""
    replies = {"/model_info": MODEL, **replies}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["path"] in replies:
            await answer(send, 200, msgspec.json.encode(replies[scope["path"]]))
        else:
            await answer(send, 404, b"{}")

    return app


async def answer(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
