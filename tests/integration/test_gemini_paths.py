"""The paths of Google's API, below a session and at the root: keys, sessions that are named otherwise, requests sent again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google import genai
from google.genai import types

from middleware_hub.client import Client, Session
from router.config import StoreConfig
from tests.support.agents import AgentSession
from tests.support.client import Answer
from tests.support.stack import Stack, stack
from tests.support.templates import folder
from tests.support.vocabularies import vocabulary

GENERATE, STREAM = "/v1beta/models/m:generateContent", "/v1beta/models/m:streamGenerateContent"
BODY: dict[str, Any] = {
    "contents": [{"role": "user", "parts": [{"text": "Count"}]}],
    "generationConfig": {"maxOutputTokens": 12},
}
KEYS = {"api_keys": ("a:key-of-a", "b:key-of-b"), "admin_keys": ("key-of-all",)}


def template() -> dict[str, Any]:
    return {"chat_template": str(folder() / "qwen3.jinja")}


@pytest.fixture(scope="module")
def free() -> Iterator[Stack]:
    with stack("qwen", styles=("incremental",), sessions={**template(), "implicit": True}) as made:
        yield made
        assert made.idle()


@pytest.fixture(scope="module")
def kept() -> Iterator[Stack]:
    with stack("qwen", styles=("incremental",), sessions=template(), server=KEYS) as made:
        yield made


def client(url: str, key: str = "none", headers: dict[str, str] | None = None) -> genai.Client:
    return genai.Client(api_key=key, http_options=types.HttpOptions(base_url=url, headers=headers))


def text_of(answer: Answer) -> str:
    """The text of a reply in any of its three forms."""
    assert answer.status == 200, answer.content
    body = answer.content.decode()
    if body.startswith("data: "):
        found = [json.loads(line.removeprefix("data: ")) for line in body.split("\n\n") if line.startswith("data: ")]
    else:
        found = json.loads(body)
        found = found if isinstance(found, list) else [found]
    return "".join(part["text"] for one in found for part in one["candidates"][0]["content"]["parts"])


def test_a_conversation_without_a_session_keeps_its_ids(free: Stack) -> None:
    (worker,) = free.workers
    worker.script(text="one  two")
    google = client(free.url)
    chat = google.chats.create(model="m")
    chat.send_message("a")
    before = worker.log[-1]
    worker.script(text="three")
    chat.send_message("b")
    chain = [*before.input_ids, *before.output_ids]
    assert list(worker.log[-1].input_ids)[: len(chain)] == chain


def test_a_header_names_a_session(free: Stack) -> None:
    (worker,) = free.workers
    worker.script(text="one  two")
    google = client(free.url, headers={"x-session-id": "by-header"})
    google.models.generate_content(model="m", contents="a")
    (only,) = free.exchange("GET", "/sessions/by-header/trajectories").json()["trajectories"]
    assert only["response_ids"] == list(worker.log[-1].output_ids)


@pytest.mark.parametrize("way", ["sdk", "query"])
def test_the_key_of_a_session_names_it(kept: Stack, way: str) -> None:
    made = kept.post("/sessions", {"as_key": True}, headers={"authorization": "Bearer key-of-a"}).json()
    (worker,) = kept.workers
    worker.script(text="one  two")
    if way == "sdk":
        google = client(kept.url, made["session_key"])
        google.models.generate_content(model="m", contents="a")
    else:
        assert kept.post(f"{GENERATE}?key={made['session_key']}", BODY).status == 200
    found = kept.exchange(
        "GET", f"/sessions/{made['session_id']}/trajectories", headers={"authorization": "Bearer key-of-a"}
    ).json()["trajectories"]
    assert [one["response_ids"] for one in found] == [list(worker.log[-1].output_ids)]


@pytest.mark.parametrize(
    ("query", "headers", "status"),
    [
        ("", {"x-goog-api-key": "key-of-a"}, 200),
        ("?key=key-of-a", {}, 200),
        ("?key=key-of-b", {}, 404),
        ("", {"x-goog-api-key": "key-of-b"}, 404),
        ("?key=wrong", {}, 401),
        ("", {}, 401),
    ],
)
def test_a_session_is_its_tenants_own(kept: Stack, query: str, headers: dict[str, str], status: int) -> None:
    name = kept.post("/sessions", {}, headers={"authorization": "Bearer key-of-a"}).json()["session_id"]
    answer = kept.post(f"/sessions/{name}{GENERATE}{query}", BODY, headers=headers)
    assert answer.status == status, answer.content
    if status != 200:
        names = {401: "UNAUTHENTICATED", 404: "NOT_FOUND"}
        assert (answer.json()["error"]["code"], answer.json()["error"]["status"]) == (status, names[status])
        assert b"key-of" not in answer.content


@pytest.mark.parametrize("path", [GENERATE, STREAM, f"{STREAM}?alt=sse"])
def test_a_request_that_is_sent_again_gets_its_reply(free: Stack, path: str) -> None:
    """And an equal body at another path is another request."""
    session = AgentSession.make(free)
    (worker,) = free.workers
    sent = {"idempotency-key": path}
    since = len(worker.log)
    first = free.post(f"{session.path}{path}", BODY, headers=sent)
    again = free.post(f"{session.path}{path}", BODY, headers=sent)
    assert (again.content, again.headers["content-type"]) == (first.content, first.headers["content-type"])
    assert len(worker.log) == since + 1
    for other in {GENERATE, STREAM, f"{STREAM}?alt=sse"} - {path}:
        before = len(worker.log)
        answer = free.post(f"{session.path}{other}", BODY, headers=sent)
        assert len(worker.log) == before + 1
        assert text_of(answer)
    assert first.headers["content-type"] == ("text/event-stream" if "sse" in path else "application/json")


def test_what_is_there_takes_its_methods_only(free: Stack) -> None:
    session = AgentSession.make(free)
    answer = free.exchange("GET", f"{session.path}{GENERATE}")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["status"] == "UNIMPLEMENTED"
    answer = free.post(f"{session.path}/v1beta/models/m:embedContent", {})
    assert (answer.status, answer.json()["error"]["status"]) == (404, "NOT_FOUND")
    answer = free.post(f"{session.path}/v1/messages/batches", {})
    assert (answer.status, answer.json()["error"]["type"]) == (404, "not_found_error"), "Anthropic's shape"


def test_a_router_without_a_template_says_so(tmp_path: Path) -> None:
    """At the root, too, where other dialects go to a worker."""
    shutil.copytree(vocabulary("qwen"), tmp_path / "bare")
    config = tmp_path / "bare" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": None}))
    with stack("qwen", styles=("incremental",), folder=tmp_path / "bare") as bare:
        session = AgentSession.make(bare)
        for path in (GENERATE, session.path + GENERATE):
            answer = bare.post(path, BODY)
            assert answer.status == 400
            assert "--chat-template" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [GENERATE, STREAM, f"{STREAM}?alt=sse"])
def test_after_a_restart_a_reply_is_written_anew(tmp_path: Path, path: str) -> None:
    store, said = StoreConfig(url=f"sqlite:{tmp_path}/store/"), []
    body = {**BODY, "generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
    for life in range(2):
        with stack("qwen", styles=("incremental",), sessions=template(), store=store) as made:
            if not life:
                made.post("/sessions", {"session_id": "s"})
                made.workers[0].script(text="<think>\nhm\n</think>\n\none  two")
            answer = made.post(f"/sessions/s{path}", body, headers={"idempotency-key": "k"})
            said.append((text_of(answer), answer.headers["content-type"], answer.headers["x-generation-id"]))
            assert len(made.workers[0].log) == 1 - life
    assert said[0] == said[1]
    assert said[0][0] == "hmone  two"


def test_a_model_of_text_says_what_it_reads(free: Stack) -> None:
    """Whether or not there is a session: no worker could read the request otherwise."""
    session = AgentSession.make(free)
    parts = [{"inlineData": {"mimeType": "image/png", "data": "aGk="}}]
    for path in (GENERATE, session.path + GENERATE):
        answer = free.post(path, {"contents": [{"role": "user", "parts": parts}]})
        assert answer.status == 400
        found = answer.json()["error"]
        assert found["details"][0]["metadata"]["param"] == "contents[0].parts[0]"


def test_the_answer_that_makes_a_session_has_googles_base_url(free: Stack) -> None:
    """It is the last field, since earlier ones keep their places."""
    made = free.post("/sessions", {"as_key": True}).json()
    assert list(made) == [
        "session_id",
        "base_url",
        "anthropic_base_url",
        "reward_info_url",
        "session_key",
        "google_base_url",
    ]
    (worker,) = free.workers
    worker.script(text="one")
    google = client(made["google_base_url"])
    assert google.models.generate_content(model="m", contents="a").text == "one"
    with Client(free.url) as own, Session(own, session_id="googles") as session:
        google = client(session.google_base_url)
        google.models.generate_content(model="m", contents="a")
        assert len(session.trajectories()) == 1
