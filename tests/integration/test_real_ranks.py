"""A real SGLang with two data-parallel ranks. The judges are `dp_rank` and `cached_tokens` of its replies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from router.app import create_app
from router.config import RadixConfig, RouterConfig, WorkersConfig
from tests.support import sglang_server
from tests.support.client import call
from tests.support.serving import serve
from tests.support.sglang_server import SGLangServer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    if not sglang_server.is_installed():
        pytest.skip(f"no SGLang in {sglang_server.sglang_dir()}: run tests/sglang_cpu/setup.sh")
    # A rank of an engine on the CPU wants to know its cores. They may have the same one.
    cores = "0|1" if (os.cpu_count() or 1) > 1 else "0|0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", cores)
        with sglang_server.sglang_server("--dp-size", "2", log_dir=tmp_path_factory.mktemp("sglang")) as server:
            yield server


@pytest.fixture(scope="module")
def router(worker: SGLangServer) -> Iterator[str]:
    config = RouterConfig(
        workers=WorkersConfig(urls=(worker.url,), policy="cache_aware"),
        radix=RadixConfig(tokenizer_path=str(sglang_server.model_path())),
    )
    with serve(create_app(config)) as url:
        yield url


def generate(url: str, text: Any, **more: Any) -> Any:
    params = {"max_new_tokens": 8, "ignore_eos": True}
    answer = call(f"{url}/generate", {"text": text, "sampling_params": params, **more})
    assert answer.status == 200, answer.content
    return answer.json()


def test_every_turn_finds_its_cache(router: str) -> None:
    texts = [f"Conversation {number * 7919} is about something else, " + "and so on " * 30 for number in range(8)]
    at: dict[int, int] = {}
    for turn in range(4):
        for number, text in enumerate(texts):
            reply = generate(router, text)
            meta = reply["meta_info"]
            assert at.setdefault(number, meta["dp_rank"]) == meta["dp_rank"]
            assert not turn or meta["cached_tokens"] > meta["prompt_tokens"] / 2
            texts[number] = text + reply["text"] + f" And {number}? "
    assert set(at.values()) == {0, 1}
    (told,) = call(f"{router}/workers").json()["workers"]
    assert told["targets"] == [{"rank": 0, "load": 0}, {"rank": 1, "load": 0}]
    assert told["rank_mismatches"] == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_client_names_the_rank(router: str, rank: int) -> None:
    assert generate(router, "One.", routed_dp_rank=rank)["meta_info"]["dp_rank"] == rank
    assert generate(router, "One.", data_parallel_rank=rank)["meta_info"]["dp_rank"] == rank
    batch = generate(router, ["One.", "Two.", "Three."], routed_dp_rank=rank)
    assert [reply["meta_info"]["dp_rank"] for reply in batch] == [rank] * 3
    samples = generate(router, "One.", routed_dp_rank=rank, sampling_params={"n": 3, "max_new_tokens": 4})
    assert [reply["meta_info"]["dp_rank"] for reply in samples] == [rank] * 3


def test_a_rank_that_it_has_not_is_refused_in_the_same_way(worker: SGLangServer, router: str) -> None:
    for url in (worker.url, router):
        answer = call(f"{url}/generate", {"text": "One.", "routed_dp_rank": 2})
        assert answer.status == 400, url
