"""An aborted stream is held back while it may be sent again; any other one goes through byte for byte, however it is cut."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from router.config import AbortConfig
from router.engines.form.worker_request import WorkerRequest
from router.generate.abort_retries import AbortedStream, Retries
from router.http.request_state import RequestRecord
from router.http.upstream import Take, UpstreamBrokenError
from router.observability.metrics import RouterMetrics
from router.proxy.generate_call import GenerateCall
from router.proxy.in_flight import InFlight
from router.proxy.worker_reply import WorkerReply


def event(number: int, finish: Any = None) -> bytes:
    fields = {"text": "x" * number, "meta_info": {"id": "worker's", "finish_reason": finish}}
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


STREAM = event(1) + event(2) + b": a comment\n\n" + event(3, {"type": "stop"}) + b"data: [DONE]\n\n"
ABORTED = event(1, {"type": "abort"}) + b"data: [DONE]\n\n"
REFUSED = event(1, {"type": "abort", "status_code": 503})
CUTS = st.lists(st.integers(0, 10_000), max_size=8)


class Rest:
    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    async def read(self) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""

    async def flow(self, take: Take) -> None:
        while self.pieces and take(self.pieces.pop(0)):
            pass

    def close(self) -> None: ...


def reply_of(stream: bytes, cuts: list[int]) -> WorkerReply:
    """A stream whose first piece has a whole event, as the proxy gives it."""
    first = stream.index(b"\n\n") + 2
    places = [0, *sorted({cut for cut in (cut % len(stream) for cut in cuts) if cut >= first}), len(stream)]
    head, *rest = [stream[begin:end] for begin, end in pairwise(places)]
    return WorkerReply(200, [], head, stream=True, rest=Rest(rest))


def passed(
    attempts: list[bytes | Exception], cuts: list[int], *, rid: str = "mine", ends: bool = False
) -> tuple[bytes, int]:
    """What comes through of the last attempt, and how many attempts there were. `ends`: the client has ended it."""
    request = WorkerRequest.parse(json.dumps({"text": "a", "rid": rid, "stream": True}).encode())
    assert request is not None
    call = GenerateCall(request.body, request, [], RequestRecord("", "POST", "/generate"))
    in_flight, left = InFlight(request.rids, call=call), list(attempts)

    class Workers:
        async def generate(self, _: InFlight) -> WorkerReply:
            found = left.pop(0)
            if isinstance(found, Exception):
                raise found
            return reply_of(found, cuts)

    async def main() -> bytes:
        workers: Any = Workers()
        retries = Retries(AbortConfig(attempts=3, wait=0), RouterMetrics(CollectorRegistry()))
        reply = await workers.generate(in_flight)
        if ends:
            in_flight.end()
        reply = await AbortedStream(workers.generate, retries, in_flight, request).made_good(reply)
        pieces = []
        while piece := await reply.read():
            pieces.append(piece)
        return b"".join(pieces)

    return asyncio.run(main()), len(attempts) - len(left)


@given(CUTS)
def test_a_stream_goes_through_byte_for_byte(cuts: list[int]) -> None:
    assert passed([STREAM], cuts) == (STREAM, 1)


@given(CUTS)
def test_every_event_of_a_later_attempt_is_given_the_clients_name(cuts: list[int]) -> None:
    body, attempts = passed([ABORTED, STREAM], cuts)
    assert attempts == 2
    told = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    assert [one["meta_info"]["id"] for one in told] == ["mine"] * 3
    assert [one["text"] for one in told] == ["x", "xx", "xxx"]
    assert body.endswith(b"data: [DONE]\n\n")
    assert b": a comment\n\n" in body


@given(CUTS)
def test_the_last_attempt_comes_through_if_it_is_aborted_as_well(cuts: list[int]) -> None:
    body, attempts = passed([ABORTED] * 3, cuts)
    told = json.loads(body[6 : body.index(b"\n\n")])
    assert (attempts, told["meta_info"]["id"], told["text"]) == (3, "mine", "x")
    assert body.endswith(b"\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize("bad", [REFUSED, UpstreamBrokenError("gone")])
def test_a_later_attempt_that_fails_is_no_reply(bad: bytes | Exception) -> None:
    """An aborted reply is better than a refused one, and a later one may still be good."""
    body, attempts = passed([ABORTED, bad, STREAM], [])
    assert (attempts, body.count(b'"mine"')) == (3, 3)
    body, attempts = passed([ABORTED, bad, bad], [])
    assert (attempts, body) == (3, ABORTED)


def test_a_stream_that_its_client_has_ended_is_not_sent_again() -> None:
    assert passed([ABORTED, STREAM], [], ends=True) == (ABORTED, 1)


def test_a_comment_in_front_is_no_event() -> None:
    assert passed([b": a comment\n\n" + ABORTED, STREAM], [15])[1] == 2
