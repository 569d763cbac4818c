"""A session counts as exported when a client has received all of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Scope

from middleware_hub.sessions.session import Session
from router.errors import ClientDisconnectedError
from tests.middleware_hub.sessions.in_process import Room

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 20}
EXPORTS = [
    ("GET", "/sessions/s/trajectories", ""),
    ("GET", "/sessions/s/trajectories", "format=safetensors"),
    ("POST", "/sessions/s/finalize", ""),
]


class Reader:
    """A client that takes one message of a reply after the other, and can leave at any of them."""

    def __init__(self, leaves_at: int | None) -> None:
        self._leaves_at = leaves_at
        self._gone = asyncio.Event()
        self._asked = False
        self.messages: list[Message] = []

    async def receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"{}", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if len(self.messages) == self._leaves_at:
            self._gone.set()
            await asyncio.Event().wait()  # a connection that takes no more
        self.messages.append(message)


async def export(room: Room, method: str, path: str, query: str, leaves_at: int | None = None) -> Reader:
    reader = Reader(leaves_at)
    scope: Scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": query.encode()}
    async with asyncio.timeout(20):  # or who is never seen to leave would be waited for
        await room.app(scope, reader.receive, reader.send)
    return reader


async def spoken(turns: int = 1, words: int = 1) -> tuple[Room, Session]:
    room = Room()
    session = await room.open()
    for _ in range(turns):
        status, _ = await room.ask({**BODY, "messages": [{"role": "user", "content": "word " * words}]}).answer()
        assert status == 200
    return room, session


@pytest.mark.parametrize(("method", "path", "query"), EXPORTS)
def test_a_client_that_has_all_of_it(method: str, path: str, query: str) -> None:
    async def work() -> None:
        room, session = await spoken()
        reader = await export(room, method, path, query)
        assert session.exported
        assert not reader.messages[-1]["more_body"]
        content = b"".join(message.get("body", b"") for message in reader.messages)
        assert query or len(json.loads(content)["trajectories"]) == 1

    asyncio.run(work())


@pytest.mark.parametrize("leaves_at", [0, 1])
@pytest.mark.parametrize(("method", "path", "query"), EXPORTS)
def test_a_client_that_leaves(method: str, path: str, query: str, leaves_at: int) -> None:
    async def work() -> None:
        room, session = await spoken()
        with pytest.raises(ClientDisconnectedError):
            await export(room, method, path, query, leaves_at)
        assert not session.exported
        await export(room, method, path, query)
        assert session.exported

    asyncio.run(work())


def test_a_client_that_leaves_in_the_middle_of_a_long_one() -> None:
    async def work() -> None:
        room, session = await spoken(turns=40, words=2000)
        with pytest.raises(ClientDisconnectedError):
            await export(room, "GET", "/sessions/s/trajectories", "", 3)
        assert not session.exported

    asyncio.run(work())


def test_what_is_committed_meanwhile_is_not_exported() -> None:
    async def work() -> None:
        room, session = await spoken(turns=40, words=2000)

        class Slow(Reader):
            async def send(self, message: Message) -> None:
                if len(self.messages) == 2:
                    assert (await room.ask(BODY).answer())[0] == 200
                await super().send(message)

        reader = Slow(None)
        scope: Scope = {
            "type": "http",
            "method": "GET",
            "path": "/sessions/s/trajectories",
            "headers": [],
            "query_string": b"",
        }
        await room.app(scope, reader.receive, reader.send)
        assert len(reader.messages) > 3
        assert (session.samples, session.exported) == (41, False)

    asyncio.run(work())
