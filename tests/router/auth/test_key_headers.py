"""A key of this router never reaches a worker, in whatever header it came; where there are none, keys are the workers' own."""

from __future__ import annotations

import asyncio

import pytest

from router.config import ServerConfig
from tests.router.conftest import EchoWorker, running
from tests.support.serving import serving

KEYS = ServerConfig(api_keys=("a:one",), admin_keys=("all",))
HEADERS = [{"authorization": "Bearer all"}, {"x-api-key": "all"}, {"authorization": "Bearer all", "x-api-key": "mine"}]
CALLS = [("POST", "/v1/messages"), ("POST", "/generate"), ("POST", "/continue_generation"), ("GET", "/v1/models")]


async def told(server: ServerConfig, method: str, path: str, headers: dict[str, str]) -> dict[str, str]:
    """The headers that the worker got."""
    worker = EchoWorker()
    async with serving(worker) as url, running([url], server=server) as router:
        body = None if method == "GET" else {"text": "a"}
        async with router.client.request(method, path, json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
    (seen,) = [one for one in worker.seen if one["raw_path"] == path]
    return dict(seen["headers"])


@pytest.mark.parametrize("headers", HEADERS, ids=["bearer", "as Anthropic's clients", "both"])
@pytest.mark.parametrize(("method", "path"), CALLS)
def test_workers_are_told_no_key(method: str, path: str, headers: dict[str, str]) -> None:
    found = asyncio.run(told(KEYS, method, path, headers))
    assert not {"authorization", "x-api-key"} & found.keys()


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_without_keys_here_they_are_the_workers_own(method: str, path: str) -> None:
    headers = {"authorization": "Bearer theirs", "x-api-key": "theirs"}
    found = asyncio.run(told(ServerConfig(), method, path, headers))
    assert {name: found.get(name) for name in headers} == headers
