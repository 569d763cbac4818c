"""One request: choose -> lease -> send -> stream -> release.

A worker fails either before or after the client has been told anything. Before: the request goes elsewhere, as far as
that is safe, and the last word is a 502 that names what was tried. So that there is as much "before" as
possible, the head of a reply is held back until the first piece of its body (or its end) has come. After: all that
is left is to break the client's connection visibly: an ending that looks clean would make half a rollout look whole.
"""

from __future__ import annotations

import logging
from contextlib import closing
from urllib.parse import quote

import msgspec
from starlette.types import Receive, Scope, Send

from router.asgi import ROUTE_HINT, HeaderList, has_body, read_body, reply_headers, request_headers
from router.client import ClientConnection
from router.errors import BadRequestError, NoWorkerError, UpstreamError
from router.flights import FLIGHT, Flight
from router.metrics import RouterMetrics
from router.policies.base import RouteQuery
from router.upstream import (
    ConnectFailedError,
    Upstream,
    UpstreamBrokenError,
    UpstreamFailure,
    UpstreamResponse,
)
from router.workers.pool import Lease, WorkerPool
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

MAX_LOST = 3
"""After so many connections that ended without a reply, the request is more likely the cause than the victim."""


class _Request(msgspec.Struct, frozen=True):
    method: str
    target: str  # path and query as the client wrote them
    headers: HeaderList
    repeatable: bool  # sending it twice does no harm, and its body (if any) is at hand


class Proxy:
    """The innermost application: every request that is not the router's own goes to one worker as it is."""

    def __init__(
        self,
        pool: WorkerPool,
        upstream: Upstream,
        metrics: RouterMetrics,
        *,
        max_body_bytes: int,
        forward_authorization: bool,
    ) -> None:
        """`forward_authorization` is off where the header carries this router's own key."""
        self._pool = pool
        self._upstream = upstream
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._forward_authorization = forward_authorization

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request.

        Raises:
            NoWorkerError: no worker takes requests.
            UpstreamError: the workers that were tried gave no reply.
            UpstreamBrokenError: a worker broke off after `http.response.start` was sent.
            ClientDisconnectedError: the client left; the worker's request is cancelled.
        """
        method = scope["method"]
        body: bytes | None = None
        streams_body = has_body(scope)
        if method in ("POST", "PUT") and scope["path"] == "/generate":
            body = await read_body(scope, receive, self._max_body_bytes)
            streams_body = False
        request = _Request(
            method=method,
            target=_target(scope),
            headers=self._request_headers(scope, streams_body),
            repeatable=body is not None or (method in ("GET", "HEAD") and not streams_body),
        )
        attempts = _Attempts(self._pool, _query(scope), repeatable=request.repeatable)
        flight: Flight | None = (scope.get("state") or {}).get(FLIGHT)
        async with ClientConnection(receive, reads_body=streams_body) as client:
            while True:
                with attempts.lease(last=flight is not None and flight.unwanted) as lease:
                    if flight is not None:
                        flight.worker = lease.worker
                    try:
                        response = await self._upstream.send(
                            method,
                            lease.worker.url + request.target,
                            request.headers,
                            client.body() if streams_body else body,
                            fresh=attempts.fresh,
                        )
                    except UpstreamFailure as failure:
                        self._failed(attempts, lease.worker, failure)
                        continue
                    with closing(response):
                        try:
                            first = await response.read()
                        except UpstreamBrokenError as failure:
                            self._failed(attempts, lease.worker, failure)
                            continue
                        await _relay(lease.worker, response, first, send, client)
                        return

    def _failed(self, attempts: _Attempts, worker: Worker, failure: UpstreamFailure) -> None:
        reason = "connect" if isinstance(failure, ConnectFailedError) else "lost"
        logger.warning("worker %s gave no reply (%s): %s", worker.url, reason, failure)
        self._metrics.failures.labels(reason).inc()
        attempts.failed(worker, failure)

    def _request_headers(self, scope: Scope, streams_body: bool) -> HeaderList:
        headers = request_headers(scope, forward_authorization=self._forward_authorization)
        if streams_body:
            # A body passed through keeps its framing, so that a worker sees one that was cut short.
            headers += [(name, value) for name, value in scope["headers"] if name == b"content-length"]
        return headers


async def _relay(
    worker: Worker, response: UpstreamResponse, first: bytes, send: Send, client: ClientConnection
) -> None:
    headers = reply_headers(response.headers)
    headers.append((b"x-router-worker", worker.url.encode("ascii")))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    chunk = first
    while chunk:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        try:
            chunk = await response.read()
        except UpstreamBrokenError as error:
            raise UpstreamBrokenError(f"worker {worker.url} broke off in the middle of its reply: {error}") from error
    client.stop_watching()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Attempts:
    """Where a request was tried, and where it may still be tried.

    Each worker is asked once. A kept-alive connection may have been closed by its worker in the moment of use, which
    looks exactly like a worker that died; so after the first such loss all further attempts take new connections, and
    the worker that lost it is asked once more when nobody else is left. What cannot be repeated takes a new
    connection at once.
    """

    def __init__(self, pool: WorkerPool, query: RouteQuery, *, repeatable: bool) -> None:
        self._pool = pool
        self._query = query
        self._repeatable = repeatable
        self._tried: set[str] = set()
        self._failures: list[str] = []
        self._lost = 0
        self._stale: str | None = None
        self.fresh = not repeatable

    def lease(self, *, last: bool = False) -> Lease:
        """The next worker. Raises NoWorkerError if there never was one, UpstreamError after the last attempt.

        `last`: nobody wants another attempt any more.
        """
        if last and self._failures:
            raise self._exhausted()
        if self._lost >= (MAX_LOST if self._repeatable else 1):
            raise self._exhausted()
        try:
            return self._pool.lease(self._query, exclude=self._tried)
        except NoWorkerError:
            if not self._failures:
                raise
            if self._stale is None:
                raise self._exhausted() from None
        self._tried.discard(self._stale)
        self._stale = None
        return self.lease()

    def failed(self, worker: Worker, failure: UpstreamFailure) -> None:
        """Take note of a worker that gave no reply."""
        self._failures.append(f"{worker.url}: {failure}")
        self._tried.add(worker.id)
        if isinstance(failure, ConnectFailedError):
            return
        self._lost += 1
        if not self.fresh:
            self.fresh = True
            self._stale = worker.id

    def _exhausted(self) -> UpstreamError:
        return UpstreamError(f"no worker gave a reply ({'; '.join(self._failures)})", tried=self._failures)


def _query(scope: Scope) -> RouteQuery:
    hint = (scope.get("state") or {}).get(ROUTE_HINT)
    if hint is None:
        return RouteQuery()
    return RouteQuery(text=hint.text, token_ids=hint.token_ids, routing_key=hint.routing_key)


def _target(scope: Scope) -> str:
    raw: bytes | None = scope.get("raw_path")
    path = quote(scope["path"]) if raw is None else raw.decode("latin-1")
    if not path.startswith("/"):
        # Put behind a worker's URL, anything else would change its host or port.
        raise BadRequestError(f"the request target must begin with a slash, not {path!r}")
    query: bytes = scope.get("query_string", b"")
    return f"{path}?{query.decode('latin-1')}" if query else path
