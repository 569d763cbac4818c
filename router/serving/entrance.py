"""The outermost layer: request ids, the record of each request, its outcome in metrics and traces, and errors as JSON.

A request's id is the client's `x-request-id`, or a new one. The worker gets it, and the reply and every line of the log about
the request carry it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import ClientDisconnectedError, RouterError, StoppedError, UpstreamError
from router.http.headers import HeaderList
from router.http.request_state import first_state
from router.http.responses import send_error
from router.http.upstream import UpstreamBrokenError
from router.observability.metrics import BROKEN, CLIENT_LEFT, RouterMetrics, route_class
from router.observability.requests import REQUEST_ID, RequestRecord, Requests
from router.observability.tracing import OFF, Span, Tracer
from router.random_ids import random_id

logger = logging.getLogger(__name__)

_sane = re.compile(rb"[!-~]{1,128}").fullmatch


class ErrorBoundary:
    """Turns errors into JSON, keeps each request in `requests` while it lasts, and counts it.

    An error after the reply's head can no longer be answered. It is raised on into the server, which then breaks the
    connection off: the client must not take what it has for a whole reply.

    Attributes:
        fault: why the application could not start.
    """

    def __init__(self, app: ASGIApp, metrics: RouterMetrics, requests: Requests, tracer: Tracer = OFF) -> None:
        self.app = app
        self.requests = requests
        self.tracer = tracer
        self.fault: RouterError | None = None
        self._metrics = metrics

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._outside(scope, receive, send)
        headers, request_id = _identified(scope["headers"])
        record = RequestRecord(request_id, scope["method"], scope["path"])
        scope = {**scope, "headers": headers, "state": first_state(scope, record)}
        # Never reset: the request's task ends with it, and what the server logs about its end belongs to it, too.
        REQUEST_ID.set(request_id)
        return _ServedRequest(record, self._metrics, send).serve(self, scope, receive)

    async def _outside(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the lifespan and websockets, which are not requests."""
        try:
            await self.app(scope, receive, send)
        except RouterError as error:
            if scope["type"] != "lifespan":
                raise
            self.fault = error
            await send({"type": "lifespan.startup.failed", "message": ""})


class _ServedRequest:
    """One request, and its outcome for metrics and traces."""

    __slots__ = ("_metrics", "_outcome", "_record", "_route", "_send", "_status")

    def __init__(self, record: RequestRecord, metrics: RouterMetrics, send: Send) -> None:
        self._record = record
        self._metrics = metrics
        self._send = send
        self._status: int | None = None
        self._outcome: str | None = BROKEN  # until the request ends otherwise
        self._route = route_class(record.path)

    async def serve(self, boundary: ErrorBoundary, scope: Scope, receive: Receive) -> None:
        record, in_flight = self._record, boundary.requests.records
        in_flight[record] = None
        with boundary.tracer.receive(
            scope["headers"], method=record.method, path=record.path, route=self._route, request_id=record.id
        ) as span:
            try:
                await boundary.app(scope, receive, self.send)
                self._outcome = None
            except ClientDisconnectedError:
                self._outcome = CLIENT_LEFT
            except asyncio.CancelledError as cancelled:
                # Only a server whose time to finish is over cancels a request.
                if self._status is not None:
                    raise UpstreamBrokenError("the router was stopped before the reply had ended") from cancelled
                stopped = StoppedError(
                    "the router was stopped before there was a reply: send it again", headers=(("retry-after", "1"),)
                )
                await send_error(self.send, stopped, record.path)
                self._outcome = None
            except Exception as error:
                if not isinstance(error, RouterError | UpstreamBrokenError):
                    logger.exception("%s %s failed", record.method, record.path)
                if self._status is not None:
                    raise
                await send_error(self.send, _answerable(error), record.path)
                self._outcome = None
            finally:
                del in_flight[record]
                self._over(span)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            record = self._record
            self._status = message["status"]
            self._metrics.first_bytes.observe((self._route,), record.answering())
            headers = [header for header in message.get("headers", ()) if header[0] != b"x-request-id"]
            headers.append((b"x-request-id", record.id.encode("ascii")))
            if "/v1/messages" in record.path:  # Anthropic's clients look for its own name
                headers.append((b"request-id", record.id.encode("ascii")))
            message = {**message, "headers": headers}
        await self._send(message)

    def _over(self, span: Span) -> None:
        """Report the outcome of the request."""
        record, status = self._record, self._status
        outcome = str(status or BROKEN) if self._outcome is None else self._outcome
        seconds = time.monotonic() - record.begun
        self._metrics.requests.counts[self._route, outcome] += 1
        self._metrics.durations.observe((self._route,), seconds)
        logger.debug("%s %s %s %.3f s %s", record.method, record.path, outcome, seconds, record.worker)
        if status is not None:
            span.set(status=status)
        if outcome == BROKEN or (status is not None and status >= 500):
            span.fail(outcome)
        elif outcome == CLIENT_LEFT:
            span.set(outcome=outcome)


def _identified(headers: HeaderList) -> tuple[HeaderList, str]:
    """Return the headers with exactly one `x-request-id`, and its value: the client's, if it is one short word."""
    given: list[bytes] = []
    for name, value in headers:
        if name == b"x-request-id":
            given.append(value)
    if len(given) == 1 and _sane(given[0]):
        return headers, given[0].decode("ascii")
    request_id = random_id()
    kept = [header for header in headers if header[0] != b"x-request-id"] if given else headers
    return [*kept, (b"x-request-id", request_id.encode("ascii"))], request_id


def _answerable(error: Exception) -> RouterError:
    if isinstance(error, RouterError):
        return error
    if isinstance(error, UpstreamBrokenError):
        return UpstreamError(str(error))
    return RouterError(f"internal error ({type(error).__name__}): the router's log has the details")
