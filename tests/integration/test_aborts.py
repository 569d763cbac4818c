"""Generations that are aborted: sent again where no client asked for the abort, ended at once where one did, and never lost."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from router.config import AbortConfig, RetryConfig
from tests.support.asking import Asking, assert_kept, calls, counted, in_no_workers_hands, outcomes, settle, until
from tests.support.chat_models import chat_model
from tests.support.client import Answer, call
from tests.support.serving import read_request, serving_socket
from tests.support.stack import STYLES, Stack, stack
from tests.support.usual import usual
from worker.options import StreamStyle
from worker.worker import EmbeddedWorker

ATTEMPTS = 3
WHOLE_OR_STREAMED = usual((None, *STYLES), None, "cumulative", "incremental")


@pytest.fixture(scope="module")
def eager() -> Iterator[Stack]:
    """One worker, and one on leave; an aborted generation goes out again at once."""
    with stack("qwen", styles=("cumulative",) * 2, abort=AbortConfig(attempts=ATTEMPTS, wait=0)) as started:
        assert started.post("/remove_worker", {"url": started.workers[1].url}).status == 200
        yield started


@pytest.fixture
def pair(eager: Stack) -> Iterator[Stack]:
    """The same with both, in turn."""
    assert eager.post("/add_worker", {"url": eager.workers[1].url}).status == 200
    yield eager
    assert eager.post("/remove_worker", {"url": eager.workers[1].url}).status == 200


@pytest.fixture(scope="module")
def patient() -> Iterator[Stack]:
    """An aborted generation goes out again in an hour: what is answered before was not waited for."""
    with stack("qwen", styles=("cumulative",), abort=AbortConfig(attempts=ATTEMPTS, wait=3600)) as started:
        yield started


@pytest.fixture(scope="module")
def reluctant() -> Iterator[Stack]:
    """The policy is `return`; who asks for `retry` waits for a moment, in which a test can do something."""
    with stack("qwen", styles=("cumulative",), abort=AbortConfig(policy="return", attempts=2, wait=1.0)) as started:
        yield started


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The stack that a test asks for by `@on(...)`; at its end nothing is in flight, and all that workers got was valid.

    Where a test's `stream` is one of the styles, the workers speak it.
    """
    found: Stack = request.getfixturevalue(getattr(request, "param", "eager"))
    style = request.node.callspec.params.get("stream") if hasattr(request.node, "callspec") else None
    for worker in found.workers:
        worker.wire.stream_style = style or "cumulative"
        worker.forget_scripts()  # of a test that failed
    logged = [len(worker.log) for worker in found.workers]
    yield found
    settle(found)
    for worker, start in zip(found.workers, logged, strict=True):
        assert worker.out_of_range == []
        rids = [record.rid for record in worker.log[start:]]
        assert len(set(rids)) == len(rids), "a worker saw an id twice"


