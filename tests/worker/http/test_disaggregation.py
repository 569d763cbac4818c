"""A prefill and a decode worker serve a request together, and refuse what SGLang's do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from tests.worker.talk import events, request
from worker.worker import EmbeddedWorker

ROOMS = count(1)


class Pair:
    """Both workers, and a plain one with the same seed."""

    def __init__(self, prefill: EmbeddedWorker, decode: EmbeddedWorker, plain: EmbeddedWorker) -> None:
        self.prefill, self.decode, self.plain = prefill, decode, plain
        self.threads = ThreadPoolExecutor(8)

    def body(self, **body: Any) -> dict[str, Any]:
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.port, "bootstrap_room": next(ROOMS)}
        return {"text": "Once upon a time", "return_logprob": True, **where, **body}

    def send(self, worker: EmbeddedWorker, body: dict[str, Any]) -> Future[tuple[int, bytes, str | None]]:
        return self.threads.submit(request, worker, "/generate", body)

    def both(self, body: dict[str, Any]) -> list[tuple[int, bytes, str | None]]:
        return [leg.result(20) for leg in [self.send(worker, body) for worker in (self.decode, self.prefill)]]

    def until_joined(self) -> None:
        """A leg that comes after the end of the other one waits for long, as at SGLang."""
        self.prefill.wait_for(lambda: any(job.leg and job.leg.ready for job in self.prefill.jobs.values()))


@pytest.fixture
def pair() -> Iterator[Pair]:
    with (
        EmbeddedWorker(disaggregation_mode="prefill") as prefill,
        EmbeddedWorker(disaggregation_mode="decode") as decode,
        EmbeddedWorker() as plain,
    ):
        found = Pair(prefill, decode, plain)
        yield found
        assert not prefill.in_flight
        assert not decode.in_flight
        found.threads.shutdown()


def test_the_two_legs_sample_what_one_worker_would(pair: Pair) -> None:
    for _ in range(3):
        (status, _, _), (also, _, _) = pair.both(pair.body())
        assert (status, also) == (200, 200)
        assert request(pair.plain, "/generate", pair.body())[0] == 200
    for mine, other, first in zip(pair.decode.log, pair.plain.log, pair.prefill.log, strict=True):
        assert mine.output_ids == other.output_ids
        assert mine.logprobs == other.logprobs
        assert first.output_ids == other.output_ids[:1]
        assert first.finish_reason == {"type": "length", "length": 0}


def test_a_stream_and_a_batch(pair: Pair) -> None:
    (status, content, _), (_, first, _) = pair.both(pair.body(stream=True))
    assert status == 200
    assert events(content)[-1]["output_ids"] == pair.decode.log[-1].output_ids
    assert events(first)[-1]["output_ids"] == pair.decode.log[-1].output_ids[:1]
    rooms = [next(ROOMS), next(ROOMS)]
    (status, content, _), (also, _, _) = pair.both(pair.body(text=["One", "Two"], bootstrap_room=rooms))
    assert (status, also) == (200, 200), content


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_plain_request_is_refused(pair: Pair, role: str) -> None:
    status, content, _ = request(getattr(pair, role), "/generate", {"text": "Hello"})
    assert status == 400
    assert b"without bootstrap room id" in content


def test_samples_that_would_share_a_room_are_out_of_range(pair: Pair) -> None:
    assert request(pair.prefill, "/generate", pair.body(sampling_params={"n": 2}))[0] == 400
    assert pair.prefill.out_of_range


def test_a_leg_waits_for_its_other_leg(pair: Pair) -> None:
    body = pair.body(rid="early")
    for worker, other in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
        early = pair.send(worker, body)
        worker.wait_for_arrivals(1)
        assert not early.done()
        assert request(other, "/generate", body)[0] == 200
        assert early.result(20)[0] == 200


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_an_abort_of_one_leg_fails_the_other(pair: Pair, first: str) -> None:
    """Its caller has to abort both."""
    aborted, other = (pair.prefill, pair.decode) if first == "prefill" else (pair.decode, pair.prefill)
    pair.prefill.hold(0)
    body = pair.body(rid="a" * 32)
    legs = [pair.send(aborted, body), pair.send(other, body)]
    pair.prefill.wait_for_arrivals(1)
    pair.decode.wait_for_arrivals(1)
    pair.until_joined()
    request(aborted, "/abort_request", {"rid": "a" * 32})
    assert b"abort" in legs[0].result(20)[1]
    # A prefill worker that may go on before it knows of the other leg's end hands over to nobody.
    pair.prefill.wait_for(lambda: all(job.leg and job.leg.failure for job in pair.prefill.jobs.values()))
    pair.prefill.release()
    assert legs[1].result(20)[0] == 500


def test_a_prefill_worker_that_dies_fails_the_decode_leg(pair: Pair) -> None:
    pair.prefill.hold(0)
    body = pair.body()
    legs = [pair.send(pair.decode, body), pair.send(pair.prefill, body)]
    pair.until_joined()
    pair.prefill.kill()
    assert legs[0].result(20)[0] == 500
    with pytest.raises(ConnectionError):
        legs[1].result(20)


def test_a_leg_gives_up() -> None:
    with EmbeddedWorker(disaggregation_mode="prefill", bootstrap_timeout=0.2) as prefill:
        body = {"text": "Hello", "bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.port, "bootstrap_room": 7}
        status, content, _ = request(prefill, "/generate", body)
        assert status == 500
        assert b"room 7" in content


def test_it_tells_its_role_as_started_and_at_present(pair: Pair) -> None:
    def told(path: str) -> Any:
        return json.loads(request(pair.prefill, path)[1])

    assert told("/server_info")["disaggregation_mode"] == told("/model_info")["disaggregation_mode"] == "prefill"
    assert told("/server_info")["disaggregation_bootstrap_port"] == pair.prefill.port
    pair.prefill.switch_role("decode")
    assert told("/server_info")["disaggregation_mode"] == "prefill"
    assert told("/model_info")["disaggregation_mode"] == "decode"
