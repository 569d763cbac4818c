"""The client towards the workers: what it writes, how it reads, what its sockets are told, and which connections it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from router.http.headers import retry_after
from router.http.upstream import (
    KEEPALIVE_SECONDS,
    AiohttpUpstream,
    ClosedBeforeReplyError,
    ConnectFailedError,
    NotHttpError,
    UpstreamBrokenError,
    UpstreamResponse,
)
from router.serving.server import new_event_loop
from tests.router.conftest import GatedWorker
from tests.support.serving import read_request, serving, serving_socket


@pytest.mark.parametrize("fresh", [False, True])
def test_a_machine_that_is_gone_is_noticed(fresh: bool) -> None:
    """Its system does not answer to keep-alives, after which the connection is reset: read off the sockets themselves."""

    async def main() -> None:
        async with serving(GatedWorker(first=b"begun")) as url, AiohttpUpstream(connect_timeout=5) as upstream:
            response = await upstream.send("GET", url + "/x", [], fresh=fresh)
            connection = response._connection  # type: ignore[attr-defined]
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
            protocol = first._connection.protocol  # type: ignore[attr-defined]
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
    assert retry_after([(b"Retry-After", said)]) is None


Run = Callable[[Coroutine[Any, Any, None]], None]


def _by_ours(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main)


both_loops = pytest.mark.parametrize("run", [asyncio.run, _by_ours], ids=["asyncio", "ours"])

LARGE = b"0123456789abcdef" * (2 * 1024 * 1024)
"""32 MiB: far more than the buffers of a connection hold."""


async def all_of(reply: UpstreamResponse) -> bytes:
    pieces = []
    while piece := await reply.read():
        pieces.append(piece)
    return b"".join(pieces)


class Scripted:
    """A worker that keeps the requests it read, and answers each with the next of its replies, in bytes."""

    def __init__(self, *replies: bytes) -> None:
        self.replies = [*replies]
        self.heads: list[bytes] = []
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while self.replies:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                if length:
                    await reader.readexactly(int(length[0].split(b":")[1]))
                self.heads.append(head)
                writer.write(self.replies.pop(0))


def _against(worker: Scripted, use: Callable[[AiohttpUpstream, str], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), serving_socket(worker) as url, AiohttpUpstream(connect_timeout=5) as upstream:
            await use(upstream, url)

    asyncio.run(main())


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def test_a_request_arrives_in_the_bytes_in_which_it_came() -> None:
    worker = Scripted(OK)
    headers = [(b"x-name", "Zoë".encode("latin-1")), (b"x-name", "Zoë".encode()), (b"Accept", b"*/*")]

    async def use(upstream: AiohttpUpstream, url: str) -> None:
        reply = await upstream.send("POST", url + "/a%2Fb?c=%20&d=\xe9", headers, b"body")
        assert await all_of(reply) == b"ok"
        host = url.removeprefix("http://").encode()
        assert worker.heads == [
            b"POST /a%2Fb?c=%20&d=\xe9 HTTP/1.1\r\nHost: " + host + b"\r\nx-name: Zo\xeb\r\nx-name: Zo\xc3\xab\r\n"
            b"Accept: */*\r\nContent-Length: 4\r\n\r\n"
        ]

    _against(worker, use)


@pytest.mark.parametrize(
    ("method", "body", "length"),
    [("GET", None, None), ("HEAD", None, None), ("POST", None, b"0"), ("POST", b"", b"0"), ("DELETE", None, b"0")],
)
def test_the_length_of_a_body_is_said_where_there_could_be_one(
    method: str, body: bytes | None, length: bytes | None
) -> None:
    worker = Scripted(b"HTTP/1.1 204 No Content\r\n\r\n")

    async def use(upstream: AiohttpUpstream, url: str) -> None:
        assert await all_of(await upstream.send(method, url, [], body)) == b""
        assert (b"Content-Length: %b\r\n" % length in worker.heads[0]) if length else b"ength" not in worker.heads[0]
        assert worker.heads[0].startswith(f"{method} / HTTP/1.1\r\n".encode())

    _against(worker, use)


@pytest.mark.parametrize("where", ["name", "value", "target", "method"])
def test_nothing_smuggles_a_line_into_a_head(where: str) -> None:
    worker = Scripted()

    async def use(upstream: AiohttpUpstream, url: str) -> None:
        evil = "x\r\nx-evil: 1"
        pair = (evil.encode() if where == "name" else b"name", evil.encode() if where == "value" else b"value")
        target = f"/{evil}" if where == "target" else "/"
        with pytest.raises(ValueError, match="line break"):
            await upstream.send(evil if where == "method" else "GET", url + target, [pair])
        assert worker.connections == 0

    _against(worker, use)


def test_what_has_no_body_leaves_its_connection_to_the_next_request() -> None:
    """The interim replies before a reply are passed over, and are no replies."""
    replies = (
        b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
        OK,
    )
    worker = Scripted(*replies)

    async def use(upstream: AiohttpUpstream, url: str) -> None:
        found = []
        for method in ("GET", "GET", "GET", "HEAD", "GET", "GET"):
            reply = await upstream.send(method, url + "/x", [])
            found.append((reply.status, await all_of(reply)))
            reply.close()
        assert found == [(200, b"ok"), (204, b""), (304, b""), (200, b""), (200, b"ok"), (200, b"ok")]
        assert worker.connections == 1

    _against(worker, use)


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", NotHttpError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", NotHttpError),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", NotHttpError),
        (b"HTTP/1.1 200 OK\r\ncontent", ClosedBeforeReplyError),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n", ClosedBeforeReplyError),
        (b"", ClosedBeforeReplyError),
    ],
)
def test_a_reply_that_is_none_says_so(reply: bytes, failure: type[Exception]) -> None:
    async def use(upstream: AiohttpUpstream, url: str) -> None:
        with pytest.raises(failure):
            await upstream.send("GET", url + "/x", [])

    _against(Scripted(reply), use)


def test_a_host_that_does_not_answer_is_no_connection() -> None:
    """As a full backlog does, which is silent like a firewall."""

    async def main() -> None:
        with socket.socket() as listener, contextlib.ExitStack() as others:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            for _ in range(4):
                other = others.enter_context(socket.socket())
                other.setblocking(False)
                other.connect_ex(listener.getsockname())
            async with AiohttpUpstream(connect_timeout=0.05) as upstream:
                with pytest.raises(ConnectFailedError):
                    await upstream.send("GET", f"http://127.0.0.1:{listener.getsockname()[1]}/x", [])

    asyncio.run(main())


@both_loops
@pytest.mark.parametrize("turns", range(4))
def test_a_connection_that_was_there_before_the_router_looked_counts(run: Run, turns: int) -> None:
    """The loop is held up for longer than connecting may take, in each of the turns that it takes."""

    async def main() -> None:
        async with serving(GatedWorker(first=b"begun")) as url, AiohttpUpstream(connect_timeout=0.1) as upstream:
            sending = asyncio.create_task(upstream.send("GET", url + "/x", []))
            for _ in range(turns):
                await asyncio.sleep(0)
            time.sleep(0.2)  # noqa: ASYNC251 - this is the lateness
            (await sending).close()

    run(main())


@both_loops
def test_connecting_has_its_turns_of_a_loop_that_is_always_late(run: Run) -> None:
    """Each turn of the loop takes a part of the limit, and all of them together take more."""

    async def main() -> None:
        async with serving(GatedWorker(first=b"begun")) as url, AiohttpUpstream(connect_timeout=0.1) as upstream:
            sending = asyncio.create_task(upstream.send("GET", url + "/x", []))
            while not sending.done():
                time.sleep(0.04)  # noqa: ASYNC251 - this is the lateness
                await asyncio.sleep(0)
            sending.result().close()

    run(main())


@both_loops
def test_a_large_body_arrives_whole_and_holds_nothing_up(run: Run) -> None:
    """Another request is answered while a worker that reads slowly has not read the body."""

    async def main() -> None:
        read = asyncio.Event()

        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                await read.wait()
                same = await reader.readexactly(len(LARGE)) == LARGE
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n" + (b"same" if same else b"else"))
            else:
                writer.write(OK)
            await reader.read()

        async with asyncio.timeout(30), serving_socket(worker) as url, AiohttpUpstream(connect_timeout=5) as upstream:
            large = asyncio.create_task(upstream.send("POST", url + "/x", [], LARGE))
            await asyncio.sleep(0)
            assert await all_of(await upstream.send("GET", url + "/x", [])) == b"ok"
            assert not large.done()
            read.set()
            assert await all_of(await large) == b"same"

    run(main())


@both_loops
def test_a_reply_before_the_request_is_read_counts_and_its_connection_ends(run: Run) -> None:
    """The rest of the request is still on its way: a worker would take what follows on this connection for a part of it."""

    async def main() -> None:
        connections = 0

        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 5\r\n\r\nlarge")
            await asyncio.Event().wait()

        async with asyncio.timeout(30), serving_socket(worker) as url, AiohttpUpstream(connect_timeout=5) as upstream:
            for _ in range(2):
                reply = await upstream.send("POST", url + "/x", [], LARGE)
                assert (reply.status, await all_of(reply)) == (413, b"large")
            assert connections == 2

    run(main())


@both_loops
@pytest.mark.parametrize("size", [4, len(LARGE)])
def test_a_worker_notices_at_once_that_nobody_waits_any_more(run: Run, size: int) -> None:
    """It may not have read the request yet: what is unsent is not sent first."""

    async def main() -> None:
        begun, over = asyncio.Event(), asyncio.Event()
        read = 0

        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal read
            await reader.readuntil(b"\r\n\r\n")
            begun.set()
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(65536):
                    read += len(piece)
            over.set()

        async with asyncio.timeout(30), serving_socket(worker) as url, AiohttpUpstream(connect_timeout=5) as upstream:
            asking = asyncio.create_task(upstream.send("POST", url + "/x", [], LARGE[:size]))
            await begun.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await over.wait()
            assert read < len(LARGE) or size < len(LARGE)

    run(main())


@pytest.mark.parametrize(
    ("kind", "body", "fits"),
    [
        ("application/json", b"x" * 100, True),
        ("application/json", b"x\n" * 50 + b"x", False),
        ("text/event-stream", b"data: x\n\n" * 50, True),
        ("text/event-stream", b"data: x\n\ndata: " + b"x" * 100, False),
    ],
)
def test_a_reply_or_an_event_has_a_largest_size(kind: str, body: bytes, fits: bool) -> None:
    """A worker that never ends its reply must not take all memory."""

    async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n\r\n" % kind.encode())
        for at in range(0, len(body), 9):
            writer.write(body[at : at + 9])
            await asyncio.sleep(0)
        if not fits:
            await reader.read()

    async def main() -> None:
        limited = AiohttpUpstream(connect_timeout=5, max_reply=100)
        async with asyncio.timeout(30), serving_socket(worker) as url, limited as upstream:
            with contextlib.closing(await upstream.send("GET", url + "/x", [])) as reply:
                if fits:
                    assert await all_of(reply) == body
                else:
                    with pytest.raises(UpstreamBrokenError, match="longer than 100 bytes"):
                        await all_of(reply)

    asyncio.run(main())
