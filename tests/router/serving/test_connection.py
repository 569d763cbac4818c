"""The limits of a client's connection, seen from the other end of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import ClientDisconnectedError
from router.http.bodies import read_body
from router.http.disconnect import ClientConnection, ClientMessages, ServedClient, served_client
from router.http.request_state import Requests
from router.observability.metrics import RouterMetrics
from router.serving import server
from router.serving.connection import AHEAD, LimitedConnection, Limits, limited_by
from router.serving.entrance import Entrance
from tests.conftest import examples
from tests.router.conftest import EchoWorker, GatedWorker
from tests.support.serving import serving

LIMIT = 2048
PLENTY = 100


@dataclass
class Client:
    """One bare connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, *pieces: bytes) -> None:
        """Each on its way before the next one is written."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next one."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        else:
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body

    async def last_answer(self) -> tuple[int, dict[str, Any]]:
        """An error in the usual form, with nothing behind it."""
        status, headers, body = await self.answer()
        assert headers["connection"] == "close"
        assert headers["content-type"] == "application/json"
        assert await self.reader.read() == b""
        error = json.loads(body)["error"]
        assert error["code"] == status
        return status, error

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


Connect = Callable[[], Awaitable[Client]]


@contextlib.asynccontextmanager
async def limits(
    app: Any = None, *, connections: int = PLENTY, seconds: float = 30.0, idle: int = 60
) -> AsyncIterator[Connect]:
    """A server with limits, to which one can connect."""
    protocol = limited_by(Limits(max_header_bytes=LIMIT, max_connections=connections, header_seconds=seconds))
    async with asyncio.timeout(20), serving(app or EchoWorker(), protocol=protocol, keep_alive=idle) as url:
        clients: list[Client] = []

        async def connect() -> Client:
            clients.append(Client(*await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))))
            return clients[-1]

        try:
            yield connect
        finally:
            for client in clients:
                await client.close()


def head_of(size: int, *, body: bytes = b"") -> bytes:
    """The head of a request, so many bytes long."""
    start = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\nx-long: " % len(body)
    return start + b"a" * (size - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT])
@pytest.mark.parametrize("piece", [1, 700, 1 << 20])
def test_a_head_within_the_limit(size: int, piece: int) -> None:
    """In whatever pieces, the second one of a connection, too; and a body of any size behind it counts for nothing."""

    async def main() -> None:
        async with limits() as connect:
            client, body = await connect(), b"b" * (3 * LIMIT)
            raw = head_of(size, body=body) + body
            for _ in range(2):
                await client.say(*(raw[at : at + piece] for at in range(0, len(raw), piece)))
                status, _, seen = await client.answer()
                assert status == 200
                assert json.loads(seen)["body"] == body.decode()

    asyncio.run(main())


TOO_LONG = {
    "a byte too much": head_of(LIMIT + 1),
    "a long path": b"GET /" + b"a" * LIMIT + b" HTTP/1.1\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * LIMIT + b"\r\n",
    "a header without an end": b"GET / HTTP/1.1\r\na: " + b"b" * (1 << 20),
    "a name without an end": b"GET / HTTP/1.1\r\n" + b"b" * (1 << 20),
    "a path without an end": b"GET /" + b"b" * (1 << 20),
    "with a body": head_of(LIMIT + 1, body=b"b" * 100) + b"b" * 100,
}


@pytest.mark.parametrize("raw", TOO_LONG.values(), ids=list(TOO_LONG))
@pytest.mark.parametrize("piece", [1000, 1 << 20])
@pytest.mark.parametrize("before", [0, 1])
def test_a_head_over_the_limit(raw: bytes, piece: int, before: int) -> None:
    """Is answered, although the client goes on to send."""

    async def main() -> None:
        worker = EchoWorker()
        async with limits(worker) as connect:
            client = await connect()
            for _ in range(before):
                await client.say(head_of(100))
                assert (await client.answer())[0] == 200
            with contextlib.suppress(ConnectionError):
                await client.say(*(raw[at : at + piece] for at in range(0, len(raw), piece)))
            status, error = await client.last_answer()
            assert (status, error["type"]) == (431, "headers_too_large")
            assert f"{LIMIT} bytes" in error["message"]
            assert "--max-header-bytes" in error["message"]
            assert len(worker.seen) == before

    asyncio.run(main())


def test_trailers_are_limited_too() -> None:
    """They come behind a body; the application sees a client that has left."""

    async def main() -> None:
        left = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            while scope["type"] == "http" and (await receive())["type"] != "http.disconnect":
                pass
            left.set()

        async with limits(app) as connect:
            client = await connect()
            await client.say(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n")
            with contextlib.suppress(ConnectionError):
                await client.say(b"a: " + b"b" * (2 * LIMIT))
            with contextlib.suppress(ConnectionError):
                assert await client.reader.read() == b""
            await left.wait()

    asyncio.run(main())


@settings(deadline=None, max_examples=examples(50))
@given(cuts=st.lists(st.integers(0, 400), max_size=8), stray=st.sampled_from((b"", b"\r\n", b"\r\n\r\n")))
def test_requests_in_any_pieces(cuts: list[int], stray: bytes) -> None:
    """Two on one connection, of which one has its length and one has chunks, with line breaks in between."""
    first = b"POST /first HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello" + stray
    chunks = b"1\r\nh\r\n4\r\nello\r\n0\r\nx-trailer: t\r\n\r\n"
    second = b"POST /second HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + stray
    raw = first + second
    places = sorted({min(cut, len(raw)) for cut in cuts})
    pieces = [raw[begin:end] for begin, end in zip([0, *places], [*places, len(raw)], strict=True)]

    async def main() -> None:
        async with limits() as connect:
            client = await connect()
            await client.say(*pieces)
            for path in ("/first", "/second"):
                status, _, body = await client.answer()
                assert status == 200
                seen = json.loads(body)
                assert (seen["raw_path"], seen["body"]) == (path, "hello")

    asyncio.run(main())


def test_one_connection_too_many(caplog: pytest.LogCaptureFixture) -> None:
    """Is answered and closed; when another one has ended, there is room again."""

    async def main() -> None:
        async with limits(connections=2) as connect:
            there = [await connect(), await connect()]
            for client in there:
                await client.say(head_of(100))
                assert (await client.answer())[0] == 200
            for _ in range(3):
                refused = await connect()
                await refused.say(head_of(100, body=b"body"), b"body")
                status, headers, body = await refused.answer()
                assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
                error = json.loads(body)["error"]
                assert error["type"] == "too_many_connections"
                assert "--max-connections" in error["message"]
                assert await refused.reader.read() == b""
                await refused.close()
            await there[0].close()
            async with asyncio.timeout(30):
                while True:
                    client = await connect()
                    await client.say(head_of(100))
                    if (await client.answer())[0] == 200:
                        break
                    await client.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert caplog.text.count("others are refused") == 1, "one line, and not one for each"


def test_a_head_takes_its_time() -> None:
    async def main() -> None:
        async with limits(seconds=0.15) as connect:
            late = await connect()
            await late.say(b"GET / HTTP/1.1\r\nhost:")
            status, error = await late.last_answer()
            assert (status, error["type"]) == (408, "request_timeout")

            silent = await connect()
            assert await silent.reader.read() == b""

            late_again = await connect()
            await late_again.say(head_of(100))
            assert (await late_again.answer())[0] == 200
            await late_again.say(b"GET / HT")
            assert (await late_again.last_answer())[0] == 408

    asyncio.run(main())


def test_a_generation_may_take_longer_than_a_head() -> None:
    """Also if the client has begun to ask for the next thing; only when it is answered is the next one late."""

    async def main() -> None:
        worker = GatedWorker()
        async with limits(worker, seconds=0.15) as connect:
            client, other = await connect(), await connect()
            await client.say(head_of(100), b"GET / HT")
            await worker.wait_for_arrivals(1)
            assert await other.reader.read() == b""  # time has passed
            third = await connect()
            assert await third.reader.read() == b""
            worker.release()
            assert (await client.answer())[2] == b"rest"
            assert (await client.last_answer())[0] == 408

    asyncio.run(main())


def test_an_idle_connection_is_kept() -> None:
    """A line break behind a body is no beginning of a request."""

    async def main() -> None:
        async with limits(seconds=0.15) as connect:
            client = await connect()
            await client.say(head_of(100), b"\r\n")
            assert (await client.answer())[0] == 200
            for _ in range(2):
                assert await (await connect()).reader.read() == b""
            await client.say(head_of(100))
            assert (await client.answer())[0] == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    "raw",
    [
        b"hello\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_request(raw: bytes) -> None:
    async def main() -> None:
        async with limits() as connect:
            client = await connect()
            await client.say(raw)
            status, error = await client.last_answer()
            assert (status, error["type"]) == (400, "invalid_request_error")

    asyncio.run(main())


def test_white_space_around_the_value_of_a_header_is_no_part_of_it() -> None:
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            seen.append(dict(scope["headers"])[b"x-session-id"])
            await refuse(scope, receive, send)

    async def main() -> None:
        async with limits(app) as connect:
            client = await connect()
            await client.say(b"GET / HTTP/1.1\r\nhost: a\r\nx-session-id: \t a b \t\r\n\r\n")
            await client.answer()

    asyncio.run(main())
    assert seen == [b"a b"]


@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
def test_a_request_that_offers_another_protocol_is_served_in_this_one(offer: bytes) -> None:
    """With its body, as Java's client and `curl --http2` send it; the connection goes on, and a body may say the same."""

    async def main() -> None:
        async with limits() as connect:
            client, body = await connect(), b"x\r\nUpgrade: none\r\n"
            for first, more in (("Upgrade: ", b"http2-settings: AAEAAEAA\r\n"), ("UPGRADE:", b"")):
                head = (
                    b"POST /x HTTP/1.1\r\nhost: a\r\nConnection: Upgrade, HTTP2-Settings\r\n" + first.encode() + offer
                )
                await client.say(head + b"\r\n" + more + b"content-length: %d\r\n\r\n" % len(body) + body)
                status, _, seen = await client.answer()
                assert (status, json.loads(seen)["body"]) == (200, body.decode())

    asyncio.run(main())


