"""Workers that fail: before the client was told anything, and after."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from router.config import BreakerConfig
from router.workers.breaker import BreakerState
from tests.router.conftest import ENGINE, PROBED, EchoWorker, answer, running
from tests.support.serving import SocketHandler, dead_url, read_request, serving, serving_socket

GENERATE = b'{"rid":"r","text":"hello"}'
STREAM = b'{"text": "hello", "stream": true}'
WELL = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(ENGINE), ENGINE)
"""What a worker answers to a probe: otherwise it would be asked only as the last one."""


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
                writer.write(WELL.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
                return
            self.requests += 1
            if self.drop == "always" or (self.drop == "second" and served == 1):
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            served += 1


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nx-odd: a\x01b\r\n", b"HTTP/1.1 999 Odd\r\n", b"HTTP/1.1 101 Switching Protocols\r\n"]
)
def test_a_head_that_no_client_may_be_sent_is_a_fault_of_the_worker(head: bytes) -> None:
    """It is found before the client is told anything: another worker answers, or a 502 does."""

    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            asked, _ = await read_request(reader)
            probed = any(path in asked.split("\r\n")[0] for path in ("server_info", "/ping", "model_info"))
            writer.write(WELL if probed else head + b"content-length: 2\r\n\r\n{}")

    async def main() -> None:
        async with serving_socket(odd) as url, running([url]) as router:
            async with router.client.post("/generate", data=GENERATE) as reply:
                assert reply.status == 502
            await router.idle()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "not a valid HTTP reply: Bad status line"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "Invalid character in chunk size"),
        (b"HTTP/1.1 200 OK\r\nset-cookie: a=sec", "closed in the middle of the reply's head"),
    ],
)
def test_why_a_worker_gave_no_reply_is_one_line_in_words(said: bytes, why: str) -> None:
    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked, _ = await read_request(reader)
        probed = any(path in asked.split("\r\n")[0] for path in ("server_info", "/ping", "model_info"))
        writer.write(WELL if probed else said)

    async def main() -> None:
        async with (
            serving_socket(odd) as url,
            running([url]) as router,
            router.client.post("/generate", data=GENERATE) as reply,
        ):
            assert reply.status == 502
            message = (await reply.json())["error"]["message"]
            assert why in message
            assert message.isprintable()
            assert "set-cookie" not in message

    asyncio.run(main())


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


def test_a_request_that_no_worker_answers_reaches_three() -> None:
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
            async with router.client.post("/start_profile", data=b"{}") as reply:
                assert reply.status == 502
            assert sum(worker.requests for worker in workers) == 1

    asyncio.run(main())


def test_worker_that_breaks_before_its_first_byte_is_replaced() -> None:
    """The head of a reply came, nothing of its body: the client has been told nothing yet."""

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        nothing = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n"
        writer.write(nothing if "generate" in head else WELL)
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
            assert router.app.pool.get(bad).doubts, "it may have been restarted with other weights"

    asyncio.run(main())


def half_a_reply(framing: str) -> SocketHandler:
    """A worker that breaks off in the middle of a reply."""

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        piece = b"5\r\nhello\r\n" if "chunked" in framing else b"hello"
        half = b"HTTP/1.1 200 OK\r\n" + framing.encode() + b"\r\n\r\n" + piece
        writer.write(half if "generate" in head else WELL)
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
            assert router.app.pool.get(bad).doubts, "it was asked"

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
            assert router.app.pool.get(url).doubts, "it may have been restarted with other weights"
            async with router.client.get("/metrics") as reply:
                assert 'tito_router_requests_total{route="generate",status="broken"} 1.0' in await reply.text()

    asyncio.run(main())


def talks(status: int, body: bytes, *, method: str = "POST") -> ASGIApp:
    """A worker that is well when it is probed, and answers a method at /generate in one way."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/generate" and scope["method"] == method:
            await answer(send, status, body)
        elif scope["type"] == "http":
            await answer(send, 200, ENGINE)

    return app