def on(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("served", [name], indirect=True)


def words(served: Stack, *pieces: str) -> list[int]:
    return [number for piece in pieces for number in served.spelling.encode_tail(piece)]


def scripts(served: Stack, *replies: tuple[tuple[str, ...], str], worker: int = 0) -> None:
    """What the next samples shall be, and how each ends."""
    for pieces, finish in replies:
        served.workers[worker].script(words(served, *pieces), finish=finish)  # type: ignore[arg-type]


def ask(
    served: Stack,
    asks: list[Asking],
    body: dict[str, Any],
    space: str = "",
    policy: str | None = None,
    *,
    path: str = "/generate",
) -> Asking:
    headers = {"x-radix-namespace": space} | ({"x-abort-policy": policy} if policy else {})
    asks.append(Asking(served.url, body, headers=headers, path=path))
    return asks[-1]


def abort_behind_its_back(worker: EmbeddedWorker, **body: Any) -> None:
    """As an engine does by itself, or a trainer that knows the worker's address."""
    assert call(worker.url + "/abort_request", body or {"abort_all": True}).status == 200


def finish(reply: dict[str, Any]) -> str:
    return str(reply["meta_info"]["finish_reason"]["type"])


# -- who is sent again ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", WHOLE_OR_STREAMED)
def test_an_aborted_generation_is_sent_again(served: Stack, space: str, stream: StreamStyle | None) -> None:
    """The client sees one reply, of the second attempt, under one id; the worker saw two ids, the same prompt twice."""
    scripts(served, (("Hel",), "abort"), (("sum", "mary"), "eos"))
    reply = served.generate({"text": "A:", "stream": stream is not None}, headers={"x-radix-namespace": space})
    first, second = reply.records
    assert second.rid.startswith(first.rid)
    assert second.rid != first.rid
    assert first.input_ids == second.input_ids
    assert first.finish_reason is not None
    assert first.finish_reason["type"] == "abort"
    last = reply.body[-1] if stream else reply.body
    assert finish(last) == "stop"
    shown = {event["meta_info"]["id"] for event in reply.body} if stream else {last["meta_info"]["id"]}
    assert shown == {first.rid}
    if not stream:
        assert last["output_ids"] == second.output_ids
    found = served.retrieve("A:summary", namespace=space, request_id=first.rid)
    assert_kept(found, second)
    assert found["variants"] == 1
    assert served.retrieve("A:Hel", namespace=space)["loss_mask"].count(1) == 0, "the first attempt was left behind"


@pytest.mark.parametrize("stream", WHOLE_OR_STREAMED)
def test_an_abort_in_the_queue_is_sent_again(
    served: Stack, asks: list[Asking], space: str, stream: StreamStyle | None
) -> None:
    """Such a reply has neither tokens nor a number of prompt tokens."""
    worker = served.workers[0]
    logged = len(worker.log)
    worker.hold()
    asking = ask(
        served, asks, {"text": "A:", "stream": stream is not None, "sampling_params": {"max_new_tokens": 4}}, space
    )
    worker.wait_for_arrivals(1)
    abort_behind_its_back(worker)
    worker.wait_for(lambda: len(worker.log) == logged + 2)
    worker.release()
    last = asking.events()[-1] if stream else asking.answer().json()
    assert finish(last) == "length"
    found = served.retrieve("A:" + worker.log[-1].text, namespace=space)
    assert_kept(found, worker.log[-1])


def test_it_goes_on_until_it_is_answered(served: Stack, space: str) -> None:
    before = counted(served, "tito_router_abort_retries_total").get('{outcome="retried"}', 0)
    scripts(served, *[(("Hel",), "abort")] * (ATTEMPTS - 1), (("sum",), "eos"))
    reply = served.generate({"text": "A:"}, headers={"x-radix-namespace": space})
    assert finish(reply.body) == "stop"
    assert len(reply.records) == ATTEMPTS
    assert len({record.rid for record in reply.records}) == ATTEMPTS
    assert all(record.rid.startswith(reply.body["meta_info"]["id"]) for record in reply.records)
    assert counted(served, "tito_router_abort_retries_total")['{outcome="retried"}'] == before + ATTEMPTS - 1


@pytest.mark.parametrize("stream", WHOLE_OR_STREAMED)
def test_the_last_reply_is_returned_when_attempts_run_out(
    served: Stack, space: str, stream: StreamStyle | None
) -> None:
    """With what it has: a partial reply under the client's id, recorded."""
    before = outcomes(served)
    given_up = counted(served, "tito_router_abort_retries_total").get('{outcome="given_up"}', 0)
    scripts(served, (("Hel",), "abort"), (("lo",), "abort"), (("Hello",), "abort"))
    rid = uuid.uuid4().hex
    reply = served.generate(
        {"text": "A:", "rid": rid, "stream": stream is not None}, headers={"x-radix-namespace": space}
    )
    last = reply.body[-1] if stream else reply.body
    assert len(reply.records) == ATTEMPTS
    assert (finish(last), last["meta_info"]["id"]) == ("abort", rid)
    if not stream:
        assert (last["text"], last["output_ids"]) == ("Hello", reply.records[-1].output_ids)
    assert_kept(served.retrieve("A:Hello", namespace=space, request_id=rid), reply.records[-1])
    after = outcomes(served)
    assert sum(after.values()) == sum(before.values()) + 1
    assert counted(served, "tito_router_abort_retries_total")['{outcome="given_up"}'] == given_up + 1


@pytest.mark.parametrize("stream", WHOLE_OR_STREAMED)
def test_policy_return_gives_it_back_at_once(served: Stack, space: str, stream: StreamStyle | None) -> None:
    scripts(served, (("sum", "mary"), "abort"))
    headers = {"x-radix-namespace": space, "x-abort-policy": "return"}
    reply = served.generate({"text": "A:", "stream": stream is not None}, headers=headers)
    assert finish(reply.body[-1] if stream else reply.body) == "abort"
    assert "x-abort-policy" not in reply.record.headers
    assert_kept(served.retrieve("A:summary", namespace=space), reply.record)


@on("reluctant")
def test_the_flag_is_the_policy_of_who_says_nothing(served: Stack, space: str) -> None:
    headers = {"x-radix-namespace": space}
    scripts(served, (("Hel",), "abort"))
    assert finish(served.generate({"text": "A:"}, headers=headers).body) == "abort"
    scripts(served, (("Hel",), "abort"), (("lo",), "eos"))
    reply = served.generate({"text": "A:"}, headers={**headers, "x-abort-policy": "retry"})
    assert (finish(reply.body), len(reply.records)) == ("stop", 2)


@pytest.mark.parametrize("policy", ["", "Retry", "retry, return", "never", "é"])
def test_an_unknown_policy_is_refused(served: Stack, policy: str) -> None:
    logged = len(served.workers[0].log)
    answer = served.post("/generate", {"text": "A:"}, headers={"x-abort-policy": policy})
    assert answer.status == 400
    assert "x-abort-policy" in answer.json()["error"]["message"]
    assert len(served.workers[0].log) == logged


@pytest.mark.parametrize("fault", ["http_503", "abort_503"])
def test_a_worker_that_refuses_has_not_aborted(served: Stack, fault: Any) -> None:
    """An abort with a status is a full queue or a timeout: the client's business."""
    served.workers[0].fault(fault)
    logged = len(served.workers[0].log)
    assert served.post("/generate", {"text": "A:"}).status == 503
    assert len(served.workers[0].log) == logged + 1


@pytest.mark.parametrize("fault", ["http_500", "http_503", "abort_503"])
@pytest.mark.parametrize("stream", WHOLE_OR_STREAMED)
def test_a_refusal_of_the_second_attempt_is_no_answer(
    served: Stack, space: str, fault: Any, stream: StreamStyle | None
) -> None:
    """A third attempt is better than another worker's full queue, which in a stream comes with status 200."""
    scripts(served, (("Hel",), "abort"))
    served.workers[0].script(fault=fault)
    scripts(served, (("sum",), "eos"))
    body = {"text": "A:", "stream": stream is not None}
    reply = served.generate(body, headers={"x-radix-namespace": space})
    assert finish(reply.body[-1] if stream else reply.body) == "stop"
    assert len(reply.records) == 3
    assert_kept(served.retrieve("A:sum", namespace=space), reply.records[-1])


@pytest.mark.parametrize("fault", ["http_503", "abort_503"])
@pytest.mark.parametrize("stream", WHOLE_OR_STREAMED)
def test_the_aborted_reply_is_better_than_a_refusal(
    served: Stack, space: str, fault: Any, stream: StreamStyle | None
) -> None:
    """It is what the client gets when no attempt comes to more."""
    scripts(served, (("Hel",), "abort"))
    served.workers[0].script(words(served, "lo"), fault=fault, times=ATTEMPTS - 1)
    body = {"text": "A:", "stream": stream is not None, "rid": space}
    answer = served.generate(body, headers={"x-radix-namespace": space})
    last = answer.body[-1] if stream else answer.body
    assert (finish(last), last["meta_info"]["id"]) == ("abort", space)
    assert_kept(served.retrieve("A:Hel", namespace=space), answer.records[0])


# -- batches -------------------------------------------------------------------------------------------------------------


def test_of_a_batch_only_what_was_aborted_goes_out_again(served: Stack, space: str) -> None:
    """In its order, each with its own parameters, ids and logprobs wishes."""
    worker = served.workers[0]
    scripts(served, (("Hel",), "eos"), (("x",), "abort"), (("lo",), "eos"), (("y",), "abort"))
    scripts(served, (("sum",), "eos"), (("mary",), "eos"))
    texts = ["A:", "B: b", "C: c c", "D: d d d"]
    rids = [uuid.uuid4().hex for _ in texts]
    params = [{"max_new_tokens": 20 + number} for number in range(4)]
    asked = [True, True, False, False]
    body = {"text": texts, "rid": rids, "sampling_params": params, "return_logprob": asked, "stream": False}
    reply = served.generate(body, headers={"x-radix-namespace": space})
    assert [one["text"] for one in reply.body] == ["Hel", "sum", "lo", "mary"]
    assert [one["meta_info"]["id"] for one in reply.body] == rids
    assert ["output_token_logprobs" in one["meta_info"] for one in reply.body] == asked
    again = reply.records[4:]
    assert [record.input_ids for record in again] == [reply.records[1].input_ids, reply.records[3].input_ids]
    assert [one["max_new_tokens"] for one in again[0].body["sampling_params"]] == [21, 23]
    assert not {record.rid for record in again} & set(rids)
    final = [reply.records[0], again[0], reply.records[2], again[1]]
    for text, rid, record, one in zip(texts, rids, final, reply.body, strict=True):
        found = served.retrieve(text + one["text"], namespace=space, request_id=rid)
        assert_kept(found, record)
        assert found["variants"] == 1
    assert worker.in_flight == 0


def test_a_batch_shrinks_from_attempt_to_attempt(served: Stack, space: str) -> None:
    scripts(served, (("a",), "abort"), (("Hel",), "eos"), (("b",), "abort"))
    scripts(served, (("c",), "abort"), (("lo",), "eos"))
    scripts(served, (("sum",), "eos"))
    reply = served.generate({"text": ["A:", "B:", "C:"]}, headers={"x-radix-namespace": space})
    assert [one["text"] for one in reply.body] == ["sum", "Hel", "lo"]
    assert [len(record.body["input_ids"]) for record in reply.records] == [3, 3, 3, 2, 2, 1]


def test_a_batch_of_one_stays_a_list(served: Stack, space: str) -> None:
    scripts(served, (("a",), "abort"), (("sum",), "eos"))
    reply = served.generate({"text": ["A:"], "rid": ["one" + space]}, headers={"x-radix-namespace": space})
    assert [(one["text"], one["meta_info"]["id"]) for one in reply.body] == [("sum", "one" + space)]


def test_one_rid_for_a_batch_is_numbered_and_works_after_a_retry(served: Stack, space: str) -> None:
    scripts(served, (("Hel",), "eos"), (("x",), "abort"), (("lo",), "eos"))
    reply = served.generate({"text": ["A:", "B:"], "rid": space}, headers={"x-radix-namespace": space})
    assert [one["meta_info"]["id"] for one in reply.body] == [f"{space}_0", f"{space}_1"]
    assert_kept(served.retrieve("B:lo", namespace=space, request_id=f"{space}_1"), reply.records[-1])


def test_of_several_samples_only_the_aborted_ones_are_drawn_again(served: Stack, space: str) -> None:
    scripts(served, (("Hel",), "eos"), (("x",), "abort"), (("y",), "abort"))
    scripts(served, (("sum",), "eos"), (("mary",), "eos"))
    body = {"text": "A:", "sampling_params": {"n": 3}}
    reply = served.generate(body, headers={"x-radix-namespace": space})
    assert [one["text"] for one in reply.body] == ["Hel", "sum", "mary"]
    first, again = reply.records[:3], reply.records[3:]
    assert {tuple(record.input_ids) for record in reply.records} == {tuple(first[0].input_ids)}
    assert len(again) == 2
    for one, record in zip(reply.body, [first[0], *again], strict=True):
        found = served.retrieve("A:" + one["text"], namespace=space, request_id=one["meta_info"]["id"])
        assert_kept(found, record)


def test_a_list_with_several_samples_keeps_its_order(served: Stack, space: str) -> None:
    """Prompt by prompt, as SGLang has it."""
    scripts(served, (("Hel",), "eos"), (("x",), "abort"), (("y",), "abort"), (("lo",), "eos"))
    scripts(served, (("sum",), "eos"), (("mary",), "eos"))
    body = {"text": ["A:", "B: b"], "sampling_params": [{"n": 2}, {"n": 2}]}
    reply = served.generate(body, headers={"x-radix-namespace": space})
    assert [one["text"] for one in reply.body] == ["Hel", "sum", "mary", "lo"]
    again = reply.records[4:]
    assert [record.input_ids for record in again] == [reply.records[0].input_ids, reply.records[2].input_ids]
    final = [reply.records[0], *again, reply.records[3]]
    for text, one, record in zip(["A:", "A:", "B: b", "B: b"], reply.body, final, strict=True):
        assert_kept(served.retrieve(text + one["text"], namespace=space), record)


def test_prompts_that_came_as_ids_go_out_again_as_the_same_ids(served: Stack, space: str) -> None:
    prompts = [words(served, "Hel", "lo"), words(served, "sum", "mary")]
    scripts(served, (("x",), "abort"), (("y",), "abort"), (("a",), "eos"), (("b",), "eos"))
    reply = served.generate({"input_ids": prompts}, headers={"x-radix-namespace": space})
    assert [record.input_ids for record in reply.records] == prompts * 2
    assert [one["text"] for one in reply.body] == ["a", "b"]


# -- streams -------------------------------------------------------------------------------------------------------------


def test_a_stream_that_has_begun_is_returned_as_it_ended(served: Stack, asks: list[Asking], space: str) -> None:
    worker = served.workers[0]
    logged = len(worker.log)
    worker.hold(after=2)
    asking = ask(served, asks, {"text": "A:", "stream": True, "rid": space}, space)
    first = asking.event()
    assert first is not None
    worker.wait_for_arrivals(1)
    abort_behind_its_back(worker)
    (*_, last) = asking.events()
    assert finish(last) == "abort"
    (record,) = worker.log[logged:]
    assert len(record.output_ids) == 2
    assert_kept(served.retrieve("A:" + record.text, namespace=space, request_id=space), record)


def test_a_first_event_in_many_pieces_is_no_abort(served: Stack, space: str) -> None:
    """Prompt logprobs and whatever else a worker puts in: it does not fit into one piece of the connection."""
    logged = len(served.workers[0].log)
    served.workers[0].script(words(served, "sum", "mary"), extra={"routed_experts": "x" * 4_000_000})
    reply = served.generate({"text": "A:", "stream": True}, headers={"x-radix-namespace": space})
    assert len(served.workers[0].log) == logged + 1
    assert_kept(served.retrieve("A:summary", namespace=space), reply.record)


def test_a_stream_of_a_batch_is_not_held_back(served: Stack, space: str) -> None:
    """Its items share one stream, which has begun as soon as one of them has."""
    scripts(served, (("Hel",), "eos"), (("x",), "abort"))
    reply = served.generate({"text": ["A:", "B:"], "stream": True}, headers={"x-radix-namespace": space})
    last = {event["index"]: finish(event) for event in reply.body if event["meta_info"]["finish_reason"]}
    assert last == {0: "stop", 1: "abort"}
    assert len(reply.records) == 2


# -- ids, wherever the generation is -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", WHOLE_OR_STREAMED)
@pytest.mark.parametrize("attempt", range(ATTEMPTS))
def test_the_clients_id_ends_it_in_every_attempt(
    served: Stack, asks: list[Asking], space: str, stream: StreamStyle | None, attempt: int
) -> None:
    """The worker is told the id it knows, and the partial reply comes back under the client's."""
    worker = served.workers[0]
    logged, told = len(worker.log), len(calls(worker, "/abort_request"))
    scripts(served, *[(("x",), "abort")] * attempt, (("sum", "mary", "Hel", "lo"), "length"))
    worker.hold(after=2)
    asking = ask(served, asks, {"text": "A:", "rid": space, "stream": stream is not None}, space)
    worker.wait_for_arrivals(1)
    until(lambda: len(worker.log) == logged + attempt + 1)
    record = worker.log[-1]
    assert served.post("/abort_request", {"rid": space}).status == 200
    last = asking.events()[-1] if stream else asking.answer().json()
    assert (finish(last), last["meta_info"]["id"]) == ("abort", space)
    assert calls(worker, "/abort_request")[told:] == [{"rid": record.rid}]
    assert len(worker.log) == logged + attempt + 1
    assert (record.rid == space) == (attempt == 0)
    assert_kept(served.retrieve("A:summary", namespace=space, request_id=space), record)


@pytest.mark.parametrize("stream", WHOLE_OR_STREAMED)
def test_what_is_ended_in_its_last_attempt_was_not_given_up(
    served: Stack, asks: list[Asking], space: str, stream: StreamStyle | None
) -> None:
    """Operators are alerted by `given_up`; a client that ends its generation is no reason."""
    worker, logged = served.workers[0], len(served.workers[0].log)
    before = counted(served, "tito_router_abort_retries_total").get('{outcome="given_up"}', 0)
    scripts(served, *[(("x",), "abort")] * (ATTEMPTS - 1))
    worker.hold()
    asking = ask(served, asks, {"text": "A:", "rid": space, "stream": stream is not None}, space)

    def wait_for_attempt(number: int) -> None:
        until(lambda: len(worker.log) == logged + number)
        worker.wait_for_arrivals(1)

    for number in range(1, ATTEMPTS):
        wait_for_attempt(number)
        worker.release(1)
    wait_for_attempt(ATTEMPTS)
    assert served.post("/abort_request", {"rid": space}).status == 200
    last = asking.events()[-1] if stream else asking.answer().json()
    assert (finish(last), last["meta_info"]["id"]) == ("abort", space)
    assert counted(served, "tito_router_abort_retries_total").get('{outcome="given_up"}', 0) == before


@pytest.mark.parametrize("attempt", range(2))
def test_the_id_of_a_streams_first_event_ends_it(served: Stack, asks: list[Asking], space: str, attempt: int) -> None:
    """Without an id of the client's own."""
    worker = served.workers[0]
    scripts(served, *[(("x",), "abort")] * attempt, (("sum", "mary", "Hel", "lo"), "length"))
    worker.hold(after=2)
    asking = ask(served, asks, {"text": "A:", "stream": True}, space)
    first = asking.event()
    assert first is not None
    worker.wait_for_arrivals(1)
    assert served.post("/abort_request", {"rid": first["meta_info"]["id"]}).status == 200
    (*_, last) = asking.events()
    assert (finish(last), last["meta_info"]["id"]) == ("abort", first["meta_info"]["id"])
    found = served.retrieve("A:" + worker.log[-1].text, namespace=space, request_id=first["meta_info"]["id"])
    assert_kept(found, worker.log[-1])


@on("pair")
@pytest.mark.parametrize("stream", WHOLE_OR_STREAMED)
def test_a_second_attempt_may_be_elsewhere(
    served: Stack, asks: list[Asking], space: str, stream: StreamStyle | None
) -> None:
    """The abort goes to where the generation is now, and to nobody else."""
    for worker in served.workers:
        worker.script(words(served, "x"), finish="abort")
        worker.hold(after=1)
    told = [len(calls(worker, "/abort_request")) for worker in served.workers]
    logged = [len(worker.log) for worker in served.workers]
    asking = ask(served, asks, {"text": "A:", "rid": space, "stream": stream is not None}, space)
    # Each has aborted it once then; the third attempt is the first worker's again, and is held there.
    until(lambda: sum(len(w.log) for w in served.workers) == sum(logged) + 3)
    holder = next(worker for worker in served.workers if worker.in_flight)
    holder.wait_for_arrivals(1)
    assert served.post("/abort_request", {"rid": space}).status == 200
    reply = asking.events()[-1] if stream else asking.answer().json()
    assert finish(reply) == "abort"
    new = [calls(worker, "/abort_request")[count:] for worker, count in zip(served.workers, told, strict=True)]
    assert new[served.workers.index(holder)] == [{"rid": holder.log[-1].rid}]
    assert sum(map(len, new)) == 1


@on("pair")
def test_the_reply_names_the_worker_that_gave_it(served: Stack, space: str) -> None:
    """The last one, under the id of the first attempt, which was another worker's."""
    aborting, giver = served.workers
    aborting.script(words(served, "x"), finish="abort")
    for number in range(50):  # until it is the first worker that is asked first
        name = f"{space}-{number}"
        body = {"text": "A:", "rid": name, "sampling_params": {"max_new_tokens": 5}}
        reply = served.generate(body, headers={"x-radix-namespace": space})
        if len(reply.records) > 1:
            break
    assert (finish(reply.body), reply.body["meta_info"]["id"]) == ("length", name)
    assert giver.log[-1].output_ids == reply.body["output_ids"]
    assert reply.answer.headers["x-router-worker"] == giver.url


# -- aborts that a client asked for --------------------------------------------------------------------------------------

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("/abort_request", {"abort_all": True}),
    "pause": ("/pause_generation", {}),
    "pause, mode abort": ("/pause_generation", {"mode": "abort"}),
    "version": ("/update_weight_version", {"new_version": "9"}),
    "version, said so": ("/update_weight_version", {"new_version": "9", "abort_all_requests": True}),
    "disk": ("/update_weights_from_disk", {"model_path": "x", "abort_all_requests": True}),
    "tensor": (
        "/update_weights_from_tensor",
        {"serialized_named_tensors": [], "weight_version": "10", "abort_all_requests": True},
    ),
    "distributed": (
        "/update_weights_from_distributed",
        {"names": [], "dtypes": [], "shapes": [], "abort_all_requests": True},
    ),
    "ipc": ("/update_weights_from_ipc", {"zmq_handles": {}, "abort_all_requests": True}),
}
BY_ID = {"rid": "{rid}", "prefix": "{prefix}"}


