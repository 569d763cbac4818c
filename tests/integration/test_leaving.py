"""Clients that leave and workers that die: what was sampled is kept, what nobody waits for is ended, all is accounted for."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from router.config import AbortConfig
from tests.support.asking import Asking, assert_kept, calls, in_no_workers_hands, outcomes, settle, until
from tests.support.client import call
from tests.support.stack import STYLES, Stack, stack
from tests.support.usual import usual
from worker.engine.script import Fault
from worker.options import StreamStyle
from worker.worker import EmbeddedWorker

EXACT = '{reason="",recorded="exact"}'


@pytest.fixture(scope="module")
def started() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), abort=AbortConfig(attempts=3, wait=3600)) as served:
        yield served


@pytest.fixture(scope="module")
def at_once() -> Iterator[Stack]:
    """An aborted generation goes out again at once."""
    with stack("qwen", styles=("cumulative",), abort=AbortConfig(attempts=3, wait=0)) as served:
        yield served


@pytest.fixture
def served(started: Stack, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """One worker, which speaks a test's `style`. At the end nothing is in flight, and the next request is served."""
    if hasattr(request.node, "callspec"):
        started.workers[0].wire.stream_style = request.node.callspec.params.get("style", "cumulative")
    yield started
    settle(started)
    assert started.workers[0].out_of_range == []
    record = started.generate({"text": "Hello", "sampling_params": {"max_new_tokens": 2}}).record
    assert len(record.output_ids) == 2
    settle(started)


@pytest.fixture
def worker(served: Stack) -> EmbeddedWorker:
    return served.workers[0]


def ask(served: Stack, asks: list[Asking], space: str, policy: str = "retry", **body: Any) -> Asking:
    headers = {"x-radix-namespace": space, "x-abort-policy": policy}
    asks.append(Asking(served.url, {"text": "A:", **body}, headers=headers))
    return asks[-1]


def freed(worker: EmbeddedWorker, count: int = 0) -> None:
    """The worker is rid of all but so many."""
    worker.wait_for(lambda: worker.in_flight == count)


def told_since(served: Stack, worker: EmbeddedWorker, told: int) -> list[Any]:
    """What a worker was told to abort until now: a last call goes behind all others."""
    assert served.post("/abort_request", {"rid": "nobody's"}).status == 200
    (*before, last) = calls(worker, "/abort_request")[told:]
    assert last == {"rid": "nobody's"}
    return before


def total(found: dict[str, int]) -> int:
    return sum(found.values())


LEAVES = pytest.mark.parametrize("rudely", [False, True], ids=["closed", "reset"])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
POLICIES = pytest.mark.parametrize("policy", ["retry", "return"])


# -- a client leaves ---------------------------------------------------------------------------------------------------


@LEAVES
@STREAMED
@POLICIES
@pytest.mark.parametrize("after", [0, 2], ids=["queued", "running"])
def test_a_client_that_left_before_the_first_token(
    served: Stack,
    worker: EmbeddedWorker,
    asks: list[Asking],
    space: str,
    rudely: bool,
    stream: bool,
    policy: str,
    after: int,
) -> None:
    """Its worker is told at once, by the id that it knows; nobody has seen a token, so nothing is kept."""
    before, told = outcomes(served), len(calls(worker, "/abort_request"))
    worker.hold(after=after)
    if stream:
        after = 0
        worker.hold()
    asking = ask(served, asks, space, policy, stream=stream)
    worker.wait_for_arrivals(1)
    record = worker.log[-1]
    asking.leave(rudely=rudely)
    worker.wait_for(lambda: len(calls(worker, "/abort_request")) > told)
    assert calls(worker, "/abort_request")[told:] == [{"rid": record.rid}]
    freed(worker)
    settle(served)
    assert served.retrieve("A:x", namespace=space)["loss_mask"].count(1) == 0
    assert total(outcomes(served)) == total(before) + 1
    assert outcomes(served).get(EXACT) == before.get(EXACT)


