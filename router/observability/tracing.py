"""What a request spends its time on, for those who collect traces, and nothing at all for the others.

Whoever does a piece of its work says so with one line, `with tracer.span("encode", tokens=...):`. What becomes of that is
the tracer's business: `OFF` does nothing, in a fraction of a microsecond, and `otel.py` makes OpenTelemetry spans.
Names of attributes are the words of this project; those of a standard are put in their place where the standard is known.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import TracebackType
from typing import Protocol

from router.config import TraceConfig
from router.errors import BadRequestError
from router.http.asgi import HeaderList

Attribute = str | bool | int | float


class Span(Protocol):
    """A piece of work that lasts as long as its `with` block. An error that leaves the block fails it."""

    def __enter__(self) -> Span: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def set(self, **attributes: Attribute) -> None:
        """Say more about it."""

    def fail(self, reason: str) -> None:
        """It did not go well, though no error leaves the block."""

    def inject(self, headers: HeaderList) -> HeaderList:
        """Headers of a request that is part of this work: `traceparent` names this span, not the client's."""


class Tracer(Protocol):
    """Makes spans. Those of one request are children of its `receive`."""

    def receive(self, headers: HeaderList, **attributes: Attribute) -> Span:
        """The whole of a request: a child of the client's `traceparent`, or the first span of a new trace."""

    def span(self, name: str, **attributes: Attribute) -> Span:
        """A part of the request that is being served."""

    def close(self) -> None:
        """Send what has not been sent yet; blocks for some seconds at the most."""


class _Off(nullcontext["_Off"]):
    """No tracing: a tracer and its spans in one. A client's `traceparent` passes as it is."""

    def __init__(self) -> None:
        super().__init__(self)

    def receive(self, headers: HeaderList, **attributes: Attribute) -> _Off:
        return self

    def span(self, name: str, **attributes: Attribute) -> _Off:
        return self

    def set(self, **attributes: Attribute) -> None: ...

    def fail(self, reason: str) -> None: ...

    def inject(self, headers: HeaderList) -> HeaderList:
        return headers

    def close(self) -> None: ...


OFF: Tracer = _Off()
"""What there is without `--enable-trace`."""


def create_tracer(config: TraceConfig) -> Tracer:
    """The tracer as configured. BadRequestError if it needs what is not installed."""
    if not config.enabled:
        return OFF
    try:
        from router.observability.otel import exporting_tracer
    except ImportError as error:
        raise BadRequestError(
            f"--enable-trace needs OpenTelemetry ({error}): pip install 'tito-router[otel]'"
        ) from error
    return exporting_tracer(config.url)
