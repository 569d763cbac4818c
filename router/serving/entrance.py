"""The outermost layer: request ids, the record of each request, checks, its outcome in metrics and traces, and errors as JSON.

A request's id is the client's `x-request-id`, or a new one. The worker gets it, and the reply and every line of the log about
the request carry it.

A *check* is a function of the scope. It refuses a request by raising a RouterError, or notes who is calling; it awaits nothing,
reads no body, and sends nothing. The checks run in their order, so the first one that refuses decides the answer. Most checks
read certain headers, which most requests do not have: such a check is not called for the others.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.auth.key_check import take_key_out
from router.errors import (
    ClientDisconnectedError,
    LoopError,
    RequestTimeoutError,
    RouterError,
    StoppedError,
    UpstreamError,
)
from router.http.disconnect import ClientMessages, DirectSend, ServedClient, served_client
from router.http.headers import HeaderList
from router.http.request_state import REQUEST_ID, RequestRecord, Requests, first_state
from router.http.responses import send_error
from router.http.time_limits import patience
from router.http.upstream import UpstreamBrokenError
from router.observability.metrics import BROKEN, CLIENT_LEFT, RouterMetrics
from router.observability.tracing import Span, Tracer, untraced

logger = logging.getLogger(__name__)

INSTANCE = b"x-tito-router-instance"

_sane = re.compile(rb"[!-~]{1,128}").fullmatch

_ROUTE_CLASSES: Mapping[str, str] = {
    "/generate": "generate",
    "/v1/completions": "generate",
    "/v1/chat/completions": "turn",
    "/v1/messages": "turn",
    "/retrieve_from_text": "retrieve",
    "/radix_tree/explain": "radix_tree",
    "/radix_tree/stats": "radix_tree",
    "/add_worker": "workers",
    "/remove_worker": "workers",
    "/list_workers": "workers",
    "/workers": "workers",
    "/health": "health",
    "/liveness": "health",
    "/readiness": "health",
    "/metrics": "metrics",
    "/debug/requests": "debug",
}

_GENERATES = (":generateContent", ":streamGenerateContent")


Check = Callable[[Scope], None]
"""Raises a RouterError, or changes the scope, which is the entrance's own copy."""


@runtime_checkable
class HeaderCheck(Protocol):
    """A `Check` of the requests that have one of the headers in `reads`."""

    reads: ClassVar[frozenset[bytes]]

    def __call__(self, scope: Scope) -> None: ...


