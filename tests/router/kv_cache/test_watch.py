"""Discovery of publishing workers, over HTTP and ZeroMQ."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from starlette.types import Receive, Scope, Send

from router.app import create_app
from router.config import RouterConfig, WorkersConfig
from router.http.responses import send_json
from router.kv_cache.index import KvIndex
from router.kv_cache.subscriptions import KvSubscriptions
from router.kv_cache.watch import KvWatch
from router.policies.cache_aware import CacheAware, CacheAwareParameters
from router.workers.worker import KvFollowing, KvState, ProbeResult, Worker, WorkerState
from tests.router.conftest import MODEL, json_app
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
            told = {**MODEL, "kv_events": {"publisher": "zmq", "endpoint_port_base": port, "dp_size": 1}}
            replies = {"/ping": {}, "/server_info": told}
            async with (
                serving(json_app(replies)) as one,
                serving(json_app({"/ping": {}, "/server_info": MODEL})) as other,
            ):
                workers = WorkersConfig(
                    urls=(one, other), policy="cache_aware", parameters=CacheAwareParameters(kv_events=True)
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


class Fleet:
    """Workers, as the pool lists them and as a prober describes them."""

    def __init__(self, *urls: str) -> None:
        self.workers = {url: Worker(url) for url in urls}
        self.told: dict[str, bytes | ProbeResult | None] = dict.fromkeys(
            urls, b'{"kv_events":{"publisher":"zmq","endpoint_port_base":1,"dp_size":1}}'
        )
        self.asked: list[str] = []
        self.meanwhile: Callable[[Worker], None] = lambda worker: None
        for worker in self.workers.values():
            worker.state = WorkerState.HEALTHY

    def list(self) -> list[Worker]:
        return [*self.workers.values()]

    async def description(self, url: str, paths: Any) -> bytes | ProbeResult | None:
        self.asked.append(url)
        self.meanwhile(self.workers[url])
        return self.told[url]


@contextlib.asynccontextmanager
async def looking(fleet: Fleet) -> AsyncIterator[tuple[Callable[[], Any], KvSubscriptions]]:
    watch = KvWatch(fleet, fleet, KvIndex())  # type: ignore[arg-type]
    assert watch.subscriptions is not None
    try:
        yield lambda: watch.look(watch.subscriptions), watch.subscriptions  # type: ignore[arg-type]
    finally:
        await watch.subscriptions.close()


def test_a_worker_is_asked_again_only_after_it_was_away() -> None:
    """It may publish no more, or elsewhere."""

    async def main() -> None:
        fleet = Fleet("http://127.0.0.1:1", "http://127.0.0.1:2")
        one, other = fleet.workers
        async with looking(fleet) as (look, subscriptions):
            await look()
            await look()
            assert sorted(fleet.asked) == [one, other]
            assert subscriptions.urls == {one, other}
            fleet.workers[one].state = WorkerState.QUARANTINED
            fleet.told[one] = b"{}"
            await look()
            assert one in subscriptions.urls, "it may be back in a moment"
            fleet.workers[one].state = WorkerState.HEALTHY
            await look()
            assert fleet.asked[2:] == [one]
            assert subscriptions.urls == {other}
            del fleet.workers[other]
            await look()
            assert not subscriptions.urls

    asyncio.run(main())


def test_a_worker_with_other_ranks_than_before_is_asked_again() -> None:
    """Each rank that is a target has a cache of its own."""

    async def main() -> None:
        fleet = Fleet("http://127.0.0.1:1")
        (url,) = fleet.workers
        fleet.told[url] = b'{"kv_events":{"publisher":"zmq","endpoint_port_base":1,"dp_size":2}}'
        async with looking(fleet) as (look, subscriptions):
            for targets, separate in ((1, False), (2, True), (3, False), (2, True)):
                fleet.workers[url].split(targets)
                await look()
                await look()
                assert subscriptions._index.is_separate(url) is separate
            assert len(fleet.asked) == 4

    asyncio.run(main())


def test_a_worker_that_may_have_been_restarted_is_asked_again() -> None:
    """Its connections broke, and it was back before a probe found it away."""

    async def main() -> None:
        fleet = Fleet("http://127.0.0.1:1")
        (url,) = fleet.workers
        async with looking(fleet) as (look, subscriptions):
            await look()
            assert subscriptions.urls == {url}
            fleet.workers[url].doubts += 1
            fleet.told[url] = b"{}"
            await look()
            await look()
            assert fleet.asked == [url, url]
            assert not subscriptions.urls

    asyncio.run(main())


def test_a_worker_that_says_it_has_very_many_ranks_is_not_followed() -> None:
    """Each would take three sockets."""

    async def main() -> None:
        fleet = Fleet("http://127.0.0.1:1")
        (url,) = fleet.workers
        fleet.told[url] = b'{"kv_events":{"publisher":"zmq","endpoint_port_base":1,"dp_size":60000}}'
        async with looking(fleet) as (look, subscriptions):
            await look()
            assert not subscriptions.urls

    asyncio.run(main())


def test_a_worker_that_goes_away_while_it_is_asked_is_asked_again() -> None:
    """What it said may be from before its restart, even if it is back at the next look."""

    async def main() -> None:
        fleet = Fleet("http://127.0.0.1:1")
        (url,) = fleet.workers

        def gone(worker: Worker) -> None:
            worker.state = WorkerState.QUARANTINED

        async with looking(fleet) as (look, subscriptions):
            fleet.meanwhile = gone
            await look()
            assert not subscriptions.urls
            fleet.meanwhile = lambda worker: None
            fleet.workers[url].state = WorkerState.HEALTHY
            await look()
            assert fleet.asked == [url, url]
            assert url in subscriptions.urls

    asyncio.run(main())


def test_a_worker_that_does_not_answer_is_asked_again_after_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.kv_cache.watch.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("router.kv_cache.watch.LONGEST_WAIT_SECONDS", 0.15)

    async def main() -> None:
        fleet = Fleet("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3")
        one, none, other = fleet.workers
        publishes, fleet.told[one] = fleet.told[one], ProbeResult("no answer within 5 s")
        fleet.told[none] = None
        async with looking(fleet) as (look, subscriptions), asyncio.timeout(20):
            clock, asked = asyncio.get_running_loop().time, list[float]()
            fleet.meanwhile = lambda worker: asked.append(clock()) if worker.url == one else None
            while len(asked) < 4:
                await look()
                await asyncio.sleep(0.001)
            pauses = [after - before for before, after in itertools.pairwise(asked)]
            assert all(pause >= least for pause, least in zip(pauses, (0.05, 0.1, 0.15), strict=True))
            workers = fleet.workers
            assert workers[one].kv_events == KvFollowing(KvState.UNKNOWN, "no answer within 5 s")
            assert workers[none].kv_events == KvFollowing(KvState.NONE)
            assert workers[other].kv_events == KvFollowing(KvState.CONNECTING)
            fleet.told[one] = publishes
            while one not in subscriptions.urls:
                await look()
                await asyncio.sleep(0.001)
            await look()
            assert workers[one].kv_events == KvFollowing(KvState.CONNECTING)
            assert fleet.asked.count(none) == fleet.asked.count(other) == 1

    asyncio.run(main())


def test_a_worker_whose_description_failed_once_is_followed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """`GET /workers` and the metrics tell how far it is."""
    monkeypatch.setattr("router.kv_cache.watch.LOOK_SECONDS", 0.02)

    async def main() -> None:
        async with publisher() as (_, port):
            told = {**MODEL, "kv_events": {"publisher": "zmq", "endpoint_port_base": port, "dp_size": 1}}
            described = json_app({"/ping": {}, "/model_info": MODEL, "/server_info": told})
            broken = True

            async def worker(scope: Scope, receive: Receive, send: Send) -> None:
                if broken and scope["path"] == "/server_info":
                    await send_json(send, 500, b"{}")
                else:
                    await described(scope, receive, send)

            async with serving(worker) as url:
                workers = WorkersConfig(
                    urls=(url,), policy="cache_aware", parameters=CacheAwareParameters(kv_events=True)
                )
                app = create_app(RouterConfig(workers=workers, middlewares=()))
                async with serving(app) as router, aiohttp.ClientSession(router) as client:

                    async def shown() -> tuple[Any, str]:
                        async with client.get("/workers") as reply, client.get("/metrics") as metrics:
                            return (await reply.json())["workers"][0]["kv_events"], await metrics.text()

                    await until(lambda: app.pool.list()[0].kv_events is not None)
                    found, metrics = await shown()
                    assert found == {"state": "unknown", "error": "GET /server_info is answered with 500"}
                    assert 'tito_router_kv_workers{state="unknown"} 1.0' in metrics
                    broken = False
                    connected = KvFollowing(KvState.CONNECTED)
                    await until(lambda: app.pool.list()[0].kv_events == connected)
                    found, metrics = await shown()
                    assert found == {"state": "connected", "error": None}
                    assert 'tito_router_kv_workers{state="unknown"} 0.0' in metrics
                    assert 'tito_router_kv_workers{state="connected"} 1.0' in metrics

    asyncio.run(main())


def test_without_the_flag_no_worker_is_followed() -> None:
    app = create_app(RouterConfig(workers=WorkersConfig(policy="cache_aware"), middlewares=()))
    policy = app.pool._policy
    assert isinstance(policy, CacheAware)
    assert policy.index is None
