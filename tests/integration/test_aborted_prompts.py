"""One prompt of a batch is aborted while no worker has the batch: no worker gets it, and its place in the reply is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from router.config import AbortConfig, QueueConfig, RetryConfig
from tests.support.asking import Asking, settle, until
from tests.support.stack import Stack, stack

PROMPTS, RIDS = ["A:", "B:", "C:"], ["a", "b", "c"]


@pytest.fixture(scope="module")
def narrow() -> Iterator[Stack]:
    """Two workers with room for one request each; a full one is asked again after a second."""
    retry = RetryConfig(attempts=5, first_wait=1.0, multiplier=1.0, jitter=0.0)
    workers = {"queue": QueueConfig(max_inflight_per_worker=1), "retry": retry}
    abort = AbortConfig(attempts=3, wait=0)
    with stack("qwen", styles=("cumulative",) * 2, workers=workers, abort=abort) as made:
        yield made


@pytest.fixture
def served(narrow: Stack) -> Iterator[Stack]:
    yield narrow
    settle(narrow)


def ask(served: Stack, *, stream: bool) -> Asking:
    body = {"text": PROMPTS, "rid": RIDS, "sampling_params": {"max_new_tokens": 3}, "stream": stream}
    return Asking(served.url, body)


def end(served: Stack, rid: str) -> None:
    assert served.post("/abort_request", {"rid": rid}).status == 200


def finishes(asking: Asking, *, stream: bool) -> list[tuple[str, str, int]]:
    """Return the id, the finish reason and the number of tokens of each reply, in the order of the prompts."""
    if not stream:
        answer = asking.answer()
        assert answer.status == 200, answer.content
        replies: list[dict[str, Any]] = answer.json()
    else:
        last = {event["index"]: event for event in asking.events()}
        asking.close()
        replies = [last[index] for index in sorted(last)]
    return [
        (one["meta_info"]["id"], one["meta_info"]["finish_reason"]["type"], len(one["output_ids"])) for one in replies
    ]


EXPECTED = [("a", "length", 3), ("b", "abort", 0), ("c", "length", 3)]


def sampled(served: Stack, since: list[int]) -> list[str]:
    """Return the prompts for which workers have sampled since then."""
    records = [one for worker, start in zip(served.workers, since, strict=True) for one in worker.log[start:]]
    return sorted(served.spelling.spell(one.input_ids, skip_special=False).text for one in records if one.output_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_in_the_queue(served: Stack, stream: bool) -> None:
    for worker in served.workers:
        worker.hold()
    busy = [Asking(served.url, {"text": "Busy", "sampling_params": {"max_new_tokens": 1}}) for _ in served.workers]
    for worker in served.workers:
        worker.wait_for_arrivals(1)
    since = [len(worker.log) for worker in served.workers]
    asking = ask(served, stream=stream)
    until(lambda: served.inflight() and "queued" in served.get("/debug/requests").content.decode())
    end(served, "b")
    for worker in served.workers:
        worker.release()
    assert finishes(asking, stream=stream) == EXPECTED
    assert [text for text in sampled(served, since) if text != "Busy"] == ["A:", "C:"]
    assert all(one.answer().status == 200 for one in busy)


@pytest.mark.slow
def test_what_its_worker_aborts_of_the_rest_is_sent_again(served: Stack) -> None:
    for worker in served.workers:
        worker.fault("http_503")
    asking = ask(served, stream=False)
    until(lambda: "waiting" in served.get("/debug/requests").content.decode())
    end(served, "b")
    for worker in served.workers:
        worker.script(ids=[5, 6], finish="abort")
    assert finishes(asking, stream=False) == EXPECTED
    for worker in served.workers:
        worker.forget_scripts()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_while_workers_are_full(served: Stack, stream: bool) -> None:
    for worker in served.workers:
        worker.fault("http_503")
    since = [len(worker.log) for worker in served.workers]
    asking = ask(served, stream=stream)
    until(lambda: "waiting" in served.get("/debug/requests").content.decode())
    end(served, "b")
    assert finishes(asking, stream=stream) == EXPECTED
    assert sampled(served, since) == ["A:", "C:"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rid", ["b", "c"])
def test_all_of_it_while_workers_are_full(served: Stack, stream: bool, rid: str) -> None:
    """A wait that an abort ends is no failure of a worker."""
    for worker in served.workers:
        worker.fault("http_503", times=2)
    asking = ask(served, stream=stream)
    until(lambda: "waiting" in served.get("/debug/requests").content.decode())
    for one in sorted(RIDS, key=rid.__eq__):
        end(served, one)
    assert finishes(asking, stream=stream) == [(one, "abort", 0) for one in RIDS]
    for worker in served.workers:
        worker.forget_scripts()


@pytest.mark.slow
def test_where_its_worker_died(served: Stack) -> None:
    for worker in served.workers:
        worker.hold()
    asking = ask(served, stream=False)
    until(lambda: any(worker.in_flight for worker in served.workers))
    (holder,) = [worker for worker in served.workers if worker.in_flight]
    (other,) = [worker for worker in served.workers if worker is not holder]
    since = [len(worker.log) for worker in served.workers]
    end(served, "b")
    holder.kill()
    other.release()
    try:
        found = finishes(asking, stream=False)
    finally:
        holder.restart()
        holder.release()
    assert found == EXPECTED
    assert sampled(served, since) == ["A:", "C:"]
