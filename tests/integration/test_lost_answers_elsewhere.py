"""A reply that was lost on the way, whose request comes again to another router of the store, or after a restart.

The reply is written anew from its turn: it says the same under the same id, and nothing is sampled a second time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.sessions.turn import written_again
from router.config import StoreConfig
from tests.integration.test_open_responses import CALLS as CALLED
from tests.integration.test_open_responses import WEATHER
from tests.support.agents import user
from tests.support.chat_models import chat_model
from tests.support.client import Answer
from tests.support.lives import Router
from tests.support.usual import usual
from worker.worker import EmbeddedWorker

AGAIN = {"x-stainless-retry-count": "1"}
CHAT = "chat/completions"
PATHS = [(CHAT, True), ("responses", True), ("messages", True), (CHAT, False), ("messages", False)]
"""Each dialect, and whether in a session."""
NATIVE: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "function", "function": {key: value for key, value in WEATHER.items() if key != "type"}}],
    "responses": [WEATHER],
    "messages": [
        {"name": "get_weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]},
    ],
}
THOUGHTS = {"qwen3": "<think>\nhm\n</think>\n\n", "qwen3_5_think": "hm\n</think>\n\n", "glm4moe": "<think>hm</think>\n"}


class Two:
    """Two routers over one store, in front of one worker that says other words each time."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.worker = EmbeddedWorker(chat_model(name), token_delay=0)
        self.store = StoreConfig(url=f"sqlite:{folder / 'store.sqlite3'}")

    def __enter__(self) -> Two:
        self.worker.__enter__()
        self.one, self.other = (Router(self.worker, self.store, folder=chat_model(self.name)) for _ in range(2))
        return self

    def __exit__(self, *_: object) -> None:
        self.one.stop()
        self.other.stop()
        self.worker.__exit__(None, None, None)

    def says(self, text: str, times: int = 1) -> None:
        self.worker.forget_scripts()
        self.worker.script(text=f"<|channel|>final<|message|>{text}" if self.name == "gptoss" else text, times=times)

    def place(self, path: str, session: bool) -> str:
        made = self.one.stack.post("/sessions", {}).json()["session_id"] if session else ""
        return f"/sessions/{made}/v1/{path}" if session else f"/v1/{path}"

    @property
    def sampled(self) -> int:
        return len(self.worker.log)


@pytest.fixture(scope="module", params=usual(CALLED, "qwen3"))
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with Two(request.param, tmp_path_factory.mktemp("two")) as made:
        yield made


def body_of(path: str, text: str, **more: Any) -> dict[str, Any]:
    asked = {"input": text} if path == "responses" else {"messages": [user(text)]}
    return {"model": "m", **asked, **({"max_tokens": 90} if path == "messages" else {}), **more}


def told(answer: Answer, stream: bool) -> Any:
    """What a client reads in a reply, whole or streamed."""
    assert answer.status == 200, answer.content
    if not stream:
        found = answer.json()
        for unknown in ("meta_info", "created", "created_at", "completed_at"):
            found.pop(unknown, None)
        for choice in found.get("choices", ()):
            choice.pop("meta_info", None)
            choice.pop("matched_stop", None)
        found.pop("usage")
        return found
    assert answer.headers["content-type"].startswith("text/event-stream")
    said: dict[str, str] = {}
    for line in answer.content.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        said["id"] = event.get("id") or event.get("message", {}).get("id") or said.get("id", "")
        deltas = [choice["delta"] for choice in event.get("choices", ())] or [event.get("delta")]
        for delta in deltas:
            if isinstance(delta, str):
                said[event["type"]] = said.get(event["type"], "") + delta
            for key, value in (delta or {}).items() if isinstance(delta, dict) else ():
                if key == "type":
                    continue
                if key == "tool_calls":
                    key, value = "arguments", "".join(one["function"].get("arguments") or "" for one in value)
                said[key] = said.get(key, "") + str(value or "")
        if event.get("type") == "response.completed":
            said["output"] = json.dumps(event["response"]["output"])
            said["id"] = event["response"]["id"]
    return said


