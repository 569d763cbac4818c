"""A key of this router never reaches a worker, in whatever header it came; where there are none, keys are the workers' own."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from yarl import URL

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


GOOGLES = "/v1beta/models/m:generateContent"


async def asked(server: ServerConfig, target: str, headers: dict[str, str]) -> tuple[int, list[dict[str, Any]]]:
    """The status of a request, and what the worker got, apart from what the router asks by itself."""
    worker = EchoWorker()
    async with (
        serving(worker) as url,
        running([url], server=server) as router,
        router.client.post(URL(target, encoded=True), json={}, headers=headers) as reply,
    ):
        await reply.read()
    return reply.status, [one for one in worker.seen if one["raw_path"].startswith(GOOGLES)]


@pytest.mark.parametrize("server", [KEYS, ServerConfig()], ids=["keys", "no keys"])
@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("", {"x-goog-api-key": "one"}),
        ("?key=one", {}),
        ("?alt=sse&key=one&a=%20+b", {}),
        ("?%6bey=one", {}),
        ("?key=two&key=one", {"x-goog-api-key": "one"}),
        ("?key=%6Fne", {}),
    ],
)
def test_googles_keys_count_and_stay_here(
    server: ServerConfig, query: str, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "router"):
        status, seen = asyncio.run(asked(server, GOOGLES + query, headers))
    assert status == 200
    (found,) = seen
    assert found["query"] == ("alt=sse&a=%20+b" if "alt" in query else "")
    assert "x-goog-api-key" not in dict(found["headers"])
    assert "key=" not in caplog.text


@pytest.mark.parametrize("target", [GOOGLES, f"{GOOGLES}?key=wrong", "/generate?key=one"])
def test_without_one_nobody_gets_in(target: str) -> None:
    """Elsewhere than at Google's paths, `key` is no key."""
    assert asyncio.run(asked(KEYS, target, {})) == (401, [])


def test_elsewhere_it_is_a_workers_own() -> None:
    async def query() -> str:
        worker = EchoWorker()
        async with serving(worker) as url, running([url]) as router, router.client.get("/get_thing?key=a") as reply:
            assert reply.status == 200
        return str(next(one["query"] for one in worker.seen if one["raw_path"] == "/get_thing"))

    assert asyncio.run(query()) == "key=a"
