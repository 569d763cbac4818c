"""Spans: their names, their parents, and what is exported."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.types import Receive, Scope, Send

from router.app import create_app, create_tracer
from router.config import RadixConfig, RouterConfig, TraceConfig, WorkersConfig
from router.errors import BadRequestError
from router.observability import otel
from router.observability.otel import OtelTracer
from tests.router.conftest import EchoWorker, GatedWorker, answer, running
from tests.router.test_cli import Process
from tests.support.serving import dead_url, serving
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"
RADIX = RouterConfig().middlewares


class Traced:
    """A router that keeps its spans, and a client for it."""

    def __init__(self, exporter: InMemorySpanExporter, client: aiohttp.ClientSession) -> None:
        self._exporter = exporter
        self.client = client

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        """Names of the spans that have ended, in that order."""
        return self._exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def span(self, name: str) -> ReadableSpan:
        (found,) = (span for span in self.spans if span.name == name)
        return found

    async def received(self, count: int = 1) -> ReadableSpan:
        """Return the span of the last of `count` requests. It ends after the client has its reply."""
        async with asyncio.timeout(30):
            while self.names.count("receive") < count:  # noqa: ASYNC110 - an exporter reports nothing
                await asyncio.sleep(0)
        return [span for span in self.spans if span.name == "receive"][-1]


@contextlib.asynccontextmanager
async def traced(urls: Sequence[str] = (), middlewares: tuple[str, ...] = ()) -> AsyncIterator[Traced]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    config = RouterConfig(
        workers=WorkersConfig(urls=tuple(urls)),
        radix=RadixConfig(tokenizer_path=str(shipped_tokenizer())),
        middlewares=middlewares,
    )
    async with (
        asyncio.timeout(60),
        serving(create_app(config, OtelTracer(provider))) as url,
        aiohttp.ClientSession(url) as client,
    ):
        yield Traced(exporter, client)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def trace_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.trace_id


def test_a_request_starts_a_trace() -> None:
    async def main() -> None:
        async with traced() as router:
            async with router.client.get("/list_workers", headers={"x-request-id": "me"}) as reply:
                assert reply.status == 200
            receive = await router.received()
            assert parent(receive) is None
            assert receive.kind is SpanKind.SERVER
            assert receive.status.status_code is StatusCode.UNSET
            assert attributes(receive) == {
                "http.request.method": "GET",
                "http.route": "workers",
                "http.response.status_code": 200,
                "url.path": "/list_workers",
                "tito.request_id": "me",
            }
            async with router.client.get("/list_workers") as reply:
                assert reply.status == 200
            assert trace_id(await router.received(2)) != trace_id(receive)

    asyncio.run(main())


def test_a_request_belongs_to_the_clients_trace() -> None:
    async def main() -> None:
        async with traced() as router:
            async with router.client.get("/list_workers", headers={"traceparent": TRACEPARENT}) as reply:
                assert reply.status == 200
            receive = await router.received()
            assert (trace_id(receive), parent(receive)) == (int(TRACE, 16), int(CALLER, 16))

    asyncio.run(main())


@pytest.mark.parametrize("odd", ["", "00-xyz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é"])
def test_a_bad_traceparent_is_ignored(odd: str) -> None:
    async def main() -> None:
        async with traced() as router:
            async with router.client.get("/list_workers", headers={"traceparent": odd}) as reply:
                assert reply.status == 200
            assert parent(await router.received()) is None

    asyncio.run(main())


@pytest.mark.parametrize(("path", "status", "failed"), [("/workers/none", 404, False), ("/health", 503, True)])
def test_only_our_own_faults_fail_a_span(path: str, status: int, failed: bool) -> None:
    async def main() -> None:
        async with traced() as router:
            async with router.client.get(path) as reply:
                assert reply.status == status
            receive = await router.received()
            assert attributes(receive)["http.response.status_code"] == status
            assert (receive.status.status_code is StatusCode.ERROR) is failed

    asyncio.run(main())


def test_a_client_that_leaves_ends_its_spans() -> None:
    async def main() -> None:
        worker = GatedWorker()
        async with serving(worker) as url, traced([url]) as router:
            asking = asyncio.ensure_future(router.client.post("/generate", data=b"{}"))
            await worker.wait_for_arrivals(1)
            asking.cancel()
            receive = await router.received()
            assert attributes(receive)["tito.outcome"] == "client_left"
            assert receive.status.status_code is StatusCode.UNSET

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_has_a_span_for_each_part(stream: bool) -> None:
    """Text is matched, its tail encoded, sent to a worker, and the reply recorded; a second turn finds the first one."""

    async def main() -> None:
        with EmbeddedWorker() as worker:
            async with traced([worker.url], RADIX) as router:
                text = "Question: What is 6 times 7?\n"
                for turn in (1, 2):
                    body = {"text": text, "sampling_params": {"max_new_tokens": 8}, "stream": stream}
                    headers = {"traceparent": TRACEPARENT}
                    async with router.client.post("/generate", json=body, headers=headers) as reply:
                        assert reply.status == 200
                        await reply.read()
                    receive = await router.received(turn)
                    mine = [span for span in router.spans if parent(span) == span_id(receive)]
                    assert {trace_id(span) for span in mine} == {int(TRACE, 16)}
                    assert sorted(span.name for span in mine) == ["encode", "match", "record", "upstream"]
                    parts = {span.name: span for span in mine}
                    record = worker.log[-1]
                    assert attributes(parts["record"]) == {
                        "tito.tokens": len(record.output_ids),
                        "tito.outcome": "exact",
                    }
                    assert attributes(parts["match"])["tito.characters"] == len(text)
                    reused = attributes(parts["match"])["tito.tokens"]
                    assert (reused > 0) is (turn == 2)
                    assert reused + attributes(parts["encode"])["tito.tokens"] == len(record.input_ids)
                    assert parts["upstream"].kind is SpanKind.CLIENT
                    assert attributes(parts["upstream"])["tito.worker"] == worker.url
                    text += record.text + "\nAnd 7 times 8?\n"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "prompt"), [("/generate", {"text": "hi"}), ("/v1/completions", {"prompt": "hi", "model": "m"})]
)
def test_a_stream_that_breaks_off_has_failed(path: str, prompt: dict[str, Any]) -> None:
    """The attempt at its worker, and the request, whose reply may still end as HTTP wants it."""

    async def main() -> None:
        with EmbeddedWorker() as worker:
            worker.hold(after=3)
            async with traced([worker.url], RADIX) as router:
                async with router.client.post(path, json={**prompt, "stream": True}) as reply:
                    assert await reply.content.readline()
                    worker.kill()
                    with contextlib.suppress(aiohttp.ClientError):
                        await reply.read()
                receive = await router.received()
                assert receive.status.status_code is StatusCode.ERROR
                upstream = [span for span in router.spans if span.name == "upstream"][-1]
                assert upstream.status.status_code is StatusCode.ERROR
                assert attributes(upstream)["error.type"] == "broken"

    asyncio.run(main())


def test_ids_are_matched_and_not_encoded() -> None:
    async def main() -> None:
        with EmbeddedWorker() as worker:
            async with traced([worker.url], RADIX) as router:
                body = {"input_ids": [300, 301], "sampling_params": {"max_new_tokens": 4}}
                async with router.client.post("/generate", json=body) as reply:
                    assert reply.status == 200
                await router.received()
                assert sorted(router.names) == ["match", "receive", "record", "upstream"]

    asyncio.run(main())


def test_the_worker_gets_the_attempt_as_its_parent() -> None:
    async def main() -> None:
        async with serving(EchoWorker()) as url, traced([url]) as router:
            headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1", "baggage": "run=7"}
            async with router.client.post("/generate", data=b"{}", headers=headers) as reply:
                seen = dict((await reply.json(content_type=None))["headers"])
            await router.received()
            upstream = router.span("upstream")
            assert seen["traceparent"] == f"00-{TRACE}-{span_id(upstream):016x}-01"
            assert (seen["tracestate"], seen["baggage"]) == ("vendor=1", "run=7")

    asyncio.run(main())


def test_what_belongs_to_a_bad_traceparent_does_not_reach_the_worker() -> None:
    """It would be taken for the state of the router's own trace."""
    tracer = OtelTracer(TracerProvider(shutdown_on_exit=False))
    headers = [(b"traceparent", b"00-0-0-01"), (b"tracestate", b"a=1"), (b"x-other", b"b")]
    with tracer.receive(headers), tracer.span("upstream") as span:
        assert [name for name, _ in span.inject(headers)] == [b"x-other", b"traceparent"]
    assert not trace.get_current_span().get_span_context().is_valid, "what comes later is not part of the request"


