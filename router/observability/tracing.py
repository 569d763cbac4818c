"""Traces: where a request spends its time.

Without `--enable-trace` the tracer is None, and a span is None, too, so that untraced requests pay for no attributes. Code that
does a piece of a request's work wraps it:

    with untraced if tracer is None else tracer.span("encode", characters=len(text)) as span:
        ...
        if span is not None:
            span.set(tokens=len(ids))

`otel.py` makes OpenTelemetry spans. Attributes have this project's names; `otel.py` translates them to the standard's.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import TracebackType
from typing import Protocol

from router.http.headers import HeaderList

Attribute = str | bool | int | float

untraced: nullcontext[None] = nullcontext()
"""In place of a span where there is no tracer."""


class Span(Protocol):
    """A piece of work that lasts as long as its `with` block. An error that leaves the block fails it."""

    def __enter__(self) -> Span: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def set(self, **attributes: Attribute) -> None:
        """Add attributes."""

    def fail(self, reason: str) -> None:
        """Mark the work as failed, though no error leaves the block."""

    def inject(self, headers: HeaderList) -> HeaderList:
        """Return the headers of a request that is part of this work: their `traceparent` names this span."""


class Tracer(Protocol):
    """Makes spans. All spans of a request are children of its `receive`."""

    def receive(self, headers: HeaderList, **attributes: Attribute) -> Span:
        """Return the span of a whole request: a child of the client's `traceparent`, or the first of a new trace."""

    def span(self, name: str, **attributes: Attribute) -> Span:
        """Return a span for a part of the current request."""

    def close(self) -> None:
        """Send the remaining spans. Blocks for some seconds at most."""
