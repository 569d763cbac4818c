"""The index against a real SGLang's cache: what it says is cached is what the worker then says it found there.

The judge is `cached_tokens` of each reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from router.engines.form.kv_events import KvSource
from router.engines.sglang.engine import published_source
from tests.support import sglang_server
from tests.support.client import call
from tests.support.engine_server import free_port
from tests.support.kv_follower import Follower, Generated, followed
from tests.support.sglang_server import SGLangServer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PAGE = 16
ROOM = 2_000  # tokens: a few conversations, so that others are evicted


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    if not sglang_server.is_installed():
        pytest.skip(f"no SGLang in {sglang_server.sglang_dir()}: run tests/sglang_cpu/setup.sh")
    events, replays = free_port(), free_port()
    config = {"publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replays}"}
    flags = ("--page-size", str(PAGE), "--max-total-tokens", str(ROOM), "--kv-events-config", json.dumps(config))
    with sglang_server.sglang_server(*flags, log_dir=tmp_path_factory.mktemp("sglang")) as server:
        yield server


@pytest.fixture(autouse=True)
def empty_cache(worker: SGLangServer) -> None:
    assert call(f"{worker.url}/flush_cache", {}).status == 200


def source_of(worker: SGLangServer) -> KvSource:
    found = published_source(worker.url, call(f"{worker.url}/server_info").content)
    assert found is not None
    return found


async def generated(worker: SGLangServer, ids: list[int], count: int) -> Generated:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": count, "ignore_eos": True}}
    answer = await asyncio.to_thread(call, f"{worker.url}/generate", body)
    assert answer.status == 200, answer.content
    reply: Any = answer.json()
    return Generated(ids + reply["output_ids"], reply["meta_info"]["cached_tokens"])


def following(worker: SGLangServer) -> contextlib.AbstractAsyncContextManager[Follower]:
    return followed(worker.url, source_of(worker), PAGE, functools.partial(generated, worker))


def test_a_worker_tells_where_it_publishes(worker: SGLangServer) -> None:
    source = source_of(worker)
    assert (source.host, source.topic, source.ranks) == ("127.0.0.1", "", 1)
    described = json.loads(call(f"{worker.url}/server_info").content)
    # The flag alone, which is what there is to go by where a worker does not describe it, says the same.
    del described["kv_events"]
    assert published_source(worker.url, json.dumps(described).encode()) == source


def test_conversations_that_evict_each_other(worker: SGLangServer) -> None:
    """Every turn's `cached_tokens` is what the index said before it was sent: none more, none less."""

    async def scenario() -> None:
        draw = random.Random(7)
        system = [draw.randrange(100, 4_000) for _ in range(60)]
        chains: dict[int, list[int]] = {}
        talks = [system + [draw.randrange(100, 4_000) for _ in range(draw.randrange(10, 90))] for _ in range(12)]
        async with following(worker) as follower:
            for _ in range(60):
                number = draw.randrange(len(talks))
                chain = chains[number] = await follower.turn(talks[number], draw.randrange(1, 40))
                talks[number] = chain + [draw.randrange(100, 4_000) for _ in range(draw.randrange(30))]
                if len(talks[number]) > 500:
                    talks[number] = talks[number][: draw.randrange(60, 200)]
                assert follower.index.tree_size(worker.url) * PAGE <= ROOM
            assert follower.index.tracked(worker.url)
            whole = [follower.cached(chain) == (len(chain) - 1) // PAGE for chain in chains.values()]
            assert any(whole)
            assert not all(whole), "nothing was evicted"
            assert follower.index.counts == {}
            assert follower.subscriptions.counts.keys() <= {"batches", "replays", "gaps"}

    asyncio.run(scenario())


def test_salted_blocks_are_those_of_their_salt(worker: SGLangServer) -> None:
    """As a router sends a salt whose events it follows: `cache_salt` is what the events tell."""
    ids = list(range(300, 400))

    async def cached(salt: str | None) -> int:
        salted = {} if salt is None else {"extra_key": salt, "cache_salt": salt}
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}, **salted}
        answer = await asyncio.to_thread(call, f"{worker.url}/generate", body)
        found: int = answer.json()["meta_info"]["cached_tokens"]
        return found

    async def scenario() -> None:
        async with following(worker) as follower:
            for salt in ("v1:1", "v1:2", None):
                assert follower.index.overlaps(ids, salt=salt) == {}
                assert await cached(salt) == 0
                async with asyncio.timeout(30):
                    while not follower.index.overlaps(ids, salt=salt):  # noqa: ASYNC110 - as above
                        await asyncio.sleep(0.01)
                told = min(follower.index.overlaps(ids, salt=salt)[worker.url], (len(ids) - 1) // PAGE) * PAGE
                assert await cached(salt) == told > 0

    asyncio.run(scenario())


def test_a_flush_empties_the_index(worker: SGLangServer) -> None:
    async def scenario() -> None:
        async with following(worker) as follower:
            chain = await follower.turn(list(range(100, 200)), 10)
            assert (await asyncio.to_thread(call, f"{worker.url}/flush_cache", {})).status == 200
            await follower.until_cached(chain, 0)
            assert follower.index.tracked(worker.url)
            assert await follower.turn(chain, 5)

    asyncio.run(scenario())


def test_a_router_that_comes_late_learns_what_is_cached(worker: SGLangServer) -> None:
    async def scenario() -> None:
        async with following(worker) as first:
            chains = [await first.turn(list(range(start, start + 80)), 20) for start in (100, 300, 500)]
            async with following(worker) as second:
                for chain in chains:
                    await second.until_cached(chain, first.cached(chain))
                await second.turn(chains[0], 10)

    asyncio.run(scenario())


def test_requests_side_by_side(worker: SGLangServer) -> None:
    """Whatever is stored and evicted meanwhile, in the end the index says what the worker finds."""

    async def scenario() -> None:
        draw = random.Random(11)
        async with following(worker) as follower:
            prompts = [[draw.randrange(100, 4_000) for _ in range(draw.randrange(20, 250))] for _ in range(24)]
            replies = await asyncio.gather(*(follower.generate(ids, draw.randrange(1, 60)) for ids in prompts))
            marker = await follower.generate(list(range(60)), 1)
            await follower.until_cached(marker[0], 3)
            # Newest first: a match evicts nothing that is asked for later.
            for chain, _ in reversed(replies):
                await follower.turn(chain, 1)
            assert follower.index.tracked(worker.url)

    asyncio.run(scenario())