@pytest.mark.parametrize("connection", [b"close, Upgrade", b"Upgrade\r\nConnection: close"])
@pytest.mark.parametrize("body", [b"", b"hello"])
def test_a_client_may_offer_another_protocol_and_ask_to_close(connection: bytes, body: bytes) -> None:
    """As `curl --http2 -H 'Connection: close'` does."""

    async def main() -> None:
        async with limits() as connect:
            client = await connect()
            await client.say(
                b"POST /x HTTP/1.1\r\nhost: a\r\nConnection: %b\r\nUpgrade: h2c\r\ncontent-length: %d\r\n\r\n%b"
                % (connection, len(body), body)
            )
            status, headers, seen = await client.answer()
            assert (status, json.loads(seen)["body"]) == (200, body.decode())
            assert headers["connection"] == "close"

    asyncio.run(main())


@pytest.mark.parametrize("piece", [1, 60, 1 << 20])
def test_an_offer_of_another_protocol_costs_no_body_wherever_it_stands(piece: int) -> None:
    """In a head that comes in pieces, twice in one head, and in requests behind others: nor does a body become a request."""
    body = b"GET /body HTTP/1.1\r\n\r\n"
    offers = b"POST /x HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: h2c\r\nUpgrade: websocket\r\n"
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    raw = (offers + b"content-length: %d\r\n\r\n" % len(body) + body + offers + chunked) * 2

    async def main() -> None:
        worker = EchoWorker()
        async with limits(worker) as connect:
            client = await connect()
            await client.say(*(raw[at : at + piece] for at in range(0, len(raw), piece)))
            for _ in range(4):
                status, _, seen = await client.answer()
                assert (status, json.loads(seen)["body"]) == (200, body.decode())
            assert [one["raw_path"] for one in worker.seen] == ["/x"] * 4

    asyncio.run(main())


