"""One request through the router: where it goes, what arrives on both sides, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import re
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
import zstandard
from yarl import URL

from router.config import QueueConfig, ServerConfig
from tests.router.conftest import DONE, ENGINE, PROBED, EchoWorker, GatedWorker, answer, running
from tests.support.serving import serving

GENERATE = b'{"text": "hello"}'
STREAM = b'{"text": "hello", "stream": true}'
JSON = {"content-type": "application/json"}


def headers_of(seen: dict[str, Any]) -> dict[str, str]:
    return dict(seen["headers"])


def test_generate_reaches_a_worker_as_it_was_sent_and_with_an_id() -> None:
    """Without an id of ours nobody could tell the worker that its client has left."""

    async def main() -> None:
        worker = EchoWorker()
        async with serving(worker) as url, running([url]) as router:
            async with router.client.post("/generate?a=%20b", data=GENERATE, headers=JSON) as reply:
                assert reply.status == 200
                assert reply.headers["x-router-worker"] == url
                echoed = await reply.json(content_type=None)
            assert echoed["method"] == "POST"
            assert echoed["query"] == "a=%20b"
            body = json.loads(echoed["body"])
            assert re.fullmatch("[0-9a-f]{32}", body.pop("rid"))
            assert body == json.loads(GENERATE)
            assert headers_of(echoed)["content-type"] == "application/json"
            assert headers_of(echoed)["content-length"] == str(len(echoed["body"]))

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
        async with (
            serving(EchoWorker()) as url,
            running([url]) as router,
            router.client.head("/anything") as reply,
        ):
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


def test_a_client_cannot_rename_a_generation_by_a_header() -> None:
    """A worker that takes the header's id would not find the generation when the router aborts it by the body's."""

    async def main() -> None:
        worker = EchoWorker()
        named = {**JSON, "x-override-rid": "mine", "x-override-priority": "3"}
        async with serving(worker) as url, running([url]) as router:
            for path in ("/generate", "/v1/other"):
                async with router.client.post(path, data=GENERATE, headers=named) as reply:
                    assert reply.status == 200
        generation, other = map(headers_of, worker.seen)
        assert "x-override-rid" not in generation
        assert generation["x-override-priority"] == "3"
        assert other["x-override-rid"] == "mine"

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


@pytest.mark.parametrize(
    ("path", "meant", "advice"),
    [
        *(
            (path, f"/v1{path}", "The `base_url` of an OpenAI client ends with /v1")
            for path in (
                *("/chat/completions", "/completions", "/messages", "/messages/count_tokens", "/responses"),
                "/embeddings",
            )
        ),
        ("/v1/v1/chat/completions", "/v1/chat/completions", "ends with one /v1"),
        ("/v1/v1/messages", "/v1/messages", "that of an Anthropic client with none"),
        ("/v1/retrieve_from_text", "/retrieve_from_text", ""),
        ("/retrieve_from_texts", "/retrieve_from_text", ""),
        ("/session", "/sessions", ""),
    ],
)
def test_a_misspelt_path_that_no_worker_has_is_told_with_the_one_that_is_meant(
    path: str, meant: str, advice: str
) -> None:
    """Any other 404 is the worker's own, as is a path that the worker has."""
    status, body = 404, b'{"detail":"Not Found"}'

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in PROBED:
            await answer(send, 200, ENGINE)
        elif scope["type"] == "http":
            await answer(send, status, body)

    async def main() -> None:
        nonlocal status, body
        async with serving(app) as url, running([url]) as router:
            async with router.client.post(path, data=b"{}", headers=JSON) as reply:
                error = (await reply.json())["error"]
                assert (reply.status, error["type"]) == (404, "not_found")
                assert f"did you mean {meant}?" in error["message"]
                assert advice in error["message"]
            async with router.client.post("/other", data=b"{}", headers=JSON) as reply:
                assert (reply.status, await reply.read()) == (404, body)
            for status, body in [
                (404, b'{"detail":"no such model"}'),
                (404, b'{"error":{"message":"no such model"}}'),
                (404, b""),
                (200, b'{"detail":"Not Found"}'),
            ]:
                async with router.client.post(path, data=b"{}", headers=JSON) as reply:
                    assert (reply.status, await reply.read()) == (status, body)
            async with router.client.get("/workers") as reply:
                (worker,) = (await reply.json())["workers"]
                assert (worker["load"], worker["circuit_breaker"]) == (0, "closed")

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/retrieve_from_text", "/sessions", "/sessions/a/finalize", "/trajectories/claim"])
def test_a_plain_router_says_that_it_remembers_nothing(path: str) -> None:
    """Its worker's 404 would say that about the worker."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await (
                answer(send, 200, ENGINE) if scope["path"] in PROBED else answer(send, 404, b'{"detail":"Not Found"}')
            )

    async def main() -> None:
        async with (
            serving(app) as url,
            running([url]) as router,
            router.client.post(path, data=b"{}", headers=JSON) as reply,
        ):
            error = (await reply.json())["error"]
            assert (reply.status, error["type"]) == (404, "not_found")
            assert f"without what serves {path}: see its --middleware" in error["message"]

    asyncio.run(main())


def test_compressed_reply_is_unpacked() -> None:
    """A worker that compresses although nobody asked: its content-encoding is not passed on, so its bytes are not."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in PROBED:
            await answer(send, 200, ENGINE)
        elif scope["type"] == "http":
            await answer(send, 200, gzip.compress(b"plain"), [(b"content-encoding", b"gzip")])

    async def main() -> None:
        async with serving(app) as url, running([url]) as router, router.client.get("/x") as reply:
            assert "content-encoding" not in reply.headers
            assert await reply.read() == b"plain"

    asyncio.run(main())


