"""OpenAI's and Anthropic's own clients behind a proxy that loses the first reply to each request: one sample a request."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

from tests.support.agents import AgentSession
from tests.support.chat_models import chat_model
from tests.support.stack import Stack, stack


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("incremental",), folder=chat_model("qwen3")) as made:
        yield made


class Losing(BaseHTTPRequestHandler):
    """Brings each request to the router. Of those that are sent for the first time it reads the reply, and hangs up."""

    def do_POST(self) -> None:
        target = urlsplit(self.server.router)  # type: ignore[attr-defined]  # set below
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        with closing(http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)) as connection:
            connection.request("POST", self.path, body, {**headers, "accept-encoding": "identity"})
            reply = connection.getresponse()
            content = reply.read()
        if self.headers["x-stainless-retry-count"] == "0":
            self.close_connection = True
            return
        self.send_response(reply.status)
        self.send_header("content-type", reply.headers["content-type"])
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def lossy(served: Stack) -> Iterator[str]:
    """The address of the proxy."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Losing)
    server.router = served.url  # type: ignore[attr-defined]  # read above
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("session", [True, False])
def test_each_request_is_sampled_once(served: Stack, lossy: str, session: bool) -> None:
    agent = AgentSession.make(served)
    (worker,) = served.workers
    before = len(worker.log)
    root = lossy + (agent.path if session else "")
    seeds = iter(range(100 * session, 1000))  # chats without a session share a memory
    asked = 0
    with (
        openai.OpenAI(base_url=f"{root}/v1", api_key="-") as ours,
        anthropic.Anthropic(base_url=root, api_key="-") as other,
    ):
        messages: list[Any] = []
        for turn in range(1 + session):
            messages.append({"role": "user", "content": f"Turn {turn} of {session}"})
            options: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": messages}
            worker.script(text="Yes.")
            whole = ours.chat.completions.create(**options, seed=next(seeds))
            with ours.chat.completions.create(**options, seed=next(seeds), stream=True) as events:
                assert [event.id for event in events]
            assert other.messages.create(**options, extra_body={"seed": next(seeds)}).content
            asked += 3
            if session:
                assert ours.responses.create(model="m", input=f"Turn {turn}", max_output_tokens=9).output
                asked += 1
            messages.append({"role": "assistant", "content": whole.choices[0].message.content})
    assert len(worker.log) - before == asked
    if session:
        assert agent.show()["num_generations"] == asked
