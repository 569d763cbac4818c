"""Connections to workers: which are used again, and what is sent on them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from router.http.client import pool
from router.http.client.pool import PooledUpstream
from router.http.upstream import ClosedBeforeReplyError, ConnectFailedError, UpstreamBrokenError, fetch
from tests.support.serving import dead_url, read_request, serving_socket

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
Answer = Callable[[int, str, asyncio.StreamWriter], Awaitable[bool]]
"""Answers a request: the number of its connection, its head, where to write. Returns whether the connection goes on."""


class Worker:
    """Notes each request with the number of its connection."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.requests: list[tuple[int, str]] = []
        self.bodies: list[bytes] = []
        self.lost = 0
        self._answer = answer
        self._connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number = self._connections
        try:
            while True:
                head, body = await read_request(reader)
                self.requests.append((number, head))
                self.bodies.append(body)
                if self._answer is None:
                    writer.write(OK)
                elif not await self._answer(number, head, writer):
                    return
        finally:
            self.lost += 1

    @property
    def connections(self) -> list[int]:
        return [number for number, _ in self.requests]


@contextlib.asynccontextmanager
async def upstream_to(worker: Worker) -> AsyncIterator[tuple[PooledUpstream, str]]:
    async with asyncio.timeout(10), serving_socket(worker) as url, PooledUpstream(connect_timeout=5) as upstream:
        yield upstream, url


def test_a_connection_serves_one_request_after_another() -> None:
    async def main() -> None:
        worker = Worker()
        async with upstream_to(worker) as (upstream, url):
            for _ in range(3):
                assert await fetch(upstream, "POST", f"{url}/x", [], b"body") == (200, b"ok")
            await asyncio.gather(*(fetch(upstream, "GET", url, []) for _ in range(3)))
            assert worker.connections[:3] == [1, 1, 1]
            assert Counter(worker.connections) == {1: 4, 2: 1, 3: 1}

    asyncio.run(main())


def test_a_fresh_connection_is_new_and_the_last() -> None:
    async def main() -> None:
        worker = Worker()
        async with upstream_to(worker) as (upstream, url):
            await fetch(upstream, "GET", url, [])
            await fetch(upstream, "GET", url, [], fresh=True)
            await fetch(upstream, "GET", url, [])
            assert worker.connections == [1, 2, 1]
            closes = ["connection: close" in head for _, head in worker.requests]
            assert closes == [False, True, False]

    asyncio.run(main())


def test_what_is_sent() -> None:
    async def main() -> None:
        worker = Worker()
        async with upstream_to(worker) as (upstream, url):
            await fetch(
                upstream, "POST", f"{url}/a%2Fb?c=%20#d", [(b"X-Name", "ü".encode()), (b"x-name", b"\xff")], b"body"
            )
            await fetch(upstream, "DELETE", f"{url}/?x", [])
            await fetch(upstream, "GET", url, [])
        name = url.removeprefix("http://")
        assert [head for _, head in worker.requests] == [
            f"POST /a%2Fb?c=%20 HTTP/1.1\r\nhost: {name}\r\nX-Name: \xc3\xbc\r\nx-name: \xff\r\ncontent-length: 4\r\n\r\n",
            f"DELETE /?x HTTP/1.1\r\nhost: {name}\r\ncontent-length: 0\r\n\r\n",
            f"GET / HTTP/1.1\r\nhost: {name}\r\n\r\n",
        ]

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/a b", "/a\r\nx: y", "/ä", "/\x00"])
def test_what_is_no_target_is_not_sent(path: str) -> None:
    async def main() -> None:
        worker = Worker()
        async with upstream_to(worker) as (upstream, url):
            with pytest.raises(ConnectFailedError):
                await upstream.send("GET", url + path, [])
        assert not worker.requests

    asyncio.run(main())


@pytest.mark.parametrize("header", [(b"x", b"a\r\nb: c"), (b"x", b"a\nb"), (b"x\r\ny", b"a"), (b"x", b"\x00")])
def test_a_header_that_would_be_two_is_not_sent(header: tuple[bytes, bytes]) -> None:
    async def main() -> None:
        worker = Worker()
        async with upstream_to(worker) as (upstream, url):
            with pytest.raises(ConnectFailedError):
                await upstream.send("GET", url, [header])
        assert not worker.requests

    asyncio.run(main())


async def first_only(number: int, _: str, writer: asyncio.StreamWriter) -> bool:
    """Answers each connection's first request, and closes at the second one."""
    key = f"answered {number}"
    if getattr(writer, key, False):
        return False
    setattr(writer, key, True)
    writer.write(OK)
    return True


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_connection_that_closes_in_the_moment_of_use_costs_a_question_nothing(method: str) -> None:
    async def main() -> None:
        worker = Worker(first_only)
        async with upstream_to(worker) as (upstream, url):
            await fetch(upstream, "GET", url, [])
            assert (await fetch(upstream, method, url, []))[0] == 200
            assert worker.connections == [1, 1, 2]

    asyncio.run(main())