def test_redirects_and_error_statuses_pass_through() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            if scope["path"] in PROBED:
                await answer(send, 200, ENGINE)
                return
            status = int(scope["path"][1:])
            await answer(send, status, b"" if status in (204, 304) else b"body", [(b"location", b"/elsewhere")])

    async def main() -> None:
        async with serving(app) as url, running([url]) as router:
            for status in (201, 204, 302, 304, 400, 429, 499, 500, 503):
                async with router.client.get(f"/{status}", allow_redirects=False) as reply:
                    assert reply.status == status
                    assert await reply.read() == (b"" if status in (204, 304) else b"body")
                    assert reply.headers["location"] == "/elsewhere"

    asyncio.run(main())


def test_a_redirection_does_not_lead_past_the_router() -> None:
    """SGLang answers `/generate/` so, with its own URL: what a client then sent to the worker would not be remembered."""
    worker = EchoWorker()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/generate/":
            host = dict(scope["headers"])[b"host"]
            await answer(send, 307, b"", [(b"Location", b"http://" + host + b"/generate?x=1")])
        else:
            await worker(scope, receive, send)

    async def main() -> None:
        async with serving(app) as url, running([url]) as router:
            async with router.client.post("/generate/", data=b"{}") as reply:
                assert (reply.status, str(reply.url)) == (200, f"{router.url}/generate?x=1")
                assert reply.headers["x-router-worker"] == url
            assert worker.seen[0]["raw_path"] == "/generate"

    asyncio.run(main())


@pytest.mark.parametrize(
    "elsewhere", ["http://127.0.0.1:1/x", "/x", "x", "{worker}0/x", "{worker}//other/x", "https://other/x"]
)
def test_a_redirection_elsewhere_passes_unchanged(elsewhere: str) -> None:
    async def main() -> None:
        worker = EchoWorker()
        async with serving(worker) as url, running([url]) as router:
            expected = elsewhere.format(worker=url)
            worker.reply_headers = [(b"location", expected.encode())]
            async with router.client.get("/y", allow_redirects=False) as reply:
                assert reply.headers["location"] == expected

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
        async with serving(worker) as url, running([url]) as router, asyncio.timeout(30):
            async with router.client.post("/generate", data=STREAM, headers=JSON) as reply:
                assert await reply.content.readany() == b"data: 1\n\n"
                assert router.inflight() == 1
                worker.release()
                assert await reply.read() == DONE
            await router.idle()

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/generate", "/v1/embeddings"])
def test_a_slow_body_holds_no_place_at_a_worker(path: str) -> None:
    """Another client's request is served by the only worker, which takes one at a time; then the slow one is."""

    async def main() -> None:
        waits = asyncio.Event()

        async def slow() -> Any:
            yield b"{"
            await waits.wait()
            yield b"}"

        worker = EchoWorker()
        limit = QueueConfig(max_inflight_per_worker=1, size=0)
        async with serving(worker) as url, running([url], queue=limit) as router:
            late = asyncio.create_task(router.client.post(path, data=slow()))
            async with asyncio.timeout(30):
                while len((await (await router.client.get("/debug/requests")).json())["requests"]) < 1:
                    pass
            for _ in range(3):
                async with router.client.post("/generate", data=GENERATE) as reply:
                    assert reply.status == 200
            waits.set()
            async with await late as reply:
                assert json.loads(await reply.read())["body"] == "{}"
            assert len(worker.seen) == 4

    asyncio.run(main())