def asked_for(served: Stack, how: str, rid: str) -> None:
    """Ask for the end of it through the router."""
    if how in BY_ID:
        path, body = "/abort_request", {"rid": BY_ID[how].format(rid=rid, prefix=rid[:20])}
    else:
        path, body = ASKED[how]
    answer = served.post(path, body)
    assert answer.status == 200, answer.content
    if path == "/pause_generation":
        assert served.post("/continue_generation", {}).status == 200


@on("patient")
@pytest.mark.parametrize("how", [*BY_ID, *ASKED])
@pytest.mark.parametrize("stream", WHOLE_OR_STREAMED)
def test_what_was_asked_to_end_is_not_sent_again(
    served: Stack, asks: list[Asking], space: str, how: str, stream: StreamStyle | None
) -> None:
    """The reply comes at once, though a second attempt would wait for an hour."""
    worker = served.workers[0]
    logged = len(worker.log)
    worker.hold(after=3)
    asking = ask(served, asks, {"text": "A:", "rid": space, "stream": stream is not None}, space)
    worker.wait_for_arrivals(1)
    asked_for(served, how, space)
    last = asking.events()[-1] if stream else asking.answer().json()
    assert finish(last) == "abort"
    (record,) = worker.log[logged:]
    assert_kept(served.retrieve("A:" + record.text, namespace=space, request_id=space), record)


