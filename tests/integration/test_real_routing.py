"""Conversations in front of two real SGLang workers: what the policies are worth, in the workers' own `cached_tokens`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from router.app import RouterApp, create_app
from router.config import RADIX_TREE_MIDDLEWARE, RadixConfig, RouterConfig, WorkersConfig
from router.kv_cache.index import KvIndex
from router.policies.cache_aware import CacheAware, CacheAwareParameters
from tests.support import sglang_server
from tests.support.client import call
from tests.support.engine_server import free_port
from tests.support.serving import serve
from tests.support.sglang_server import SGLangServer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

CONVERSATIONS, TURNS = 5, 4  # an odd number: round_robin must not keep them apart by luck


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SGLangServer]]:
    if not sglang_server.is_installed():
        pytest.skip(f"no SGLang in {sglang_server.sglang_dir()}: run tests/sglang_cpu/setup.sh")
    flags = []
    for _ in range(2):
        ports = {"endpoint": free_port(), "replay_endpoint": free_port()}
        config = {"publisher": "zmq", **{name: f"tcp://*:{port}" for name, port in ports.items()}}
        flags.append(("--page-size", "16", "--kv-events-config", json.dumps(config)))
    with sglang_server.sglang_servers(flags, log_dir=tmp_path_factory.mktemp("sglang")) as servers:
        yield servers


@contextlib.contextmanager
def routed(workers: list[SGLangServer], policy: str, *, kv_events: bool = False) -> Iterator[tuple[RouterApp, str]]:
    """Before empty caches."""
    for worker in workers:
        assert call(f"{worker.url}/flush_cache", {}).status == 200
    app = create_app(
        RouterConfig(
            workers=WorkersConfig(
                urls=tuple(worker.url for worker in workers),
                policy=policy,
                parameters=CacheAwareParameters(kv_events=kv_events),
            ),
            radix=RadixConfig(tokenizer_path=str(sglang_server.model_path())),
            middlewares=(RADIX_TREE_MIDDLEWARE,),
        )
    )
    with serve(app) as url:
        if kv_events:
            index = index_of(app)
            until(lambda: all(index.tracked(worker.url) for worker in workers))
        yield app, url


def index_of(app: RouterApp) -> KvIndex:
    policy = app.pool._policy
    assert isinstance(policy, CacheAware)
    assert policy.index is not None
    return policy.index


def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # other processes tell; there is nothing to wait on


def turn(url: str, text: str) -> tuple[str, int, int, str, str]:
    """The text with its reply, prompt tokens, of these cached, the worker and the reason."""
    answer = call(f"{url}/generate", {"text": text, "sampling_params": {"max_new_tokens": 48, "ignore_eos": True}})
    assert answer.status == 200, answer.content
    reply = answer.json()
    meta = reply["meta_info"]
    worker, reason = answer.headers["x-router-worker"], answer.headers["x-router-reason"]
    return text + reply["text"], meta["prompt_tokens"], meta["cached_tokens"], worker, reason


def share_cached(url: str) -> float:
    """Of the prompt tokens of some conversations under one system prompt, held side by side."""
    system = "You are a careful assistant, and you never answer before you have thought about it. " * 4
    texts = [system + f"Question {number}: what is {number * 7919} about? " for number in range(CONVERSATIONS)]
    prompts = found = 0
    for _ in range(TURNS):
        for number, text in enumerate(texts):
            said, prompt, cached, _, _ = turn(url, text)
            prompts, found = prompts + prompt, found + cached
            texts[number] = said + " And why is that? Tell me more. "
    return found / prompts


def test_cache_aware_finds_more_of_its_prompts_cached(workers: list[SGLangServer]) -> None:
    shares = {}
    for name, policy, kv_events in (
        ("round_robin", "round_robin", False),
        ("cache_aware", "cache_aware", False),
        ("cache_aware, told", "cache_aware", True),
    ):
        with routed(workers, policy, kv_events=kv_events) as (_, url):
            shares[name] = share_cached(url)
    print(shares)
    assert shares["cache_aware"] > shares["round_robin"] + 0.1
    assert shares["cache_aware, told"] > shares["round_robin"] + 0.1


def test_a_worker_that_emptied_its_cache_is_no_longer_preferred(workers: list[SGLangServer]) -> None:
    """What the tree alone would not know."""
    with routed(workers, "cache_aware", kv_events=True) as (app, url):
        text, _, _, first, _ = turn(url, "Once upon a time, in a land far away, there was a princess. " * 6)
        until(lambda: index_of(app).tree_size(first))
        text, _, cached, worker, reason = turn(url, text + " And then? ")
        assert (worker, reason) == (first, "continued")
        assert cached > 0
        assert call(f"{first}/flush_cache", {}).status == 200
        until(lambda: not index_of(app).tree_size(first))
        _, _, cached, _, reason = turn(url, text + " And in the end? ")
        assert (cached, reason) == (0, "least_loaded")
