"""Streams whose events have several tokens: `--stream-interval`, and the `stream_interval` of a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.agents import user
from tests.support.chat_models import chat_model
from tests.support.stack import Stack, events, stack

Json = dict[str, Any]
TEXT = "One two three four five six seven eight nine ten eleven twelve."
FORMS: dict[str, Json] = {
    "chat/completions": {"messages": [user("hi")]},
    "responses": {"input": "hi"},
    "messages": {"messages": [user("hi")], "max_tokens": 50},
}


@pytest.fixture(scope="module", params=["incremental", "cumulative"])
def served(request: pytest.FixtureRequest) -> Iterator[Stack]:
    sessions = {"stream_interval": 5}
    with stack("qwen", styles=(request.param,), folder=chat_model("qwen3"), sessions=sessions) as made:
        yield made
        assert made.idle()


def made(served: Stack, **fields: Any) -> str:
    answer = served.post("/sessions", fields)
    assert answer.status == 201, answer.content
    return f"/sessions/{answer.json()['session_id']}"


def asked(served: Stack, path: str, form: str = "chat/completions", *, stream: bool = True, **more: Any) -> Any:
    """Send a turn; return its answer, and the `sampling_params` that the worker got."""
    (worker,) = served.workers
    worker.script(text=TEXT)
    answer = served.post(f"{path}/v1/{form}", {"model": "m", **FORMS[form], "stream": stream, **more})
    assert answer.status == 200, answer.content
    return answer, worker.log[-1].body["sampling_params"]


def said(answer: Any) -> list[str]:
    deltas = [event["choices"][0]["delta"].get("content") for event in events(answer) if event["choices"]]
    return [delta for delta in deltas if delta]


@pytest.mark.parametrize(
    ("fields", "interval"),
    [
        ({}, 5),
        ({"stream_interval": 1}, 1),
        ({"stream_interval": 3}, 3),
        ({"stream_interval": 8}, 8),
        ({"sampling_params": {"stream_interval": 8}}, 8),
        ({"sampling_params": {"stream_interval": 2}, "stream_interval": 8}, 8),
    ],
)
def test_an_event_has_as_many_tokens_and_none_is_lost(served: Stack, fields: Json, interval: int) -> None:
    """The client gets the same text, and the trainer the same tokens."""
    path = made(served, **fields)
    answer, sampling = asked(served, path)
    assert sampling["stream_interval"] == interval
    pieces = said(answer)
    assert "".join(pieces) == TEXT
    sampled = served.workers[0].log[-1].output_ids
    assert len(pieces) <= 2 + len(sampled) // interval
    assert len(pieces) > 1
    (found,) = served.post(f"{path}/finalize", {}).json()["trajectories"]
    ids = [token for token, mask in zip(found["response_ids"], found["response_mask"], strict=True) if mask]
    assert (ids, found["exact"]) == (sampled, True)


@pytest.mark.parametrize("form", [*FORMS])
def test_it_holds_for_streams_of_every_dialect(served: Stack, form: str) -> None:
    assert asked(served, made(served, stream_interval=8), form)[1]["stream_interval"] == 8
    assert asked(served, made(served), form)[1]["stream_interval"] == 5


def test_it_holds_for_a_chat_without_a_session(served: Stack) -> None:
    assert asked(served, "")[1]["stream_interval"] == 5


@pytest.mark.parametrize("stop", ["seven", " four five", "n e"])
def test_no_event_goes_past_a_stop(served: Stack, stop: str) -> None:
    for interval in (1, 3, 8):
        answer, _ = asked(served, made(served, stream_interval=interval), stop=[stop])
        assert "".join(said(answer)) == TEXT[: TEXT.index(stop)]


def test_a_reply_in_one_piece_is_asked_for_as_ever(served: Stack) -> None:
    assert "stream_interval" not in asked(served, made(served), stream=False)[1]


def test_generate_streams_as_its_client_says(served: Stack) -> None:
    (worker,) = served.workers
    for sampling in ({}, {"stream_interval": 3}):
        worker.script(text=TEXT)
        served.post("/generate", {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 9, **sampling}})
        assert worker.log[-1].body["sampling_params"].get("stream_interval") == sampling.get("stream_interval")


@pytest.mark.parametrize("interval", [0, -1, 1.5, "8", True, 2**63])
def test_what_no_engine_takes_is_refused(served: Stack, interval: Any) -> None:
    answer = served.post("/sessions", {"stream_interval": interval})
    assert answer.status == 400, answer.content
    assert answer.json()["error"]["param"] == "stream_interval"


def test_without_the_flag_the_engine_decides() -> None:
    with stack("qwen", styles=("incremental",), folder=chat_model("qwen3")) as plain:
        assert "stream_interval" not in asked(plain, made(plain))[1]


def test_it_reaches_a_vllm_worker() -> None:
    with stack("qwen", styles=("cumulative",), folder=chat_model("qwen3"), interface="vllm") as vllm:
        (worker,) = vllm.workers
        worker.script(text=TEXT)
        path = made(vllm, stream_interval=8)
        answer = vllm.post(f"{path}/v1/chat/completions", {"messages": [user("hi")], "stream": True})
        assert answer.status == 200, answer.content
        assert "stream_interval" in str(worker.log[-1].body)
