"""An adopted orphan has a client again: it is neither given up nor given to another client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from middleware_hub.sessions.chats import PIECES_AT_ONCE
from middleware_hub.sessions.exchange import ClientState, Exchange, RequestKey
from middleware_hub.sessions.turn.generation import TurnGeneration
from tests.middleware_hub.sessions.in_process import Client, Room, until

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 20}


async def orphaned(room: Room) -> Any:
    """A generation whose client has left; it goes on when `go` is set."""
    says = room.engine.says("one two three", hold=1)
    first = room.ask(BODY)
    await room.engine.arrived()
    await first.leave()
    return says


async def adopted(room: Room) -> Client:
    client = room.ask(BODY, again="1")
    await until(lambda: room.metric("tito_session_resent_requests_total", kind="adopted") == 1)
    return client


def content(reply: Any) -> tuple[str, str]:
    (choice,) = reply["choices"]
    return choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("adopted_in_time", [True, False])
def test_the_grace_ends_with_the_adoption(adopted_in_time: bool) -> None:
    """An adopted generation outlives its grace; one without a client is given up."""

    async def work() -> None:
        composing = asyncio.Event()

        async def compose(_: Exchange[TurnGeneration]) -> list[TurnGeneration]:
            await composing.wait()
            return []

        one = Exchange(RequestKey(None, b""), compose, grace=0.0, on_over=lambda _: None)
        one.detach(delivered=False)
        if adopted_in_time:
            one.attach()
        for _ in range(10):
            await asyncio.sleep(0)  # timers of no seconds have rung by now
        assert (one.client is ClientState.GIVEN_UP, one.over) == (not adopted_in_time, not adopted_in_time)
        composing.set()
        await one.all_over()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_an_adopted_exchange_is_not_joined() -> None:
    """A third client that sends the same request while the second one reads gets a sample of its own."""

    async def work() -> None:
        room = Room()
        await room.open()
        says = await orphaned(room)
        second = await adopted(room)
        room.engine.says("four")
        status, reply = await room.ask(BODY, again="2").answer()
        assert (status, content(reply)) == (200, ("four", "stop"))
        says.go.set()
        status, reply = await second.answer()
        assert (status, content(reply)) == (200, ("one two three", "stop"))
        assert (room.session.samples, len(room.engine.log)) == (2, 2)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_an_adopted_exchange_that_loses_its_client_is_an_orphan_again() -> None:
    async def work() -> None:
        room = Room()
        await room.open()
        says = await orphaned(room)
        second = await adopted(room)
        await second.leave()
        third = room.ask(BODY, again="2")
        await until(lambda: room.metric("tito_session_resent_requests_total", kind="adopted") == 2)
        says.go.set()
        status, reply = await third.answer()
        assert (status, content(reply)) == (200, ("one two three", "stop"))
        assert (room.session.samples, len(room.engine.log)) == (1, 1)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_an_orphan_that_is_ended_for_what_was_read_of_it_is_not_adopted() -> None:
    """A client that sends the request again meanwhile would get the part that its worker returns."""

    async def work() -> None:
        room = Room()
        session = await room.open()
        body = {**BODY, "stream": True}
        says = room.engine.says("one two three", hold=1, deaf=True)
        left = room.ask(body, key="k")
        await room.engine.arrived()
        await left.leave()
        (orphan,) = session._exchanges
        read = [{"role": "assistant", "content": "one"}, {"role": "user", "content": "Go on"}]
        goes_on = room.ask({**BODY, "messages": [*BODY["messages"], *read]})
        await until(lambda: orphan.client is ClientState.GIVEN_UP)
        room.engine.says("four")
        status, events = await room.ask(body, key="k").answer()
        texts = [choice["delta"].get("content") or "" for event in events[:-1] for choice in event["choices"]]
        assert (status, "".join(texts)) == (200, "four")
        says.go.set()
        assert (await goes_on.answer())[0] == 200

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize("samples", [1, 3])
def test_a_long_reply_is_handed_over_in_steps(samples: int) -> None:
    """A stream that nobody read may wait as thousands of pieces: written all at once, they would hold up others."""

    async def scenario() -> None:
        room = Room()
        await room.open()
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "n": samples, "max_tokens": 5000}
        said = [room.engine.says(f"one two {number} " * 400, hold=1) for number in range(samples)]
        first = room.ask(body, key="k")
        await room.engine.arrived(samples)
        await first.leave()
        for one in said:
            one.go.set()
        await until(lambda: room.metric("tito_session_replies_total", recorded="exact", reason="") == samples)
        again = room.ask(body, key="k")
        status, events = await again.answer()
        assert status == 200
        texts = [""] * samples
        for event in events[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
        assert texts == [one.text for one in said]
        most = max(part.get("body", b"").count(b"data: ") for part in again.out)
        assert len(events) > 4 * PIECES_AT_ONCE, "it is long"
        assert most <= PIECES_AT_ONCE + 2 * samples + 2, f"{most} events were written in one step"

    asyncio.run(scenario())