def waiting(served: Stack, asks: list[Asking], body: dict[str, Any], space: str, *, count: int = 1) -> Asking:
    """A request whose generations were aborted behind the router's back, and which waits for its next attempt."""
    worker = served.workers[0]
    worker.hold(after=3)
    asking = ask(served, asks, body, space, "retry")
    worker.wait_for_arrivals(count)
    abort_behind_its_back(worker)
    until(lambda: in_no_workers_hands(served), "the first attempt is over")
    until(lambda: phases(served) == ["waiting"], "it waits for its next attempt")
    return asking


def phases(served: Stack) -> list[str]:
    """How far the requests are, by the list that operators look at: a worker that has one may hang, one that waits will not."""
    return [one["phase"] for one in served.get("/debug/requests").json()["requests"]]


@on("patient")
@pytest.mark.parametrize("how", [*BY_ID, *ASKED])
def test_a_wait_ends_at_once_when_somebody_asks_for_it(served: Stack, asks: list[Asking], space: str, how: str) -> None:
    worker = served.workers[0]
    logged = len(worker.log)
    asking = waiting(served, asks, {"text": "A:", "rid": space}, space)
    asked_for(served, how, space)
    reply = asking.answer().json()
    assert (finish(reply), reply["meta_info"]["id"]) == ("abort", space)
    (record,) = worker.log[logged:]
    assert reply["output_ids"] == record.output_ids
    assert_kept(served.retrieve("A:" + record.text, namespace=space, request_id=space), record)


