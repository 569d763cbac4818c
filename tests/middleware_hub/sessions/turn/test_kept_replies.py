"""Replies that are kept for a client whose connection was cut: for how long, how many, and which one comes again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from middleware_hub.chat.keys import canonical
from middleware_hub.metrics import SessionMetrics
from middleware_hub.sessions.exchange import RequestKey
from middleware_hub.sessions.session import Session
from middleware_hub.sessions.turn import kept_replies
from middleware_hub.sessions.turn.kept_replies import KeptReplies, KeptReply
from tests.middleware_hub.sessions.in_process import Room

PLACE = "", "s", 0.0, ""
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 20}


def key(body: bytes = b"{}") -> RequestKey:
    return RequestKey(None, body, "OpenAI")


def reply(name: str, *, time: float, size: int = 10) -> KeptReply:
    return KeptReply([], b"x" * size, False, (name,), time)


@pytest.fixture
def now() -> list[float]:
    """The time, which a test moves on."""
    return [1000.0]


@pytest.fixture
def session() -> Session:
    return Session("s", "", canonical, ttl=60)


def kept(now: list[float], room: int = 10**6) -> KeptReplies:
    return KeptReplies(SessionMetrics(CollectorRegistry()), room=room, clock=lambda: now[0])


def test_two_minutes(now: list[float], session: Session) -> None:
    replies = kept(now)
    replies.keep(PLACE, key(), reply("a", time=now[0]))
    now[0] += 120
    assert replies.find(session, PLACE, key()) is not None
    now[0] += 0.1
    assert replies.find(session, PLACE, key()) is None
    assert (len(replies), replies.size) == (0, 0)


def test_old_ones_go_when_others_come(now: list[float]) -> None:
    replies = kept(now)
    for number in range(10):
        replies.keep(PLACE, key(b"%d" % number), reply(f"{number}", time=now[0]))
        now[0] += 61
    assert len(replies) == 2


def test_the_oldest_make_room(now: list[float], session: Session) -> None:
    replies = kept(now, room=10_000)
    for number in range(20):
        replies.keep(PLACE, key(b"%d" % number), reply(f"{number}", time=now[0], size=1000))
    assert replies.size <= 10_000
    assert replies.find(session, PLACE, key(b"0")) is None
    assert replies.find(session, PLACE, key(b"19")) is not None
    replies.keep(PLACE, key(b"large"), reply("large", time=now[0], size=9_500))
    assert len(replies) == 0, "it does not fit, with what it takes besides its body"
    assert replies.size == 0


def test_of_equal_requests_each_gets_its_own(now: list[float], session: Session) -> None:
    """Two clients lost the replies to equal requests: they get both samples, not one of them twice."""
    replies = kept(now)
    for name in "ab":
        replies.keep(PLACE, key(), reply(name, time=now[0]))
    found = [replies.find(session, PLACE, key()) for _ in range(4)]
    assert [one.names for one in found if one is not None] == [("a",), ("b",), ("a",), ("b",)]
    replies.continued("a")
    assert {one.names for _ in range(3) if (one := replies.find(session, PLACE, key()))} == {("b",)}


def test_each_failure_counts_once(now: list[float], session: Session) -> None:
    replies = kept(now)
    replies.failed(PLACE, key())
    replies.keep(PLACE, key(), reply("a", time=now[0]))
    assert replies.find(session, PLACE, key()) is None
    assert replies.find(session, PLACE, key()) is not None
    replies.failed(PLACE, key())
    now[0] += 119
    assert replies.find(session, PLACE, key()) is None
    replies.failed(PLACE, key())
    replies.keep(PLACE, key(), reply("b", time=now[0]))
    now[0] += 121
    replies.keep(PLACE, key(), reply("c", time=now[0]))
    assert replies.find(session, PLACE, key()) is not None, "the failure was long ago"
    for number in range(5000):
        replies.failed(PLACE, key(b"%d" % number))
    assert len(replies._failed) <= kept_replies.MOST_FAILURES


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_went_out_is_kept_and_its_turn_is_not(stream: bool) -> None:
    """What stays in memory is what was sent: no prompt, no exchange."""

    async def work() -> None:
        room = Room()
        session = await room.open()
        room.engine.says("one")
        body = {**BODY, "stream": stream}
        first = room.ask(body)
        await first.answer()
        assert session._exchanges == []
        assert session.idle
        again = room.ask(body, again="1")
        await again.answer()
        assert again.content == first.content
        assert len(room.engine.log) == 1
        assert room.metric("tito_session_resent_requests_total", kind="replayed") == 1

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_reply_that_failed_in_its_stream_is_not_kept() -> None:
    async def work() -> None:
        room = Room()
        await room.open()
        body = {**BODY, "stream": True}
        room.engine.says("one two", breaks=1)
        first = room.ask(body)
        await first.answer()
        assert b"error" in first.content
        room.engine.says("three")
        again = room.ask(body, again="1")
        await again.answer()
        assert b"three" in again.content

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_request_in_flight_that_continues_it_counts_too() -> None:
    """Whether it fails or not: who continues a reply has read it."""

    async def work() -> None:
        room = Room()
        await room.open()
        room.engine.says("one")
        await room.ask(BODY).answer()
        onward = [*BODY["messages"], {"role": "assistant", "content": "one"}, {"role": "user", "content": "Go on"}]
        room.engine.says("", status=503)
        status, _ = await room.ask({**BODY, "messages": onward}).answer()
        assert status == 503
        room.engine.says("two")
        _, found = await room.ask(BODY, again="1").answer()
        assert found["choices"][0]["message"]["content"] == "two"

    asyncio.run(asyncio.wait_for(work(), 60))


def test_one_that_is_too_long_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its turn, as another router of the store would write it."""

    async def work() -> None:
        monkeypatch.setattr("middleware_hub.sessions.chats.MOST_BYTES", 10)
        room = Room()
        await room.open()
        for stream in (False, True):
            room.engine.says("one")
            for _ in range(3):
                asking = room.ask({**BODY, "stream": stream}, again="1")
                await asking.answer()
                assert b"one" in asking.content
        assert len(room.engine.log) == 2

    asyncio.run(asyncio.wait_for(work(), 60))