def test_only_public_names_of_the_server_are_overridden() -> None:
    """Private ones come and go with its versions, and what is called instead tells nobody."""
    for ours, theirs in ((LimitedConnection, HttpToolsProtocol), (server._DrainingServer, uvicorn.Server)):
        private = {name for name in vars(ours) if name.startswith("_") and not name.startswith("__")}
        assert not [name for name in private if hasattr(theirs, name)]


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without a look at the body."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


@pytest.mark.parametrize(
    "framing", [b"content-length: 99", b"transfer-encoding: chunked"], ids=["half a body", "chunks without an end"]
)
def test_the_rest_of_a_body_behind_an_answer_has_its_time(framing: bytes) -> None:
    """Then the connection ends, although the client goes on to send."""

    async def main() -> None:
        async with limits(refuse, seconds=0.15) as connect:
            client = await connect()
            await client.say(b"POST /x HTTP/1.1\r\nhost: a\r\n%b\r\n\r\n" % framing, b"1\r\na\r\n")
            assert (await client.answer())[0] == 413
            with contextlib.suppress(ConnectionError):
                assert await client.reader.read() == b""

    asyncio.run(main())


def test_a_connection_goes_on_when_the_rest_of_a_body_has_come() -> None:
    async def main() -> None:
        async with limits(refuse) as connect:
            client = await connect()
            raw = head_of(100, body=b"b" * 10_000) + b"b" * 10_000
            await client.say(raw[:-500])
            assert (await client.answer())[0] == 413
            await client.say(raw[-500:], raw)
            assert (await client.answer())[0] == 413

    asyncio.run(main())