@on("patient")
def test_a_stream_that_waits_ends_at_once(served: Stack, asks: list[Asking], space: str) -> None:
    """It was aborted in the queue: nothing has come of it."""
    worker = served.workers[0]
    worker.hold()
    asking = ask(served, asks, {"text": "A:", "rid": space, "stream": True}, space)
    worker.wait_for_arrivals(1)
    abort_behind_its_back(worker)
    until(lambda: in_no_workers_hands(served))
    until(lambda: phases(served) == ["waiting"], "it waits for its next attempt")
    asked_for(served, "rid", space)
    (last,) = asking.events()
    assert (finish(last), last["meta_info"]["id"]) == ("abort", space)


@on("patient")
@pytest.mark.parametrize("body", [{"text": ["A:", "B:", "C:"]}, {"text": "A:", "sampling_params": {"n": 3}}])
def test_a_batch_that_waits_ends_at_once(served: Stack, asks: list[Asking], space: str, body: dict[str, Any]) -> None:
    logged = len(served.workers[0].log)
    asking = waiting(served, asks, body, space, count=3)
    asked_for(served, "all", space)
    reply = asking.answer().json()
    assert [finish(one) for one in reply] == ["abort"] * 3
    records = served.workers[0].log[logged:]
    assert [one["output_ids"] for one in reply] == [record.output_ids for record in records]


