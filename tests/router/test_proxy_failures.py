"""Workers that fail: before the client was told anything, and after."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import pytest

from tests.router.conftest import EchoWorker, running
from tests.support.serving import SocketHandler, dead_url, read_request, serving, serving_socket

GENERATE = b'{"rid":"r","text":"hello"}'
STREAM = b'{"text": "hello", "stream": true}'


def test_no_worker_says_what_to_do() -> None:
    async def main() -> None:
        async with running() as router:
            for path in ("/generate", "/v1/other"):
                async with router.client.post(path, data=GENERATE) as reply:
                    assert reply.status == 503
                    error = (await reply.json())["error"]
                    assert error["type"] == "no_worker"
                    assert error["code"] == 503
                    assert "POST /add_worker?url=" in error["message"]

    asyncio.run(main())


def test_dead_worker_is_passed_over() -> None:
    """Whatever the method: nothing was sent. Each worker is asked once."""

    async def main() -> None:
        worker = EchoWorker()
        async with serving(worker) as url, running([dead_url(), dead_url(), url], policy="round_robin") as router:
            for method, path in (("POST", "/generate"), ("POST", "/upload"), ("GET", "/x"), ("DELETE", "/y")):
                data = GENERATE if method == "POST" else None
                async with router.client.request(method, path, data=data) as reply:
                    assert reply.status == 200
                    assert (await reply.json(content_type=None))["body"] == (data or b"").decode()
            assert len(worker.seen) == 4
            await router.idle()

    asyncio.run(main())


def test_all_workers_dead_names_them() -> None:
    async def main() -> None:
        urls = [dead_url(), dead_url()]
        async with running(urls) as router:
            async with router.client.post("/generate", data=GENERATE) as reply:
                assert reply.status == 502
                error = (await reply.json())["error"]
                assert error["type"] == "worker_error"
                assert len(error["tried"]) == 2
                for url in urls:
                    assert url in error["message"]
            assert router.inflight() == 0

    asyncio.run(main())


class ClosingWorker:
    """Keeps connections alive, but closes each when its second request comes (or at once)."""

    def __init__(self, *, drop: str = "second") -> None:
        self.drop = drop
        self.connections = 0
        self.requests = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        served = 0
        while True:
            head, body = await read_request(reader)
            if any(path in head.split("\r\n")[0] for path in ("server_info", "/ping", "model_info")):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
                return
            self.requests += 1
            if self.drop == "always" or (self.drop == "second" and served == 1):
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            served += 1


@pytest.mark.parametrize(("method", "path"), [("POST", "/generate"), ("GET", "/x"), ("POST", "/upload")])
def test_stale_connection_costs_nothing(method: str, path: str) -> None:
    """The only worker closes a kept-alive connection just when it is used again: the answer comes all the same."""

    async def main() -> None:
        worker = ClosingWorker()
        data = GENERATE if method == "POST" else None
        async with serving_socket(worker) as url, running([url]) as router:
            for _ in range(4):
                async with router.client.request(method, path, data=data) as reply:
                    assert reply.status == 200
                    assert await reply.read() == (data or b"")
            await router.idle()

    asyncio.run(main())


def test_stale_connections_of_all_workers_cost_nothing() -> None:
    async def main() -> None:
        workers = [ClosingWorker() for _ in range(3)]
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(serving_socket(worker)) for worker in workers]
            router = await stack.enter_async_context(running(urls, policy="round_robin"))
            for _ in range(12):
                async with router.client.post("/generate", data=GENERATE) as reply:
                    assert reply.status == 200
            await router.idle()

    asyncio.run(main())


def test_request_that_kills_workers_does_not_kill_them_all() -> None:
    async def main() -> None:
        workers = [ClosingWorker(drop="always") for _ in range(6)]
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(serving_socket(worker)) for worker in workers]
            router = await stack.enter_async_context(running(urls))
            async with router.client.post("/generate", data=GENERATE) as reply:
                assert reply.status == 502
                assert len((await reply.json())["error"]["tried"]) == 3
            assert sum(worker.requests for worker in workers) == 3
            await router.idle()

    asyncio.run(main())


def test_post_that_is_no_generation_is_sent_once() -> None:
    async def main() -> None:
        workers = [ClosingWorker(drop="always") for _ in range(2)]
        async with serving_socket(workers[0]) as one, serving_socket(workers[1]) as two, running([one, two]) as router:
            async with router.client.post("/update_weights", data=b"{}") as reply:
                assert reply.status == 502
            assert sum(worker.requests for worker in workers) == 1

    asyncio.run(main())


def test_worker_that_breaks_before_its_first_byte_is_replaced() -> None:
    """The head of a reply came, nothing of its body: the client has been told nothing yet."""

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        if "generate" in head:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
            await writer.drain()

    async def main() -> None:
        worker = EchoWorker()
        async with (
            serving_socket(broken) as bad,
            serving(worker) as good,
            running([bad, good], policy="round_robin") as router,
        ):
            for _ in range(2):
                async with router.client.post("/generate", data=GENERATE) as reply:
                    assert reply.status == 200
                    assert reply.headers["x-router-worker"] == good
            await router.idle()

    asyncio.run(main())


def half_a_reply(framing: str) -> SocketHandler:
    """A worker that breaks off in the middle of a reply."""

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        if "generate" in head:
            piece = b"5\r\nhello\r\n" if "chunked" in framing else b"hello"
            writer.write(b"HTTP/1.1 200 OK\r\n" + framing.encode() + b"\r\n\r\n" + piece)
            await writer.drain()

    return broken


@pytest.mark.parametrize("framing", ["content-length: 100", "transfer-encoding: chunked"])
def test_break_in_mid_reply_is_made_good_where_the_client_waits_for_all_of_it(framing: str) -> None:
    async def main() -> None:
        async with (
            serving_socket(half_a_reply(framing)) as bad,
            serving(EchoWorker()) as good,
            running([bad, good], policy="round_robin") as router,
        ):
            for _ in range(2):
                async with router.client.post("/generate", data=GENERATE) as reply:
                    assert reply.status == 200
                    assert reply.headers["x-router-worker"] == good
            await router.idle()

    asyncio.run(main())


@pytest.mark.parametrize("framing", ["content-length: 100", "transfer-encoding: chunked"])
def test_break_in_mid_reply_is_seen_by_the_client(framing: str) -> None:
    """A reply must never look complete when it is not."""

    async def main() -> None:
        async with serving_socket(half_a_reply(framing)) as url, running([url]) as router:
            async with router.client.post("/generate", data=STREAM) as reply:
                assert reply.status == 200
                with pytest.raises(aiohttp.ClientPayloadError):
                    await reply.read()
            await router.idle()
            async with router.client.get("/metrics") as reply:
                assert 'tito_router_requests_total{route="generate",status="broken"} 1.0' in await reply.text()

    asyncio.run(main())
