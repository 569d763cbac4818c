"""Workers that are full, fail or take too long, seen from the client: its reply is whole, under its own name, recorded once."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from router.config import HealthConfig, QueueConfig, RetryConfig
from tests.support.asking import Asking, assert_kept, calls, counted, settle, until
from tests.support.stack import STYLES, Reply, Stack, events, stack
from tests.support.usual import usual
from worker.options import StreamStyle

WHOLE_OR_STREAMED: tuple[StreamStyle | None, ...] = (None, *STYLES)
EAGER = RetryConfig(first_wait=0.001)
PROMPTS = {"single": "A:", "list": ["A:", "B: b"]}


@pytest.fixture(scope="module")
def eager() -> Iterator[Stack]:
    """One worker; a full one is asked again after a millisecond."""
    with stack("qwen", styles=("cumulative",), workers={"retry": EAGER}) as started:
        yield started


@pytest.fixture(scope="module")
def pair() -> Iterator[Stack]:
    """Two workers in turn, which get half a second to begin."""
    limits = {"retry": EAGER, "request_timeout": 0.5, "stream_idle_timeout": 0.5}
    with stack("qwen", styles=("cumulative",) * 2, workers=limits) as started:
        yield started
        settle(started)


def retries(served: Stack) -> dict[str, int]:
    return {label.split('"')[1]: count for label, count in counted(served, "tito_router_retries_total").items()}


def since(served: Stack, before: dict[str, int]) -> dict[str, int]:
    """The retries of a test."""
    return {why: count - before.get(why, 0) for why, count in retries(served).items() if count != before.get(why, 0)}


def replies(reply: Reply, stream: StreamStyle | None) -> list[Any]:
    """The last word of each generation, in order, with the whole text."""
    if stream is None:
        return reply.body if isinstance(reply.body, list) else [reply.body]
    last: dict[int, Any] = {}
    for event in reply.body:
        before = last.get(event.get("index", 0), {"text": ""})["text"] if stream == "incremental" else ""
        last[event.get("index", 0)] = {**event, "text": before + event["text"]}
    return [last[index] for index in sorted(last)]


@pytest.mark.parametrize("fault", ["http_503", "abort_503"])
@pytest.mark.parametrize(
    ("samples", "named"), usual([(1, True), (1, False), (2, True), (2, False)], (1, True), (2, False))
)
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("stream", WHOLE_OR_STREAMED)
def test_a_full_worker_is_asked_again_under_ids_that_it_has_not_seen(
    eager: Stack, space: str, stream: StreamStyle | None, prompts: str, samples: int, named: bool, fault: Any
) -> None:
    (worker,) = eager.workers
    worker.wire.stream_style = stream or "cumulative"
    texts, before, seen = PROMPTS[prompts], retries(eager), len(worker.log)
    body: dict[str, Any] = {
        "text": texts,
        "stream": stream is not None,
        "sampling_params": {"max_new_tokens": 6, "n": samples},
    }
    rids = [uuid.uuid4().hex for _ in texts] if isinstance(texts, list) else uuid.uuid4().hex
    if named:
        body["rid"] = rids
    count = len(texts) * samples if isinstance(texts, list) else samples
    worker.fault(fault, times=2 * count)
    reply = eager.generate(body, headers={"x-radix-namespace": space})
    assert since(eager, before) == {"busy": 2}
    told = [record.rid for record in worker.log[seen:]]
    assert len(told) == len(set(told)) == 3 * count, "no id twice"
    found = replies(reply, stream)
    names = [one["meta_info"]["id"] for one in found]
    if named and samples == 1:
        assert names == (rids if isinstance(rids, list) else [rids])
    if samples == 1:
        begun = [[rid for rid in told if rid.startswith(name)] for name in names]
        assert [len(rids) for rids in begun] == [3] * count, "at every attempt it begins with the generation's id"
    given = texts if isinstance(texts, list) else [texts]
    for number, (one, record) in enumerate(zip(found, reply.records[-count:], strict=True)):
        text = given[number // samples] + one["text"]
        name = {"request_id": one["meta_info"]["id"]} if samples == 1 else {}
        assert_kept(eager.retrieve(text, namespace=space, **name), record)
    assert not any(eager.inflight().values())


def test_a_worker_that_stays_full_has_the_last_word(eager: Stack) -> None:
    (worker,) = eager.workers
    worker.fault("http_503", times=5)
    logged = len(worker.log)
    answer = eager.post("/generate", {"text": "A:", "rid": "mine"})
    assert answer.status == 503
    assert "queue is full" in answer.content.decode()
    assert len(worker.log) == logged + 5


def test_an_abort_ends_the_wait_for_a_full_worker(asks: list[Asking]) -> None:
    with stack(
        "qwen", styles=("cumulative",), workers={"retry": RetryConfig(first_wait=3600, longest_wait=3600)}
    ) as one:
        one.workers[0].fault("http_503")
        asking = Asking(one.url, {"text": "A:", "rid": "mine"})
        asks.append(asking)
        until(lambda: phases(one) == ["waiting"], "it waits")
        assert one.post("/abort_request", {"rid": "mine"}).status == 200
        answer = asking.answer()
        assert answer.status == 200
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"


def phases(served: Stack) -> list[str]:
    return [one["phase"] for one in served.get("/debug/requests").json()["requests"] if one["path"] == "/generate"]


@pytest.mark.parametrize("stream", WHOLE_OR_STREAMED)
def test_an_error_of_one_worker_is_answered_by_another(pair: Stack, space: str, stream: StreamStyle | None) -> None:
    for worker in pair.workers:
        worker.wire.stream_style = stream or "cumulative"
    before = retries(pair)
    pair.workers[0].fault("http_500")
    for _ in range(2):  # in turn: one of the two meets it
        reply = pair.generate({"text": "A:", "stream": stream is not None, "sampling_params": {"max_new_tokens": 4}})
        assert any(record.output_ids for record in reply.records)
    assert since(pair, before) == {"error": 1}


def test_an_error_that_all_give_is_the_reply(pair: Stack) -> None:
    for worker in pair.workers:
        worker.fault("http_500")
    answer = pair.post("/generate", {"text": "A:"})
    assert answer.status == 500
    assert [worker["circuit_breaker"] for worker in pair.get("/workers").json()["workers"]] == ["closed"] * 2


def test_a_worker_that_takes_too_long_is_told_to_stop_and_another_one_answers(pair: Stack, space: str) -> None:
    slow, quick = pair.workers
    before, name = retries(pair), uuid.uuid4().hex
    slow.hold()
    told = len(calls(slow, "/abort_request"))
    body = {"text": "A:", "sampling_params": {"max_new_tokens": 5}, "rid": name}
    for _ in range(2):
        body["rid"] = uuid.uuid4().hex
        reply = pair.generate(body, headers={"x-radix-namespace": space})
        assert reply.answer.headers["x-router-worker"] == quick.url
        assert reply.body["meta_info"]["id"] == body["rid"]
        found = pair.retrieve("A:" + reply.body["text"], namespace=space, request_id=body["rid"])
        assert_kept(found, next(record for record in reply.records if record.output_ids))
    assert since(pair, before) == {"timeout": 1}
    assert len(calls(slow, "/abort_request")) == told + 1
    slow.wait_until_idle()
    slow.release()


def test_what_a_worker_has_when_it_is_given_up_goes_elsewhere(space: str, asks: list[Asking]) -> None:
    """Without any timeout: it does not answer its probes, and so it will not answer this. A stream that has begun stays."""
    health = HealthConfig(interval=0.05, timeout=0.2)
    with stack("qwen", styles=("cumulative",) * 2, workers={"health": health}) as served:
        hung, other = served.workers
        for worker in served.workers:
            worker.hold()
        body = {"text": "A:", "sampling_params": {"max_new_tokens": 5}}
        names = [uuid.uuid4().hex for _ in range(4)]
        for name in names:
            sent = {**body, "rid": name, "stream": name == names[0]}
            asks.append(Asking(served.url, sent, headers={"x-radix-namespace": space}))
        for worker in served.workers:
            worker.wait_for_arrivals(2)
        with hung.hanging():
            until(lambda: state_of(served, hung.url) == "quarantined", "it is noticed")
            other.wait_for_arrivals(4)
            other.release()
            answers = [asking.answer() for asking in asks]
        assert [answer.status for answer in answers] == [200] * 4
        assert retries(served) == {"timeout": 2}
        for name, answer in zip(names, answers, strict=True):
            found = events(answer)[-1] if name == names[0] else answer.json()
            record = next(record for record in other.log if record.rid == name)
            assert_kept(served.retrieve("A:" + found["text"], namespace=space, request_id=name), record)
        hung.release()
        until(served.idle, "the copies end when their connections are found closed")


def state_of(served: Stack, url: str) -> str:
    return next(one["state"] for one in served.get("/workers").json()["workers"] if one["url"] == url)


def test_when_all_take_too_long_the_client_is_told(pair: Stack) -> None:
    for worker in pair.workers:
        worker.hold()
    answer = pair.post("/generate", {"text": "A:"})
    assert answer.status == 504
    assert answer.json()["error"]["type"] == "worker_timeout"
    for worker in pair.workers:
        worker.wait_until_idle()
        worker.release()


def test_a_stream_that_stands_still_is_broken_off_and_what_came_is_kept(
    pair: Stack, asks: list[Asking], space: str
) -> None:
    """Its worker is told to stop, because it would take seconds to notice the closed connection."""
    for worker in pair.workers:
        worker.wire.stream_style = "cumulative"
        worker.hold(3)
    name, told = uuid.uuid4().hex, [len(calls(worker, "/abort_request")) for worker in pair.workers]
    body = {"text": "A:", "stream": True, "rid": name, "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}}
    asking = Asking(pair.url, body, headers={"x-radix-namespace": space})
    asks.append(asking)
    seen = [asking.event()]
    with pytest.raises(OSError, match=r"\[DONE\]"):
        seen.extend(iter(asking.event, None))
    new = [calls(worker, "/abort_request")[count:] for worker, count in zip(pair.workers, told, strict=True)]
    assert sorted(new, key=len) == [[], [{"rid": name}]]
    for worker in pair.workers:
        worker.wait_until_idle()
        worker.release()
    found = pair.retrieve("A:" + seen[-1]["text"], namespace=space, request_id=name)
    assert found["tokens"][-3:] == seen[-1]["output_ids"]
    assert found["exact"]


def test_limits_queue_and_turn_away(asks: list[Asking], space: str) -> None:
    """One at the worker, two wait in turn, one is turned away; those who waited too long are told."""
    queue = QueueConfig(max_inflight_per_worker=1, size=2, timeout=1.0)
    with stack("qwen", styles=("cumulative",), workers={"queue": queue}) as served:
        (worker,) = served.workers
        worker.hold()
        body = {"text": "A:", "sampling_params": {"max_new_tokens": 3}}
        first = Asking(served.url, body)
        worker.wait_for_arrivals(1)
        waiting = [Asking(served.url, body) for _ in range(2)]
        asks += [first, *waiting]
        until(lambda: phases(served).count("queued") == 2, "both wait")
        turned_away = served.post("/generate", body)
        assert turned_away.status == 429
        assert turned_away.headers["retry-after"] == "1"
        assert turned_away.json()["error"]["type"] == "queue_full"
        assert served.get("/v1/models").status == 200, "what is no work needs no room"
        assert [asking.answer().status for asking in waiting] == [408, 408]
        worker.release()
        assert first.answer().status == 200
        assert served.generate(body).answer.status == 200
        ended = {label.split('"')[1]: n for label, n in counted(served, "tito_router_generations_total").items()}
        assert ended == {"answered": 2, "failed": 3}
        waits = counted(served, "tito_router_queue_seconds_count")
        assert {label.split('"')[1]: n for label, n in waits.items()} == {"full": 1, "timeout": 2}
        assert len(worker.log) == 2
        assert not any(served.inflight().values())
