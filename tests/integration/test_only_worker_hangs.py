"""A worker that hangs where there is no other one: what it has is waited for, for it may go on."""

from __future__ import annotations

import pytest

from router.config import HealthConfig
from tests.support.asking import Asking, calls, until
from tests.support.stack import Stack, stack


def state(served: Stack) -> str:
    (worker,) = served.get("/workers").json()["workers"]
    return str(worker["state"])


def test_the_only_worker_keeps_what_it_has(asks: list[Asking]) -> None:
    """It is quarantined, so nothing new comes to it; but what it has begun is nowhere else, and is answered in the end."""
    health = HealthConfig(interval=0.05, timeout=0.2)
    with stack("qwen", styles=("cumulative",), workers={"health": health}) as served:
        (worker,) = served.workers
        worker.hold()
        asks.append(Asking(served.url, {"text": "A:", "sampling_params": {"max_new_tokens": 3}}))
        worker.wait_for_arrivals(1)
        with worker.hanging():
            until(lambda: state(served) == "quarantined", "it is noticed")
            assert served.post("/generate", {"text": "B:"}).status == 503
        worker.release()
        answer = asks[0].answer()
        assert answer.status == 200, answer.content
        assert len(worker.log) == 1


def test_a_worker_whose_stream_stands_still_is_told_to_end_it(asks: list[Asking]) -> None:
    """Its client's stream is broken off, and what nobody reads must not go on at the worker."""
    limits = {"stream_idle_timeout": 0.3}
    with stack("qwen", styles=("cumulative",), workers=limits) as served:
        (worker,) = served.workers
        worker.hold(after=2)
        body = {
            "text": "A:",
            "stream": True,
            "rid": "0" * 32,
            "sampling_params": {"max_new_tokens": 9, "ignore_eos": True},
        }
        asks.append(Asking(served.url, body))
        with pytest.raises(OSError, match=r"\[DONE\]"):
            asks[0].events()
        assert [call["rid"] for call in calls(worker, "/abort_request")] == ["0" * 32]
        worker.wait_until_idle()