def test_it_is_said_that_the_lost_connection_was_a_kept_one() -> None:
    """What does something may have been done already, and is not sent again here."""

    async def main() -> None:
        worker = Worker(first_only)
        async with upstream_to(worker) as (upstream, url):
            await fetch(upstream, "POST", url, [], b"x")
            with pytest.raises(ClosedBeforeReplyError) as failed:
                await upstream.send("POST", url, [], b"x")
            assert failed.value.kept
            assert worker.connections == [1, 1]

        async def never(*_: object) -> bool:
            return False

        worker = Worker(never)
        async with upstream_to(worker) as (upstream, url):
            for method in ("POST", "GET"):
                with pytest.raises(ClosedBeforeReplyError) as failed:
                    await upstream.send(method, url, [])
                assert not failed.value.kept
            assert worker.connections == [1, 2]

    asyncio.run(main())


def test_a_connection_that_a_worker_closed_is_not_used() -> None:
    async def once(_: int, __: str, writer: asyncio.StreamWriter) -> bool:
        writer.write(OK)
        return False

    async def main() -> None:
        worker = Worker(once)
        async with upstream_to(worker) as (upstream, url):
            await fetch(upstream, "POST", url, [], b"x")
            await asyncio.sleep(0.05)
            await fetch(upstream, "POST", url, [], b"x")
            assert worker.connections == [1, 2]

    asyncio.run(main())


def test_a_connection_is_not_kept_for_longer_than_workers_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE_SECONDS", 0.05)

    async def main() -> None:
        worker = Worker()
        async with upstream_to(worker) as (upstream, url):
            await fetch(upstream, "GET", url, [])
            async with asyncio.timeout(2):
                while not worker.lost:  # noqa: ASYNC110 - closed by a timer of the pool
                    await asyncio.sleep(0.01)
            await fetch(upstream, "GET", url, [])
            assert worker.connections == [1, 2]

    asyncio.run(main())


def test_the_end_closes_all_connections() -> None:
    """Those with a reply on its way too."""

    async def slow(_: int, head: str, writer: asyncio.StreamWriter) -> bool:
        writer.write(OK if head.startswith("GET") else OK[:-1])
        return True

    async def main() -> None:
        worker = Worker(slow)
        async with serving_socket(worker) as url:
            async with PooledUpstream(connect_timeout=5) as upstream:
                await fetch(upstream, "GET", url, [])
                reply = await upstream.send("POST", url, [])
                await fetch(upstream, "GET", url, [])
                assert await reply.read() == b"o"
            with pytest.raises(UpstreamBrokenError):
                await reply.read()
            async with asyncio.timeout(2):
                while worker.lost < 2:  # noqa: ASYNC110 - the other end learns it from its own socket
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_large_body_arrives_whole() -> None:
    async def main() -> None:
        worker, body = Worker(), bytes(range(256)) * 20_000
        async with upstream_to(worker) as (upstream, url):
            for _ in range(2):
                await fetch(upstream, "POST", url, [], body)
            assert worker.bodies == [body, body]
            assert worker.connections == [1, 1]

    asyncio.run(main())


def test_who_leaves_in_the_middle_of_a_large_body_stops_it() -> None:
    async def main() -> None:
        read = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            read.set()
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await asyncio.sleep(0.05)
                await reader.readexactly(100_000_000)
                raise AssertionError("it was sent to its end")
            read.set()

        async with serving_socket(handler) as url, PooledUpstream(connect_timeout=5) as upstream:
            task = asyncio.create_task(upstream.send("POST", url, [], bytes(100_000_000)))
            await read.wait()
            read.clear()
            task.cancel()
            await asyncio.wait((task,))
            async with asyncio.timeout(5):
                await read.wait()

    asyncio.run(main())


def test_no_connection() -> None:
    async def main() -> None:
        async with PooledUpstream(connect_timeout=5) as upstream:
            with pytest.raises(ConnectFailedError):
                await upstream.send("GET", dead_url(), [])
            with pytest.raises(ConnectFailedError):
                await upstream.send("GET", "http://no-such-host.invalid", [])

    asyncio.run(main())


def test_a_connection_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(pool, "start_connection", hang)

    async def main() -> None:
        async with PooledUpstream(connect_timeout=0.05) as upstream:
            with pytest.raises(ConnectFailedError, match="within"):
                await upstream.send("GET", "http://127.0.0.1:1", [])

    asyncio.run(main())
