"""A worker's life."""

from __future__ import annotations

import errno
import http.client
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.vocabularies import vocabulary
from tests.worker.talk import generate, request
from worker.worker import EmbeddedWorker


def test_the_gate_says_when_nobody_comes(worker: EmbeddedWorker) -> None:
    with pytest.raises(TimeoutError, match="0 in flight"):
        worker.wait_for_arrivals(1, timeout=0.05)


def test_it_comes_back_on_its_port_with_its_weights(worker: EmbeddedWorker, pool: ThreadPoolExecutor) -> None:
    url = worker.url
    worker.set_weight_version("7")
    worker.hold(after=2)
    broken = pool.submit(generate, worker)
    worker.wait_for_arrivals(1)
    worker.kill()
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        broken.result(20)
    assert " down, " in repr(worker)
    worker.restart()
    worker.release()
    assert worker.url == url
    assert generate(worker)["meta_info"]["weight_version"] == "7"


def test_it_wants_to_be_entered() -> None:
    with pytest.raises(RuntimeError, match="enter the worker first"):
        EmbeddedWorker(vocabulary("qwen")).hold()


def test_a_port_that_is_taken(worker: EmbeddedWorker) -> None:
    with pytest.raises(OSError, match="in use"), EmbeddedWorker(vocabulary("qwen"), port=worker.port):
        pass


def test_with_the_shipped_tokenizer_it_is_a_language_model() -> None:
    """Honestly sampled: the likeliest token has the greatest logprob, and a seed says the same again."""
    wanted: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 7]}
    with EmbeddedWorker() as worker:
        greedy = generate(worker, sampling_params={"temperature": 0, "max_new_tokens": 20}, **wanted)["meta_info"]
        seeded = [generate(worker, sampling_params={"sampling_seed": 3, "max_new_tokens": 20}) for _ in range(2)]
        free = [generate(worker, sampling_params={"max_new_tokens": 20}) for _ in range(2)]
        scored = generate(worker, sampling_params={"max_new_tokens": 1}, logprob_start_len=0, **wanted)["meta_info"]
        read = worker.log[-1].input_ids
    for sampled, top, chosen in zip(
        *(greedy[f"output_{key}"] for key in ("token_logprobs", "top_logprobs", "token_ids_logprobs")), strict=True
    ):
        assert sampled == top[0]
        assert top == sorted(top, reverse=True)
        assert [entry[1] for entry in chosen] == [5, 7]
        assert all(entry[0] <= sampled[0] for entry in chosen)
    assert seeded[0]["output_ids"] == seeded[1]["output_ids"]
    assert free[0]["output_ids"] != free[1]["output_ids"]
    assert [entry[1] for entry in scored["input_token_logprobs"]] == read
    assert [entry[0] is None for entry in scored["input_token_logprobs"]] == [True] + [False] * (len(read) - 1)


def test_a_worker_may_keep_no_log() -> None:
    with EmbeddedWorker(vocabulary("qwen"), keep_log=False) as worker:
        generate(worker)
        request(worker, "/ping")
        assert (worker.log, worker.calls) == ([], [])


def test_a_killed_worker_keeps_its_port(worker: EmbeddedWorker) -> None:
    """Nobody answers there, and no other program gets it, until the worker comes back."""
    worker.kill()
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", worker.port)) == errno.ECONNREFUSED
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", worker.port))
    worker.restart()
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", worker.port)) == 0
