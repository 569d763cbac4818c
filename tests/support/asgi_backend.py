"""A `Backend` in front of an ASGI application that plays a worker: a test scripts the messages, and the hub gets replies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message

from router.http.headers import HeaderList
from router.http.request_state import Caller
from router.http.upstream import Take, is_event_stream
from router.proxy.generate_call import GenerateCall
from router.proxy.worker_reply import WorkerReply


class AsgiBackend:
    """Sends each call to the application as a request of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def generate(self, call: GenerateCall) -> WorkerReply:
        return await self._reply(_Request(self._app, "POST", "/generate", call.body, call.headers))

    async def get(self, path: str, headers: HeaderList, _: Caller) -> WorkerReply:
        return await self._reply(_Request(self._app, "GET", path, b"", headers))

    async def _reply(self, request: _Request) -> WorkerReply:
        try:
            start = await request.start()
        except BaseException:
            request.close()
            await request.over()
            raise
        headers = dict(start["headers"])
        reply = WorkerReply(
            start["status"],
            start["headers"],
            b"",
            stream=start["status"] == 200 and is_event_stream(start["headers"]),
            worker=headers.get(b"x-router-worker", b"").decode(),
            routed=headers.get(b"x-router-reason", b"").decode(),
            rest=request,
        )
        if not reply.stream:
            try:
                await reply.gather()
            except BaseException:
                reply.close()
                await request.over()
                raise
        reply.settle = request.over
        return reply

    async def abort(self, rid: str, call: GenerateCall) -> None:
        body = json.dumps({"rid": rid}).encode()
        request = _Request(self._app, "POST", "/abort_request", body, call.headers)
        await request.start()
        while await request.read():
            pass


class _Request:
    def __init__(self, app: ASGIApp, method: str, path: str, body: bytes, headers: HeaderList) -> None:
        headers = [pair for pair in headers if pair[0] != b"content-length"]
        headers.append((b"content-length", b"%d" % len(body)))
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": headers}
        self._messages: asyncio.Queue[Message] = asyncio.Queue(1)
        self._unread = [body]
        self._task = asyncio.create_task(app(scope, self._receive, self._send))  # type: ignore[arg-type]
        self._last = False
        self._taken = asyncio.Event()

    async def start(self) -> Message:
        return await self._next()

    async def read(self) -> bytes:
        while not self._last:
            message = await self._next()
            self._last = not message.get("more_body", False)
            if body := message.get("body", b""):
                return bytes(body)
        return b""

    async def flow(self, take: Take) -> None:
        while (piece := await self.read()) and take(piece):
            pass

    def close(self) -> None:
        self._task.cancel()

    async def over(self) -> None:
        """Wait until the application has ended."""
        await asyncio.wait((self._task,))

    async def _next(self) -> Message:
        """Return the next message. Raises what the application raised, and what a cancelled test raises."""
        self._taken.set()
        get = asyncio.ensure_future(self._messages.get())
        try:
            await asyncio.wait((get, self._task), return_when=asyncio.FIRST_COMPLETED)
            if get.done():
                return get.result()
            await asyncio.sleep(0)
            if get.done():
                return get.result()
            self._task.result()  # raises what the application raised
            return {"type": "http.response.body", "body": b"", "more_body": False}
        finally:
            get.cancel()

    async def _send(self, message: Message) -> None:
        """Send a message, and wait until the reader has done with it: then a test knows what the reader has seen."""
        self._taken.clear()
        await self._messages.put(message)
        if message["type"] == "http.response.start" or message.get("more_body", False):
            await self._taken.wait()

    async def _receive(self) -> Message:
        if not self._unread:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self._unread.pop(), "more_body": False}
