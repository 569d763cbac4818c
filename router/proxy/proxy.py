"""One request: choose -> lease -> send -> stream -> release.

A worker fails either before or after the client has been told anything. Before: the request goes elsewhere, as far as
that is safe, and the last word is a 502 that names what was tried. So that there is as much "before" as
possible, the head of a reply is held back until the first piece of its body (or its end) has come. After: all that
is left is to break the client's connection visibly: an ending that looks clean would make half a rollout look whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from starlette.types import Receive, Scope, Send

from router.config import WorkersConfig
from router.engines.sglang.attempt import is_error, refusal_status
from router.engines.sglang.beginnings import StreamBeginnings, tell_whole
from router.engines.sglang.stream import END_BYTES, has_ended
from router.errors import NoWorkerError
from router.http.asgi import HeaderList, gather_body, has_body, read_body, reply_headers
from router.http.disconnect import ClientConnection
from router.http.reply import is_event_stream
from router.http.upstream import (
    ClosedBeforeReplyError,
    ConnectFailedError,
    Upstream,
    UpstreamBrokenError,
    UpstreamFailure,
    UpstreamResponse,
    retry_after,
)
from router.observability.metrics import RouterMetrics
from router.observability.requests import Phase
from router.observability.tracing import OFF, Span, Tracer
from router.policies.base import ENOUGH_IDS
from router.proxy.attempts import BUSY, FAULTY, Attempts, Failure
from router.proxy.in_flight import Flight
from router.proxy.outbound import OutboundRequest
from router.workers.pool import Lease, WorkerPool
from router.workers.probe import NONE_SUCH
from router.workers.queue import RequestQueue
from router.workers.worker import Worker, WorkerState

logger = logging.getLogger(__name__)


class Recall(Protocol):
    """Tells a worker that its copy of a generation is not wanted any more, and waits until it knows."""

    async def __call__(self, flight: Flight, scope: Scope) -> None:
        """Failures are logged: the worker may be dead."""


class Proxy:
    """The innermost application: every request that is not the router's own goes to one worker as it is.

    Args:
        pool: the workers.
        queue: where requests wait for one that has room.
        upstream: the way to them.
        metrics: what is counted.
        config: how long things may take, and how often they are tried.
        recall: for a worker that took too long.
        on_trouble: told of each worker whose connections break.
        max_body_bytes: the limit for a body.
        forward_authorization: off where the header carries this router's own key.
    """

    def __init__(
        self,
        pool: WorkerPool,
        queue: RequestQueue,
        upstream: Upstream,
        metrics: RouterMetrics,
        config: WorkersConfig,
        *,
        recall: Recall,
        on_trouble: Callable[[Worker], None],
        max_body_bytes: int,
        forward_authorization: bool,
        tracer: Tracer = OFF,
    ) -> None:
        self._tracer = tracer
        self._pool = pool
        self._pool.on_quarantine = self._give_up_on
        self._unanswered: dict[Worker, set[asyncio.Timeout]] = {}
        self._queue = queue
        self._upstream = upstream
        self._metrics = metrics
        self._config = config
        self._recall = recall
        self._on_trouble = on_trouble
        self._max_body_bytes = max_body_bytes
        self._forward_authorization = forward_authorization

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request.

        Raises:
            NoWorkerError: no worker takes requests.
            QueueFullError, QueueTimeoutError: none has room.
            UpstreamError, UpstreamTimeoutError: the workers that were tried gave no reply.
            UpstreamBrokenError: a worker broke off after `http.response.start` was sent, or ended a stream without `[DONE]`.
            ClientDisconnectedError: the client left; the worker's request is cancelled.
        """
        generation = scope["method"] in ("POST", "PUT") and scope["path"] == "/generate"
        body: bytes | None = None
        if generation:
            body = await read_body(scope, receive, self._max_body_bytes)
        elif has_body(scope):
            # Whole, before a worker is asked: one that is slow to come holds nobody's place there.
            body = await gather_body(scope, receive, self._max_body_bytes)
        request = OutboundRequest.of(
            scope,
            body,
            generation=generation,
            forward_authorization=self._forward_authorization,
            reads_prompt=self._config.routes_by_prompt,
        )
        attempts = Attempts(self._pool, self._config.retry, repeatable=request.repeatable)
        async with ClientConnection(receive) as client:
            while True:
                attempts.check(unwanted=request.flight is not None and request.flight.unwanted)
                lease = await self._lease(request, attempts)
                if lease is None:
                    continue
                self._metrics.decided(lease.reason)
                if attempts.reason is not None:
                    self._metrics.retries.labels(attempts.reason).inc()
                with lease, self._tracer.span("upstream", worker=lease.worker.url) as span:
                    wait = await self._attempt(request, attempts, lease, send, client, span)
                if wait is None:
                    return
                if wait:
                    await _pause(wait, request)

    async def _lease(self, request: OutboundRequest, attempts: Attempts) -> Lease | None:
        """The next worker; None if one is to be asked a second time, which takes another look."""
        try:
            if not request.limited:
                return self._pool.lease(request.query, attempts.exclude, limited=False)
            request.record.enter(Phase.QUEUED)
            return await self._queue.lease(request.key, request.query, attempts.exclude, again=attempts.count > 0)
        except NoWorkerError as error:
            attempts.nobody(error)
            return None

    async def _attempt(
        self,
        request: OutboundRequest,
        attempts: Attempts,
        lease: Lease,
        send: Send,
        client: ClientConnection,
        span: Span,
    ) -> float | None:
        """Ask one worker. None when the client has its reply, else the seconds to wait before the next attempt."""
        worker = lease.worker
        if request.flight is not None:
            request.flight.worker = worker
            if worker.id in attempts.asked and request.flight.renew is not None:
                request.body = request.flight.renew()
        attempts.asked.add(worker.id)
        request.record.sent_to(worker.url)
        attempts.count += 1
        try:
            async with self._patience(worker):
                response, first = await self._ask(request, attempts, worker, span.inject(request.headers))
        except UpstreamFailure as failure:
            why: Failure = "connect" if isinstance(failure, ConnectFailedError) else "lost"
            span.fail(why)
            kept = isinstance(failure, ClosedBeforeReplyError) and failure.kept
            self._failed(attempts, worker, why, str(failure), kept=kept)
            self._on_trouble(worker)
            return 0.0
        except TimeoutError:
            span.fail("timeout")
            await self._took_too_long(request, attempts, worker)
            return 0.0
        with contextlib.closing(response):
            status = _status(response, first)
            span.set(status=status)
            if status in BUSY:
                wait = attempts.wait_after_busy(worker, status, retry_after(response))
                if wait is not None:
                    return wait
            elif status in FAULTY:
                if attempts.goes_on_after_error(worker, status):
                    return 0.0
            elif status in NONE_SUCH and request.flight is not None:
                if self._goes_on_elsewhere(attempts, worker, status, first):
                    return 0.0
            elif status < 500:
                attempts.answered(worker)
            await self._relay(request, lease, response, first, send, client)
        return None

    async def _ask(
        self,
        request: OutboundRequest,
        attempts: Attempts,
        worker: Worker,
        headers: HeaderList,
    ) -> tuple[UpstreamResponse, bytes]:
        """A reply and the first piece of its body: a whole event of a stream, all of it where the client waits for all of it.

        Less than that is of no use to a client; and if it breaks off before, another worker may still begin anew.
        """
        response = await self._upstream.send(
            request.method,
            worker.url + request.target,
            headers,
            request.body,
            fresh=attempts.fresh,
        )
        try:
            first = piece = await response.read()
            if request.flight is not None and (request.flight.whole or is_event_stream(response.headers)):
                begun, looked_at = bytearray(first), 0
                while piece and (request.flight.whole or begun.find(b"\n\n", looked_at) < 0):
                    looked_at = max(0, len(begun) - 1)
                    begun += (piece := await response.read())
                if not piece and response.status == 200 and is_event_stream(response.headers) and not has_ended(begun):
                    raise UpstreamBrokenError("its stream ended before its end")
                first = bytes(begun)
            return response, first
        except BaseException:
            response.close()
            raise

    @contextlib.asynccontextmanager
    async def _patience(self, worker: Worker) -> AsyncIterator[None]:
        """Raises TimeoutError when a reply took too long, or its worker does not answer to anything any more."""
        waiting = self._unanswered.setdefault(worker, set())
        async with asyncio.timeout(self._config.request_timeout) as timeout:
            waiting.add(timeout)
            try:
                yield
            finally:
                waiting.discard(timeout)
                if not waiting:
                    self._unanswered.pop(worker, None)

    def _give_up_on(self, worker: Worker) -> None:
        """A worker hangs, as far as anybody can tell: what it has not begun to answer goes elsewhere, if there is somewhere."""
        if self._pool.routable:
            now = asyncio.get_running_loop().time()
            for timeout in self._unanswered.get(worker, ()):
                timeout.reschedule(now)

    async def _took_too_long(self, request: OutboundRequest, attempts: Attempts, worker: Worker) -> None:
        if worker.state is WorkerState.QUARANTINED:
            # It would not hear it. Its system closes the connection, and that is what it finds when it goes on.
            self._failed(attempts, worker, "timeout", f"no reply, and it is quarantined: {worker.complaint}", gone=True)
            return
        if request.flight is not None:
            await self._recall(request.flight, request.scope)
        self._failed(attempts, worker, "timeout", f"no reply within {self._config.request_timeout} s")

    def _goes_on_elsewhere(self, attempts: Attempts, worker: Worker, status: int, body: bytes) -> bool:
        """There is no `/generate`, it seems. An engine that says so in its own words may mean something in the request."""
        if is_error(body):
            return attempts.goes_on_after_error(worker, status)
        logger.warning("worker %s answers /generate with %d: it is no engine", worker.url, status)
        self._metrics.failures.labels("no_engine").inc()
        self._on_trouble(worker)
        return attempts.goes_on_without_engine(worker, status)

    def _failed(
        self, attempts: Attempts, worker: Worker, why: Failure, message: str, *, kept: bool = False, gone: bool = False
    ) -> None:
        logger.warning("worker %s gave no reply (%s): %s", worker.url, why, message)
        self._metrics.failures.labels(why).inc()
        attempts.failed(worker, why, message, kept=kept, gone=gone)

    def _listener(
        self, request: OutboundRequest, lease: Lease, response: UpstreamResponse, first: bytes
    ) -> StreamBeginnings | None:
        """See to it that the policy hears how replies begin, if it wants to, before the client has all of them.

        A middleware that knows the prompt tells of the replies itself. Else a reply in one piece is told of here, and what has
        to hear a stream is given back.
        """
        if self._pool.listener is None or response.status != 200:
            return None
        if request.hint is not None:
            request.hint.replied = lease.replied
            return None
        if not request.alone or request.flight is None:
            return None
        ids = request.query.token_ids is not None
        if is_event_stream(response.headers):
            return StreamBeginnings(lease.replied, ids=ids, enough=ENOUGH_IDS)
        if request.flight.whole:
            tell_whole(first, lease.replied, ids=ids)
        return None

    async def _relay(
        self,
        request: OutboundRequest,
        lease: Lease,
        response: UpstreamResponse,
        first: bytes,
        send: Send,
        client: ClientConnection,
    ) -> None:
        """The reply to the client, as it comes."""
        worker, headers = lease.worker, reply_headers(response.headers)
        listener = self._listener(request, lease, response, first)
        headers.append((b"x-router-worker", worker.url.encode("ascii")))
        headers.append((b"x-router-reason", lease.reason.encode("latin-1", "replace")))
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        chunk, seconds = first, self._config.stream_idle_timeout
        ends_with_done = request.ends_with_done and response.status == 200 and is_event_stream(response.headers)
        end = b""
        while chunk:
            end = end[-END_BYTES:] + chunk[-END_BYTES:]
            if listener is not None:
                listener.feed(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            try:
                if seconds is None:
                    chunk = await response.read()
                else:
                    async with asyncio.timeout(seconds):
                        chunk = await response.read()
            except UpstreamBrokenError as error:
                self._on_trouble(worker)
                raise UpstreamBrokenError(
                    f"worker {worker.url} broke off in the middle of its reply: {error}"
                ) from error
            except TimeoutError:
                if request.flight is not None:
                    await self._recall(request.flight, request.scope)
                raise UpstreamBrokenError(
                    f"worker {worker.url} sent nothing for {seconds:g} s in the middle of its reply"
                ) from None
        if ends_with_done and not has_ended(end):
            # The client knows an end of the connection without the end of the reply for what it is.
            raise UpstreamBrokenError(f"the stream of worker {worker.url} ended before its end")
        client.stop_watching()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _status(response: UpstreamResponse, first: bytes) -> int:
    """The status of a reply. Of a stream it is 200 whatever happened; then its first event tells."""
    if response.status == 200 and is_event_stream(response.headers):
        return refusal_status(first) or 200
    return response.status


async def _pause(seconds: float, request: OutboundRequest) -> None:
    """Wait, but not for what is to end."""
    request.record.enter(Phase.WAITING)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            if request.flight is None:
                await asyncio.Event().wait()
            else:
                await request.flight.until_asked(range(len(request.flight.names) or 1))
