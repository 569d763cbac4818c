"""A middleware that still works after the last message has been sent."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.plugins import MiddlewareContext

finished = asyncio.Event()


class Slow:
    def __init__(self, app: ASGIApp, context: MiddlewareContext) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def slow_send(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                await asyncio.to_thread(lambda: None)
                for _ in range(10):
                    await asyncio.sleep(0)
                finished.set()

        await self._app(scope, receive, slow_send)
