"""Replies out of a pool are consistent."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.usual import usual
from tests.support.vocabularies import NAMES, Name, vocabulary
from tests.worker.talk import generate, stream
from worker.engine.detokenizer import Detokenizer
from worker.engine.source import SamplingParams, float32
from worker.vocabulary import load_vocabulary
from worker.worker import EmbeddedWorker


@pytest.mark.parametrize("name", usual([*NAMES, None], None))
@pytest.mark.parametrize("prompt", ["Hello", "Say: ", "你好"])
def test_the_text_is_what_the_ids_decode_to_behind_the_prompt(name: Name | None, prompt: str) -> None:
    folder = None if name is None else vocabulary(name)
    params: dict[str, Any] = {"max_new_tokens": 500, "ignore_eos": True}
    with EmbeddedWorker(folder, scripted=True) as worker:
        reply = generate(worker, prompt, sampling_params=params, return_logprob=True)
        (record,) = worker.log
    known = load_vocabulary(worker.tokenizer_path)
    assert record.output_ids == reply["output_ids"]
    assert len(record.output_ids) == 500
    finish = reply["meta_info"]["finish_reason"]
    assert finish == {"type": "length", "length": 500}
    detokenizer = Detokenizer(known, record.input_ids, SamplingParams())
    assert detokenizer.push(record.output_ids, finish) == reply["text"] == record.text
    entries = reply["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == record.output_ids
    assert [entry[0] for entry in entries] == record.logprobs
    assert all(float32(value) == value <= 0 for value in record.logprobs)


def test_a_pool_can_be_streamed() -> None:
    with EmbeddedWorker(vocabulary("qwen"), scripted=True, stream_style="incremental") as worker:
        got = stream(worker, sampling_params={"max_new_tokens": 20})
        (record,) = worker.log
    assert "".join(event["text"] for event in got) == record.text
    assert [token for event in got for token in event["output_ids"]] == record.output_ids
    assert len(got) == 20


def test_replies_differ_and_runs_do_not() -> None:
    runs = []
    for _ in range(2):
        with EmbeddedWorker(vocabulary("qwen"), scripted=True, seed=3) as worker:
            runs.append([generate(worker)["output_ids"] for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_max_new_tokens_0_and_a_new_weight_version() -> None:
    with EmbeddedWorker(vocabulary("qwen"), scripted=True) as worker:
        assert generate(worker, sampling_params={"max_new_tokens": 0})["output_ids"] == []
        worker.set_weight_version("2")
        assert generate(worker)["meta_info"]["weight_versions"] == [{"version": "2", "start": 0, "end": 128}]
