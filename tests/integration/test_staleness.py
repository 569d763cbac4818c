"""How far behind the current weights a reply's tokens are when it is recorded, as /metrics has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.asking import Asking
from tests.support.stack import Stack, stack

NAME = "tito_radix_staleness_versions"


@pytest.fixture
def served() -> Iterator[Stack]:
    with stack("tekken", styles=("cumulative",)) as started:
        yield started


def staleness(served: Stack) -> dict[str, float]:
    lines = served.get("/metrics").content.decode().splitlines()
    found = (line.removeprefix(NAME).rsplit(" ", 1) for line in lines if line.startswith(NAME))
    return {label: float(value) for label, value in found}


def test_the_oldest_token_of_a_reply_counts(served: Stack) -> None:
    """Sampled under 3 and 5 while 5 is the current one: two versions behind."""
    (worker,) = served.workers
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
    served.set_weight_version("3")
    served.generate(body)
    assert staleness(served)["_sum"] == 0
    worker.hold(after=2)
    asking = Asking(served.url, body)
    worker.wait_for_arrivals(1)
    served.set_weight_version("5")
    worker.release()
    assert asking.answer().status == 200
    assert worker.log[-1].versions == ["3", "3", "5", "5", "5", "5"]
    found = staleness(served)
    assert found["_count"] == 2
    assert (found['_bucket{le="0.0"}'], found['_bucket{le="1.0"}'], found['_bucket{le="2.0"}']) == (1, 1, 2)


def test_what_is_not_recorded_has_no_staleness(served: Stack) -> None:
    served.workers[0].script([], finish="eos")
    answer = served.post("/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 0}})
    assert answer.headers["x-radix-recorded"].startswith("no; ")
    assert staleness(served)["_count"] == 0
