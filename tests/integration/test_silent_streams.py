"""A stream in which nothing comes for a while: its client gets a ping, so that nobody takes it for its end."""

from __future__ import annotations

import time

import pytest

from middleware_hub.sessions import chats
from tests.support.agents import AgentSession, user
from tests.support.asking import Asking
from tests.support.chat_models import chat_model
from tests.support.stack import stack

PING = 0.4


def test_a_silent_stream_has_pings_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as far apart as they should be, and none comes while there are tokens."""
    monkeypatch.setattr(chats, "PING_SECONDS", PING)
    with stack("qwen", styles=("incremental",), folder=chat_model("qwen3")) as served:
        agent, worker = AgentSession.make(served), served.workers[0]
        worker.script(text="One two three four.")
        worker.hold(after=3)
        body = {"messages": [user("hi")], "stream": True}
        asking = Asking(served.url, body, path=f"{agent.path}/v1/chat/completions")
        begun, lines = time.monotonic(), list[bytes]()
        while lines.count(b": ping\n") < 3:
            lines.append(asking.response.readline())
        seconds = time.monotonic() - begun
        worker.release()
        rest = asking.response.read()
        asking.close()
    assert b"".join(lines).count(b'"content"') == 4, "the role, and three tokens"
    assert 2 * PING < seconds < 3 * PING + 5
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b": ping" not in rest
