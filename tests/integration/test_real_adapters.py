"""Adapters of real engines: whose tokens are remembered as whose, what an index says of their caches, and who lacks them."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from router.app import RouterApp, create_app
from router.config import RadixConfig, RouterConfig, WorkersConfig
from router.policies.cache_aware import CacheAware, CacheAwareParameters
from tests.integration.conftest import RouterFor
from tests.support.client import call
from tests.support.engine_server import free_port
from tests.support.engines import Engine
from tests.support.lora import RANK, make_adapter
from tests.support.serving import serve
from tests.support.vllm_server import KIT

ENGINES = ("sglang", "vllm")
PAGE = 32
TEXT = "An adapter answers in words of its own, and nobody else's. " * 6
ADAPTERS = (None, "one", "two")


def test_a_worker_that_lacks_an_adapter_says_so(engine: Engine, router_for: RouterFor) -> None:
    """In words that the router knows: it asks the other worker, too."""
    url = router_for(0, 1)

    def asked_again() -> float:
        (found,) = re.findall(
            r'tito_router_retries_total\{reason="no_adapter"\} (\S+)', call(f"{url}/metrics").content.decode()
        )
        return float(found)

    for stream in (False, True):
        before = asked_again()
        answer = call(f"{url}/generate", {"text": "Hello", "lora_path": "nobody", "stream": stream})
        assert b"nobody" in answer.content
        assert asked_again() == before + 1


class Served(NamedTuple):
    app: RouterApp
    url: str
    folders: dict[str, Path]

    def generate(self, adapter: str | None, text: str = TEXT) -> Any:
        sampling = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
        answer = call(f"{self.url}/generate", {"text": text, "sampling_params": sampling, "lora_path": adapter})
        assert answer.status == 200, answer.content
        assert answer.headers["x-radix-recorded"] == "exact"
        return answer.json()

    def chat(self, model: str) -> tuple[int, list[int]]:
        """The status, and the ids of a reply at the root, which names no session."""
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
        answer = call(f"{self.url}/v1/chat/completions", {**body, "return_token_ids": True})
        return answer.status, answer.json()["choices"][0]["token_ids"] if answer.status == 200 else []

    def cached(self, ids: list[int], adapter: str | None, expected: int) -> int:
        """Tokens that the worker has in its cache by its events, once these say so: another process tells."""
        policy = self.app.pool._policy
        assert isinstance(policy, CacheAware)
        assert policy.index is not None
        deadline = time.monotonic() + 10
        while (found := sum(policy.index.overlaps(ids, adapter).values()) * PAGE) != expected:
            assert time.monotonic() < deadline, (found, expected)
            time.sleep(0.01)
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One real vLLM with an adapter, which takes others while it runs. (SGLang 0.5.23 takes none without a GPU.)"""
    if not KIT.is_installed:
        pytest.skip(f"no vLLM in {KIT.directory}: run {KIT.setup}")
    home = tmp_path_factory.mktemp("adapters")
    folders = {name: make_adapter(home / name, KIT.model, seed) for seed, name in enumerate(("one", "two"))}
    ports = {name: f"tcp://*:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    events = {"enable_kv_cache_events": True, "publisher": "zmq", **ports}
    flags = (
        "--enable-lora",
        "--max-loras",
        "2",
        "--max-lora-rank",
        str(RANK),
        "--lora-modules",
        f"one={folders['one']}",
    )
    flags = (*flags, "--block-size", str(PAGE), "--kv-events-config", json.dumps(events))
    with ExitStack() as entered:
        patch = entered.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        worker = entered.enter_context(KIT.server(*flags, log_dir=home))
        parameters = CacheAwareParameters(kv_events=True)
        app = create_app(
            RouterConfig(
                workers=WorkersConfig(urls=(worker.url,), policy="cache_aware", parameters=parameters),
                radix=RadixConfig(tokenizer_path=str(KIT.model)),
            )
        )
        yield Served(app, entered.enter_context(serve(app)), folders)


@pytest.mark.vllm
@pytest.mark.slow
def test_adapters_share_neither_tokens_nor_caches(served: Served) -> None:
    """One is loaded through the router, which all paths know at once, and unloaded again."""
    before = served.chat("two")
    load = {"lora_name": "two", "lora_path": str(served.folders["two"])}
    assert call(f"{served.url}/load_lora_adapter", load).status == 200
    said = [served.chat(model)[1] for model in ("any", "one", "two")]
    assert before == (200, said[0]), "a name that no worker lists names the base model"
    assert all(one != other for one, other in itertools.combinations(said, 2))

    replies = {adapter: served.generate(adapter) for adapter in ADAPTERS}
    prompt = replies[None]["meta_info"]["prompt_tokens"]
    known = (prompt + 39) // PAGE * PAGE
    for adapter, reply in replies.items():
        assert reply["meta_info"]["cached_tokens"] == 0, "the same prompt, which another one has computed"
        for other in ADAPTERS:
            found = call(f"{served.url}/retrieve_from_text", {"text": TEXT + reply["text"], "lora_path": other}).json()
            assert found["exact"] == (other == adapter)
        ids = call(f"{served.url}/retrieve_from_text", {"text": TEXT + reply["text"], "lora_path": adapter}).json()[
            "tokens"
        ]
        assert ids[prompt:] == reply["output_ids"]
        told = served.cached(ids, adapter, known)
        assert served.generate(adapter, TEXT + reply["text"])["meta_info"]["cached_tokens"] == told > 0

    assert call(f"{served.url}/unload_lora_adapter", {"lora_name": "two"}).status == 200
    assert served.chat("two") == (400, []), "an adapter that is gone is not the base model"