def test_the_end_does_not_wait_for_a_collector_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answered = threading.Event()

    class Hangs(InMemorySpanExporter):
        def shutdown(self) -> None:
            answered.wait()

    monkeypatch.setattr(otel, "CLOSE_SECONDS", 0.01)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(Hangs()))
    OtelTracer(provider).close()
    answered.set()
    assert "were not taken by their collector" in caplog.text


def test_every_attempt_has_a_span() -> None:
    async def main() -> None:
        dead = [dead_url(), dead_url()]
        async with traced(dead) as router:
            async with router.client.post("/generate", data=b"{}") as reply:
                assert reply.status == 502
            receive = await router.received()
            attempts = [span for span in router.spans if span.name == "upstream"]
            assert {attributes(span)["tito.worker"] for span in attempts} == set(dead)
            assert {attributes(span)["error.type"] for span in attempts} == {"connect"}
            assert {parent(span) for span in attempts} == {span_id(receive)}

    asyncio.run(main())


def test_without_tracing_the_clients_traceparent_passes() -> None:
    async def main() -> None:
        async with serving(EchoWorker()) as url, running([url]) as router:
            headers = {"traceparent": TRACEPARENT}
            async with router.client.post("/generate", data=b"{}", headers=headers) as reply:
                assert dict((await reply.json(content_type=None))["headers"])["traceparent"] == TRACEPARENT

    asyncio.run(main())


