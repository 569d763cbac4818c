"""What the registry and a session remember, for whom and for how long: the cases exactly on a limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from middleware_hub.chat.keys import canonical
from middleware_hub.sessions.anonymous import MOST_NAMESPACES, OpenChats
from middleware_hub.sessions.session import Session
from tests.middleware_hub.sessions.in_process import Room
from tests.middleware_hub.sessions.trie.test_trie import Talk, assistant, user

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 20}


class TestNamespaces:
    """Of those who talk without a session, the ones that have been silent for longest are forgotten."""

    def test_one_that_is_used_outlives_those_that_are_not(self) -> None:
        async def work() -> None:
            chats = OpenChats(max_tokens=1000)
            used, unused = chats.of("t", "used"), chats.of("t", "unused")
            for number in range(MOST_NAMESPACES - 2):
                chats.of("t", f"n{number}")
            assert chats.of("t", "used") is used
            chats.of("t", "one more")
            assert chats.of("t", "used") is used
            assert chats.of("t", "unused") is not unused
            await asyncio.gather(*(one.abort() for one in chats))

        asyncio.run(work())

    def test_there_are_never_more_than_that(self) -> None:
        async def work() -> None:
            chats = OpenChats(max_tokens=1000)
            first = [chats.of("t", f"n{number}") for number in range(MOST_NAMESPACES)]
            assert [chats.of("t", f"n{number}") for number in range(MOST_NAMESPACES)] == first
            assert chats.of("other", "n0") is not first[0]
            assert chats.of("t", "n1") is first[1], "one more is one less: the oldest went"
            assert chats.of("t", "n0") is not first[0]
            await asyncio.gather(*(one.abort() for one in chats))

        asyncio.run(work())


class TestUse:
    def test_a_commit_is_a_use(self) -> None:
        """A generation of hours ends in a session that is as young as its reply."""

        async def work() -> None:
            room = Room()
            session = await room.open()
            says = room.engine.says("one two", hold=1)
            client = room.ask(BODY)
            await room.engine.arrived()
            session.used = 0.0
            says.go.set()
            assert (await client.answer())[0] == 200
            assert session.used > 0.0

        asyncio.run(work())

    def test_what_was_exported_is_lost_all_the_same_when_more_was_sampled_since(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It was asked for its trajectories, went on, and ran out of time: nobody has had the last turn."""

        async def work() -> None:
            room = Room()
            session = await room.open()
            await room.ask(BODY).answer()
            await room.call("GET", "/sessions/s/trajectories")
            assert session.exported
            await room.ask(BODY).answer()
            assert not session.exported
            room.app.registry.sweep(session.used + session.ttl + 1)
            assert room.metric("tito_sessions_total", event="expired_unexported") == 1
            assert room.metric("tito_sessions_total", event="expired") == 0
            await asyncio.sleep(0)

        asyncio.run(work())
        assert "before it was exported" in caplog.text


class TestRoom:
    def test_chats_without_a_session_take_no_room_from_sessions(self) -> None:
        """They have a share of their own, from which the oldest go: nobody could finalize them to make room."""

        async def work() -> None:
            room = Room()
            await room.ask(BODY, "/v1/chat/completions").answer()
            assert room.app.open_chats.of("", "").tokens > 0
            assert room.app.registry.tokens == 0
            session = await room.open()
            await room.ask(BODY).answer()
            assert room.app.registry.tokens == session.tokens > 0
            await room.call("DELETE", "/sessions/s")
            assert room.app.registry.tokens == 0

        asyncio.run(work())


class TestContexts:
    def test_a_prompt_that_fills_the_context_leaves_no_room_for_a_token(self) -> None:
        """One token less, and one is sampled. Exactly as long as the context: refused, and no worker is asked."""

        async def work() -> None:
            room = Room()
            await room.open()
            await room.ask(BODY).answer()
            tokens = len(room.engine.log[0][0]["input_ids"])
            full, roomy = Room(max_context=tokens), Room(max_context=tokens + 1)
            for one in (full, roomy):
                await one.open()
            status, reply = await full.ask(BODY).answer()
            assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
            assert not full.engine.log
            assert (full.session.trie.nodes, full.session.trie.in_flight) == (0, 0)
            assert (await roomy.ask(BODY).answer())[0] == 200
            assert roomy.engine.log[0][0]["sampling_params"]["max_new_tokens"] == 1

        asyncio.run(work())


class TestWhichSample:
    def test_of_equal_reasonings_the_newest_is_continued(self) -> None:
        """And it is told that there was a choice."""
        talk = Talk()
        talk.say(user("a"), reply="b", reasoning="hm")
        newest = talk.say(user("a"), reply="b", reasoning="hm")
        talk.say(user("a"), reply="b", reasoning="well")
        turn, _ = talk.open(user("a"), assistant("b", reasoning_content="hm"), user("c"))
        assert (turn.checkpoint, turn.ambiguous) == (newest, True)


@pytest.mark.parametrize("count", [0, 1, 256, 2_500])
def test_a_list_of_many_sessions_is_made_and_written_in_steps(count: int) -> None:
    async def work() -> None:
        room = Room()
        for number in range(count):
            room.app.registry.add(Session(f"s{number}", "", canonical, ttl=100.0))
        asked, turns = asyncio.create_task(room.call("GET", "/sessions")), 0
        while not asked.done():
            await asyncio.sleep(0)
            turns += 1
        status, found = asked.result()
        assert status == 200
        assert [one["session_id"] for one in found["sessions"]] == [f"s{number}" for number in range(count)]
        assert turns >= 2 * (count // 256)

    asyncio.run(work())