@LEAVES
@POLICIES
@pytest.mark.parametrize("style", usual(STYLES, "cumulative", "incremental"))
@pytest.mark.parametrize("seen", [1, 4])
def test_what_was_streamed_to_a_client_that_left_is_kept(
    served: Stack,
    worker: EmbeddedWorker,
    asks: list[Asking],
    space: str,
    rudely: bool,
    policy: str,
    style: StreamStyle,
    seen: int,
) -> None:
    """Each token that it has seen, with logprobs and versions; and a later request goes on from there."""
    before, told = outcomes(served), len(calls(worker, "/abort_request"))
    pieces = [number for piece in ("Hel", "lo", "sum", "mary", " on") for number in served.spelling.encode_tail(piece)]
    worker.script(pieces, finish="length")
    worker.hold(after=seen)
    asking = ask(served, asks, space, policy, stream=True, rid=space)
    events = [asking.event() for _ in range(seen)]
    assert all(events)
    worker.wait_for_arrivals(1)
    asking.leave(rudely=rudely)
    worker.wait_for(lambda: len(calls(worker, "/abort_request")) > told)
    assert calls(worker, "/abort_request")[told:] == [{"rid": space}]
    freed(worker)
    settle(served)
    record = worker.log[-1]
    assert len(record.output_ids) == seen
    assert_kept(served.retrieve("A:" + record.text, namespace=space, request_id=space), record)
    assert outcomes(served)[EXACT] == before.get(EXACT, 0) + 1
    assert total(outcomes(served)) == total(before) + 1
    text = "A:" + record.text + "!"
    body = {"text": text, "sampling_params": {"max_new_tokens": 1}}
    later = served.generate(body, headers={"x-radix-namespace": space}).record
    assert later.input_ids == record.input_ids + record.output_ids + served.spelling.encode_tail("!")


@LEAVES
@pytest.mark.parametrize("body", [{}, {"stream": True}, {"text": ["A:", "B:"]}, {"sampling_params": {"n": 2}}])
def test_a_client_that_leaves_while_a_retry_waits(
    served: Stack, worker: EmbeddedWorker, asks: list[Asking], space: str, rudely: bool, body: dict[str, Any]
) -> None:
    """The wait is over with it; no worker has anything of it, and none is asked again."""
    before, logged = outcomes(served), len(worker.log)
    count = 2 if body and "stream" not in body else 1
    worker.hold()
    asking = ask(served, asks, space, **body)
    worker.wait_for_arrivals(count)
    assert call(worker.url + "/abort_request", {"abort_all": True}).status == 200
    freed(worker)
    until(lambda: in_no_workers_hands(served))
    assert total(outcomes(served)) == total(before)
    asking.leave(rudely=rudely)
    until(lambda: total(outcomes(served)) == total(before) + count, "an outcome each")
    assert len(worker.log) == logged + count


