"""One request through the router: where it goes, what arrives on both sides, and how it ends."""

from __future__ import annotations

import asyncio
import gzip
import io
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from yarl import URL

from router.config import ServerConfig
from tests.router.conftest import EchoWorker, GatedWorker, answer, running
from tests.support.serving import dead_url, read_request, serving, serving_socket

GENERATE = b'{"text": "hello"}'
JSON = {"content-type": "application/json"}


def headers_of(seen: dict[str, Any]) -> dict[str, str]:
    return dict(seen["headers"])


def test_generate_reaches_a_worker_as_it_was_sent() -> None:
    async def main() -> None:
        worker = EchoWorker()
        async with serving(worker) as url, running([url]) as router:
            async with router.client.post("/generate?a=%20b", data=GENERATE, headers=JSON) as reply:
                assert reply.status == 200
                assert reply.headers["x-router-worker"] == url
                echoed = await reply.json(content_type=None)
            assert echoed["method"] == "POST"
            assert echoed["query"] == "a=%20b"
            assert echoed["body"].encode() == GENERATE
            assert headers_of(echoed)["content-type"] == "application/json"
            assert headers_of(echoed)["content-length"] == str(len(GENERATE))

    asyncio.run(main())


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_any_path_and_method_is_proxied_untouched(method: str) -> None:
    """Escapes in path and query stay as the client wrote them, and bodies may be any bytes."""

    async def main() -> None:
        worker = EchoWorker()
        body = None if method in ("GET", "OPTIONS") else bytes(range(256)) * 300
        async with serving(worker) as url, running([url]) as router:
            target = f"{router.url}/v1/a%2Fb%20c//d?x=%2F&y=1+2&y"
            async with router.client.request(method, URL(target, encoded=True), data=body) as reply:
                assert reply.status == 200
                echoed = await reply.json(content_type=None)
        assert echoed["method"] == method
        assert echoed["raw_path"] == "/v1/a%2Fb%20c//d"
        assert echoed["query"] == "x=%2F&y=1+2&y"
        assert echoed["body"].encode("latin-1") == (body or b"")

    asyncio.run(main())


def test_head_has_no_body() -> None:
    async def main() -> None:
        async with serving(EchoWorker()) as url, running([url]) as router, router.client.head("/anything") as reply:
            assert reply.status == 200
            assert await reply.read() == b""

    asyncio.run(main())


def test_request_header_hygiene() -> None:
    """What is between client and router, or meant for the router, does not reach a worker; the rest does."""

    async def main() -> None:
        worker = EchoWorker()
        sent = {
            "connection": "keep-alive, x-private",
            "x-private": "1",
            "te": "trailers",
            "accept-encoding": "gzip, br",
            "x-radix-anything": "1",
            "x-abort-policy": "return",
            "authorization": "Bearer the-workers-own",
            "x-smg-routing-key": "k",
            "cookie": "a=b; c=d",
            "user-agent": "me",
            "x-utf8": "é",
        }
        async with serving(worker) as url, running([url]) as router:
            for path in ("/generate", "/v1/other"):
                async with router.client.post(path, data=GENERATE, headers={**JSON, **sent}) as reply:
                    assert reply.status == 200
                    assert "connection" not in reply.headers
            for seen in worker.seen:
                got = headers_of(seen)
                assert "x-private" not in got
                assert "te" not in got
                assert "x-radix-anything" not in got
                assert "x-abort-policy" not in got
                assert "x-private" not in got.get("connection", "")
                assert got["accept-encoding"] == "identity"
                assert got["authorization"] == "Bearer the-workers-own"
                assert got["x-smg-routing-key"] == "k"
                assert got["cookie"] == "a=b; c=d"
                assert got["user-agent"] == "me"
                assert got["x-utf8"].encode("latin-1").decode() == "é"
                assert got["host"] == url.removeprefix("http://")
                names = [name for name, _ in seen["headers"]]
                assert len(names) == len(set(names))

    asyncio.run(main())