ROUTES = ("/generate", "/v1/embeddings", "/flush_cache", "/abort_request", "/add_worker", "/x")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("framing", [b"content-length: 50", b"transfer-encoding: chunked"])
def test_a_body_of_which_no_more_comes(path: str, framing: bytes) -> None:
    """Is answered on every route, and no worker has heard of it. The client is not even at fault: its network may be."""

    async def main() -> None:
        worker = EchoWorker()
        async with serving(worker) as url, running([url], server=ServerConfig(body_timeout=0.1)) as router:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rsplit(":", 1)[1]))
            head = b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % (path.encode(), framing)
            writer.write(head + (b"1\r\n{\r\n" if b"chunked" in framing else b"{"))
            answer = (await reader.readuntil(b"\r\n\r\n")).decode()
            assert answer.startswith("HTTP/1.1 408 ")
            error = json.loads(await reader.readuntil(b"}}"))["error"]
            assert error["type"] == "request_timeout"
            assert "--body-timeout-secs" in error["message"]
            assert not worker.seen
            assert router.inflight() == 0
            writer.close()

    asyncio.run(main())


def test_a_worker_may_take_longer_than_a_body() -> None:
    async def main() -> None:
        worker = GatedWorker()
        async with serving(worker) as url, running([url], server=ServerConfig(body_timeout=0.05)) as router:
            slow = asyncio.create_task(router.client.post("/v1/embeddings", data=b"{}"))
            await worker.wait_for_arrivals(1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(slow), 0.2)
            worker.release()
            async with await slow as reply:
                assert reply.status == 200

    asyncio.run(main())


@pytest.mark.parametrize("path", [path for path in ROUTES if path != "/add_worker"])  # it has a limit of its own
def test_body_limit(path: str) -> None:
    async def chunked() -> Any:
        for _ in range(3):
            yield b"x" * 50

    async def main() -> None:
        worker = EchoWorker()
        async with serving(worker) as url, running([url], server=ServerConfig(max_body_bytes=100)) as router:
            for data in (b"x" * 101, chunked()):
                async with router.client.post(path, data=data) as reply:
                    assert reply.status == 413
                    assert "--max-body-bytes" in (await reply.json())["error"]["message"]
            assert not worker.seen
            async with router.client.post(path, data=b"x" * 100) as reply:
                assert reply.status != 413

    asyncio.run(main())


@pytest.mark.slow
def test_a_small_reply_that_unpacks_to_hundreds_of_megabytes_breaks_off() -> None:
    async def main() -> None:
        bomb = gzip.compress(bytes(100 * 1024 * 1024))

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                await answer(send, 200, bomb, [(b"content-encoding", b"gzip")])

        async with serving(app) as url, running([url]) as router:
            for path in ("/generate", "/v1/embeddings"):
                seen = 0
                with contextlib.suppress(aiohttp.ClientPayloadError):
                    async with router.client.post(path, data=GENERATE) as reply:
                        async for piece in reply.content.iter_any():
                            seen += len(piece)
                assert seen < 20 * 1024 * 1024

    asyncio.run(main())


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "br"])
def test_a_worker_gets_a_compressed_generate_unpacked(encoding: str) -> None:
    async def main() -> None:
        worker = EchoWorker()
        async with serving(worker) as url, running([url]) as router:
            packed = zstandard.compress(GENERATE) if encoding == "zstd" else gzip.compress(GENERATE)
            headers = {"content-encoding": encoding}
            async with router.client.post("/generate", data=packed, headers=headers) as reply:
                if encoding == "br":
                    assert reply.status == 415
                    assert reply.headers["accept-encoding"] == "gzip, zstd"
                    assert "gzip, zstd" in (await reply.json())["error"]["message"]
                    return
                assert reply.status == 200
            (seen,) = worker.seen
            assert json.loads(seen["body"])["text"] == json.loads(GENERATE)["text"]
            assert "content-encoding" not in dict(seen["headers"])

    asyncio.run(main())

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
            async with router.client.post("/generate", data=STREAM) as stream:
                assert await stream.content.readany() == b"data: 1\n\n"
                async with router.client.post(f"/remove_worker?url={url}") as reply:
                    assert (await reply.json())["worker"]["state"] == "draining"
                async with router.client.get("/health") as reply:
                    assert reply.status == 503
                async with router.client.post("/generate", data=GENERATE) as reply:
                    assert reply.status == 503
                    assert "draining" in (await reply.json())["error"]["message"]
                worker.release()
                assert await stream.read() == DONE
            await router.idle()
            assert router.app.pool.list() == ()

    asyncio.run(main())