@on("patient")
def test_a_batch_waits_until_all_of_it_shall_end(served: Stack, asks: list[Asking], space: str) -> None:
    rids = [f"{space}-{letter}" for letter in "abc"]
    asking = waiting(served, asks, {"text": ["A:", "B:", "C:"], "rid": rids}, space, count=3)
    for rid in rids:
        asked_for(served, "rid", rid)
    assert [one["meta_info"]["id"] for one in asking.answer().json()] == rids


@on("reluctant")
def test_what_was_asked_to_end_while_it_waited_is_not_sent_again_with_the_others(
    served: Stack, asks: list[Asking], space: str
) -> None:
    """Two of a batch are aborted, the end of one of them is asked for: only the other one goes out again."""
    worker = served.workers[0]
    logged = len(worker.log)
    rids = [f"{space}-{letter}" for letter in "ab"]
    body = {"text": ["A:", "B: b"], "rid": rids, "sampling_params": {"max_new_tokens": 5}}
    asking = waiting(served, asks, body, space, count=2)
    asked_for(served, "rid", rids[0])
    worker.wait_for(lambda: len(worker.log) > logged + 2)
    worker.release()
    first, second = asking.answer().json()
    mine = worker.log[logged:]
    assert [record.input_ids for record in mine[2:]] == [mine[1].input_ids]
    assert (finish(first), finish(second)) == ("abort", "length")
    assert (first["output_ids"], second["output_ids"]) == (mine[0].output_ids, mine[2].output_ids)


@on("patient")
def test_others_are_left_alone(served: Stack, asks: list[Asking], space: str) -> None:
    """An abort by id means one generation, though another's begins with it; a prefix means all that begin so."""
    worker = served.workers[0]
    names = [f"{space}-1", f"{space}-12", uuid.uuid4().hex]
    worker.hold(after=1)
    asking = {name: ask(served, asks, {"text": "A:", "rid": name}, space) for name in names}
    worker.wait_for_arrivals(3)
    asked_for(served, "rid", names[1])
    assert finish(asking[names[1]].answer().json()) == "abort"
    assert worker.in_flight == 2
    assert served.post("/abort_request", {"rid": f"{space}-"}).status == 200
    assert finish(asking[names[0]].answer().json()) == "abort"
    assert worker.in_flight == 1
    worker.release()
    assert finish(asking[names[2]].answer().json()) == "length"


@on("patient")
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_that_aborts_nothing_ends_nothing(served: Stack, asks: list[Asking], space: str, mode: str) -> None:
    """A wait goes on, and what was running goes on afterwards."""
    asking = waiting(served, asks, {"text": "A:", "rid": space}, space)
    assert served.post("/pause_generation", {"mode": mode}).status == 200
    for quiet in ({"new_version": "11", "abort_all_requests": False},):
        assert served.post("/update_weight_version", quiet).status == 200
    assert served.post("/update_weights_from_disk", {"model_path": "x"}).status == 200
    running = ask(served, asks, {"text": "B:", "sampling_params": {"max_new_tokens": 2}}, space)
    served.workers[0].wait_for_arrivals(1)
    assert served.post("/continue_generation", {}).status == 200
    assert finish(running.answer().json()) == "length"
    asked_for(served, "rid", space)
    assert finish(asking.answer().json()) == "abort"


