"""A real vLLM with two data-parallel ranks. The judge is its own count of tokens for each of its engines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.integration.conftest import real_router
from tests.support.asking import until
from tests.support.client import call
from tests.support.engine_server import EngineServer, free_port
from tests.support.engines import VLLM
from tests.support.vllm_server import KIT

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
_COUNT = re.compile(r'vllm:(prompt_tokens|prefix_cache_hits)_total\{engine="(\d)",[^}]*\} (\S+)')


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    if not KIT.is_installed:
        pytest.skip(f"no vLLM in {KIT.directory}: run {KIT.setup}")
    # Each rank publishes events at the port that is as many above.
    ports = {name: f"tcp://*:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    events = {"enable_kv_cache_events": True, "publisher": "zmq", **ports}
    flags = ("--block-size", str(VLLM.page), "--kv-events-config", json.dumps(events), "--data-parallel-size", "2")
    with KIT.server(*flags, log_dir=tmp_path_factory.mktemp("vllm"), timeout=900) as server:
        yield server


@pytest.fixture(scope="module")
def router(worker: EngineServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--policy", "cache_aware", "--kv-events", "--kv-salt", "version")
    log = tmp_path_factory.mktemp("router") / "router.log"
    with real_router([worker.url], KIT.model, log, flags) as url:
        (told,) = call(f"{url}/workers").json()["workers"]
        assert [one["rank"] for one in told["targets"]] == [0, 1]
        yield url


def counts(worker: EngineServer) -> dict[tuple[str, int], float]:
    """Tokens of prompts, and of those the ones that were cached, for each rank."""
    lines = call(f"{worker.url}/metrics").content.decode()
    return {(what, int(rank)): float(count) for what, rank, count in _COUNT.findall(lines)}


def generate(url: str, text: str, rank: int | None = None) -> dict[str, object]:
    more = {} if rank is None else {"routed_dp_rank": rank}
    params = {"max_new_tokens": 8, "temperature": 0}
    answer = call(f"{url}/generate", {"text": text, "sampling_params": params, **more})
    assert answer.status == 200, answer.content
    found: dict[str, object] = answer.json()
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_a_client_names_serves_its_request(worker: EngineServer, router: str, rank: int) -> None:
    before = counts(worker)
    generate(router, f"To rank {rank}, and to no other, goes this prompt of a few words.", rank)
    after = counts(worker)
    grown = {at: after["prompt_tokens", at] - before["prompt_tokens", at] for at in (0, 1)}
    assert grown[rank] > 0 == grown[1 - rank]


def test_a_rank_that_it_has_not_is_refused(router: str) -> None:
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 1}, "routed_dp_rank": 2}
    assert call(f"{router}/generate", body).status == 400


def test_turns_find_their_cache_at_both_ranks_under_a_salt(worker: EngineServer, router: str) -> None:
    texts = [f"Conversation {number * 7919} is about something else, " + "and so on " * 30 for number in range(6)]
    before = counts(worker)
    for turn in range(3):
        for number, text in enumerate(texts):
            reply = generate(router, text)
            meta = reply["meta_info"]
            assert isinstance(meta, dict)
            assert not turn or meta["cached_tokens"] > meta["prompt_tokens"] / 2
            texts[number] = f"{text}{reply['text']} And {number}? "
    after = counts(worker)
    assert all(after["prefix_cache_hits", rank] > before["prefix_cache_hits", rank] for rank in (0, 1))
    until(lambda: batches(router) > 0, "no events of their caches have come")


def batches(router: str) -> float:
    """Events of caches that the router has taken in."""
    lines = call(f"{router}/metrics").content.decode()
    (found,) = re.findall(r'tito_router_kv_events_total\{kind="batches"\} (\S+)', lines)
    return float(found)
