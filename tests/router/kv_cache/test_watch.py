"""Discovery of publishing workers, over HTTP and ZeroMQ."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from router.app import create_app
from router.config import CacheAwareConfig, RouterConfig, WorkersConfig
from router.kv_cache.index import KvIndex
from router.policies.cache_aware import CacheAware
from tests.router.conftest import json_app
from tests.support.serving import serving


@contextlib.asynccontextmanager
async def publisher() -> AsyncIterator[tuple[zmq.asyncio.Socket, int]]:
    """A worker's publisher. An XPUB is a PUB that reports its subscribers."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.XPUB)
    socket.bind("tcp://127.0.0.1:*")
    try:
        yield socket, int(socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    finally:
        context.destroy(linger=0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - an index has no notification of changes
            await asyncio.sleep(0.01)


def stored(ids: list[int]) -> bytes:
    block = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": ids,
        "block_size": len(ids) // 2,
        "lora_id": None,
    }
    return msgspec.msgpack.encode([1.0, [block], 0])


def index_of(app: Any) -> KvIndex:
    policy = app.pool._policy
    assert isinstance(policy, CacheAware)
    assert policy.index is not None
    return policy.index


def test_publishing_workers_are_followed_and_removed_workers_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.kv_cache.watch.LOOK_SECONDS", 0.05)

    async def main() -> None:
        async with publisher() as (socket, port):
            told = {"kv_events": {"publisher": "zmq", "endpoint_port_base": port, "dp_size": 1}}
            replies = {"/ping": {}, "/server_info": told}
            async with serving(json_app(replies)) as one, serving(json_app({"/ping": {}, "/server_info": {}})) as other:
                workers = WorkersConfig(
                    urls=(one, other), policy="cache_aware", cache_aware=CacheAwareConfig(kv_events=True)
                )
                app = create_app(RouterConfig(workers=workers, middlewares=()))
                async with serving(app):
                    index, ids = index_of(app), list(range(32))
                    async with asyncio.timeout(20):
                        assert await socket.recv() == b"\x01"
                    await socket.send_multipart([b"", (0).to_bytes(8, "big"), stored(ids)])
                    await until(lambda: index.overlaps(ids) == {one: 2})
                    assert index.tracked(one)
                    assert not index.tracked(other)
                    app.pool.remove(one)
                    assert index.overlaps(ids) == {}
                    async with asyncio.timeout(20):
                        assert await socket.recv() == b"\x00"

    asyncio.run(main())


def test_without_the_flag_no_worker_is_followed() -> None:
    app = create_app(RouterConfig(workers=WorkersConfig(policy="cache_aware"), middlewares=()))
    policy = app.pool._policy
    assert isinstance(policy, CacheAware)
    assert policy.index is None
