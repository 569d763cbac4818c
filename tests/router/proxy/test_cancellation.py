"""Clients that leave: the worker's request ends, and the worker counts as free again."""

from __future__ import annotations

import asyncio

import pytest

from tests.router import slow_middleware
from tests.router.conftest import EchoWorker, GatedWorker, Running, running
from tests.support.serving import serving

REQUEST = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


async def connect(router: Running, path: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(router.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST % path)
    return reader, writer


@pytest.mark.parametrize("path", [b"/generate", b"/v1/other"])
@pytest.mark.parametrize("end", ["close", "abort"])
def test_client_leaves_while_waiting(path: bytes, end: str) -> None:
    async def main() -> None:
        worker = GatedWorker()
        async with serving(worker) as url, running([url]) as router:
            _, writer = await connect(router, path)
            await worker.wait_for_arrivals(1)
            assert router.inflight() == 1
            writer.close() if end == "close" else writer.transport.abort()
            await worker.wait_for_disconnects(1)
            await router.idle()

    asyncio.run(main())


@pytest.mark.parametrize("end", ["close", "abort"])
def test_client_leaves_in_mid_stream(end: str) -> None:
    async def main() -> None:
        worker = GatedWorker(first=b"data: 1\n\n")
        async with serving(worker) as url, running([url]) as router:
            reader, writer = await connect(router, b"/generate")
            await reader.readuntil(b"data: 1\n\n")
            assert router.inflight() == 1
            writer.close() if end == "close" else writer.transport.abort()
            await worker.wait_for_disconnects(1)
            await router.idle()
            async with router.client.get("/metrics") as reply:
                assert 'tito_router_requests_total{route="generate",status="client_left"} 1.0' in await reply.text()

    asyncio.run(main())


def test_client_leaves_in_mid_upload() -> None:
    """No worker has heard of it."""

    async def main() -> None:
        worker = EchoWorker()
        async with serving(worker) as url, running([url]) as router, asyncio.timeout(30):
            port = int(router.url.rsplit(":", 1)[1])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"PUT /upload HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nonly this")
            writer.close()
            left = ""
            while 'route="other",status="client_left"' not in left:
                left = await (await router.client.get("/metrics")).text()
            assert not worker.seen
            await router.idle()

    asyncio.run(main())


def test_many_clients_leave_at_once() -> None:
    async def main() -> None:
        worker = GatedWorker(first=b"data: 1\n\n")
        async with serving(worker) as url, running([url]) as router:
            clients = [await connect(router, b"/generate") for _ in range(50)]
            await worker.wait_for_arrivals(50)
            for _, writer in clients:
                writer.transport.abort()
            await worker.wait_for_disconnects(50)
            await router.idle()

    asyncio.run(main())


def test_reply_that_ended_is_no_client_that_left() -> None:
    """A server reports every client as gone once the reply is complete; a middleware may still be at work then."""

    async def main() -> None:
        worker = GatedWorker()
        worker.release()
        async with serving(worker) as url, running([url], middlewares=("tests.router.slow_middleware:Slow",)) as router:
            async with router.client.post("/generate", data=b"{}") as reply:
                assert await reply.read() == b"rest"
            async with asyncio.timeout(30):
                await slow_middleware.finished.wait()
            await router.idle()
            async with router.client.get("/metrics") as reply:
                assert 'tito_router_requests_total{route="generate",status="200"} 1.0' in await reply.text()

    asyncio.run(main())
