"""A router that is asked by itself notices, whichever way the question came."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from router.config import ServerConfig
from router.http.request_state import Requests
from router.observability.metrics import RouterMetrics
from router.serving.entrance import INSTANCE, Entrance, Instance
from router.workers.probe import loop_refusal
from tests.router.conftest import EchoWorker, running
from tests.support.serving import serving


def asking(instance: Instance) -> dict[str, str]:
    """The headers of its question."""
    return {name.decode(): value.decode() for name, value in instance.headers}


def checked(app: ASGIApp, instance: Instance) -> ASGIApp:
    """The entrance of the router that asks, with no other check, and `app` behind it."""
    return Entrance(app, [instance], RouterMetrics(CollectorRegistry()), Requests(), body_timeout=5.0)


def test_its_own_question_is_known() -> None:
    """Any other one goes on, that of another router, too."""

    async def main() -> None:
        mine, inside = Instance(), EchoWorker()
        async with serving(checked(inside, mine)) as url, aiohttp.ClientSession() as client:
            async with client.get(f"{url}/server_info", headers=asking(mine)) as reply:
                assert reply.status == 508
                assert (await reply.json())["error"]["type"] == "loop"
                assert loop_refusal(url, reply.status) is not None
            for headers in ({}, asking(Instance()), {INSTANCE.decode(): ""}):
                async with client.get(f"{url}/x", headers=headers) as reply:
                    assert reply.status == 200
                    assert loop_refusal(url, reply.status) is None
            assert [seen["raw_path"] for seen in inside.seen] == ["/x"] * 3

    asyncio.run(main())


def test_a_question_passes_through_other_routers() -> None:
    """So a ring of two is found as well: the other one's worker is who asks."""

    async def main() -> None:
        mine = Instance()
        async with (
            serving(checked(EchoWorker(), mine)) as url,
            running([url]) as other,
            other.client.get("/v1/models", headers=asking(mine)) as reply,
        ):
            assert reply.status == 508

    asyncio.run(main())


def test_every_process_is_another_one() -> None:
    assert Instance().headers != Instance().headers


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]"])
@pytest.mark.parametrize("keys", [(), ("k",)])
@pytest.mark.parametrize("path", ["/add_worker", "/workers"])
def test_a_router_is_no_worker_of_its_own(host: str, keys: tuple[str, ...], path: str) -> None:
    """By whatever name; and its own key does not stand in the way."""

    async def main() -> None:
        async with running(server=ServerConfig(api_keys=keys)) as router:
            url = f"http://{host}:{router.url.rsplit(':', 1)[1]}"
            headers = {"authorization": "Bearer k"} if keys else {}
            async with router.client.post(path, json={"url": url}, headers=headers) as reply:
                assert reply.status == 400
                assert "leads back to this router" in (await reply.json())["error"]["message"]
            assert router.app.pool.list() == ()

    asyncio.run(main())


def test_two_routers_are_not_each_others_workers() -> None:
    async def main() -> None:
        async with running() as one, running() as other:
            async with one.client.post("/add_worker", json={"url": other.url}) as reply:
                assert reply.status == 200
            async with other.client.post("/add_worker", json={"url": one.url}) as reply:
                assert reply.status == 400

    asyncio.run(main())