@LEAVES
@STREAMED
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"text": ["A:", "B:", "C:"]}, 3),
        ({"text": ["A:", "B:", "C:"], "rid": "{space}"}, 3),
        ({"text": ["A:"], "rid": ["{space}"]}, 1),
        ({"sampling_params": {"n": 3}}, 0),
        ({"text": ["A:", "B:"], "sampling_params": {"n": 2}}, 0),
    ],
    ids=["batch", "one rid", "batch of one", "samples", "both"],
)
def test_a_client_that_leaves_a_batch(
    served: Stack,
    worker: EmbeddedWorker,
    asks: list[Asking],
    space: str,
    rudely: bool,
    stream: bool,
    body: dict[str, Any],
    told: int,
) -> None:
    """Each item is ended by its id. Samples have none that we know: their connection is closed."""
    before, start, logged = outcomes(served), len(calls(worker, "/abort_request")), len(worker.log)
    body = {key: _named(value, space) for key, value in body.items()}
    count = len(body.get("text", "x")) * body.get("sampling_params", {}).get("n", 1)
    worker.hold(after=1)
    asking = ask(served, asks, space, stream=stream, **body)
    worker.wait_for_arrivals(count)
    seen = [asking.event() for _ in range(count)] if stream else []
    asking.leave(rudely=rudely)
    worker.wait_for(lambda: len(calls(worker, "/abort_request")) == start + told)
    freed(worker)
    records = worker.log[logged:]
    assert sorted(one["rid"] for one in calls(worker, "/abort_request")[start:]) == sorted(
        record.rid for record in records[:told]
    )
    until(lambda: total(outcomes(served)) == total(before) + count, "an outcome each")
    assert outcomes(served).get(EXACT, 0) == before.get(EXACT, 0) + len(seen)
    for record in records if stream else []:
        prompt = body.get("text", ["A:"])[record.index if told else record.index // body["sampling_params"]["n"]]
        assert_kept(served.retrieve(prompt + record.text, namespace=space, request_id=record.rid), record)


def _named(value: Any, space: str) -> Any:
    if isinstance(value, str):
        return value.format(space=space)
    return [_named(one, space) for one in value] if isinstance(value, list) else value


@STREAMED
def test_a_client_that_leaves_a_second_attempt(at_once: Stack, asks: list[Asking], space: str, stream: bool) -> None:
    """The worker is told the id that it knows; what was streamed is kept under the client's."""
    worker, before = at_once.workers[0], outcomes(at_once)
    logged, told = len(worker.log), len(calls(worker, "/abort_request"))
    worker.script([9707], finish="abort")
    worker.hold(after=2)
    asking = ask(at_once, asks, space, stream=stream, rid=space)
    worker.wait_for_arrivals(1)
    first, second = worker.log[logged:]
    seen = [asking.event(), asking.event()] if stream else []
    asking.leave()
    worker.wait_for(lambda: len(calls(worker, "/abort_request")) > told)
    assert calls(worker, "/abort_request")[told:] == [{"rid": second.rid}]
    assert second.rid != first.rid == space
    freed(worker)
    until(lambda: total(outcomes(at_once)) == total(before) + 1)
    settle(at_once)
    if seen:
        assert_kept(at_once.retrieve("A:" + second.text, namespace=space, request_id=space), second)


# -- but nobody else's -------------------------------------------------------------------------------------------------


@STREAMED
def test_a_client_that_leaves_does_not_end_one_whose_id_begins_with_its_own(
    served: Stack, worker: EmbeddedWorker, asks: list[Asking], space: str, stream: bool
) -> None:
    """Workers abort by prefix, also when they notice by themselves that a client left. So they know the two by other ids."""
    told = len(calls(worker, "/abort_request"))
    worker.hold(after=1)
    longer = ask(served, asks, space, "return", rid=f"{space}-12", sampling_params={"max_new_tokens": 4})
    worker.wait_for_arrivals(1)
    shorter = ask(served, asks, space, rid=f"{space}-1", stream=stream)
    worker.wait_for_arrivals(2)
    kept, left = (record.rid for record in worker.log[-2:])
    assert kept == f"{space}-12"
    assert not kept.startswith(left)
    shorter.leave()
    freed(worker, 1)
    until(lambda: sum(one["load"] for one in served.get("/workers").json()["workers"]) == 1)
    worker.release()
    reply = longer.answer().json()
    assert told_since(served, worker, told) == [{"rid": left}]
    assert reply["meta_info"]["id"] == kept
    assert reply["meta_info"]["finish_reason"]["type"] == "length"
    assert len(reply["output_ids"]) == 4


def test_a_client_that_leaves_does_not_end_samples_whose_ids_only_the_worker_knows(
    served: Stack, worker: EmbeddedWorker, asks: list[Asking], space: str
) -> None:
    """Of `n > 1` each has an id that the worker made up, and a short id of a client's may be how one begins."""
    told = len(calls(worker, "/abort_request"))
    worker.hold(after=1)
    params = {"n": 4, "max_new_tokens": 3}
    samples = ask(served, asks, space, "return", sampling_params=params)
    worker.wait_for_arrivals(4)
    short = ask(served, asks, space, rid=worker.log[-1].rid[:2])
    worker.wait_for_arrivals(5)
    short.leave()
    freed(worker, 4)
    until(lambda: sum(one["load"] for one in served.get("/workers").json()["workers"]) == 1)
    worker.release()
    ends = [one["meta_info"]["finish_reason"]["type"] for one in samples.answer().json()]
    assert ends == ["length"] * 4
    # The double forgets who left at once. A real worker takes seconds, and would have aborted all that begin so.
    assert not told_since(served, worker, told)


def test_one_of_many_leaves(served: Stack, worker: EmbeddedWorker, asks: list[Asking], space: str) -> None:
    """The others are answered."""
    worker.hold(after=1)
    many = [ask(served, asks, space, stream=number % 2 == 0, rid=f"{number}{space}") for number in range(8)]
    worker.wait_for_arrivals(8)
    for number in (1, 4, 6):
        many[number].leave(rudely=number == 4)
    freed(worker, 5)
    worker.release()
    for number in (0, 2, 3, 5, 7):
        reply = many[number].answer()
        assert reply.status == 200
        assert reply.content.endswith(b"data: [DONE]\n\n") == (number % 2 == 0)


# -- a worker dies -----------------------------------------------------------------------------------------------------


@STREAMED
@POLICIES
@pytest.mark.parametrize("body", [{}, {"text": ["A:", "B:"]}, {"sampling_params": {"n": 2}}], ids=["one", "list", "n"])
def test_a_worker_that_dies_before_its_reply(
    served: Stack,
    worker: EmbeddedWorker,
    asks: list[Asking],
    space: str,
    stream: bool,
    policy: str,
    body: dict[str, Any],
) -> None:
    """With no other worker that is a 502, and one outcome for each generation."""
    before = outcomes(served)
    count = 2 if body else 1
    worker.hold()
    asking = ask(served, asks, space, policy, stream=stream, **body)
    worker.wait_for_arrivals(count)
    worker.kill()
    try:
        # A stream whose head was sent before has nothing to show for it, so it can still be answered properly.
        answer = asking.answer()
    finally:
        worker.restart()
    assert answer.status == 502
    assert worker.url in answer.json()["error"]["message"]
    until(lambda: total(outcomes(served)) == total(before) + count)
    assert outcomes(served).get(EXACT) == before.get(EXACT)


@POLICIES
@pytest.mark.parametrize("style", usual(STYLES, "cumulative", "incremental"))
def test_a_worker_that_dies_in_its_stream(
    served: Stack, worker: EmbeddedWorker, asks: list[Asking], space: str, policy: str, style: StreamStyle
) -> None:
    """The client's stream breaks off, visibly; what came of it is kept, and it has one outcome."""
    before = outcomes(served)
    worker.hold(after=3)
    asking = ask(served, asks, space, policy, stream=True, rid=space)
    last = [asking.event() for _ in range(3)][-1]
    assert last is not None
    worker.wait_for_arrivals(1)
    worker.kill()
    try:
        with pytest.raises((ConnectionError, OSError)):
            asking.event()
    finally:
        worker.restart()
    record = worker.log[-1]
    until(lambda: total(outcomes(served)) == total(before) + 1)
    assert outcomes(served)[EXACT] == before.get(EXACT, 0) + 1
    worker.wait_until_idle()
    assert_kept(served.retrieve("A:" + record.text, namespace=space, request_id=space), record)


FAULTS: tuple[Fault, ...] = ("dies", "no_done", "http_500", "http_503", "not_json", "error_event", "abort_503")


@STREAMED
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_becomes_of_a_generation_it_has_one_outcome(
    served: Stack, worker: EmbeddedWorker, asks: list[Asking], space: str, stream: bool, fault: Fault
) -> None:
    before = outcomes(served)
    worker.script([9707, 9707], fault=fault)
    asking = ask(served, asks, space, "return", stream=stream)
    with contextlib.suppress(OSError, http.client.IncompleteRead):
        asking.answer()
    until(lambda: total(outcomes(served)) == total(before) + 1)
    settle(served)
    assert total(outcomes(served)) == total(before) + 1


def test_a_client_that_leaves_a_worker_that_never_answers(
    served: Stack, worker: EmbeddedWorker, asks: list[Asking], space: str
) -> None:
    before = outcomes(served)
    worker.fault("no_answer")
    asking = ask(served, asks, space, stream=True)
    worker.wait_for(lambda: worker.in_flight == 1)
    asking.leave()
    freed(worker)
    until(lambda: total(outcomes(served)) == total(before) + 1)


@STREAMED
def test_a_client_that_leaves_a_paused_worker(
    served: Stack, worker: EmbeddedWorker, asks: list[Asking], space: str, stream: bool
) -> None:
    """It is freed at once, and has nothing left to do when it goes on."""
    assert served.post("/pause_generation", {"mode": "in_place"}).status == 200
    asking = ask(served, asks, space, stream=stream)
    worker.wait_for_arrivals(1)
    asking.leave()
    freed(worker)
    assert served.post("/continue_generation", {}).status == 200


def test_a_client_that_leaves_in_the_middle_of_its_request(served: Stack, worker: EmbeddedWorker) -> None:
    """No worker hears of it, and it is no generation."""
    before, logged = outcomes(served), len(worker.log)
    parts = urlsplit(served.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as half:
        half.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n" + b'{"text": "A')
    reply = served.generate({"text": "A:", "sampling_params": {"max_new_tokens": 1}})
    assert len(worker.log) == logged + 1, reply
    assert total(outcomes(served)) == total(before) + 1


@pytest.mark.parametrize("leaves", [False, True], ids=["to its end", "until its client left"])
def test_a_stream_that_is_ahead_of_its_own_count_is_kept(
    served: Stack, worker: EmbeddedWorker, asks: list[Asking], space: str, leaves: bool
) -> None:
    """A busy SGLang counts the tokens of a cumulative event before it prints them."""
    worker.fault("late_count")
    worker.hold(after=6)
    asking = ask(served, asks, space, rid=space, stream=True, sampling_params={"max_new_tokens": 9})
    worker.wait_for_arrivals(1)
    events = [asking.event() for _ in range(6)]
    assert [event["meta_info"]["completion_tokens"] for event in events if event] == [1, 1, 2, 2, 3, 3]
    if leaves:
        asking.leave(rudely=True)
        worker.wait_until_idle()
    worker.release()
    if not leaves:
        assert len(asking.events()[-1]["output_ids"]) == 9
    settle(served)
    record = worker.log[-1]
    assert_kept(served.retrieve("A:" + record.text, namespace=space, request_id=space), record)