class Collector:
    """Takes spans like an OTLP collector."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.services: set[str] = set()
        self.names: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {one.key: one.value.string_value for one in group.resource.attributes}
            self.services.add(named["service.name"])
            self.names += [span.name for scoped in group.scope_spans for span in scoped.spans]
        self.paths.append(scope["path"])
        await answer(send, 200, b"")


def test_a_process_exports_its_spans_before_it_ends() -> None:
    async def main() -> None:
        collector = Collector()
        async with serving(collector) as url, serving(EchoWorker()) as worker:
            host_and_port = url.removeprefix("http://")
            flags = ("--enable-trace", "--otlp-traces-endpoint", host_and_port, "--worker-urls", worker)
            async with Process(*flags) as process, aiohttp.ClientSession(process.url) as client:
                async with client.post("/generate", data=b"{}") as reply:
                    assert reply.status == 200
                process.signal(signal.SIGTERM)
                assert await process.exit_code() == 0
        assert set(collector.paths) == {"/v1/traces"}
        assert collector.services == {"tito-router"}
        assert "receive" in collector.names

    asyncio.run(main())


@pytest.mark.parametrize(
    ("given", "url"),
    [
        (None, None),
        ("localhost:4318", "http://localhost:4318/v1/traces"),
        ("[::1]:4318", "http://[::1]:4318/v1/traces"),
        ("collector", "http://collector/v1/traces"),
        ("https://traces.example", "https://traces.example/v1/traces"),
        ("https://traces.example/", "https://traces.example/v1/traces"),
        ("http://traces.example:80/in?token=1", "http://traces.example:80/in?token=1"),
    ],
)
def test_an_endpoint_is_an_address_or_a_url(given: str | None, url: str | None) -> None:
    assert TraceConfig(endpoint=given).url == url


@pytest.mark.parametrize("given", ["", "host:many", "host:99999", "grpc://host:4317", "http://", ":4318", "[::1:4318"])
def test_another_endpoint_is_refused(given: str) -> None:
    with pytest.raises(BadRequestError, match="--otlp-traces-endpoint"):
        TraceConfig(endpoint=given)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an import finds it: a name that is None in `sys.modules` cannot be imported."""
    monkeypatch.delitem(sys.modules, "router.observability.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(BadRequestError, match=r"pip install 'tito-router\[otel\]'"):
        create_tracer(TraceConfig(enabled=True))


def test_nothing_is_imported_without_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "router.observability.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert create_tracer(TraceConfig()) is None
