"""Turns that were asked for before the weights changed, and answered after: they do not turn the clock back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from middleware_hub.spans.versions import FALL_AFTER
from tests.support.agents import AgentSession, user
from tests.support.asking import Asking
from tests.support.stack import Stack, stack


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), version_spans=False) as made:
        yield made


def current(served: Stack) -> Any:
    return served.get("/radix_tree/stats").json()["weight_version"]


@pytest.mark.parametrize("session", [True, False], ids=["a session", "no session"])
def test_late_turns_of_the_old_weights_are_no_fall(served: Stack, asks: list[Asking], session: bool) -> None:
    """Three replies below the current version are a run that was resumed, but not those that were asked for before it."""
    (worker,) = served.workers
    path = f"{AgentSession.make(served).path}/v1/chat/completions" if session else "/v1/chat/completions"
    body = {"messages": [user("a")], "max_tokens": 3}
    assert served.post("/update_weight_version", {"new_version": "7"}).status == 200
    worker.hold(after=1)
    asks += [Asking(served.url, body, path=path) for _ in range(FALL_AFTER)]
    worker.wait_for_arrivals(FALL_AFTER)
    assert served.post("/update_weight_version", {"new_version": "8", "abort_all_requests": False}).status == 200
    worker.set_weight_version("7")
    worker.release()
    assert [asking.answer().status for asking in asks] == [200] * FALL_AFTER
    assert current(served) == "8"
    for _ in range(FALL_AFTER):
        assert current(served) == "8"
        assert served.post(path, body).status == 200
    assert current(served) == "7", "these were asked for, and answered, by a worker that was set back"