def test_our_own_key_stays_here() -> None:
    async def main() -> None:
        worker = EchoWorker()
        async with serving(worker) as url, running([url], server=ServerConfig(api_keys=("k",))) as router:
            async with router.client.get("/x", headers={"authorization": "Bearer k"}) as reply:
                assert reply.status == 200
            assert "authorization" not in headers_of(worker.seen[0])

    asyncio.run(main())


def test_reply_header_hygiene() -> None:
    async def main() -> None:
        worker = EchoWorker()
        worker.reply_headers = [
            (b"connection", b"x-hop"),
            (b"x-hop", b"1"),
            (b"keep-alive", b"timeout=5"),
            (b"date", b"long ago"),
            (b"server", b"sglang"),
            (b"set-cookie", b"a=1"),
            (b"set-cookie", b"b=2"),
            (b"x-router-worker", b"http://elsewhere"),
            (b"X-Custom", b"kept"),
        ]
        async with serving(worker) as url, running([url]) as router, router.client.get("/x") as reply:
            assert "x-hop" not in reply.headers
            assert "keep-alive" not in reply.headers
            assert "server" not in reply.headers
            assert "content-length" not in reply.headers
            assert "long ago" not in reply.headers.getall("date", [])
            assert reply.headers.getall("set-cookie") == ["a=1", "b=2"]
            assert reply.headers.getall("x-router-worker") == [url]
            assert reply.headers["x-custom"] == "kept"

    asyncio.run(main())


