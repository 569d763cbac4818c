"""A router with the tokenizer of a model of text, in front of workers that take images: it says what to do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from router.app import create_app
from router.config import RouterConfig, WorkersConfig
from router.config.radix import RadixConfig
from tests.support.agents import AgentSession
from tests.support.chat_models import chat_model
from tests.support.fleet import until
from tests.support.pictures import data_url, picture
from tests.support.serving import serve
from tests.support.stack import Stack, speller, stack
from worker.models.ngram import shipped_image_tokenizer
from worker.worker import EmbeddedWorker

PICTURE = data_url(picture(30, 20, 1))
CHATS = {
    "/v1/chat/completions": {"type": "image_url", "image_url": {"url": PICTURE}},
    "/v1/messages": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]},
    },
}


@pytest.fixture(scope="module")
def blind() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), folder=chat_model("qwen3")) as made:
        yield made


def chat(part: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize("path", CHATS)
def test_a_worker_without_chats_leaves_the_answer_to_the_router(blind: Stack, path: str) -> None:
    """It has no such path (404), which tells a client nothing about its image."""
    answer = blind.post(path, chat(CHATS[path]))
    assert answer.status == 400
    error = answer.json()["error"]
    assert "--tokenizer-path" in error["message"]
    assert "messages[0].content[0]" in error["message"]
    assert answer.headers["x-radix-recorded"] == "no; unsupported_content"


def test_a_session_says_the_same(blind: Stack) -> None:
    agent = AgentSession.make(blind)
    answer = blind.post(f"{agent.path}/v1/chat/completions", chat(CHATS["/v1/chat/completions"]))
    assert answer.status == 400
    assert answer.json()["error"]["code"] == "unsupported_content"
    assert "--tokenizer-path" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("theirs", "told"), [(shipped_image_tokenizer, True), (lambda: chat_model("qwen3"), False)])
def test_a_worker_that_takes_images_is_told_of(
    blind: Stack, theirs: Any, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedWorker(theirs()) as other:
        assert blind.post("/add_worker", {"url": other.url}).status == 200

        def asked() -> bool:
            return any(one["url"] == other.url and one["is_healthy"] for one in blind.get("/workers").json()["workers"])

        def warning() -> str:
            (found,) = [one for one in blind.get("/workers").json()["workers"] if one["url"] == other.url]
            return found["warning"] or ""

        until(asked, "the worker is healthy")
        if told:
            until(lambda: "it takes images" in warning(), "the worker has said that it takes images")
            assert "--tokenizer-path" in warning()
        else:
            assert "images" not in warning()
        blind.post("/remove_worker", {"url": other.url})


@contextmanager
def worker_that_answers(status: int, body: bytes) -> Iterator[str]:
    """A worker whose chats have this answer."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, status: int, body: bytes) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._answer(200, b'{"model_path": "m"}')

        def do_POST(self) -> None:
            self._answer(status, body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "said", "instead"),
    [
        (404, {"detail": "Not Found"}, True),
        (404, {"error": {"message": "The model `m` does not exist."}}, False),
        (404, {"detail": "Not Found here"}, False),
        (400, {"detail": "Not Found"}, False),
        (200, {"choices": []}, False),
    ],
)
def test_any_other_answer_of_a_worker_is_passed_on(status: int, said: dict[str, Any], instead: bool) -> None:
    with worker_that_answers(status, json.dumps(said).encode()) as url:
        config = RouterConfig(
            workers=WorkersConfig(urls=(url,)), radix=RadixConfig(tokenizer_path=str(chat_model("qwen3")))
        )
        with serve(create_app(config)) as router:
            made = Stack("qwen", router, [], speller("qwen"))
            answer = made.post("/v1/chat/completions", chat(CHATS["/v1/chat/completions"]))
    assert answer.headers["x-radix-recorded"] == "no; unsupported_content"
    if instead:
        assert (answer.status, answer.json()["error"]["code"]) == (400, "unsupported_content")
    else:
        assert (answer.status, answer.json()) == (status, said)
