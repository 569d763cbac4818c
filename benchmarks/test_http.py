"""Benchmarks over real sockets: a retrieval of 32,000 tokens, and a whole turn."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from router.app import create_app
from router.config import RadixConfig, RouterConfig, WorkersConfig
from tests.support.client import call
from tests.support.serving import serve
from tests.support.vocabularies import vocabulary
from worker.worker import EmbeddedWorker

TOKENS = 32_000


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(vocabulary("qwen-whole"), context_length=2 * TOKENS) as worker:
        yield worker


@pytest.fixture(scope="module")
def router(worker: EmbeddedWorker) -> Iterator[str]:
    config = RouterConfig(
        workers=WorkersConfig(urls=(worker.url,)), radix=RadixConfig(tokenizer_path=str(vocabulary("qwen-whole")))
    )
    with serve(create_app(config)) as url:
        yield url


def test_retrieve_32k_tokens(benchmark: BenchmarkFixture, worker: EmbeddedWorker, router: str) -> None:
    rng = random.Random(0)
    worker.script(ids=[rng.randrange(1_000, 50_000) for _ in range(TOKENS)], finish="length")
    body = {"text": "Write a long one. ", "sampling_params": {"max_new_tokens": TOKENS, "skip_special_tokens": False}}
    reply = call(f"{router}/generate", body, timeout=120)
    assert reply.headers["x-radix-recorded"] == "exact"
    text = body["text"] + reply.json()["text"]

    def retrieve() -> int:
        return call(f"{router}/retrieve_from_text", {"text": text}).json()["token_length"]

    assert benchmark.pedantic(retrieve, rounds=20) >= TOKENS


@pytest.mark.parametrize("direct", [True, False], ids=["worker", "router"])
def test_a_turn_of_64_tokens(benchmark: BenchmarkFixture, worker: EmbeddedWorker, router: str, direct: bool) -> None:
    """The difference of the two rows is what the router adds. Every call opens a connection, so both are high."""
    url = worker.url if direct else router
    number = iter(range(10**9))

    def turn() -> None:
        body = {"text": f"Question {next(number)}: what is this?", "sampling_params": {"max_new_tokens": 64}}
        assert call(f"{url}/generate", body).status == 200

    benchmark.pedantic(turn, rounds=100, warmup_rounds=5)
