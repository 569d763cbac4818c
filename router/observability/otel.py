"""Spans as OpenTelemetry spans, exported as OTLP over HTTP. Imported only with `--enable-trace`."""

from __future__ import annotations

import logging
import threading
from contextvars import Token
from types import TracebackType

from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from router.http.headers import HeaderList
from router.observability.tracing import Attribute

logger = logging.getLogger(__name__)

SERVICE = "tito-router"
"""The name of the service unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES sets another."""

CLOSE_SECONDS = 5.0
"""How long the last spans may delay the end of the process. The SDK would wait 30 s for a missing collector."""

GRPC_PORT = ":4317/"

_KINDS = {"receive": SpanKind.SERVER, "upstream": SpanKind.CLIENT}
# https://opentelemetry.io/docs/specs/semconv/http/http-spans/; all other names get the prefix `tito.`
_SEMANTIC_NAMES = {
    "method": "http.request.method",
    "path": "url.path",
    "route": "http.route",
    "status": "http.response.status_code",
}


def exporting_tracer(endpoint: str | None) -> OtelTracer:
    """Return a tracer that sends its spans in batches to this URL; for None, to the one in the SDK's environment variables.

    The SDK reads its other OTEL_* variables as well: sampler, propagators, batches, headers, limits.
    """
    if endpoint is not None and GRPC_PORT in endpoint:
        logger.warning("spans are sent to %s over HTTP, for which collectors usually listen on port 4318", endpoint)
    detected = OTELResourceDetector().detect().attributes
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: SERVICE, **detected}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return OtelTracer(provider)


class OtelTracer:
    """A `Tracer` with its own provider, which leaves the provider of the process to other users of OpenTelemetry."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE)

    def receive(self, headers: HeaderList, **attributes: Attribute) -> OtelSpan:
        """Return the span of a request. It is current until it ends, and so the parent of the others."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        parent = propagate.extract(carrier, Context())
        return OtelSpan(self._start("receive", attributes, parent), parent)

    def span(self, name: str, **attributes: Attribute) -> OtelSpan:
        """Return a span that is never current: work that a reply's bytes cause on their way is not part of `upstream`."""
        return OtelSpan(self._start(name, attributes, None), None)

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning("the last spans were not taken by their collector within %g s", CLOSE_SECONDS)

    def _start(self, name: str, attributes: dict[str, Attribute], parent: Context | None) -> trace.Span:
        kind = _KINDS.get(name, SpanKind.INTERNAL)
        return self._tracer.start_span(name, parent, kind, _named(attributes))


class OtelSpan:
    """A `Span`. With a `base` context it is current in its block, and the parent of spans that start there."""

    __slots__ = ("_base", "_span", "_token")

    def __init__(self, span: trace.Span, base: Context | None) -> None:
        self._span = span
        self._base = base
        self._token: Token[Context] | None = None

    def __enter__(self) -> OtelSpan:
        if self._base is not None:
            self._token = context.attach(trace.set_span_in_context(self._span, self._base))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            context.detach(self._token)
        if error is not None:
            # Not the message, which may quote the client's request.
            self.fail(type(error).__qualname__)
        self._span.end()

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_named(attributes))

    def fail(self, reason: str) -> None:
        self._span.set_attribute("error.type", reason)
        self._span.set_status(StatusCode.ERROR, reason)

    def inject(self, headers: HeaderList) -> HeaderList:
        """Replace all headers that the propagators use."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span))
        replaced = {name.encode("latin-1") for name in (*carrier, *propagate.get_global_textmap().fields)}
        kept = [header for header in headers if header[0] not in replaced]
        return kept + [(name.encode("latin-1"), value.encode("latin-1")) for name, value in carrier.items()]


def _named(attributes: dict[str, Attribute]) -> dict[str, Attribute]:
    return {_SEMANTIC_NAMES.get(name, f"tito.{name}"): value for name, value in attributes.items()}
