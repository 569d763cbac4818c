"""A worker with data-parallel ranks: whose turn it is, whose cache hits, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.client import call
from tests.worker.talk import request
from worker.options import Interface
from worker.worker import EmbeddedWorker

TEXT = "Once upon a time there was a worker with four ranks. "


@pytest.fixture
def worker() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(dp_size=4) as worker:
        yield worker


def generate(worker: EmbeddedWorker, text: Any = TEXT, **more: Any) -> tuple[int, Any]:
    body = {"text": text, "sampling_params": {"max_new_tokens": 3}, **more}
    status, said, _ = request(worker, "/generate", body)
    return status, json.loads(said)


def test_each_rank_has_a_cache_of_its_own(worker: EmbeddedWorker) -> None:
    for rank in (0, 2):
        for hit in (False, True):
            _, reply = generate(worker, routed_dp_rank=rank)
            assert reply["meta_info"]["dp_rank"] == rank
            assert bool(reply["meta_info"]["cached_tokens"]) is hit
    assert request(worker, "/flush_cache", {})[0] == 200
    assert generate(worker, data_parallel_rank=2)[1]["meta_info"]["cached_tokens"] == 0


def test_ranks_that_nobody_names_take_turns(worker: EmbeddedWorker) -> None:
    found = [generate(worker)[1]["meta_info"]["dp_rank"] for _ in range(8)]
    assert Counter(found) == dict.fromkeys(range(4), 2)
    _, replies = generate(worker, [TEXT] * 4)
    assert {reply["meta_info"]["dp_rank"] for reply in replies} == set(range(4))
    _, replies = generate(worker, [TEXT] * 4, routed_dp_rank=3)
    assert {reply["meta_info"]["dp_rank"] for reply in replies} == {3}


@pytest.mark.parametrize("rank", [-1, 4, 99])
def test_a_rank_that_it_has_not_is_refused(worker: EmbeddedWorker, rank: int) -> None:
    """As SGLang 0.5.23 does it."""
    status, said = generate(worker, routed_dp_rank=rank)
    assert (status, said) == (400, {"error": {"message": f"routed_dp_rank={rank} out of range [0, 4)"}})
    assert generate(worker, routed_dp_rank=[0])[0] == 400


def test_it_tells_its_ranks_and_their_loads(worker: EmbeddedWorker) -> None:
    _, said, _ = request(worker, "/server_info")
    info = json.loads(said)
    assert (info["dp_size"], info["attn_dp_size"]) == (4, 1)
    loads = json.loads(request(worker, "/v1/loads")[1])["loads"]
    assert [(load["dp_rank"], load["num_total_reqs"]) for load in loads] == [(rank, 0) for rank in range(4)]
    (load,) = json.loads(request(worker, "/v1/loads?dp_rank=2")[1])["loads"]
    assert load["dp_rank"] == 2
    assert b'sglang:num_running_reqs{dp_rank="3",' in request(worker, "/metrics")[1]


def test_a_worker_with_one_rank_says_none() -> None:
    with EmbeddedWorker() as worker:
        for body in ({}, {"routed_dp_rank": 0}):
            assert generate(worker, **body)[1]["meta_info"]["dp_rank"] is None
        assert generate(worker, routed_dp_rank=1)[0] == 400


@pytest.mark.parametrize(("header", "rank"), [("2", 2), ("two", None), ("", None), (None, None)])
def test_vllms_header(header: str | None, rank: int | None) -> None:
    """It ignores what is no number, and refuses a rank that it has not."""
    interface: Interface = "vllm"
    with EmbeddedWorker(interface=interface, dp_size=4) as worker:
        url = f"{worker.url}/v1/completions"
        body = {"prompt": TEXT, "max_tokens": 3, "n": 2, "model": "any", "temperature": 1.0}
        assert call(url, body, headers={} if header is None else {"x-data-parallel-rank": header}).status == 200
        found = [record.rank for record in worker.log]
        assert found == [rank, rank] if rank is not None else len(set(found)) == 2
        answer = call(url, body, headers={"x-data-parallel-rank": "4"})
        assert answer.status == 400
        assert b"data_parallel_rank 4 is out of range [0, 4)" in answer.content
        info = call(f"{worker.url}/server_info?config_format=json").json()
        assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 4
        assert b'engine="3"' in call(f"{worker.url}/metrics").content
