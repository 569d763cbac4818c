"""The end of a session, also when several callers end it at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.middleware_hub.sessions.in_process import Room, until

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 20}


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_that_is_deleted_while_it_is_finalized(stream: bool) -> None:
    """Finalizing waits for a worker; then there is nothing to be exported any more, and it says so."""

    async def work() -> None:
        room = Room()
        session = await room.open()
        assert (await room.ask(BODY).answer())[0] == 200
        says = room.engine.says("one two", hold=1, deaf=True)
        client = room.ask({**BODY, "stream": stream})
        await room.engine.arrived()
        finalizing = asyncio.create_task(room.call("POST", "/sessions/s/finalize"))
        await until(lambda: session.trie.closed)
        deleting = asyncio.create_task(room.call("DELETE", "/sessions/s"))
        await until(lambda: not len(room.app.registry))
        assert not finalizing.done()
        says.go.set()
        status, found = await finalizing
        assert (status, found["error"]["type"]) == (409, "session_over")
        assert (await deleting)[0] == 200
        assert (await client.answer())[0] == (200 if stream else 409)
        assert (room.app.registry.tokens, session.samples, session.trie.nodes) == (0, 0, 0)
        assert room.metric("tito_sessions_total", event="finalized") == 0
        assert (await room.call("POST", "/sessions/s/finalize"))[0] == 404

    asyncio.run(work())


def test_a_session_that_is_finalized_twice_at_once() -> None:
    async def work() -> None:
        room = Room()
        session = await room.open()
        assert (await room.ask(BODY).answer())[0] == 200
        says = room.engine.says("one two", hold=1, deaf=True)
        client = room.ask(BODY)
        await room.engine.arrived()
        both = [asyncio.create_task(room.call("POST", "/sessions/s/finalize")) for _ in range(2)]
        await until(lambda: session.trie.closed)
        says.go.set()
        (_, one), (_, other) = [await finalizing for finalizing in both]
        assert one == other
        assert len(one["trajectories"]) == 1
        assert (await client.answer())[0] == 409
        assert room.metric("tito_sessions_total", event="finalized") == 1

    asyncio.run(work())


@pytest.mark.parametrize("call", [("POST", "/sessions/s/finalize"), ("DELETE", "/sessions/s")])
def test_a_stream_that_has_not_begun_when_its_session_ends_is_a_409(call: tuple[str, str]) -> None:
    """What the worker answers to the abort is its first event: not the beginning of a reply."""

    async def work() -> None:
        room = Room()
        await room.open()
        room.engine.says("one two", hold=0)
        client = room.ask({**BODY, "stream": True})
        await room.engine.arrived()
        assert (await room.call(*call))[0] == 200
        status, found = await client.answer()
        assert (status, found["error"]["type"]) == (409, "session_over")

    asyncio.run(work())


def test_the_prompts_of_a_session_go_with_it() -> None:
    """They would be kept until there is no room for others: for hours, if sessions are short."""

    async def work() -> None:
        room = Room()
        session = await room.open()
        assert (await room.ask(BODY).answer())[0] == 200
        assert (await room.ask(BODY).answer())[0] == 200
        prompts = session.prompts
        assert prompts is not None
        assert len(prompts) == 2
        assert prompts.size > 0
        assert (await room.call("POST", "/sessions/s/finalize"))[0] == 200
        assert (await room.call("DELETE", "/sessions/s"))[0] == 200
        assert (len(prompts), prompts.size) == (0, 0)

    asyncio.run(work())
