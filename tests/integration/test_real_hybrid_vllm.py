"""The index against the cache of a real vLLM whose model is hybrid: half of its layers keep a window of 64 tokens.

The judge is `cached_tokens` of each reply. For these layers vLLM keeps the ends of prompts, so a shared prefix is often of no
use: it is computed anew, and its blocks are cached twice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.engines.vllm.engine import published_source
from tests.support.client import call
from tests.support.engine_server import EngineServer, free_port
from tests.support.kv_follower import Generated, followed
from tests.support.vllm_server import KIT

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PAGE = 32  # vLLM's choice for the 16 that are asked for, so that both kinds of layers have blocks of one size
ROOM = 80  # blocks: a few conversations, so that others are evicted


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    if not KIT.is_installed:
        pytest.skip(f"no vLLM in {KIT.directory}: run {KIT.setup}")
    model = tmp_path_factory.mktemp("model")
    script = Path(__file__).parents[1] / "vllm_cpu" / "make_hybrid.py"
    subprocess.run([KIT.directory / "venv/bin/python", script, KIT.model, model], check=True, timeout=120)
    ports = {name: f"tcp://*:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    events = {"enable_kv_cache_events": True, "publisher": "zmq", **ports}
    room = ("--block-size", "16", "--num-gpu-blocks-override", str(ROOM), "--max-model-len", "1024")
    flags = (*room, "--kv-events-config", json.dumps(events))
    kit = dataclasses.replace(KIT, served=model)
    with kit.server(*flags, log_dir=tmp_path_factory.mktemp("vllm"), timeout=900) as server:
        yield server


async def generated(worker: EngineServer, ids: list[int], count: int) -> Generated:
    body = {"prompt": ids, "max_tokens": count, "ignore_eos": True, "return_token_ids": True}
    answer = await asyncio.to_thread(call, f"{worker.url}/v1/completions", body)
    assert answer.status == 200, answer.content
    reply: Any = answer.json()
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Generated(ids + reply["choices"][0]["token_ids"], cached)


def test_conversations_that_evict_each_other(worker: EngineServer) -> None:
    """Every turn's `cached_tokens` is what the index said before it was sent: none more, none less."""
    source = published_source(worker.url, call(f"{worker.url}/kv_event_sources").content)
    assert source is not None

    async def scenario() -> None:
        draw = random.Random(7)
        system = [draw.randrange(100, 4_000) for _ in range(150)]
        talks = [system + [draw.randrange(100, 4_000) for _ in range(draw.randrange(10, 90))] for _ in range(6)]
        found: list[tuple[int, int, int]] = []
        async with followed(worker.url, source, PAGE, functools.partial(generated, worker)) as follower:
            for _ in range(60):
                number = draw.randrange(len(talks))
                ids = talks[number][:-1]
                found.append((follower.cached(ids), follower.stored(ids), len(ids) // PAGE))
                chain = await follower.turn(talks[number], draw.randrange(1, 40))
                talks[number] = chain + [draw.randrange(100, 4_000) for _ in range(draw.randrange(30))]
                if len(talks[number]) > 600:
                    talks[number] = talks[number][: draw.randrange(150, 400)]
            assert follower.index.tracked(worker.url)
            assert follower.index.counts == {}
            assert sum(usable > 0 for usable, _, _ in found) > 10
            assert any(usable < stored for usable, stored, _ in found), "no layer kept less than the others"
            assert any(stored < whole for _, stored, whole in found[len(talks) :]), "nothing was evicted"

    asyncio.run(scenario())