class Entrance:
    """Lets requests in, turns errors into JSON, keeps each request in `requests` while it lasts, and counts it.

    An error after the reply's head can no longer be answered. It is raised on into the server, which then breaks the
    connection off: the client must not take a part of the reply for all of it.

    Attributes:
        fault: why the application could not start.
    """

    def __init__(
        self,
        app: ASGIApp,
        checks: Sequence[Check],
        metrics: RouterMetrics,
        requests: Requests,
        *,
        body_timeout: float,
        tracer: Tracer | None = None,
    ) -> None:
        """Wrap `app`.

        Args:
            checks: run before `app` sees a request, in this order.
            body_timeout: the seconds after which a read of the body fails if no further piece of it has come.
        """
        self.requests = requests
        self.fault: RouterError | None = None
        self._app = app
        self._checks = [(check, check.reads if isinstance(check, HeaderCheck) else None) for check in checks]
        self._metrics = metrics
        self._body_timeout = body_timeout
        self._tracer = tracer

    # A coroutine function, because servers recognize the interface by that.
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._outside(scope, receive, send)
            return
        headers, request_id = _identified(scope["headers"])
        record = RequestRecord(request_id, scope["method"], scope["path"])
        scope = {**scope, "headers": headers, "state": first_state(scope, record)}
        if scope.get("query_string"):
            take_key_out(scope)
        # Never reset: the task ends with the request, and lines that the server logs about its end belong to the request, too.
        REQUEST_ID.set(request_id)
        client = served_client(scope)
        # Nearly all requests are here as a whole when their turn comes, and need no limit.
        here = client is not None and client.all_here
        receive = ClientMessages(receive, client) if here else _in_time(receive, self._body_timeout)
        reply, in_flight = _Reply(record, self._metrics, send, client), self.requests.records
        in_flight[record] = None
        tracer = self._tracer
        with (
            untraced
            if tracer is None
            else tracer.receive(
                headers, method=record.method, path=record.path, route=reply.route, request_id=request_id
            )
        ) as span:
            try:
                self._check(scope)
                await self._app(scope, receive, reply)
                reply.outcome = BROKEN if record.broken else None
            except ClientDisconnectedError:
                reply.outcome = CLIENT_LEFT
            except asyncio.CancelledError as cancelled:
                # Only a server whose time to finish is over cancels a request.
                if reply.status is not None:
                    raise UpstreamBrokenError("the router was stopped before the reply had ended") from cancelled
                stopped = StoppedError(
                    "the router was stopped before there was a reply: send it again", headers=(("retry-after", "1"),)
                )
                await send_error(reply, stopped, record.path)
                reply.outcome = None
            except Exception as error:
                if not isinstance(error, RouterError | UpstreamBrokenError):
                    logger.exception("%s %s failed", record.method, record.path)
                if reply.status is not None:
                    raise
                await send_error(reply, _answerable(error), record.path)
                reply.outcome = None
            finally:
                del in_flight[record]
                reply.over(span)

    def _check(self, scope: Scope) -> None:
        present = dict(scope["headers"])
        for check, reads in self._checks:
            if reads is None or not reads.isdisjoint(present):
                check(scope)

    async def _outside(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the lifespan, and websockets that the checks let in; neither is a request."""
        try:
            if scope["type"] != "lifespan":
                scope = {**scope}
                self._check(scope)
            await self._app(scope, receive, send)
        except RouterError as error:
            if scope["type"] != "lifespan":
                raise
            self.fault = error
            await send({"type": "lifespan.startup.failed", "message": ""})


class Instance:
    """The id of this router, which goes along with probes. Processes that share a port share it, too.

    So a router that is among its own workers is recognized before a request goes round in circles: a probe that comes back to
    this process, by any way, was sent to this router. Names and addresses do not show that: one host has too many of them.

    Attributes:
        headers: for a probe of a worker.
    """

    reads: ClassVar[frozenset[bytes]] = frozenset({INSTANCE})

    def __init__(self, name: bytes | None = None) -> None:
        self._mark = INSTANCE, secrets.token_hex(16).encode() if name is None else name
        self.headers: HeaderList = [self._mark]

    def __call__(self, scope: Scope) -> None:
        """Refuse a probe of this process, before the check of keys, because probes carry none. Raises LoopError."""
        if self._mark in scope["headers"]:
            raise LoopError("this is the router that asks")


class _Reply(DirectSend):
    """The reply to one request, and its outcome for metrics and traces."""

    __slots__ = ("_metrics", "_record", "outcome", "route", "status")

    def __init__(self, record: RequestRecord, metrics: RouterMetrics, send: Send, client: ServedClient | None) -> None:
        self._send = send
        self._client = client
        self._record = record
        self._metrics = metrics
        self.status: int | None = None
        self.outcome: str | None = BROKEN  # until the request ends otherwise
        self.route = route_class(record.path)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            record = self._record
            self.status = message["status"]
            self._metrics.first_bytes.observe((self.route,), record.answering())
            headers = [header for header in message.get("headers", ()) if header[0] != b"x-request-id"]
            headers.append((b"x-request-id", record.id.encode("ascii")))
            if "/v1/messages" in record.path:  # Anthropic's clients look for its own name
                headers.append((b"request-id", record.id.encode("ascii")))
            message = {**message, "headers": headers}
        await self._send(message)

    def over(self, span: Span | None) -> None:
        """Report the outcome of the request."""
        record, status = self._record, self.status
        outcome = str(status or BROKEN) if self.outcome is None else self.outcome
        seconds = time.monotonic() - record.begun
        self._metrics.requests.counts[self.route, outcome] += 1
        self._metrics.durations.observe((self.route,), seconds)
        logger.debug("%s %s %s %.3f s %s", record.method, record.path, outcome, seconds, record.worker)
        if span is None:
            return
        if status is not None:
            span.set(status=status)
        if outcome == BROKEN or (status is not None and status >= 500):
            span.fail(outcome)
        elif outcome == CLIENT_LEFT:
            span.set(outcome=outcome)


def route_class(path: str) -> str:
    """Return the `route` label of a path. There are few labels, however many paths clients invent."""
    found = _ROUTE_CLASSES.get(path)
    if found is not None:
        return found
    if path.startswith("/trajectories"):
        return "trajectories"
    if path.startswith("/sessions"):
        return "turn" if path.endswith(("/chat/completions", "/messages", "/responses", *_GENERATES)) else "sessions"
    if path.endswith(_GENERATES):
        return "turn"
    return "workers" if path.startswith("/workers/") else "other"


def _identified(headers: HeaderList) -> tuple[HeaderList, str]:
    """Return the headers with exactly one `x-request-id`, and its value: the client's, if it is one short word."""
    given: list[bytes] = []
    for name, value in headers:
        if name == b"x-request-id":
            given.append(value)
    if len(given) == 1 and _sane(given[0]):
        return headers, given[0].decode("ascii")
    request_id = secrets.token_hex(16)
    kept = [header for header in headers if header[0] != b"x-request-id"] if given else headers
    return [*kept, (b"x-request-id", request_id.encode("ascii"))], request_id


def _answerable(error: Exception) -> RouterError:
    if isinstance(error, RouterError):
        return error
    if isinstance(error, UpstreamBrokenError):
        return UpstreamError(str(error))
    return RouterError(f"internal error ({type(error).__name__}): the router's log has the details")


def _in_time(receive: Receive, seconds: float) -> Receive:
    """Return a `receive` that raises RequestTimeoutError when the next piece of the body does not come in time.

    Only the time between two pieces counts, and only while a handler waits for one: a large body over a slow line may take
    minutes, and the client is not at fault while the router does not read.
    """
    more = True

    async def receive_in_time() -> Message:
        nonlocal more
        if not more:
            return await receive()  # now it is the client that waits
        try:
            async with patience(seconds):
                message = await receive()
        except TimeoutError:
            raise RequestTimeoutError(
                f"no piece of the request body came for {seconds:g} s (--body-timeout-secs)"
            ) from None
        more = message.get("more_body", False)
        return message

    return receive_in_time
