"""Prompts that are left out of a batch have their places in its reply."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.form.worker_request import WorkerRequest
from router.errors import UpstreamError
from router.http.upstream import UpstreamBrokenError
from router.proxy.outbound import LeftOut


def batch(count: int, *, stream: bool = False, **fields: Any) -> WorkerRequest:
    names = [f"r{number}" for number in range(count)]
    body = {"text": [f"p{number}" for number in range(count)], "rid": names, "stream": stream, **fields}
    made = WorkerRequest.parse(json.dumps(body).encode())
    assert made is not None
    return made


def reply(request: WorkerRequest, number: int, **more: Any) -> bytes:
    """Return what a worker answers to a prompt; NaN is among its logprobs."""
    text = json.loads(bytes(request.fields["text"]))[number]
    logprobs = [[float("nan"), 1, None], [1e-07, 2, None]]
    meta = {"id": request.rids[number], "output_token_logprobs": logprobs, "finish_reason": {"type": "stop"}}
    return json.dumps({"text": f"of {text}", "meta_info": meta, **more}).encode()


chosen = st.integers(2, 6).flatmap(
    lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1), min_size=1, max_size=count - 1))
)


@given(chosen)
def test_a_reply_in_one_piece(drawn: tuple[int, set[int]]) -> None:
    count, sent = drawn[0], sorted(drawn[1])
    whole = batch(count, sampling_params=[{"max_new_tokens": number + 1} for number in range(count)])
    one = LeftOut(whole, sent)
    body = json.loads(one.request.body)
    assert body["text"] == [f"p{number}" for number in sent]
    assert body["rid"] == [f"r{number}" for number in sent]
    assert [params["max_new_tokens"] for params in body["sampling_params"]] == [number + 1 for number in sent]
    replies = [reply(one.request, place) for place in range(len(sent))]
    merged = one.whole(200, b"[" + b", ".join(replies) + b"]")
    for number, found in enumerate(json.loads(merged)):
        assert found["meta_info"]["id"] == f"r{number}"
        if number in sent:
            assert replies[sent.index(number)] in merged
            assert found["text"] == f"of p{number}"
        else:
            assert found["meta_info"]["finish_reason"]["type"] == "abort"
            assert (found["text"], found["output_ids"]) == ("", [])


@given(chosen, st.booleans())
def test_a_stream(drawn: tuple[int, set[int]], nan: bool) -> None:
    count, sent = drawn[0], sorted(drawn[1])
    one = LeftOut(batch(count, stream=True), sent)
    data = [reply(one.request, place, index=place) for place in range(len(sent))]
    if not nan:
        data = [event.replace(b"NaN", b"0.5") for event in data]
    shown = [json.loads(part) for event in data for part in one.event(event).split(b"\n\ndata: ")]
    assert [event["index"] for event in shown] == [n for n in range(count) if n not in sent] + sent
    assert all(event["meta_info"]["id"] == f"r{event['index']}" for event in shown)
    assert repr([event["meta_info"] for event in shown[-len(sent) :]]) == repr(
        [json.loads(event)["meta_info"] for event in data]
    )
    assert one.event(b"[DONE]") == b"[DONE]"
    assert one.event(b'{"error": {"message": "x"}}') == b'{"error": {"message": "x"}}'


@pytest.mark.parametrize("index", ["2", "-1", "null", '"0"', "1e0", "true", "0.0"])
@pytest.mark.parametrize("logprob", ["0.5", "NaN"])
def test_an_event_of_no_prompt_breaks_the_stream_off(index: str, logprob: str) -> None:
    one = LeftOut(batch(5, stream=True), [1, 3])
    with pytest.raises(UpstreamBrokenError):
        one.event(f'{{"text": "", "logprob": {logprob}, "index": {index}}}'.encode())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_replies_as_prompts_were_sent(count: int) -> None:
    """Three of a batch of three would look like the whole batch."""
    one = LeftOut(batch(3), [0, 2])
    with pytest.raises(UpstreamError, match=f"2 prompts with {count} replies"):
        one.whole(200, json.dumps([{}] * count).encode())


def test_an_error_is_passed_on_as_it_is() -> None:
    one = LeftOut(batch(3), [0])
    for status, body in ((503, b'{"error": "full"}'), (200, b"not json")):
        assert one.whole(status, body) == body
