"""Replies and streams of both endpoints, read as SGLang's are read: every id, float and character is there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.engine import EngineAnswer, KnownWorker, UntranslatableError
from router.engines.events import event_data, event_index
from router.engines.form.reply import Reply, read_reply
from router.engines.form.stream import StreamedReply
from router.engines.vllm.generation import VllmGeneration
from router.engines.vllm.images import NamedImages
from router.engines.vllm.requests import COMPLETIONS, GENERATE, SCALE_OUT, read
from tests.router.engines.vllm.worker_json import (
    ENDPOINTS,
    PROMPTS,
    Json,
    Piece,
    Sample,
    events,
    samples,
    stream,
    whole,
)
from tests.support.sglang_contract import contract

PROMPT = [1, 2, 3]
SAMPLE = Sample([Piece("a", [5], [-0.5]), Piece("bc", [6, 7], [-1.5, -0.25])])


def generation(
    prompts: Sequence[list[int]] = (PROMPT,),
    *,
    endpoint: str = COMPLETIONS,
    batch: bool = False,
    cumulative: bool = True,
    version: str | None = None,
    **body: Any,
) -> VllmGeneration:
    fields: Json = {"input_ids": list(prompts) if batch else prompts[0], "return_logprob": True, **body}
    abilities = frozenset({SCALE_OUT}) if endpoint == GENERATE else frozenset()
    asked = read(msgspec.json.encode(fields), abilities, NamedImages())
    assert {prompt.call.target for prompt in asked.prompts} == {endpoint}
    worker = KnownWorker(version=lambda: version)
    return VllmGeneration(asked, worker, lambda _: pytest.fail("asked again"), cumulative=cumulative)


def streamed(one: VllmGeneration, streams: Sequence[bytes]) -> bytes:
    """What the router gets of the streams of all calls, one after the other."""
    out = b""
    for number, data in enumerate(streams):
        for event in data.split(b"\n\n")[:-1]:
            payload = event_data(event + b"\n\n")
            assert payload is not None
            out += one.event(number, payload)
    return out + one.end()


def replies_of(stream: bytes) -> dict[int, Reply]:
    found: dict[int, StreamedReply] = {}
    assert stream.endswith(b"data: [DONE]\n\n")
    for event in stream.split(b"\n\n")[:-2]:
        data = event_data(event + b"\n\n")
        assert data is not None
        found.setdefault(event_index(data), StreamedReply()).feed(data)
    replies = {number: one.reply() for number, one in found.items()}
    assert None not in replies.values()
    return replies  # type: ignore[return-value] # just asserted


def check(reply: Reply, sample: Sample, endpoint: str, prompt: list[int]) -> None:
    assert list(reply.ids) == sample.ids
    assert list(reply.checked_logprobs()) == sample.logprobs
    assert reply.text == sample.text
    assert reply.fault(len(prompt), logprobs_asked=True) is None
    assert reply.finish_type == sample.finish
    last = sample.ids[-1] if sample.ids else None
    expected = (last if sample.stop_reason is None else sample.stop_reason) if sample.finish == "stop" else None
    assert reply.matched == expected
    if endpoint == GENERATE and sample.ids:
        assert reply.versions == [(sample.version, 0, len(sample.ids))]
        assert reply.version == sample.version
    else:
        assert (reply.versions, reply.version) == (None, "default")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@given(prompt=PROMPTS, found=st.lists(samples(), min_size=1, max_size=3))
def test_a_reply_in_one_piece(endpoint: str, prompt: list[int], found: list[Sample]) -> None:
    one = generation([prompt], endpoint=endpoint, sampling_params={"n": len(found)})
    body = json.loads(whole(endpoint, prompt, found))
    body["choices"].reverse()  # what counts is their index
    answer = one.whole([EngineAnswer(200, json.dumps(body).encode())])
    assert answer.status == 200
    replies = json.loads(answer.body) if len(found) > 1 else [json.loads(answer.body)]
    for reply, sample in zip(replies, found, strict=True):
        contract().GenerateResponse.from_json_value(reply)
        check(read_reply(msgspec.json.encode(reply))[0], sample, endpoint, prompt)
        assert reply["meta_info"]["cached_tokens"] == 3
    assert len({reply["meta_info"]["id"] for reply in replies}) == len(found)


@pytest.mark.parametrize("cumulative", [True, False], ids=["cumulative", "incremental"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@given(prompt=PROMPTS, found=st.lists(samples(), min_size=1, max_size=3))
def test_a_stream(endpoint: str, cumulative: bool, prompt: list[int], found: list[Sample]) -> None:
    one = generation([prompt], endpoint=endpoint, cumulative=cumulative, stream=True, sampling_params={"n": len(found)})
    replies = replies_of(streamed(one, [stream(endpoint, prompt, found)]))
    assert sorted(replies) == list(range(len(found)))
    for number, sample in enumerate(found):
        check(replies[number], sample, endpoint, prompt)


@pytest.mark.parametrize("streams", [False, True])
@given(found=st.lists(st.tuples(PROMPTS, samples(), samples()), min_size=1, max_size=3))
def test_a_batch_is_prompt_major(streams: bool, found: list[tuple[list[int], Sample, Sample]]) -> None:
    prompts = [prompt for prompt, _, _ in found]
    one = generation(prompts, batch=True, stream=streams, sampling_params={"n": 2})
    assert len(one.calls) == len(prompts)
    if streams:
        replies = replies_of(streamed(one, [stream(COMPLETIONS, prompt, list(two)) for prompt, *two in found]))
        in_order = [replies[number] for number in range(2 * len(found))]
    else:
        answer = one.whole([EngineAnswer(200, whole(COMPLETIONS, prompt, list(two))) for prompt, *two in found])
        in_order = [read_reply(msgspec.json.encode(reply))[0] for reply in json.loads(answer.body)]
    for reply, (prompt, sample) in zip(in_order, [(p, s) for p, *two in found for s in two], strict=True):
        check(reply, sample, COMPLETIONS, prompt)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@given(sample=samples(), data=st.data())
def test_a_stream_that_is_cut_never_looks_whole(endpoint: str, sample: Sample, data: st.DataObject) -> None:
    """Wherever it ends: what has come is a beginning of the ids, and the end is an error."""
    payloads = [msgspec.json.encode(event) for event in events(endpoint, PROMPT, [sample])]
    kept = data.draw(st.integers(0, len(payloads)))
    one, watched = generation(endpoint=endpoint, stream=True), StreamedReply()
    for payload in payloads[:kept]:
        for event in one.event(0, payload).split(b"\n\n")[:-1]:
            shown = event_data(event + b"\n\n")
            assert shown is not None
            watched.feed(shown)
            assert list(watched.ids) == sample.ids[: len(watched.ids)]
    with pytest.raises(UntranslatableError, match="ended before"):
        one.end()


def broken(endpoint: str, **changes: Any) -> Json:
    body: Json = json.loads(whole(endpoint, PROMPT, [SAMPLE]))
    body["choices"][0] |= changes
    return body


GARBAGE: dict[str, Any] = {
    "no JSON": b"<html>",
    "another object": {"hello": 1},
    "no choice": {"choices": []},
    "a choice too many": {**broken(COMPLETIONS), "choices": broken(COMPLETIONS)["choices"] * 2},
    "no ids": broken(COMPLETIONS, token_ids=None),
    "ids that are texts": broken(COMPLETIONS, token_ids=["5"]),
    "a negative id": broken(COMPLETIONS, token_ids=[5, 6, -7]),
    "an id too few": broken(COMPLETIONS, token_ids=[5, 6]),
    "no text": broken(COMPLETIONS, text=None),
    "no end": broken(COMPLETIONS, finish_reason=None),
    "another prompt": broken(COMPLETIONS, prompt_token_ids=[1, 2, 4]),
    "a longer prompt": broken(COMPLETIONS, prompt_token_ids=[1, 2, 3, 4]),
    "no prompt": broken(COMPLETIONS, prompt_token_ids=None),
    "versions of other tokens": broken(COMPLETIONS, weight_versions=[{"version": "7", "start": 0, "end": 2}]),
    "versions with a hole": broken(
        COMPLETIONS,
        weight_versions=[{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 2, "end": 3}],
    ),
}


def _stream_of(data: bytes) -> None:
    one = generation(stream=True)
    one.event(0, data)
    one.event(0, b"[DONE]")


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_no_reply(body: Any) -> None:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    with pytest.raises(UntranslatableError):
        generation().whole([EngineAnswer(200, data)])
    with pytest.raises(UntranslatableError):
        _stream_of(data)


@given(
    data=st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(msgspec.json.encode)
)
def test_any_bytes_are_garbage(data: bytes) -> None:
    with pytest.raises(UntranslatableError):
        generation().whole([EngineAnswer(200, data)])
    with pytest.raises(UntranslatableError):
        _stream_of(data)


def test_what_comes_behind_an_end_is_an_error() -> None:
    ended = msgspec.json.encode(events(COMPLETIONS, PROMPT, [Sample(SAMPLE.pieces[:1])])[0])
    one = generation(stream=True)
    one.event(0, ended)
    with pytest.raises(UntranslatableError, match="after its end"):
        one.event(0, ended)


@pytest.mark.parametrize(
    ("worker", "router", "expected"),
    [
        ("default", None, ("default", [("default", 0, 3)])),
        ("default", "7", ("7", None)),
        ("8", "7", ("8", [("8", 0, 3)])),
        ("default", "default", ("default", [("default", 0, 3)])),
        ("8", None, ("8", [("8", 0, 3)])),
    ],
)
def test_the_engines_version_counts_unless_nobody_named_it(
    worker: str, router: str | None, expected: tuple[str, Any]
) -> None:
    sample = Sample(SAMPLE.pieces, version=worker)
    one = generation(endpoint=GENERATE, version=router)
    reply, _ = read_reply(one.whole([EngineAnswer(200, whole(GENERATE, PROMPT, [sample]))]).body)
    assert (reply.version, reply.versions) == expected


def test_no_token_is_no_token() -> None:
    """vLLM samples at least one. Where the client wants none, it is left out everywhere."""
    for endpoint in ENDPOINTS:
        body = whole(endpoint, PROMPT, [Sample([Piece("a", [5], [-0.5])])])
        one = generation(endpoint=endpoint, sampling_params={"max_new_tokens": 0})
        reply, _ = read_reply(one.whole([EngineAnswer(200, body)]).body)
        assert (list(reply.ids), reply.text, list(reply.checked_logprobs())) == ([], "", [])
        assert (reply.completion_tokens, reply.finish_type) == (0, "length")
        one = generation(endpoint=endpoint, stream=True, sampling_params={"max_new_tokens": 0})
        found = replies_of(streamed(one, [stream(endpoint, PROMPT, [Sample([Piece("a", [5], [-0.5])])])]))[0]
        assert (list(found.ids), found.text, found.completion_tokens) == ([], "", 0)


def test_an_error_is_passed_on() -> None:
    said = EngineAnswer(
        400, b'{"error":{"message":"temperature","type":"BadRequestError","param":"temperature","code":400}}'
    )
    assert generation().whole([said]) == said
    assert generation(stream=True).whole([said]) == said


def test_an_unknown_adapter_is_a_bad_request() -> None:
    said = b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","param":"model","code":404}}'
    found = generation(lora_path="x").whole([EngineAnswer(404, said)])
    assert found.status == 400
    assert b'"code":400' in found.body


def test_another_missing_page_stays_one() -> None:
    """Only of an adapter does the worker know that the request is at fault."""
    said = EngineAnswer(
        404, b'{"error":{"message":"The path does not exist.","type":"NotFoundError","param":null,"code":404}}'
    )
    assert generation().whole([said]) == said


def test_an_error_in_a_stream_is_shown_and_ends_it() -> None:
    one = generation(stream=True)
    data = msgspec.json.encode(events(COMPLETIONS, PROMPT, [SAMPLE])[0])
    error = b'{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}'
    assert b'"output_ids":[5]' in one.event(0, data)
    assert not one.over
    assert one.event(0, error) == b"data: " + error + b"\n\n"
    assert one.over
    assert one.event(0, b"[DONE]") + one.end() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_reply_that_lost_tokens_is_recognised_by_the_workers_count(endpoint: str) -> None:
    def counted(data: bytes, tokens: int) -> bytes:
        return data.replace(b'"prompt_tokens":3', b'"prompt_tokens":3,"completion_tokens":%d' % tokens)

    lost = Sample([SAMPLE.pieces[1]])
    for sample, faulty in ((SAMPLE, False), (lost, True)):
        whole_one = generation(endpoint=endpoint).whole(
            [EngineAnswer(200, counted(whole(endpoint, PROMPT, [sample]), 3))]
        )
        stream_one = streamed(
            generation(endpoint=endpoint, stream=True), [counted(stream(endpoint, PROMPT, [sample]), 3)]
        )
        for reply in (read_reply(whole_one.body)[0], replies_of(stream_one)[0]):
            assert (reply.fault(3, logprobs_asked=True) is not None) is faulty
            assert list(reply.ids) == sample.ids, "the client gets what has come"
    both = {"stream": True, "sampling_params": {"n": 2}}
    assert streamed(generation(endpoint=endpoint, **both), [counted(stream(endpoint, PROMPT, [SAMPLE, SAMPLE]), 6)])
    with pytest.raises(UntranslatableError, match="counts 6 tokens, and 5 have come"):
        streamed(generation(endpoint=endpoint, **both), [counted(stream(endpoint, PROMPT, [SAMPLE, lost]), 6)])


@pytest.mark.parametrize("samples", [1, 2])
def test_a_generation_without_an_event_was_aborted(samples: int) -> None:
    """A worker leaves out an end without a token at `/v1/completions`, and then counts and ends as always."""
    usage = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":0}}'
    one = generation(stream=True, sampling_params={"n": samples})
    for reply in replies_of(one.event(0, usage) + one.event(0, b"[DONE]") + one.end()).values():
        assert (list(reply.ids), reply.text, reply.finish_type) == ([], "", "abort")
        assert reply.fault(3, logprobs_asked=True) is None
    one = generation(stream=True)
    with pytest.raises(UntranslatableError, match="have no end"):
        one.event(0, b"[DONE]")
    one = generation(stream=True)
    one.event(0, msgspec.json.encode(events(COMPLETIONS, PROMPT, [SAMPLE])[0]))
    one.event(0, usage)
    with pytest.raises(UntranslatableError, match="have no end"):
        one.event(0, b"[DONE]")


def test_the_prompt_is_shown_to_who_asks() -> None:
    one = generation(return_prompt_token_ids=True)
    assert (
        json.loads(one.whole([EngineAnswer(200, whole(COMPLETIONS, PROMPT, [SAMPLE]))]).body)["prompt_token_ids"]
        == PROMPT
    )
    one = generation(stream=True, return_prompt_token_ids=True)
    shown = streamed(one, [stream(COMPLETIONS, PROMPT, [SAMPLE])])
    assert shown.count(b'"prompt_token_ids":[1,2,3]') == 2


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_another_worker_needs_to_go_on_is_returned(endpoint: str) -> None:
    """Whoever asks one worker to compute a prompt, and another one to go on, sends it to the other one."""
    body = json.loads(whole(endpoint, PROMPT, [SAMPLE])) | {
        "kv_transfer_params": {"a": [1]},
        "ec_transfer_params": None,
    }
    reply = json.loads(
        generation([PROMPT], endpoint=endpoint).whole([EngineAnswer(200, msgspec.json.encode(body))]).body
    )
    assert reply["meta_info"]["kv_transfer_params"] == {"a": [1]}
    assert "ec_transfer_params" not in reply["meta_info"]


def test_an_error_with_status_200_is_told() -> None:
    with pytest.raises(UntranslatableError, match="out of memory"):
        generation().whole([EngineAnswer(200, b'{"error": {"message": "out of memory"}}')])