def test_an_idle_connection_ends_also_behind_a_body_that_came_late() -> None:
    async def main() -> None:
        async with limits(refuse, idle=1) as connect:
            client, late = await connect(), await connect()
            await client.say(head_of(100))
            await late.say(head_of(100, body=b"body"))
            for one in (client, late):
                assert (await one.answer())[0] == 413
            await late.say(b"body")
            for one in (client, late):
                assert await one.reader.read() == b""

    asyncio.run(main())


def test_a_client_that_waits_for_leave_to_send_and_gets_an_answer_instead_is_let_go() -> None:
    """It may send its body or not. So what comes next could be either, and nothing may come next."""

    async def main() -> None:
        async with limits(refuse) as connect:
            client = await connect()
            await client.say(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n")
            assert (await client.answer())[0] == 413
            assert await client.reader.read() == b""

    asyncio.run(main())


def test_a_client_that_did_not_wait_for_leave_to_send_goes_on() -> None:
    """A piece of its body has come, so the rest comes, too, and then a request."""

    async def main() -> None:
        async with limits(refuse) as connect:
            client = await connect()
            raw = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n123456789"
            await client.say(raw[:-4])
            assert (await client.answer())[0] == 413
            await client.say(raw[-4:], raw)
            assert (await client.answer())[0] == 413

    asyncio.run(main())


def test_a_client_that_leaves_is_noticed_by_what_it_is_served_and_not_by_what_it_asked_for_last() -> None:
    """Three requests in one go: the second one is being answered, the third one has not begun."""

    async def main() -> None:
        left = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] == "/2":
                while (await receive())["type"] != "http.disconnect":
                    pass
                left.set()
            else:
                await EchoWorker()(scope, receive, send)

        async with limits(app) as connect:
            client = await connect()
            await client.say(b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % number for number in (1, 2, 3)))
            await client.answer()
            await client.close()
            await left.wait()

    asyncio.run(main())


@pytest.mark.parametrize("later", range(AHEAD))
def test_a_client_that_leaves_is_noticed_behind_what_it_asked_for_later(later: int) -> None:
    """The first request is being answered when the others come."""

    async def main() -> None:
        begun, left = asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            assert scope["path"] == "/1"
            begun.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()

        async with limits(_only_http(app)) as connect:
            client = await connect()
            await client.say(b"GET /1 HTTP/1.1\r\n\r\n")
            await begun.wait()
            await client.say(*[b"POST /2 HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"] * later)
            await client.close()
            await left.wait()

    asyncio.run(main())


@pytest.mark.parametrize(
    "size", [0, 10, 3_000_000], ids=["no body", "a body", "a body behind which the server stops reading"]
)
@pytest.mark.parametrize("piecewise", [False, True])
def test_the_work_for_a_client_that_leaves_ends(size: int, piecewise: bool) -> None:
    """The connection itself tells it: no task reads `receive` meanwhile, unless the body came late."""

    async def main() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            assert len(await read_body(scope, receive, 1 << 30)) == size
            try:
                async with ClientConnection(receive):
                    begun.set()
                    await asyncio.Event().wait()
            except ClientDisconnectedError:
                ended.set()
                raise

        entrance = Entrance(app, (), RouterMetrics(CollectorRegistry()), Requests(), body_timeout=5.0)
        async with limits(_only_http(entrance)) as connect:
            client = await connect()
            head = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size
            await client.say(*([head, bytes(size)] if piecewise else [head + bytes(size)]))
            await begun.wait()
            await client.close()
            await ended.wait()

    asyncio.run(main())


