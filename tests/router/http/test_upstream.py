"""The client towards the workers: what its sockets are told, and which connections it keeps."""

from __future__ import annotations

import asyncio
import socket

import pytest

from router.http.upstream import KEEPALIVE_SECONDS, AiohttpUpstream, retry_after
from tests.router.conftest import GatedWorker
from tests.support.serving import read_request, serving, serving_socket


@pytest.mark.parametrize("fresh", [False, True])
def test_a_machine_that_is_gone_is_noticed(fresh: bool) -> None:
    """Its system does not answer to keep-alives, after which the connection is reset: read off the sockets themselves."""

    async def main() -> None:
        async with serving(GatedWorker(first=b"begun")) as url, AiohttpUpstream(connect_timeout=5) as upstream:
            response = await upstream.send("GET", url + "/x", [], fresh=fresh)
            connection = response._response.connection  # type: ignore[attr-defined]
            one = connection.transport.get_extra_info("socket")
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            if hasattr(socket, "TCP_KEEPIDLE"):
                idle, every, count = (
                    one.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert idle + every * count == 2 * KEEPALIVE_SECONDS
            response.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "late",
    [
        b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 4\r\n\r\nlate",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nlate",
    ],
)
def test_what_comes_on_an_idle_connection_answers_no_later_request(late: bytes) -> None:
    async def main() -> None:
        connections = 0
        begun, over = asyncio.Event(), asyncio.Event()

        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
            await begun.wait()
            writer.write(b"right")
            await over.wait()
            writer.write(late)
            await reader.read()

        async with asyncio.timeout(30), serving_socket(worker) as url, AiohttpUpstream(connect_timeout=5) as upstream:
            first = await upstream.send("GET", url + "/x", [])
            protocol = first._response.connection.protocol  # type: ignore[attr-defined]
            begun.set()
            assert (await first.read(), await first.read()) == (b"right", b"")
            over.set()
            while not protocol.should_close:  # noqa: ASYNC110 - until the late bytes have come
                await asyncio.sleep(0)
            over.clear()
            second = await upstream.send("GET", url + "/x", [])
            assert (second.status, await second.read()) == (200, b"right")
            assert connections == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    "said", [b"soon", b"-1", b"\xb2", b"Mon, 01 Jan 2026 00:00:00 +" + b"9" * 20, b"Mon, 01 Jan 99999 00:00:00 GMT"]
)
def test_a_wish_to_be_asked_later_that_makes_no_sense_is_none(said: bytes) -> None:
    class Refusal:
        status = 503
        headers = ((b"Retry-After", said),)

        async def read(self) -> bytes:
            return b""

        def close(self) -> None:
            pass

    assert retry_after(Refusal()) is None