def streams(*pieces: bytes) -> ASGIApp:
    """A worker whose streams end well, in HTTP's terms, behind these pieces."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in PROBED:
            await answer(send, 200, ENGINE)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


ONE_FAILURE = BreakerConfig(failure_threshold=1)
OWN_WORDS = b'{"error": {"message": "no such adapter", "code": 404}}'


@pytest.mark.parametrize("status", [404, 405, 501])
@pytest.mark.parametrize("body", [b"", b"<title>Error</title>", b'{"detail":"Not Found"}'])
def test_what_does_not_generate_is_passed_over_and_blamed(status: int, body: bytes) -> None:
    async def main() -> None:
        async with (
            serving(talks(status, body)) as bad,
            serving(EchoWorker()) as good,
            running([bad, good], policy="round_robin", breaker=ONE_FAILURE) as router,
        ):
            for data in (GENERATE, STREAM):
                async with router.client.post("/generate", data=data) as reply:
                    assert (reply.status, reply.headers["x-router-worker"]) == (200, good)
            assert router.app.pool.get(bad).breaker.state is BreakerState.OPEN
            assert router.app.pool.get(good).breaker.state is BreakerState.CLOSED
            await router.idle()

    asyncio.run(main())


def test_what_does_not_generate_is_blamed_if_it_is_the_only_one_too() -> None:
    async def main() -> None:
        async with serving(talks(404, b"")) as bad, running([bad], breaker=ONE_FAILURE) as router:
            for status in (404, 503):
                async with router.client.post("/generate", data=GENERATE) as reply:
                    assert reply.status == status
            await router.idle()

    asyncio.run(main())


def test_a_404_in_an_engines_own_words_that_all_give_is_nobodys_fault() -> None:
    async def main() -> None:
        async with (
            serving(talks(404, OWN_WORDS)) as one,
            serving(talks(404, OWN_WORDS)) as two,
            running([one, two], breaker=ONE_FAILURE) as router,
        ):
            async with router.client.post("/generate", data=GENERATE) as reply:
                assert (reply.status, await reply.read()) == (404, OWN_WORDS)
            assert {worker.breaker.state for worker in router.app.pool.list()} == {BreakerState.CLOSED}

    asyncio.run(main())


def test_a_404_in_an_engines_own_words_is_its_fault_if_another_one_answers() -> None:
    async def main() -> None:
        async with (
            serving(talks(404, OWN_WORDS)) as bad,
            serving(EchoWorker()) as good,
            running([bad, good], policy="round_robin", breaker=ONE_FAILURE) as router,
        ):
            async with router.client.post("/generate", data=GENERATE) as reply:
                assert (reply.status, reply.headers["x-router-worker"]) == (200, good)
            assert router.app.pool.get(bad).breaker.state is BreakerState.OPEN

    asyncio.run(main())


SGLANG_LACKS = (
    b'{"error": {"message": "Got LoRA adapter that has never been loaded: x\\nAll loaded adapters: dict_keys([])."%b}}'
)
VLLM_LACKS = b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","param":"model","code":400}}'
LACKS = [
    pytest.param(talks(400, SGLANG_LACKS % b""), id="sglang"),
    pytest.param(streams(b"data: " + SGLANG_LACKS % b', "code": 400' + b"\n\ndata: [DONE]\n\n"), id="sglang-stream"),
    pytest.param(talks(400, VLLM_LACKS), id="vllm"),
]


@pytest.mark.parametrize("lacking", LACKS)
def test_an_adapter_that_some_workers_lack_is_sampled_by_another_one(lacking: ASGIApp) -> None:
    """They have just started, or were added: an adapter is loaded by a call to the workers of that moment."""

    async def main() -> None:
        async with AsyncExitStack() as entered:
            bad = [await entered.enter_async_context(serving(lacking)) for _ in range(4)]
            good = await entered.enter_async_context(serving(EchoWorker()))
            router = await entered.enter_async_context(running([*bad, good], policy="round_robin", breaker=ONE_FAILURE))
            for data in (GENERATE, STREAM) * 3:
                data = data.replace(b"{", b'{"lora_path":"x",', 1)
                async with router.client.post("/generate", data=data) as reply:
                    assert (reply.status, reply.headers["x-router-worker"]) == (200, good)
            assert {worker.breaker.state for worker in router.app.pool.list()} == {BreakerState.CLOSED}
            async with router.client.get("/metrics") as reply:
                assert 'tito_router_retries_total{reason="no_adapter"}' in await reply.text()
            await router.idle()

    asyncio.run(main())


@pytest.mark.parametrize("data", [GENERATE, GENERATE.replace(b"{", b'{"lora_path":"x",')])
def test_an_adapter_that_no_worker_has_is_the_last_ones_refusal(data: bytes) -> None:
    """Without an adapter in the request its words say something else, and one worker is asked."""

    async def main() -> None:
        async with (
            serving(talks(400, VLLM_LACKS)) as one,
            serving(talks(400, VLLM_LACKS)) as two,
            running([one, two], breaker=ONE_FAILURE) as router,
        ):
            async with router.client.post("/generate", data=data) as reply:
                assert (reply.status, await reply.read()) == (400, VLLM_LACKS)
            async with router.client.get("/metrics") as reply:
                asked_again = float(b"lora_path" in data)
                assert f'tito_router_retries_total{{reason="no_adapter"}} {asked_again}' in await reply.text()
            await router.idle()

    asyncio.run(main())


@pytest.mark.parametrize(("method", "path"), [("GET", "/generate"), ("DELETE", "/generate"), ("POST", "/no/such/path")])
def test_a_call_that_there_is_not_is_no_workers_fault(method: str, path: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            status = 200 if scope["path"] in PROBED else 405 if scope["path"] == "/generate" else 404
            await answer(send, status, ENGINE if status == 200 else b"{}")

    async def main() -> None:
        async with serving(app) as url, running([url], breaker=ONE_FAILURE) as router:
            async with router.client.request(method, path, data=b"{}" if method == "POST" else None) as reply:
                assert reply.status in (404, 405)
            assert router.app.pool.get(url).breaker.state is BreakerState.CLOSED

    asyncio.run(main())


# -- streams that end too early ----------------------------------------------------------------------------------------------


EVENT = b'data: {"text": "[DONE]"}\n\n'


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        ((EVENT, b"data: [DONE]\n\n"), True),
        ((EVENT, b"da", b"ta: [DO", b"NE]\n", b"\n"), True),
        ((EVENT, b"data:[DONE]\r\n"), True),
        ((EVENT,), False),
        ((EVENT, EVENT), False),
        ((EVENT, b"data: [DONE]\n\n", EVENT), False),
        ((EVENT, b"data: [DON"), False),
        ((EVENT, b"metadata: [DONE]\n\n"), False),
    ],
)
def test_a_stream_is_whole_if_it_says_so(path: str, pieces: tuple[bytes, ...], whole: bool) -> None:
    async def main() -> None:
        async with serving(streams(*pieces)) as url, running([url]) as router:
            async with router.client.post(path, data=STREAM) as reply:
                assert reply.status == 200
                if whole:
                    assert await reply.read() == b"".join(pieces)
                else:
                    with pytest.raises(aiohttp.ClientPayloadError):
                        await reply.read()
            await router.idle()
            if path == "/generate":
                async with router.client.get("/metrics") as reply:
                    outcome = "answered" if whole else "failed"
                    assert f'tito_router_generations_total{{outcome="{outcome}"}} 1.0' in await reply.text()

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("before", "first", "last"),
    [
        ((EVENT,), b"data: [DO", b"NE]\n\n"),
        ((EVENT[:-1], EVENT[-1:]), b"", b"data: [DONE]\n\n"),
        ((EVENT[:-2] + b"\r\n", b"\r", b"\n"), b"", b"data: [DONE]\r\n\r\n"),
    ],
    ids=["the end", "the first event", "the empty line behind it"],
)
def test_an_event_may_come_in_pieces(path: str, before: tuple[bytes, ...], first: bytes, last: bytes) -> None:
    """The client has the first event, and all of the stream is taken for whole."""

    async def main() -> None:
        rest = asyncio.Event()

        async def worker(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] in PROBED:
                return await answer(send, 200, ENGINE)
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for piece in (*before, first):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0.05)  # so that each comes by itself
            await rest.wait()
            await send({"type": "http.response.body", "body": last, "more_body": False})

        seen = b"".join((*before, first))
        async with serving(worker) as url, running([url]) as router, asyncio.timeout(30):
            async with router.client.post(path, data=STREAM) as reply:
                assert await reply.content.readexactly(len(seen)) == seen
                rest.set()
                assert await reply.read() == last
            await router.idle()

    asyncio.run(main())


@pytest.mark.parametrize("pieces", [(), (b'data: {"text"',)], ids=["nothing", "half an event"])
def test_a_stream_that_ends_before_its_first_event_is_asked_for_elsewhere(pieces: tuple[bytes, ...]) -> None:
    async def main() -> None:
        good = streams(EVENT, b"data: [DONE]\n\n")
        async with (
            serving(streams(*pieces)) as bad,
            serving(good) as url,
            running([bad, url], policy="round_robin") as router,
        ):
            for _ in range(2):
                async with router.client.post("/generate", data=STREAM) as reply:
                    assert (await reply.read()).endswith(b"[DONE]\n\n")
                    assert reply.headers["x-router-worker"] == url

    asyncio.run(main())


@pytest.mark.parametrize("pieces", [(b'event: message_stop\ndata: {"type": "message_stop"}\n\n',), ()])
def test_streams_that_end_in_other_words_pass(pieces: tuple[bytes, ...]) -> None:
    async def main() -> None:
        async with (
            serving(streams(*pieces)) as url,
            running([url]) as router,
            router.client.post("/v1/messages", data=STREAM) as reply,
        ):
            assert reply.status == 200
            assert await reply.read() == b"".join(pieces)

    asyncio.run(main())