def test_work_begun_for_a_client_that_has_left_ends_too() -> None:
    async def main() -> None:
        client = ServedClient()
        client.all_here = True
        client.leave()
        with pytest.raises(ClientDisconnectedError):
            async with ClientConnection(ClientMessages(_never, client)):
                await asyncio.Event().wait()

    asyncio.run(main())


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_a_head_and_what_follows_at_once_are_written_together(method: bytes) -> None:
    """A head that nothing follows is not held back, on a connection that is used again and again."""
    follow: asyncio.Event | None = None

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        if follow is not None:
            await follow.wait()
        await send({"type": "http.response.body", "body": b"hello"})

    async def main() -> None:
        nonlocal follow
        async with limits(app) as connect:
            client = await connect()
            for follow in (None, asyncio.Event(), None):
                await client.say(method + b" /x HTTP/1.1\r\nhost: a\r\n\r\n")
                if follow is None:
                    raw = await client.reader.read(1 << 16)
                    assert raw.endswith(b"\r\n\r\n" if method == b"HEAD" else b"\r\n\r\nhello")
                else:
                    assert (await client.reader.read(1 << 16)).endswith(b"\r\n\r\n")
                    follow.set()
                    if method == b"GET":
                        assert await client.reader.read(1 << 16) == b"hello"

    asyncio.run(main())


def test_a_client_that_leaves_behind_its_reply_disturbs_nothing() -> None:
    async def main() -> None:
        client = ServedClient()
        async with ClientConnection(ClientMessages(_never, client)) as connection:
            connection.stop_watching()
            client.leave()
            await asyncio.sleep(0)
        async with ClientConnection(ClientMessages(_never, ServedClient())):
            await asyncio.sleep(0)
        client.leave()
        await asyncio.sleep(0)

    asyncio.run(main())


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def _only_http(app: ASGIApp) -> ASGIApp:
    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if scope["type"] == "http" else EchoWorker())(scope, receive, send)

    return served


