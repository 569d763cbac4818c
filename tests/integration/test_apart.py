"""Prefill and decode workers apart: a request goes to one of both, and its client sees one worker."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from router.app import create_app
from router.config import AbortConfig, HealthConfig, QueueConfig, RouterConfig, WorkersConfig
from router.errors import BadRequestError
from router.generate.fleet_calls import CallSender, FleetCall, WorkerAnswer
from router.http.headers import HeaderList
from router.proxy.legs import Legs
from router.workers.worker import Worker
from tests.support.asking import Asking, calls, until
from tests.support.client import call
from tests.support.oracle import versions_of
from tests.support.pictures import data_url, digest, picture
from tests.support.serving import serve
from tests.support.stack import Stack, stack
from worker.models.ngram import shipped_image_tokenizer
from worker.options import Role
from worker.worker import EmbeddedWorker

PROMPT = "Once upon a time"
SHORT = {"max_new_tokens": 8}
LONG = {"max_new_tokens": 64}


@pytest.fixture(scope="module")
def pairs() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative", "incremental"), apart=True) as found:
        yield found
        until(found.idle, found.inflight)


@pytest.fixture
def pair() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), apart=True) as found:
        yield found
        until(found.idle, found.inflight)
        assert not found.workers[0].out_of_range
        assert not found.prefills[0].out_of_range


def both(pair: Stack) -> tuple[EmbeddedWorker, EmbeddedWorker]:
    return pair.prefills[0], pair.workers[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_exact(pairs: Stack, stream: bool) -> None:
    text, known = PROMPT, []
    for turn in range(6):
        reply = pairs.generate({"text": text, "sampling_params": SHORT, "stream": stream})
        assert reply.record.input_ids[: len(known)] == known
        known = reply.record.input_ids + reply.record.output_ids
        text += reply.record.text
        found = pairs.retrieve(text)
        assert found["exact"], (turn, found)
        assert found["tokens"] == known
        text += f"\nand {turn}"


def test_pictures_go_to_both() -> None:
    image = picture(40, 30, 1)
    with stack("qwen", styles=("cumulative",), folder=shipped_image_tokenizer(), apart=True) as pair:
        text = "Look: <|vision_start|><|image_pad|><|vision_end|> what?"
        reply = pair.generate({"text": text, "image_data": data_url(image), "sampling_params": SHORT})
        assert [worker.log[-1].images for worker in both(pair)] == [(digest(image),)] * 2
        found = pair.retrieve(text + reply.record.text, image_data=[digest(image)])
        assert found["exact"], found["reasons"]
        assert found["tokens"] == reply.record.input_ids + reply.record.output_ids
        until(pair.idle, pair.inflight)


def test_both_workers_get_the_same_request(pairs: Stack) -> None:
    reply = pairs.generate({"text": PROMPT, "rid": "the-same", "sampling_params": SHORT})
    every = (*pairs.prefills, *pairs.workers)
    first, last = [record for worker in every for record in worker.log if record.rid == "the-same"]
    assert first.raw == last.raw
    assert len(first.output_ids) == 1
    prefill = next(worker for worker in pairs.prefills if worker.port == first.body["bootstrap_port"])
    assert reply.answer.headers["x-router-prefill-worker"] == prefill.url
    assert reply.answer.headers["x-router-worker"] in [worker.url for worker in pairs.workers]
    assert first.body["bootstrap_host"] == "127.0.0.1"


def test_a_session_is_exact(pairs: Stack) -> None:
    session = pairs.post("/sessions", {}).json()["session_id"]
    messages: list[dict[str, Any]] = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Say {turn}."})
        answer = pairs.post(f"/sessions/{session}/v1/chat/completions", {"messages": messages, "max_tokens": 8})
        assert answer.status == 200, answer.content
        messages.append(answer.json()["choices"][0]["message"])
    done = pairs.post(f"/sessions/{session}/finalize", {}).json()
    assert all(one["exact"] for one in done["trajectories"]), done


@pytest.mark.parametrize("stream", [False, True])
def test_samples_and_batches_have_a_room_for_each(pair: Stack, stream: bool) -> None:
    prefill, decode = both(pair)
    one = {"sampling_params": {**SHORT, "n": 3}, "stream": stream}
    for body, count in (({"text": PROMPT, **one}, 3), ({"text": [PROMPT, "And"], **one}, 6)):
        before = len(decode.log)
        reply = pair.generate(body)
        assert len({record.rid for record in decode.log[before:]}) == count
        rooms = decode.log[-1].body["bootstrap_room"]
        assert len(set(rooms)) == count
        assert '"n"' not in json.dumps(decode.log[-1].body["sampling_params"])
        if stream:
            assert {event["index"] for event in reply.body} == set(range(count))
        else:
            assert len(reply.body) == count
            assert [one["output_ids"] for one in reply.body] == [record.output_ids for record in decode.log[before:]]
    assert prefill.received == decode.received


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_the_prompt_are_the_prefill_workers(pair: Stack, stream: bool) -> None:
    """Those of the reply are the decode worker's. Each token has one entry in each list."""
    asked = {"text": PROMPT, "return_logprob": True, "logprob_start_len": 0, "sampling_params": SHORT, "stream": stream}
    asked |= {"top_logprobs_num": 2, "token_ids_logprob": [5]}
    before = len(pair.workers[0].log)
    reply = pair.generate(asked)
    meta = (reply.body[-1] if stream else reply.body)["meta_info"]
    ids = pair.workers[0].log[before].input_ids
    assert [entry[1] for entry in meta["input_token_logprobs"]] == ids
    assert [entry[1] for entry in meta["output_token_logprobs"]] == pair.workers[0].log[before].output_ids
    assert {len(meta[f"input_{key}"]) for key in ("top_logprobs", "token_ids_logprobs")} == {len(ids)}


