"""Logprobs of a long reply are an object for each alternative: they are spelled and written beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from middleware_hub.chat.answer import SampledTokens, TokenLogprob
from middleware_hub.dialects.openai import replies
from tests.middleware_hub.sessions.in_process import Room


def noting(threads: set[int], work: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        return work(*args, **options)

    return noted


@pytest.mark.parametrize(("words", "beside"), [(3, False), (1500, True)])
@pytest.mark.parametrize("stream", [False, True])
def test_many_logprobs_do_not_hold_up_others(
    words: int, beside: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spelled, written = set[int](), set[int]()
    monkeypatch.setattr(SampledTokens, "all", noting(spelled, SampledTokens.all))
    monkeypatch.setattr(replies, "_choice", noting(written, replies._choice))

    async def scenario() -> None:
        room = Room()
        await room.open()
        room.engine.says("one " * words)
        body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "stream": stream}
        status, answer = await room.ask(body).answer()
        assert status == 200
        chunks = answer[:-1] if stream else [answer]
        told = [one["logprobs"]["content"] for chunk in chunks for one in chunk["choices"] if one["logprobs"]]
        (_, sampled), *_ = room.engine.log
        assert sum(map(len, told)) == len(sampled)

    asyncio.run(scenario())
    here = {threading.get_ident()}
    assert spelled
    assert stream or written
    assert here.isdisjoint(spelled) is beside
    assert stream or here.isdisjoint(written) is beside


def test_logprobs_that_cannot_be_spelled_leave_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets an error and asks again: a turn that it never saw would be a second sample."""

    def failing(*_: Any) -> Any:
        raise RuntimeError("no spelling")

    async def scenario() -> None:
        room = Room()
        await room.open()
        body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
        with monkeypatch.context() as broken:
            broken.setattr(SampledTokens, "all", failing)
            status, _ = await room.ask(body).answer()
        assert status == 500
        assert room.session.trie.head is None
        assert (await room.ask(body).answer())[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_long_list_is_written_as_a_short_one(as_ids: bool) -> None:
    tokens = [TokenLogprob(n, b"x\xff%d" % n, -n / 7, [(n, b"y", -1.0)] * (n % 3)) for n in range(1001)]
    long = msgspec.json.decode(msgspec.json.encode(replies._logprobs(tokens, as_ids=as_ids)))
    short = [msgspec.json.decode(msgspec.json.encode(replies._logprobs([one], as_ids=as_ids))) for one in tokens]
    assert long == {"content": [one["content"][0] for one in short], "refusal": None}
