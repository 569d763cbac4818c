"""Replies, events and errors have SGLang's shapes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.sglang_contract import contract
from tests.support.vocabularies import vocabulary
from tests.worker.talk import events, generate, request, stream
from worker.engine.source import float32
from worker.options import StreamStyle
from worker.worker import EmbeddedWorker


def test_a_reply_has_sglangs_keys_and_the_log_has_the_truth(worker: EmbeddedWorker) -> None:
    reply = generate(worker, "Hello", sampling_params={"max_new_tokens": 5}, return_logprob=True)
    (record,) = worker.log
    meta = reply["meta_info"]
    assert list(reply) == ["text", "output_ids", "meta_info"]
    assert record.input_ids == worker.vocabulary.encode("Hello")
    assert record.from_text
    assert reply["output_ids"] == record.output_ids
    assert [entry[0] for entry in meta["output_token_logprobs"]] == record.logprobs
    assert [entry[1] for entry in meta["output_token_logprobs"]] == record.output_ids
    assert all(float32(value) == value for value in record.logprobs)
    assert reply["text"] == record.text
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["prompt_tokens"] == len(record.input_ids)
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 5}]
    assert (meta["completion_tokens"], meta["output_token_logprobs_length"]) == (5, 5)
    assert worker.out_of_range == []


def test_logprobs_and_prompt_ids_are_there_only_on_request(worker: EmbeddedWorker) -> None:
    plain = generate(worker, "Hello")
    assert not [key for key in plain["meta_info"] if "logprob" in key]
    full = generate(
        worker, "Hello", return_logprob=True, return_prompt_token_ids=True, logprob_start_len=0, top_logprobs_num=2
    )
    assert full["prompt_token_ids"] == worker.log[1].input_ids
    assert len(full["meta_info"]["input_token_logprobs"]) == full["meta_info"]["prompt_tokens"]
    assert len(full["meta_info"]["output_top_logprobs"]) == full["meta_info"]["completion_tokens"]


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
@pytest.mark.parametrize("interval", [1, 3])
def test_the_events_add_up_to_the_reply(style: StreamStyle, interval: int) -> None:
    """The three styles differ only in which fields are deltas and which are cumulative."""
    with EmbeddedWorker(vocabulary("qwen"), stream_style=style, stream_interval=interval) as worker:
        got = stream(worker, sampling_params={"max_new_tokens": 10}, return_logprob=True)
        (record,) = worker.log
    last, ids, text, logprobs = got[-1]["meta_info"], [], "", []
    for event in got:
        ids = event["output_ids"] if style == "cumulative" else ids + event["output_ids"]
        text = text + event["text"] if style == "incremental" else event["text"]
        entries = [entry[0] for entry in event["meta_info"]["output_token_logprobs"]]
        logprobs = logprobs + entries if style == "incremental" else entries
        assert event["meta_info"]["completion_tokens"] == len(ids) == len(logprobs)
    assert (ids, text, logprobs) == (record.output_ids, record.text, record.logprobs)
    assert [event["meta_info"]["finish_reason"] for event in got[:-1]] == [None] * (len(got) - 1)
    assert all("weight_versions" not in event["meta_info"] for event in got[:-1])
    assert last["weight_versions"] == [{"version": "default", "start": 0, "end": 10}]
    assert len(got) == (10 if interval == 1 else 4)


def test_a_stream_holds_back_what_may_become_a_stop_string(worker: EmbeddedWorker) -> None:
    worker.script(text="one two three")
    got = stream(worker, sampling_params={"stop": "two three"})
    assert [event["text"] for event in got] == ["one", "one "]


def test_a_batch_interleaves_with_indexes(worker: EmbeddedWorker) -> None:
    body = {"text": ["a", "b"], "stream": True, "sampling_params": {"max_new_tokens": 3}}
    status, content, _ = request(worker, "/generate", body)
    got = events(content)
    assert status == 200
    assert {event["index"] for event in got} == {0, 1}
    for index, record in enumerate(worker.log):
        mine = [event for event in got if event["index"] == index]
        assert mine[-1]["output_ids"] == record.output_ids


def test_a_wrong_request_is_an_error_event(worker: EmbeddedWorker) -> None:
    (event,) = stream(worker, sampling_params={"temperature": -1})
    assert event["error"]["code"] == 400


def test_an_old_engine_has_no_spans() -> None:
    with EmbeddedWorker(vocabulary("qwen"), version_spans=False) as worker:
        assert "weight_versions" not in generate(worker)["meta_info"]


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
def test_sglangs_own_contract_accepts_its_replies(style: StreamStyle, pool: ThreadPoolExecutor) -> None:
    """The decoder that ships with SGLang reads replies, events and errors."""
    types = contract()
    with EmbeddedWorker(vocabulary("qwen"), stream_style=style) as worker:
        wanted = {"return_logprob": True, "return_prompt_token_ids": True, "logprob_start_len": 0}
        reply = generate(worker, sampling_params={"max_new_tokens": 4}, **wanted)
        decoded = types.GenerateResponse.from_json_value(reply)
        assert decoded.output_ids == worker.log[0].output_ids
        assert decoded.prompt_token_ids == worker.log[0].input_ids
        assert [entry.logprob for entry in decoded.meta_info.output_token_logprobs] == worker.log[0].logprobs
        for event in stream(worker, sampling_params={"max_new_tokens": 4}, **wanted):
            types.GenerateResponse.from_json_value(event)
        for event in stream(worker, sampling_params={"temperature": -1}):
            types.GenerateStreamError.from_json_value(event)
        worker.hold()
        queued = pool.submit(generate, worker, rid="r")
        worker.wait_for_arrivals(1)
        request(worker, "/abort_request", {"rid": "r"})
        types.GenerateResponse.from_json_value(queued.result(20))
        types.GetModelInfoResponse.from_json_value(json.loads(request(worker, "/model_info")[1]))
        types.GenerateRequest.from_json_value(worker.log[0].body)


def test_a_stream_that_is_retracted_and_aborted_repeats_itself(pool: ThreadPoolExecutor) -> None:
    """SGLang ends an incremental stream with the id that was sent last, and with the whole text and all logprobs."""
    with EmbeddedWorker(vocabulary("qwen"), stream_style="incremental") as worker:
        worker.hold(after=3)
        running = pool.submit(stream, worker, rid="r", return_logprob=True)
        worker.wait_for_arrivals(1)
        request(worker, "/pause_generation", {"mode": "retract"})
        request(worker, "/abort_request", {"rid": "r"})
        *pieces, last = running.result(20)
        (record,) = worker.log
    assert [one["output_ids"] for one in pieces] == [[token] for token in record.output_ids]
    assert last["output_ids"] == record.output_ids[-1:]
    assert last["text"] == record.text == "".join(one["text"] for one in pieces)
    assert len(last["meta_info"]["output_token_logprobs"]) == last["meta_info"]["completion_tokens"] == 3