@pytest.mark.parametrize("style", ["cumulative", "incremental"])
@on("patient")
def test_what_is_aborted_after_a_pause_retracted_it_is_kept(
    served: Stack, asks: list[Asking], space: str, style: StreamStyle
) -> None:
    """A stream of deltas then ends with all of it once more."""
    worker = served.workers[0]
    before, worker.wire.stream_style = worker.wire.stream_style, style
    worker.hold(after=3)
    asking = ask(served, asks, {"text": "A:", "rid": space, "stream": True}, space)
    worker.wait_for_arrivals(1)
    assert served.post("/pause_generation", {"mode": "retract"}).status == 200
    asked_for(served, "rid", space)
    asking.answer()
    worker.wire.stream_style = before
    assert served.post("/continue_generation", {}).status == 200
    found = served.retrieve("A:" + worker.log[-1].text, namespace=space, request_id=space)
    assert found["exact"]
    assert found["tokens"][-3:] == worker.log[-1].output_ids
    assert found["loss_mask"][-4:] == [0, 1, 1, 1]


@on("patient")
def test_an_id_that_nobody_knows_goes_to_every_worker(served: Stack) -> None:
    told = len(calls(served.workers[0], "/abort_request"))
    assert served.post("/abort_request", {"rid": "nobody's"}).status == 200
    assert calls(served.workers[0], "/abort_request")[told:] == [{"rid": "nobody's"}]


@on("patient")
def test_what_comes_while_workers_are_told_to_abort_is_not_sent_again_either(served: Stack) -> None:
    """A call takes its time to reach them all; what overtakes it is aborted by it all the same."""
    reply = {"text": "", "output_ids": [], "meta_info": {"id": "x", "finish_reason": {"type": "abort", "message": "."}}}

    async def talk() -> Answer:
        told, generated = asyncio.Event(), asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head, _ = await read_request(reader)
            path = head.split(" ")[1]
            content = json.dumps(reply if path == "/generate" else {"model_path": "m"}).encode()
            if path == "/pause_generation":
                told.set()
                await generated.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
            await writer.drain()
            if path == "/generate":
                generated.set()

        async with serving_socket(slow) as url:
            other = {"url": served.workers[0].url}
            assert (await asyncio.to_thread(served.post, "/add_worker", {"url": url})).status == 200
            assert (await asyncio.to_thread(served.post, "/remove_worker", other)).status == 200
            try:
                pause = asyncio.create_task(asyncio.to_thread(served.post, "/pause_generation", {}))
                await told.wait()
                answer = await asyncio.to_thread(served.post, "/generate", {"text": "A:"})
                assert (await pause).status == 200
                return answer
            finally:
                await asyncio.to_thread(served.post, "/remove_worker", {"url": url})
                await asyncio.to_thread(served.post, "/add_worker", other)

    assert finish(asyncio.run(talk()).json()) == "abort"


# -- a partial rollout goes on -------------------------------------------------------------------------------------------


@on("patient")
@pytest.mark.parametrize("stream", WHOLE_OR_STREAMED)
def test_a_partial_reply_is_continued_from_exactly_its_ids(
    served: Stack, asks: list[Asking], space: str, stream: StreamStyle | None
) -> None:
    """Across a weight update: one chain, each token with the version it was sampled under."""
    worker = served.workers[0]
    logged = len(worker.log)
    worker.set_weight_version("20")
    worker.script(words(served, "Hel", "lo", "sum", "mary", " on"), finish="length")
    worker.hold(after=3)
    asking = ask(served, asks, {"text": "A:", "stream": stream is not None}, space)
    worker.wait_for_arrivals(1)
    assert served.post("/update_weight_version", {"new_version": "21"}).status == 200
    partial = asking.events()[-1] if stream else asking.answer().json()
    assert finish(partial) == "abort"
    cut = worker.log[-1]
    assert cut.text == "Hellosum"
    worker.release()
    worker.script(words(served, "mary", "!"), finish="eos")
    reply = served.generate({"text": "A:Hellosum"}, headers={"x-radix-namespace": space})
    rest = reply.record
    assert rest.input_ids == cut.input_ids + cut.output_ids
    found = served.retrieve("A:Hellosummary!", namespace=space, max_staleness=0)
    assert found["tokens"] == cut.input_ids + cut.output_ids + rest.output_ids
    start = len(cut.input_ids)
    assert found["loss_mask"] == [0] * start + [1] * (len(cut.output_ids) + len(rest.output_ids))
    assert found["rollout_logp"][start:] == cut.logprobs + rest.logprobs
    assert found["weight_versions"] == [
        {"version": "20", "start": start, "end": start + 3},
        {"version": "21", "start": start + 3, "end": start + 3 + len(rest.output_ids)},
    ]
    assert found["exact"]
    assert found["stale_tokens"] == 3
    assert len(worker.log) == logged + 2