async def three_pieces(scope: Scope, receive: Receive, send: Send) -> None:
    """A reply without a length; `/half` breaks off in it."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    for piece in (b"one ", b"", b"two "):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    if scope["path"] == "/half":
        raise ClientDisconnectedError
    await send({"type": "http.response.body", "body": b"three"})


@pytest.mark.parametrize("keep", [b"", b"connection: keep-alive\r\n"])
def test_a_client_of_http_1_0_gets_no_chunks(keep: bytes) -> None:
    """It knows none: the end of the connection is the end of the reply."""

    async def main() -> None:
        async with limits(three_pieces) as connect:
            client = await connect()
            await client.say(b"GET /x HTTP/1.0\r\n%b\r\n" % keep)
            head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
            assert head.splitlines()[0] == b"HTTP/1.1 200 OK"
            assert b"connection: close" in head.splitlines()
            assert b"transfer-encoding" not in head
            assert body == b"one two three"
            newer = await connect()
            await newer.say(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n")
            _, headers, body = await newer.answer()
            assert (headers["transfer-encoding"], body) == ("chunked", b"one two three")

    asyncio.run(main())


async def written_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    """A reply whose pieces are written past `send` where that is possible, and the head says how many were."""
    client = served_client(scope)
    assert client is not None
    write = client.write or (lambda _: False)
    before = write(b"before the head")
    length = [(b"content-length", b"15")] if scope["path"] == "/length" else []
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-before", b"%d" % before), *length]})
    at_once = 0
    for piece in (b"one ", b"two ", b"", b"three "):
        if write(piece):
            at_once += 1
        else:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"%d" % at_once})
    assert not write(b"behind the end")
    assert client.write is None


@pytest.mark.parametrize(
    ("request_line", "said"),
    [
        (b"GET /x HTTP/1.1", b"one two three 2"),  # the first goes with the head
        (b"GET /length HTTP/1.1", b"one two three 0"),
        (b"GET /x HTTP/1.0", b"one two three 0"),
        (b"HEAD /x HTTP/1.1", b""),
    ],
)
def test_pieces_are_written_past_send_where_a_message_would_do_no_more(request_line: bytes, said: bytes) -> None:
    async def main() -> None:
        async with limits(_only_http(written_at_once)) as connect:
            client = await connect()
            for _ in range(1 if request_line.endswith(b"1.0") else 2):
                await client.say(request_line + b"\r\nhost: a\r\n\r\n")
                head = await client.reader.readuntil(b"\r\n\r\n")
                assert b"x-before: 0\r\n" in head
                if b"chunked" in head and said:
                    assert b"".join([piece async for piece in _chunks(client.reader)]) == said
                elif said:
                    assert await client.reader.readexactly(len(said)) == said

    asyncio.run(main())


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)


def test_nothing_is_written_past_send_to_a_client_that_does_not_read_or_is_gone() -> None:
    """What is refused then is sent as messages, and nothing is lost."""
    refused, gone = asyncio.Event(), asyncio.Event()
    after: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        client = served_client(scope)
        assert client is not None
        write = client.write
        assert write is not None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begin ", "more_body": True})
        pieces = 0
        while write(b"x" * 1000):
            pieces += 1
        assert pieces > 10
        refused.set()
        await send({"type": "http.response.body", "body": b" end %d" % pieces, "more_body": True})
        client.watch(gone.set)
        await gone.wait()
        after.append(write(b"too late"))

    async def main() -> None:
        async with limits(_only_http(app)) as connect:
            client = await connect()
            await client.say(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n")
            await refused.wait()
            await client.reader.readuntil(b"\r\n\r\n")
            came: list[bytes] = []
            async for piece in _chunks(client.reader):
                came.append(piece)
                if piece.startswith(b" end"):
                    break
            assert came[0] == b"begin "
            assert came[1:] == [b"x" * 1000] * (len(came) - 2) + [b" end %d" % (len(came) - 2)]
            await client.close()
            await gone.wait()
            while not after:  # noqa: ASYNC110 - the application goes on in its own task
                await asyncio.sleep(0)
            assert after == [False]

    asyncio.run(main())


def test_a_client_of_http_1_0_sees_that_a_reply_is_not_whole() -> None:
    """Nothing but a reset connection says so."""

    async def main() -> None:
        async with limits(three_pieces) as connect:
            client = await connect()
            await client.say(b"GET /half HTTP/1.0\r\n\r\n")
            with pytest.raises(ConnectionResetError):
                await client.reader.read()

    asyncio.run(main())


def test_a_client_of_http_1_0_gets_the_length_of_what_has_one() -> None:
    async def whole(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"whole"})

    async def main() -> None:
        async with limits(whole) as connect:
            for method, said in ((b"GET", b"whole"), (b"HEAD", b"")):
                client = await connect()
                await client.say(b"%b /x HTTP/1.0\r\n\r\n" % method)
                head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
                assert b"content-length: 5" in head.splitlines()
                assert body == said

    asyncio.run(main())


@pytest.mark.parametrize("used", [False, True])
def test_a_request_that_comes_while_the_server_stops_is_answered(used: bool) -> None:
    """It lies in the socket, unread, when its connection is idle for the server: as the first request or a later one."""

    async def main() -> None:
        shared = Limits(max_header_bytes=LIMIT, max_connections=PLENTY)
        async with asyncio.timeout(20), serving(EchoWorker(), protocol=limited_by(shared)) as url:
            client = Client(*await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1])))
            while not shared._connected:  # noqa: ASYNC110 - an accepted connection has no event
                await asyncio.sleep(0.001)
            if used:
                await client.say(head_of(100))
                assert "connection" not in (await client.answer())[1]
            (connection,) = shared._connected
            client.writer.write(head_of(100))  # at once into the socket
            connection.shutdown()
            status, headers, _ = await client.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert await client.reader.read() == b""
            await client.close()

    asyncio.run(main())


def test_an_idle_connection_ends_with_the_server() -> None:
    async def main() -> None:
        shared = Limits(max_header_bytes=LIMIT, max_connections=PLENTY)
        async with asyncio.timeout(20), serving(EchoWorker(), protocol=limited_by(shared)) as url:
            client = Client(*await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1])))
            await client.say(head_of(100))
            await client.answer()
            (connection,) = shared._connected
            connection.shutdown()
            assert await client.reader.read() == b""
            await client.close()

    asyncio.run(main())
