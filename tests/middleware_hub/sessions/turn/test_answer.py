"""`parallel_tool_calls: false`: a client that wants one call in a turn gets one, whatever the model sampled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from middleware_hub.spans.chain import unpack_logprobs
from tests.middleware_hub.sessions.in_process import Room
from tests.support.agents import TOOLS, call_text

CALLS = "\n".join(call_text(where) for where in ("here", "there", "nowhere"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("parallel", "told"), [(True, 3), (False, 1)])
def test_the_client_gets_so_many_calls(stream: bool, parallel: bool, told: int) -> None:
    """Every sampled token stays in the branch all the same: what the client is not told was sampled."""

    async def work() -> None:
        room = Room(tool_call_parser="hermes")
        await room.open()
        room.engine.says(CALLS)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Look"}],
            "tools": TOOLS,
            "parallel_tool_calls": parallel,
            "stream": stream,
        }
        status, reply = await room.ask(body).answer()
        assert status == 200, reply
        if stream:
            deltas = [choice["delta"] for event in reply if event != b"[DONE]" for choice in event["choices"]]
            calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        else:
            calls = reply["choices"][0]["message"]["tool_calls"]
        wheres = [call["function"]["arguments"] for call in calls]
        assert len(wheres) == told
        assert '"here"' in wheres[0]
        head = room.session.trie.head
        assert head is not None
        assert len(head.span) == len(room.engine.log[0][1])

    asyncio.run(work())


def test_the_logprobs_of_a_stream_are_all_told_once_also_those_of_a_call_that_is_not() -> None:
    async def work() -> None:
        room = Room(tool_call_parser="hermes")
        await room.open()
        room.engine.says(f"{call_text('here')}{call_text('there')}\nbye")
        asked = {"tools": TOOLS, "parallel_tool_calls": False, "stream": True, "logprobs": True}
        status, reply = await room.ask({"messages": [{"role": "user", "content": "Look"}], **asked}).answer()
        assert status == 200, reply
        choices = [choice for event in reply if event != b"[DONE]" for choice in event["choices"]]
        told = [one["logprob"] for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
        head = room.session.trie.head
        assert head is not None
        assert head.span.logprobs is not None
        assert told == pytest.approx(unpack_logprobs(head.span.logprobs, len(head.span)))

    asyncio.run(work())


def test_a_text_behind_a_call_stays_behind_it() -> None:
    """A whole message has the blocks of a streamed one, in their order."""

    async def work() -> None:
        room = Room(tool_call_parser="hermes")
        await room.open()
        room.engine.says(f"before\n{call_text('here')}\nbehind")
        asked = {"max_tokens": 99, "tools": [{"name": "look", "input_schema": {}}]}
        body = {"messages": [{"role": "user", "content": "Look"}], **asked}
        status, reply = await room.ask(body, "/sessions/s/v1/messages").answer()
        assert status == 200, reply
        assert [block.get("text") for block in reply["content"]] == ["before", None, "\nbehind"]
        assert reply["content"][1]["name"] == "look"

    asyncio.run(work())