def test_weights_that_change_within_a_reply_and_at_its_cut(served: Stack, asks: list[Asking], space: str) -> None:
    """Three versions in one chain."""
    worker = served.workers[0]
    worker.set_weight_version("30")
    worker.script(words(served, "Hel", "lo", "sum", "mary", " on"), finish="length")
    worker.hold(after=1)
    asking = ask(served, asks, {"text": "A:"}, space, "return")
    worker.wait_for_arrivals(1)
    worker.set_weight_version("31")
    worker.hold(after=3)
    worker.wait_for(lambda: any(len(job.sample.output_ids) == 3 for job in worker.jobs.values()))
    abort_behind_its_back(worker)
    assert asking.answer().json()["text"] == "Hellosum"
    cut = worker.log[-1]
    assert cut.versions == ["30", "31", "31"]
    worker.release()
    worker.set_weight_version("32")
    rest = served.generate({"text": "A:Hellosum", "sampling_params": {"max_new_tokens": 2}}).records[0]
    assert rest.input_ids != cut.input_ids + cut.output_ids, "another namespace"
    rest = served.generate(
        {"text": "A:Hellosum", "sampling_params": {"max_new_tokens": 2}}, headers={"x-radix-namespace": space}
    ).record
    assert rest.input_ids == cut.input_ids + cut.output_ids
    found = served.retrieve("A:Hellosum" + rest.text, namespace=space)
    start = len(cut.input_ids)
    runs = [(span["version"], span["start"] - start, span["end"] - start) for span in found["weight_versions"]]
    assert runs == [("30", 0, 1), ("31", 1, 3), ("32", 3, 5)]


# -- workers that come and go meanwhile ----------------------------------------------------------------------------------


@on("pair")
def test_a_second_attempt_goes_past_a_worker_that_died(served: Stack, asks: list[Asking], space: str) -> None:
    for worker in served.workers:
        worker.hold(after=1)
    asking = ask(served, asks, {"text": "A:", "sampling_params": {"max_new_tokens": 5}}, space)
    until(lambda: any(worker.in_flight for worker in served.workers))
    holder, other = sorted(served.workers, key=lambda worker: -worker.in_flight)
    logged = len(holder.log)
    holder.wait_for_arrivals(1)
    other.kill()
    try:
        abort_behind_its_back(holder)
        holder.wait_for(lambda: len(holder.log) > logged)
        holder.release()
        reply = asking.answer()
    finally:
        other.restart()
    assert (reply.status, finish(reply.json())) == (200, "length")
    assert_kept(served.retrieve("A:" + reply.json()["text"], namespace=space), holder.log[-1])


@on("patient")
def test_all_workers_may_die_while_a_retry_waits(served: Stack, asks: list[Asking], space: str) -> None:
    """The client still gets what was sampled, as soon as a client aborts it."""
    worker = served.workers[0]
    asking = waiting(served, asks, {"text": "A:", "rid": space}, space)
    record = worker.log[-1]
    worker.kill()
    try:
        answer = served.post("/abort_request", {"rid": space})
        assert answer.status == 200, "there was nothing that a worker would have had to be told"
        reply = asking.answer().json()
    finally:
        worker.restart()
    assert (finish(reply), reply["output_ids"]) == ("abort", record.output_ids)
    assert_kept(served.retrieve("A:" + record.text, namespace=space), record)


@on("reluctant")
def test_with_nobody_left_the_aborted_reply_is_returned(served: Stack, asks: list[Asking], space: str) -> None:
    worker = served.workers[0]
    asking = waiting(served, asks, {"text": "A:"}, space)
    record = worker.log[-1]
    worker.kill()
    try:
        reply = asking.answer()
    finally:
        worker.restart()
    assert (reply.status, finish(reply.json())) == (200, "abort")
    assert_kept(served.retrieve("A:" + record.text, namespace=space), record)


@on("pair")
def test_what_was_asked_to_end_is_not_begun_anew_where_its_worker_died(
    served: Stack, asks: list[Asking], space: str
) -> None:
    """The worker never came to abort it, and nobody wants another one to begin."""
    params = {"max_new_tokens": 5, "custom_params": {"script": {"fault": "no_answer"}}}
    asking = ask(served, asks, {"text": "A:", "rid": space, "sampling_params": params}, space)
    until(lambda: any(worker.in_flight for worker in served.workers))
    (holder,) = [worker for worker in served.workers if worker.in_flight]
    assert served.post("/abort_request", {"rid": space}).status == 200
    holder.kill()
    try:
        assert asking.answer().status == 502
    finally:
        holder.restart()


# -- generations that a middleware makes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("session", [True, False], ids=["in a session", "without one"])
def test_the_workers_id_of_a_chat_begins_with_the_generations_own_at_every_attempt(session: bool) -> None:
    """With several tenants, too: the id was made up here, so nobody can name it."""
    server = {"api_keys": ("a:one", "b:two")}
    with stack(
        "qwen",
        styles=("cumulative",),
        folder=chat_model("qwen3"),
        server=server,
        abort=AbortConfig(attempts=3, wait=0),
        workers={"retry": RetryConfig(attempts=3, first_wait=0)},
    ) as served:
        (worker,) = served.workers
        worker.script(text="a", finish="abort")
        worker.script(text="b", fault="http_503")
        worker.script(text="c")
        headers, path = {"authorization": "Bearer one"}, "/v1/chat/completions"
        if session:
            path = f"/sessions/{served.post('/sessions', {}, headers=headers).json()['session_id']}{path}"
        answer = served.post(path, {"messages": [{"role": "user", "content": "Hello"}]}, headers=headers)
        assert answer.status == 200, answer.content
        name = answer.json()["id"].removeprefix("chatcmpl-")
        rids = [record.rid for record in worker.log]
        assert len(set(rids)) == 3
        assert all(rid.startswith(name) for rid in rids)
