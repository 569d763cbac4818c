"""Prefill and decode workers of vLLM: a request goes to one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from router.app import create_app
from router.config import HealthConfig, RadixConfig, RouterConfig, WorkersConfig
from tests.support.asking import Asking, until
from tests.support.client import Answer, call
from tests.support.serving import serve
from tests.support.vocabularies import vocabulary
from worker.worker import EmbeddedWorker

PROMPT = "Once upon a time"
SHORT = {"max_new_tokens": 8}


@dataclass
class Pair:
    url: str
    prefill: EmbeddedWorker
    decode: EmbeddedWorker

    def generate(self, **body: Any) -> Answer:
        return call(f"{self.url}/generate", {"text": PROMPT, "sampling_params": SHORT, **body})

    def idle(self) -> bool:
        loads = [one["load"] for one in call(f"{self.url}/workers").json()["workers"]]
        return not (any(loads) or self.prefill.in_flight or self.decode.in_flight)


@pytest.fixture(params=[True, False], ids=["scale-out", "completions"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    folder = vocabulary("qwen")
    options: dict[str, Any] = {"interface": "vllm", "kv_connector": True, "scale_out": request.param}
    with EmbeddedWorker(folder, **options) as prefill, EmbeddedWorker(folder, **options) as decode:
        workers = WorkersConfig(apart=True, prefill=((prefill.url, None),), decode=(decode.url,))
        config = RouterConfig(workers=workers, radix=RadixConfig(tokenizer_path=str(folder)))
        with serve(create_app(config)) as url:
            found = Pair(url, prefill, decode)
            yield found
            until(found.idle)
            assert len(prefill.kept_caches) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_the_cache_goes_from_one_to_the_other(pair: Pair, stream: bool) -> None:
    answer = pair.generate(stream=stream)
    assert answer.status == 200, answer.content
    (first,), (last,) = pair.prefill.log, pair.decode.log
    assert first.body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert last.body["kv_transfer_params"]["do_remote_prefill"] is True
    assert len(first.output_ids) == 1
    assert len(last.output_ids) == 8
    assert first.input_ids == last.input_ids
    found = call(f"{pair.url}/retrieve_from_text", {"text": PROMPT + last.text}).json()
    assert found["exact"], found
    assert found["tokens"] == last.input_ids + last.output_ids


@pytest.mark.parametrize("stream", [False, True])
def test_samples_and_batches_have_a_cache_each(pair: Pair, stream: bool) -> None:
    answer = pair.generate(text=[PROMPT, "And"], sampling_params={**SHORT, "n": 2}, stream=stream)
    assert answer.status == 200, answer.content
    names = [json.dumps(record.body["kv_transfer_params"]["remote_request_id"]) for record in pair.decode.log]
    assert len(set(names)) == len(names) == 4
    assert all(record.body.get("n", 1) == 1 for record in pair.prefill.log)


def test_logprobs_of_the_prompt_are_the_prefill_workers(pair: Pair) -> None:
    """A decode worker has not computed them, and is not asked for them."""
    answer = pair.generate(return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    assert answer.status == 200, answer.content
    meta = answer.json()["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == pair.prefill.log[0].input_ids
    assert len(meta["input_top_logprobs"]) == len(pair.prefill.log[0].input_ids)
    assert len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == 8


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_dies_is_named(pair: Pair, role: str) -> None:
    worker: EmbeddedWorker = getattr(pair, role)
    worker.kill()
    answer = pair.generate()
    assert answer.status == 502
    assert worker.url in answer.json()["error"]["message"]
    pair.prefill.kept_caches.forget()
    worker.restart()


def test_an_abort_in_the_prefill_ends_it_there(pair: Pair) -> None:
    pair.prefill.hold()
    asking = Asking(pair.url, {"text": PROMPT, "rid": "mine", "sampling_params": SHORT})
    pair.prefill.wait_for_arrivals(1)
    assert call(f"{pair.url}/abort_request", {"rid": "mine"}).status == 200
    pair.prefill.release()
    assert asking.answer().json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert pair.decode.log == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_decode_worker_that_hangs_while_its_prompt_is_prefilled_is_left_out(stream: bool) -> None:
    """The prefill worker, of which there is no other, is not at fault."""
    options: dict[str, Any] = {"interface": "vllm", "kv_connector": True}
    with ExitStack() as entered:
        prefill, *decodes = (entered.enter_context(EmbeddedWorker(vocabulary("qwen"), **options)) for _ in range(3))
        workers = WorkersConfig(
            apart=True,
            prefill=((prefill.url, None),),
            decode=tuple(worker.url for worker in decodes),
            policy="consistent_hashing",
            health=HealthConfig(interval=0.1, timeout=1.0, failure_threshold=1),
        )
        radix = RadixConfig(tokenizer_path=str(vocabulary("qwen")))
        url = entered.enter_context(serve(create_app(RouterConfig(workers=workers, radix=radix))))
        asked, headers = {"text": PROMPT, "sampling_params": SHORT, "stream": stream}, {"x-session-id": "a"}
        first = call(f"{url}/generate", asked, headers=headers)
        hung = next(worker for worker in decodes if worker.url == first.headers["x-router-worker"])
        prefill.hold()
        asking = Asking(url, asked, headers=headers)
        prefill.wait_for_arrivals(1)
        received = prefill.received
        with hung.hanging():
            until(lambda: prefill.received > received)
            prefill.release()
            answer = asking.answer()
            assert answer.status == 200, answer.content
            assert answer.headers["x-router-worker"] != hung.url
        prefill.kept_caches.forget()


def test_a_worker_without_a_role_is_refused(pair: Pair) -> None:
    with EmbeddedWorker(interface="vllm") as other:
        refused = call(f"{pair.url}/add_worker", {"url": other.url})
        assert refused.status == 400
        assert "worker_type" in refused.json()["error"]["message"]
        assert call(f"{pair.url}/workers", {"url": other.url, "worker_type": "decode"}).status == 202
        call(f"{pair.url}/remove_worker", {"url": other.url})