def test_compressed_reply_is_unpacked() -> None:
    """A worker that compresses although nobody asked: its content-encoding is not passed on, so its bytes are not."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await answer(send, 200, gzip.compress(b"plain"), [(b"content-encoding", b"gzip")])

    async def main() -> None:
        async with serving(app) as url, running([url]) as router, router.client.get("/x") as reply:
            assert "content-encoding" not in reply.headers
            assert await reply.read() == b"plain"

    asyncio.run(main())


def test_redirects_and_error_statuses_pass_through() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            status = int(scope["path"][1:]) if scope["path"][1:].isdecimal() else 404
            await answer(send, status, b"" if status in (204, 304) else b"body", [(b"location", b"/elsewhere")])

    async def main() -> None:
        async with serving(app) as url, running([url]) as router:
            for status in (201, 204, 302, 304, 400, 429, 499, 500, 503):
                async with router.client.get(f"/{status}", allow_redirects=False) as reply:
                    assert reply.status == status
                    assert await reply.read() == (b"" if status in (204, 304) else b"body")
                    assert reply.headers["location"] == "/elsewhere"

    asyncio.run(main())


def test_large_bodies_pass_both_ways() -> None:
    async def main() -> None:
        worker = EchoWorker()
        body = b"x" * (20 * 1024 * 1024)
        async with serving(worker) as url, running([url]) as router:
            for path in ("/generate", "/v1/other"):
                async with router.client.post(path, data=io.BytesIO(body), headers=JSON) as reply:
                    assert len((await reply.json(content_type=None))["body"]) == len(body)

    asyncio.run(main())


def test_first_piece_arrives_while_the_worker_still_works() -> None:
    async def main() -> None:
        worker = GatedWorker(first=b"data: 1\n\n")
        async with serving(worker) as url, running([url]) as router, asyncio.timeout(10):
            async with router.client.post("/generate", data=GENERATE, headers=JSON) as reply:
                assert await reply.content.readany() == b"data: 1\n\n"
                assert router.inflight() == 1
                worker.release()
                assert await reply.read() == b"rest"
            await router.idle()

    asyncio.run(main())


def test_request_body_is_streamed_through() -> None:
    """A path that is only proxied: the worker sees the first piece before the client has sent the second one."""

    async def main() -> None:
        got_first = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                return
            body = b""
            more = True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if body:
                    got_first.set()
            await answer(send, 200, body)

        async def upload() -> Any:
            yield b"one "
            await got_first.wait()
            yield b"two"

        async with serving(app) as url, running([url]) as router, asyncio.timeout(10):
            got_first.clear()
            async with router.client.post("/upload", data=upload()) as reply:
                assert await reply.read() == b"one two"

    asyncio.run(main())


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
            if "server_info" in head.split("\r\n")[0]:
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
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


@pytest.mark.parametrize("framing", ["content-length: 100", "transfer-encoding: chunked"])
def test_break_in_mid_reply_is_seen_by_the_client(framing: str) -> None:
    """A reply must never look complete when it is not."""

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        if "generate" in head:
            piece = b"5\r\nhello\r\n" if "chunked" in framing else b"hello"
            writer.write(b"HTTP/1.1 200 OK\r\n" + framing.encode() + b"\r\n\r\n" + piece)
            await writer.drain()

    async def main() -> None:
        async with serving_socket(broken) as url, running([url]) as router:
            async with router.client.post("/generate", data=GENERATE) as reply:
                assert reply.status == 200
                with pytest.raises(aiohttp.ClientPayloadError):
                    await reply.read()
            await router.idle()
            async with router.client.get("/metrics") as reply:
                assert 'tito_router_requests_total{route="generate",status="broken"} 1.0' in await reply.text()

    asyncio.run(main())


def test_body_limit() -> None:
    async def chunked() -> Any:
        for _ in range(3):
            yield b"x" * 50

    async def main() -> None:
        worker = EchoWorker()
        async with serving(worker) as url, running([url], server=ServerConfig(max_body_bytes=100)) as router:
            for data in (b"x" * 101, chunked()):
                async with router.client.post("/generate", data=data) as reply:
                    assert reply.status == 413
                    assert "--max-body-bytes" in (await reply.json())["error"]["message"]
            assert not worker.seen
            async with router.client.post("/generate", data=b"x" * 100) as reply:
                assert reply.status == 200

    asyncio.run(main())


def test_compressed_generate_is_refused() -> None:
    async def main() -> None:
        async with serving(EchoWorker()) as url, running([url]) as router:
            headers = {"content-encoding": "gzip"}
            async with router.client.post("/generate", data=gzip.compress(GENERATE), headers=headers) as reply:
                assert reply.status == 400
                assert "gzip" in (await reply.json())["error"]["message"]

    asyncio.run(main())


def test_least_inflight_under_concurrency() -> None:
    """Requests that come at the same moment see each other."""

    async def main() -> None:
        workers = [GatedWorker() for _ in range(4)]
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(serving(worker)) for worker in workers]
            router = await stack.enter_async_context(running(urls))

            async def one() -> int:
                async with router.client.post("/generate", data=GENERATE) as reply:
                    await reply.read()
                    return reply.status

            requests = [asyncio.create_task(one()) for _ in range(40)]
            for worker in workers:
                await worker.wait_for_arrivals(10)
            assert [worker.inflight for worker in router.app.pool.list()] == [10, 10, 10, 10]
            for worker in workers:
                worker.release()
            assert await asyncio.gather(*requests) == [200] * 40
            await router.idle()

    asyncio.run(main())


def test_removed_worker_finishes_what_it_has() -> None:
    async def main() -> None:
        worker = GatedWorker(first=b"data: 1\n\n")
        async with serving(worker) as url, running([url]) as router:
            async with router.client.post("/generate", data=GENERATE) as stream:
                assert await stream.content.readany() == b"data: 1\n\n"
                async with router.client.post(f"/remove_worker?url={url}") as reply:
                    assert (await reply.json())["worker"]["state"] == "draining"
                async with router.client.get("/health") as reply:
                    assert reply.status == 503
                async with router.client.post("/generate", data=GENERATE) as reply:
                    assert reply.status == 503
                    assert "draining" in (await reply.json())["error"]["message"]
                worker.release()
                assert await stream.read() == b"rest"
            await router.idle()
            assert router.app.pool.list() == ()

    asyncio.run(main())