@pytest.mark.parametrize("restarted", usual([False, True], False))
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "session"), PATHS)
def test_it_says_the_same(two: Two, path: str, session: bool, stream: bool, restarted: bool) -> None:
    at, text = two.place(path, session), f"Hi. {path} {session} {stream} {restarted}"
    body = body_of(path, text, stream=stream)
    two.says("One word." if two.name not in THOUGHTS else f"{THOUGHTS[two.name]}One word.")
    first, count = two.one.stack.post(at, body), two.sampled
    two.says("Another word.")
    if restarted:
        two.one.restart()
    second = (two.one if restarted else two.other).stack.post(at, body, headers=AGAIN)
    assert two.sampled == count
    assert told(second, stream) == told(first, stream)
    for name in (
        "x-generation-id",
        "x-radix-prompt-tokens",
        "x-radix-reused-tokens",
        "x-router-affinity",
        "x-session-id",
    ):
        assert second.headers.get(name) == first.headers.get(name), name
    assert second.headers["x-radix-recorded"] == first.headers["x-radix-recorded"]
    third = two.other.stack.post(at, body, headers=AGAIN)
    assert (two.sampled, told(third, stream)) == (count, told(first, stream))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "session"), PATHS)
def test_a_call_has_its_id(two: Two, path: str, session: bool, stream: bool) -> None:
    at = two.place(path, session)
    body = body_of(path, f"Rain? {path} {session} {stream}", stream=stream, tools=NATIVE[path])
    two.worker.forget_scripts()
    two.worker.script(text=THOUGHTS.get(two.name, "") + CALLED[two.name], times=2)
    first, count = two.one.stack.post(at, body), two.sampled
    assert b"Ulm" in first.content
    twin = two.one.stack.post(at, body, headers={"idempotency-key": "k"})
    assert two.sampled == count + 1, "it has another key"
    assert told(two.other.stack.post(at, body, headers=AGAIN), stream) == told(first, stream)
    second = two.other.stack.post(at, body, headers={"idempotency-key": "k"})
    assert told(second, stream) == told(twin, stream) != told(first, stream), "an equal message, with ids of its own"
    assert two.sampled == count + 1


def test_a_key_names_the_request(two: Two) -> None:
    at, body = two.place(CHAT, True), body_of(CHAT, "Hi.")
    two.says("One word.")
    first, count = two.one.stack.post(at, body, headers={"idempotency-key": "k"}), two.sampled
    second = two.other.stack.post(at, body, headers={"idempotency-key": "k"})
    assert (two.sampled, told(second, False)) == (count, told(first, False))


def test_all_samples_come_again(two: Two) -> None:
    at, body = two.place(CHAT, True), body_of(CHAT, "Which?", n=3, max_tokens=4, return_token_ids=True, logprobs=True)
    two.worker.forget_scripts()
    first, count = two.one.stack.post(at, body), two.sampled
    second = two.other.stack.post(at, body, headers=AGAIN)
    assert (two.sampled, told(second, False)) == (count, told(first, False))
    for one, other in zip(first.json()["choices"], second.json()["choices"], strict=True):
        assert other["meta_info"]["generation_id"] == one["meta_info"]["generation_id"]


@pytest.mark.parametrize(
    "why", ["continued", "another body", "two equal requests", "not sent again", "later", "top logprobs"]
)
@pytest.mark.parametrize("session", [True, False])
def test_it_is_sampled_anew(two: Two, session: bool, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = two.place(CHAT, session)
    body = body_of(
        CHAT, f"Hi. {why} {session}", **({"logprobs": True, "top_logprobs": 2} if why == "top logprobs" else {})
    )
    two.says("One word.")
    first = two.one.stack.post(at, body)
    if why == "continued":
        two.says("More.")
        message = first.json()["choices"][0]["message"]
        two.other.stack.post(at, {**body, "messages": [*body["messages"], message, user("And?")]})
    elif why == "two equal requests":
        two.says("Twin.")
        two.one.stack.post(at, body)
    elif why == "later":
        monkeypatch.setattr(written_again, "KEPT_SECONDS", -1.0)
    count = two.sampled
    two.says("Another word.")
    asked = {**body, "max_tokens": 77} if why == "another body" else body
    second = two.other.stack.post(at, asked, headers={} if why == "not sent again" else AGAIN)
    assert (second.status, two.sampled) == (200, count + 1)
    assert second.headers["x-generation-id"] != first.headers["x-generation-id"]


def test_one_sample_is_trained_on(two: Two) -> None:
    at, body = two.place(CHAT, True), body_of(CHAT, "Hi.")
    two.says("One word.")
    two.one.stack.post(at, body)
    two.one.restart()
    second = two.one.stack.post(at, body, headers=AGAIN).json()["choices"][0]["message"]
    two.says("More.")
    messages = [*body["messages"], {"role": "assistant", "content": second["content"]}, user("And?")]
    two.other.stack.post(at, {**body, "messages": messages})
    place = at.removesuffix(f"/v1/{CHAT}")
    assert two.one.stack.get(place).json()["num_generations"] == 2
    (only,) = two.one.stack.post(f"{place}/finalize", {}).json()["trajectories"]
    assert only["exact"]