def test_rows_of_experts_are_joined(pair: Stack) -> None:
    """The prefill worker has those of the prompt, the decode worker only those behind it, with anything before."""
    prefill, decode = both(pair)
    prefill.script([5], extra_meta={"routed_experts": b64encode(b"PPPP").decode()})
    decode.script([5, 6, 7], extra_meta={"routed_experts": b64encode(b"????DD").decode()})
    asked = {"text": PROMPT, "return_routed_experts": True, "sampling_params": SHORT}
    reply = pair.generate(asked)
    assert reply.body["meta_info"]["routed_experts"] == b64encode(b"PPPPDD").decode()
    decode.script([5, 6, 7], extra_meta={"routed_experts": b64encode(b"????DD").decode()})
    reply = pair.generate(asked)
    assert "routed_experts" not in reply.body["meta_info"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_version_is_told_if_both_had_it(pair: Stack, stream: bool) -> None:
    prefill, decode = both(pair)

    def turn() -> dict[str, Any]:
        reply = pair.generate({"text": PROMPT, "sampling_params": SHORT, "stream": stream})
        found: dict[str, Any] = pair.retrieve(PROMPT + reply.record.text, request_id=reply.record.rid)
        return found

    pair.set_weight_version("1")
    assert "version_uncertain" not in turn()["reasons"]
    prefill.set_weight_version("2")
    assert "version_uncertain" in turn()["reasons"]
    decode.set_weight_version("2")
    assert "version_uncertain" not in turn()["reasons"]


def test_an_update_while_it_decodes_is_seen_token_by_token(pair: Stack) -> None:
    prefill, decode = both(pair)
    decode.hold(after=3)
    asking = Asking(pair.url, {"text": PROMPT, "sampling_params": SHORT})
    until(lambda: [len(job.sample.output_ids) for job in decode.jobs.values()] == [3])
    until(lambda: not prefill.in_flight)
    pair.set_weight_version("later")
    decode.release()
    assert asking.answer().status == 200
    record = decode.log[-1]
    found = pair.retrieve(PROMPT + record.text)
    assert set(record.versions) == {"default", "later"}
    assert "version_uncertain" not in found["reasons"]


@contextmanager
def retracted(pair: Stack, asked: dict[str, Any]) -> Iterator[Asking]:
    """Ask, and have the decode worker take a generation of three tokens back; it goes on with new weights after this."""
    prefill, decode = both(pair)
    decode.hold(after=3)
    asking = Asking(pair.url, {"text": PROMPT, "sampling_params": SHORT, **asked})
    until(lambda: [len(job.sample.output_ids) for job in decode.jobs.values()] == [3])
    until(lambda: not prefill.in_flight)
    assert pair.post("/pause_generation", {"mode": "retract"}).status == 200
    update = {"model_path": "x", "weight_version": "later"}
    assert pair.post("/update_weights_from_disk", update).status == 200
    decode.release()
    yield asking
    assert pair.post("/continue_generation", {}).status == 200


@pytest.mark.parametrize("salt", [None, "rollout"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_pause_took_back_is_prefilled_again_by_the_new_weights(
    pair: Stack, stream: bool, salt: str | None
) -> None:
    prefill, decode = both(pair)
    pair.set_weight_version("first")
    with retracted(pair, {"stream": stream, "extra_key": salt}) as asking:
        pass
    assert asking.answer().status == 200
    first, again = prefill.log
    (record,) = decode.log
    assert again.input_ids == [*record.input_ids, *record.output_ids[:2]]
    assert (again.rid, again.body["bootstrap_room"]) == (first.rid, first.body["bootstrap_room"])
    assert again.body["extra_key"] == salt
    assert record.versions == ["first"] * 3 + ["later"] * 5
    found = pair.retrieve(PROMPT + record.text)
    assert (found["exact"], found["reasons"]) == (True, [])
    assert found["tokens"] == record.input_ids + record.output_ids
    assert [version for _, version in versions_of(found["weight_versions"])] == record.versions


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefill_worker_that_died_in_a_pause_ends_what_it_is_to_prefill_again(pair: Stack, stream: bool) -> None:
    prefill, decode = both(pair)
    with retracted(pair, {"stream": stream}) as asking:
        prefill.kill()
        begun = time.monotonic()
        assert call(decode.url + "/continue_generation", {}).status == 200
        if stream:
            *_, last = asking.events()
            asking.close()
            assert "Decode transfer failed" in str(last)
        else:
            answer = asking.answer()
            assert answer.status >= 500, answer.content
        assert time.monotonic() - begun < 2
        prefill.restart()


# Ends -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_an_abort_goes_to_both(pair: Stack, at: str, stream: bool) -> None:
    prefill, decode = both(pair)
    held, after = (prefill, 0) if at == "prefill" else (decode, 2)
    held.hold(after)
    asking = Asking(pair.url, {"text": PROMPT, "rid": "mine", "sampling_params": LONG, "stream": stream})
    held.wait_for_arrivals(1)
    if at == "decode":  # the prefill worker is free when it has handed over
        loads = {prefill.url: 0, decode.url: 1}
        until(lambda: {one["url"]: one["load"] for one in pair.get("/workers").json()["workers"]} == loads)
    told = pair.post("/abort_request", {"rid": "mine"})
    assert told.status == 200
    assert [one["url"] for one in told.json()["workers"]][-1] == decode.url
    assert len(told.json()["workers"]) == (2 if at == "prefill" else 1)
    held.release()
    body = asking.events()[-1] if stream else asking.answer().json()
    asking.close()
    assert body["meta_info"]["finish_reason"]["type"] == "abort"
    assert {"rid": "mine"} in calls(decode, "/abort_request")
    assert at == "decode" or {"rid": "mine"} in calls(prefill, "/abort_request")


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_stays_one_if_the_prefill_worker_dies_of_it(pair: Stack, stream: bool) -> None:
    prefill, decode = both(pair)
    prefill.fault("no_answer")
    asking = Asking(pair.url, {"text": PROMPT, "rid": "mine", "sampling_params": LONG, "stream": stream})
    until(lambda: prefill.in_flight and decode.in_flight)
    assert pair.post("/abort_request", {"rid": "mine"}).status == 200
    until(lambda: not decode.in_flight)
    time.sleep(0.1)  # the router waits for the prefill leg now
    prefill.kill()
    body = asking.events()[-1] if stream else asking.answer().json()
    asking.close()
    assert body["meta_info"]["finish_reason"]["type"] == "abort"
    prefill.restart()


def test_a_client_that_leaves_ends_both_legs(pair: Stack) -> None:
    prefill, decode = both(pair)
    prefill.hold()
    asking = Asking(pair.url, {"text": PROMPT, "sampling_params": {**LONG, "n": 2}})
    prefill.wait_for_arrivals(2)
    asking.leave()
    until(lambda: len(calls(prefill, "/abort_request")) == len(calls(decode, "/abort_request")) == 2)
    prefill.release()
    until(pair.idle, pair.inflight)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dies", ["prefill", "decode"])
def test_a_leg_that_dies_ends_the_other_at_once(pair: Stack, dies: str, stream: bool) -> None:
    prefill, decode = both(pair)
    dead, other = (prefill, decode) if dies == "prefill" else (decode, prefill)
    prefill.hold()
    asking = Asking(pair.url, {"text": PROMPT, "sampling_params": LONG, "stream": stream})
    prefill.wait_for_arrivals(1)
    decode.wait_for_arrivals(1)
    begun = time.monotonic()
    dead.kill()
    answer = asking.answer()
    assert time.monotonic() - begun < 1
    assert answer.status == 502, answer.content
    assert dead.url in answer.json()["error"]["message"]
    assert other.url not in answer.json()["error"]["message"]
    until(lambda: calls(other, "/abort_request"))
    dead.restart()
    prefill.release()
    until(pair.idle, pair.inflight)


@pytest.mark.parametrize("stream", [False, True])
def test_a_decode_worker_that_notices_nothing_is_not_waited_for(pair: Stack, stream: bool) -> None:
    prefill, decode = both(pair)
    decode.fault("no_answer")
    prefill.hold()
    asking = Asking(pair.url, {"text": PROMPT, "sampling_params": LONG, "stream": stream})
    prefill.wait_for_arrivals(1)
    until(lambda: decode.in_flight)
    begun = time.monotonic()
    prefill.kill()
    assert asking.answer().status == 502
    assert time.monotonic() - begun < 1
    until(lambda: not decode.in_flight)
    prefill.restart()
    prefill.release()


@pytest.mark.parametrize("fault", ["http_500", "abort"])
@pytest.mark.parametrize("stream", [False, True])
def test_nor_after_a_prefill_that_failed(pair: Stack, stream: bool, fault: Any) -> None:
    """A decode worker of SGLang waits for minutes for a prompt that was refused."""
    prefill, decode = both(pair)
    decode.fault("no_answer")
    if fault == "abort":
        prefill.hold()
    else:
        prefill.fault(fault)
    asking = Asking(pair.url, {"text": PROMPT, "sampling_params": LONG, "stream": stream})
    begun = time.monotonic()
    if fault == "abort":
        prefill.wait_for_arrivals(1)
        call(prefill.url + "/abort_request", {"abort_all": True})
    answer = asking.answer()
    assert time.monotonic() - begun < 1.5
    assert answer.status == (200 if fault == "abort" else 500), answer.content
    assert fault != "abort" or b'"type":"abort"' in answer.content
    prefill.release()
    until(lambda: not decode.in_flight)


def test_what_both_refuse_is_the_clients_fault(pair: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill worker says so between two pieces of what the decode worker says, in a stream."""
    ask, join = Legs._ask_prefill, Legs.joined

    async def late(legs: Legs, headers: HeaderList, body: bytes, *, fresh: bool) -> Any:
        await asyncio.sleep(0.1)
        return await ask(legs, headers, body, fresh=fresh)

    async def then(legs: Legs, status: int, first: bytes) -> Any:
        found = await join(legs, status, first)
        assert legs._first_leg is not None
        assert not legs._first_leg.done()
        await asyncio.wait((legs._first_leg,))
        return found

    monkeypatch.setattr(Legs, "_ask_prefill", late)
    monkeypatch.setattr(Legs, "joined", then)
    body = {"text": PROMPT, "sampling_params": SHORT, "return_logprob": True, "token_ids_logprob": [10**9]}
    answer = pair.post("/generate", {**body, "stream": True})  # all of it: the stream does not break off
    assert b"out-of-vocabulary" in answer.content
    assert b"internal" not in answer.content
    assert pair.get("/workers").json()["workers"][0]["is_healthy"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prefills", [1, 2])
def test_a_decode_worker_that_finds_no_prefill_worker_has_not_replied(prefills: int, stream: bool) -> None:
    """Its error, in its own words, tells of the other leg, which says nothing."""
    with ExitStack() as entered:
        dead, *others = (entered.enter_context(EmbeddedWorker(disaggregation_mode="prefill")) for _ in range(prefills))
        decode = entered.enter_context(EmbeddedWorker(disaggregation_mode="decode", bootstrap_timeout=0.1))
        urls = tuple(worker.url for worker in (dead, *others, decode))
        url = fleet(entered, urls=urls, apart=True, policy="round_robin")
        for number in (1, 2):
            dead.fault("no_answer")
            begun = time.monotonic()
            body = {"text": PROMPT, "sampling_params": SHORT, "stream": stream}
            answer = call(f"{url}/generate", body)
            assert time.monotonic() - begun < 1
            if others:
                assert answer.status == 200, answer.content
                assert b'"abort"' not in answer.content
                assert [worker.received for worker in others] == [number]
            else:
                assert answer.status == 502, answer.content
                message = answer.json()["error"]["message"]
                assert dead.url in message
                assert decode.url not in message
            until(lambda: len(calls(dead, "/abort_request")) == dead.received)
            until(lambda: not dead.in_flight)
        assert dead.received
        until(lambda: all(not one["load"] for one in call(f"{url}/workers").json()["workers"]))


def test_the_second_pair_has_another_decode_worker_if_there_is_one() -> None:
    """The first one may be at fault itself."""
    with ExitStack() as entered:
        prefills = [entered.enter_context(EmbeddedWorker(disaggregation_mode="prefill")) for _ in range(2)]
        options: dict[str, Any] = {"disaggregation_mode": "decode", "bootstrap_timeout": 0.1}
        decodes = [entered.enter_context(EmbeddedWorker(**options)) for _ in range(2)]
        urls = tuple(worker.url for worker in (*prefills, *decodes))
        url = fleet(entered, urls=urls, apart=True, policy="consistent_hashing")
        body, headers = {"text": PROMPT, "sampling_params": SHORT}, {"x-session-id": "a"}
        first = call(f"{url}/generate", body, headers=headers)
        dead = next(worker for worker in prefills if worker.url == first.headers["x-router-prefill-worker"])
        dead.fault("no_answer")
        answer = call(f"{url}/generate", body, headers=headers)
        assert answer.status == 200, answer.content
        for name in ("x-router-worker", "x-router-prefill-worker"):
            assert answer.headers[name] != first.headers[name]
        until(lambda: all(not one["load"] for one in call(f"{url}/workers").json()["workers"]))


def several(entered: ExitStack, prefills: int, decodes: int, **workers: Any) -> tuple[str, dict[str, EmbeddedWorker]]:
    """Return a router in front of so many workers, and the workers by URL."""
    roles: list[Role] = [*["prefill"] * prefills, *["decode"] * decodes]  # type: ignore[list-item]
    every = [entered.enter_context(EmbeddedWorker(disaggregation_mode=role)) for role in roles]
    urls = tuple(worker.url for worker in every)
    return fleet(entered, urls=urls, apart=True, **workers), {worker.url: worker for worker in every}


@pytest.mark.parametrize("counts", [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("stream", [False, True])
def test_either_worker_may_be_the_one_that_takes_too_long(counts: tuple[int, int], stream: bool) -> None:
    """While both legs are under way, nobody knows. So the next pair has others, as far as there are any."""
    with ExitStack() as entered:
        url, workers = several(entered, *counts, policy="consistent_hashing", request_timeout=1.0)
        asked = {"text": PROMPT, "sampling_params": SHORT, "stream": stream}
        first = call(f"{url}/generate", asked, headers={"x-session-id": "a"})
        names = [
            name
            for name, count in zip(("x-router-prefill-worker", "x-router-worker"), counts, strict=True)
            if count > 1
        ]
        for name in names:
            hung = workers[first.headers[name]]
            hung.fault("no_answer")
            answer = call(f"{url}/generate", asked, headers={"x-session-id": "a"})
            assert answer.status == 200, answer.content
            assert answer.headers[name] != hung.url
            until(lambda: not any(worker.in_flight for worker in workers.values()))
            until(lambda: all(not one["load"] for one in call(f"{url}/workers").json()["workers"]))


@pytest.mark.parametrize("stream", [False, True])
def test_the_abort_of_a_leg_does_not_end_the_next_attempt(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for all ids that begin with that of the leg, and both attempts have the prefill worker, which gets it late."""
    send, arrived = CallSender.send, []

    async def late(sender: CallSender, worker: Worker, call: FleetCall, seconds: float | None = None) -> WorkerAnswer:
        await asyncio.sleep(0.2)
        arrived.append(prefill.received)
        return await send(sender, worker, call, seconds)

    with ExitStack() as entered:
        url, workers = several(entered, 1, 2, policy="consistent_hashing")
        prefill = next(iter(workers.values()))
        asked, headers = {"text": PROMPT, "sampling_params": SHORT, "stream": stream}, {"x-session-id": "a"}
        dead = workers[call(f"{url}/generate", asked, headers=headers).headers["x-router-worker"]]
        monkeypatch.setattr(CallSender, "send", late)
        dead.fault("http_500")
        answer = call(f"{url}/generate", asked, headers=headers)
        assert answer.status == 200, answer.content
        assert b'"abort"' not in answer.content
        assert answer.headers["x-router-worker"] != dead.url
        assert (arrived, prefill.received) == ([2], 3), "the abort came before the next attempt"


def test_a_decode_worker_is_told_that_its_prefill_worker_hangs() -> None:
    with ExitStack() as entered:
        health = HealthConfig(interval=0.1, timeout=1.0, failure_threshold=1)
        url, workers = several(entered, 2, 1, policy="consistent_hashing", health=health)
        asked = {"text": PROMPT, "sampling_params": SHORT}
        first = call(f"{url}/generate", asked, headers={"x-session-id": "a"})
        hung, decode = (workers[first.headers[name]] for name in ("x-router-prefill-worker", "x-router-worker"))
        with hung.hanging():
            answer = call(f"{url}/generate", asked, headers={"x-session-id": "a"})
            assert answer.status == 200, answer.content
            assert len(calls(decode, "/abort_request")) == 1
            assert not decode.in_flight
        until(lambda: all(one["is_healthy"] and not one["load"] for one in call(f"{url}/workers").json()["workers"]))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_another_pair_serves_what_a_dead_worker_lost(pairs: Stack, role: str) -> None:
    worker = (pairs.prefills if role == "prefill" else pairs.workers)[0]
    worker.kill()
    try:
        for _ in range(4):
            assert pairs.generate({"text": PROMPT, "sampling_params": SHORT}).answer.status == 200
    finally:
        worker.restart()
    until(lambda: all(one["is_healthy"] for one in pairs.get("/workers").json()["workers"]))


@pytest.mark.parametrize("fault", ["http_500", "http_503", "abort_503", "dies", "not_json"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_faulty_leg_leaves_nothing_behind(pair: Stack, role: str, fault: Any, stream: bool) -> None:
    prefill, decode = both(pair)
    (prefill if role == "prefill" else decode).fault(fault)
    asking = Asking(pair.url, {"text": PROMPT, "sampling_params": SHORT, "stream": stream})
    begun = time.monotonic()
    with suppress(OSError, http.client.HTTPException):
        asking.answer()
    assert time.monotonic() - begun < 1.5
    asking.close()
    until(pair.idle, pair.inflight)


def test_what_the_weights_aborted_is_sent_again() -> None:
    with stack("qwen", styles=("cumulative",), apart=True, abort=AbortConfig(attempts=2, wait=0.01)) as pair:
        for held in both(pair):
            held.hold(0 if held in pair.prefills else 2)
            asking = Asking(pair.url, {"text": PROMPT, "sampling_params": SHORT})
            held.wait_for_arrivals(1)
            assert call(held.url + "/abort_request", {"abort_all": True}).status == 200
            held.release()
            answer = asking.answer()
            assert answer.json()["meta_info"]["finish_reason"]["type"] != "abort", answer.content
        until(pair.idle, pair.inflight)


def test_prefill_workers_go_on_first(pair: Stack) -> None:
    """A decode worker that goes on asks its prefill worker for the prompts of what it had taken back."""
    prefill, decode = both(pair)
    for path in ("/pause_generation", "/update_weights_from_disk", "/continue_generation"):
        body = {"mode": "retract", "model_path": "x", "weight_version": "7"}
        if path == "/continue_generation":
            with prefill.hanging():
                asking = Asking(pair.url, {}, path=path)
                time.sleep(0.2)
                assert not calls(decode, path)
            assert asking.answer().status == 200
        else:
            assert pair.post(path, body).status == 200
        assert len(calls(prefill, path)) == len(calls(decode, path)) == 1
    assert {one["weight_version"] for one in pair.get("/workers").json()["workers"]} == {"7"}


# Fleets -----------------------------------------------------------------------------------------------------------------


def fleet(entered: ExitStack, **workers: Any) -> str:
    config = RouterConfig(workers=WorkersConfig(**workers), middlewares=())
    return entered.enter_context(serve(create_app(config)))


def roles(url: str) -> dict[str, str]:
    return {one["url"]: one["worker_type"] for one in call(f"{url}/workers").json()["workers"]}


@pytest.mark.parametrize("way", ["flags", "urls", "calls"])
def test_roles_come_from_flags_and_from_the_workers(way: str) -> None:
    with ExitStack() as entered:
        prefill = entered.enter_context(EmbeddedWorker(disaggregation_mode="prefill"))
        decode = entered.enter_context(EmbeddedWorker(disaggregation_mode="decode"))
        workers: dict[str, Any] = {}
        if way == "flags":
            workers = {"apart": True, "prefill": ((prefill.url, prefill.port),), "decode": (decode.url,)}
        elif way == "urls":
            workers = {"urls": (decode.url, prefill.url)}
        url = fleet(entered, **workers)
        if way == "calls":
            body = {"url": prefill.url, "worker_type": "prefill", "bootstrap_port": prefill.port}
            assert call(f"{url}/workers", body).status == 202
            assert call(f"{url}/generate", {"text": PROMPT}).status == 503
            assert call(f"{url}/add_worker", {"url": decode.url}).status == 200
        assert roles(url) == {prefill.url: "prefill", decode.url: "decode"}
        assert call(f"{url}/generate", {"text": PROMPT, "sampling_params": SHORT}).status == 200
        assert call(f"{url}/v1/chat/completions", {"messages": []}).status == 400
        assert call(f"{url}/v1/models").status == 200


def test_workers_that_do_all_are_refused_beside_them() -> None:
    with ExitStack() as entered:
        prefill = entered.enter_context(EmbeddedWorker(disaggregation_mode="prefill"))
        regular = entered.enter_context(EmbeddedWorker())
        url = fleet(entered, urls=(prefill.url,))
        refused = call(f"{url}/add_worker", {"url": regular.url})
        assert refused.status == 400
        assert "no worker does both" in refused.json()["error"]["message"]
        other = fleet(entered, urls=(regular.url,))
        assert call(f"{other}/add_worker", {"url": prefill.url}).status == 400
        asked = fleet(entered, apart=True)
        assert "--pd-disaggregation" in call(f"{asked}/add_worker", {"url": regular.url}).json()["error"]["message"]
        wrong = call(f"{asked}/workers", {"url": prefill.url, "worker_type": "decode"})
        assert "runs with --disaggregation-mode prefill" in wrong.json()["error"]["message"]
        assert roles(asked) == {}


@pytest.mark.parametrize("way", ["urls", "flags", "calls", "named by calls"])
def test_a_switched_role_is_found(way: str) -> None:
    with ExitStack() as entered:
        one = entered.enter_context(EmbeddedWorker(disaggregation_mode="prefill"))
        two = entered.enter_context(EmbeddedWorker(disaggregation_mode="decode"))
        workers: dict[str, Any] = {"health": HealthConfig(interval=0.05)}
        if way == "urls":
            workers |= {"urls": (one.url, two.url)}
        elif way == "flags":
            workers |= {"apart": True, "prefill": ((one.url, one.port),), "decode": (two.url,)}
        url = fleet(entered, **workers)
        if "calls" in way:
            for worker, role in ((one, "prefill"), (two, "decode")):
                named = {"worker_type": role} if way == "named by calls" else {}
                assert call(f"{url}/workers", {"url": worker.url, **named}).status == 202
        for first, second in (("decode", "prefill"), ("prefill", "decode")):
            one.switch_role(first)  # type: ignore[arg-type]
            two.switch_role(second)  # type: ignore[arg-type]
            until(lambda: roles(url) == {one.url: first, two.url: second}, lambda: roles(url), 5)  # noqa: B023
            assert call(f"{url}/generate", {"text": PROMPT, "sampling_params": SHORT}).status == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_worker_got_in_its_old_role_goes_to_another_pair(stream: bool, role: Role) -> None:
    """A leg would wait there for the other leg for minutes. (SGLang switches idle workers alone.)"""
    with ExitStack() as entered:
        url, workers = several(entered, 2, 2, policy="consistent_hashing", health=HealthConfig(interval=2.0))
        asked, headers = {"text": PROMPT, "sampling_params": SHORT, "stream": stream}, {"x-session-id": "a"}
        first = call(f"{url}/generate", asked, headers=headers)
        name = "x-router-prefill-worker" if role == "prefill" else "x-router-worker"
        switched = workers[first.headers[name]]
        switched.switch_role("decode" if role == "prefill" else "prefill")
        begun = time.monotonic()
        answer = call(f"{url}/generate", asked, headers=headers)
        assert answer.status == 200, answer.content
        assert b'"abort"' not in answer.content
        assert answer.headers[name] != switched.url
        assert time.monotonic() - begun < 20
        until(lambda: not any(worker.in_flight for worker in workers.values()))
        until(lambda: all(not one["load"] for one in call(f"{url}/workers").json()["workers"]))
        until(lambda: [*roles(url).values()].count(role) == 1)


def test_each_role_has_a_policy() -> None:
    with ExitStack() as entered:
        prefills = [entered.enter_context(EmbeddedWorker(disaggregation_mode="prefill")) for _ in range(2)]
        decodes = [entered.enter_context(EmbeddedWorker(disaggregation_mode="decode")) for _ in range(2)]
        urls = tuple(worker.url for worker in (*prefills, *decodes))
        url = fleet(entered, urls=urls, apart=True, prefill_policy="consistent_hashing", decode_policy="round_robin")
        for _ in range(6):
            found = call(f"{url}/generate", {"text": PROMPT, "sampling_params": SHORT}, headers={"x-session-id": "a"})
            assert found.status == 200
        assert sorted(worker.received for worker in prefills) == [0, 6]
        assert [worker.received for worker in decodes] == [3, 3]
        metrics = call(f"{url}/metrics").content.decode()
        assert 'tito_router_decisions_total{policy="consistent_hashing",reason="key"} 6.0' in metrics


# Ranks ------------------------------------------------------------------------------------------------------------------


@contextmanager
def ranked(
    prefill_ranks: int, decode_ranks: int, **workers: Any
) -> Iterator[tuple[str, EmbeddedWorker, EmbeddedWorker]]:
    with ExitStack() as entered:
        prefill = entered.enter_context(EmbeddedWorker(disaggregation_mode="prefill", dp_size=prefill_ranks))
        decode = entered.enter_context(EmbeddedWorker(disaggregation_mode="decode", dp_size=decode_ranks))
        yield fleet(entered, urls=(prefill.url, decode.url), **workers), prefill, decode
        assert prefill.out_of_range == decode.out_of_range == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(4, 2), (1, 3), (3, 1)])
def test_each_leg_goes_to_a_rank(prefill_ranks: int, decode_ranks: int, stream: bool) -> None:
    """A room that contradicts the rank of its prefill worker fails there."""
    with ranked(prefill_ranks, decode_ranks, policy="round_robin") as (url, prefill, decode):
        for turn in range(12):
            text: Any = ["One", "Two", "Three"] if turn % 3 == 2 else PROMPT
            body = {"text": text, "stream": stream, "sampling_params": {**SHORT, "n": 1 + turn % 2}}
            answer = call(f"{url}/generate", body)
            assert answer.status == 200, answer.content
            assert b'"status_code":5' not in answer.content
        for worker, ranks in ((prefill, prefill_ranks), (decode, decode_ranks)):
            assert {record.rank for record in worker.log} == set(range(ranks))
        for record in decode.log:
            assert record.body.get("disagg_prefill_dp_rank") in (range(prefill_ranks) if prefill_ranks > 1 else (None,))
        until(lambda: all(not one["load"] for one in call(f"{url}/workers").json()["workers"]))


def test_a_rank_that_a_client_names_is_that_of_both() -> None:
    with ranked(3, 2) as (url, prefill, decode):
        body = {"text": PROMPT, "routed_dp_rank": 1, "sampling_params": SHORT}
        assert [call(f"{url}/generate", body).status for _ in range(3)] == [200] * 3
        assert {record.rank for record in (*prefill.log, *decode.log)} == {1}
        assert call(f"{url}/generate", {**body, "routed_dp_rank": 2}).status in (400, 503)
        assert call(f"{url}/generate", {**body, "routed_dp_rank": 3}).status == 400


def test_flags_of_pairs_want_their_flag() -> None:
    with pytest.raises(BadRequestError, match="--pd-disaggregation"):
        WorkersConfig(decode=("http://host:1",))


def test_a_full_prefill_worker_lets_requests_wait(pair: Stack) -> None:
    """Neither leg is leased while one of both has no room."""
    with ExitStack() as entered:
        prefill, decode = both(pair)
        urls = prefill.url, decode.url
        url = fleet(entered, urls=urls, queue=QueueConfig(max_inflight_per_worker=1))
        prefill.hold()
        asking = [Asking(url, {"text": PROMPT, "sampling_params": SHORT}) for _ in range(3)]
        prefill.wait_for_arrivals(1)
        until(lambda: "tito_router_queue_length 2.0" in call(f"{url}/metrics").content.decode())
        assert prefill.in_flight == decode.in_flight == 1
        prefill.release()
        assert [one.answer().status for one in asking] == [200] * 3
        until(lambda: all(not one["load"] for one in call(f"{url}/workers").json()["workers"]))
