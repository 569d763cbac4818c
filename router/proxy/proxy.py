"""One request: choose -> lease -> send -> stream -> release.

A worker fails either before or after the client has received any part of the reply. Before: the proxy tries other workers, as
far as that is safe, and finally the client gets a 502 that names the workers that were tried. To prolong this phase, the proxy
holds the head of a reply back until the first piece of its body (or its end) has come. After: the proxy can only break the
client's connection visibly, because a clean end would make half a rollout look whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import Receive, Scope, Send

from router.config.workers import WorkersConfig
from router.engines.events import END_BYTES, has_ended, has_event
from router.engines.form.beginnings import ReplyBeginnings
from router.engines.form.outcome import is_error, refusal_status
from router.errors import NoWorkerError
from router.http.disconnect import ClientConnection
from router.http.headers import HeaderList, reply_headers, retry_after
from router.http.reply import EditedReply, WatchedReply
from router.http.request_record import RequestPhase
from router.http.time_limits import patience
from router.http.upstream import (
    ClosedBeforeReplyError,
    ConnectFailedError,
    Upstream,
    UpstreamBrokenError,
    UpstreamFailure,
    UpstreamResponse,
)
from router.observability.metrics import RouterMetrics
from router.observability.tracing import Span, Tracer, untraced
from router.proxy.attempts import BUSY, FAULTY, Attempts, Failure
from router.proxy.in_flight import InFlight
from router.proxy.outbound import OutboundRequest, RequestReader
from router.workers.policy import ENOUGH_IDS
from router.workers.pool import Lease, WorkerPool
from router.workers.probe import NONE_SUCH
from router.workers.queue import RequestQueue
from router.workers.worker import Worker, WorkerState

logger = logging.getLogger(__name__)


class _BegunReply(msgspec.Struct):
    """A worker's reply of which something has come: `first` is a piece of its body, or all of it if it is `complete`.

    `status` says what it means. The status of a stream is always 200; its first event shows the real one.
    """

    response: UpstreamResponse
    status: int
    first: bytes
    complete: bool


class Proxy:
    """The innermost application: every request that is not the router's own goes to one worker as it is."""

    def __init__(
        self,
        pool: WorkerPool,
        queue: RequestQueue,
        upstream: Upstream,
        reader: RequestReader,
        config: WorkersConfig,
        metrics: RouterMetrics,
        tracer: Tracer | None = None,
        *,
        recall: Callable[[InFlight, Scope], Awaitable[object]],
        on_broken: Callable[[Worker], None],
    ) -> None:
        """Make the proxy of a pool.

        Args:
            recall: aborts a generation at a worker that took too long, and waits a moment. Failures are only logged.
            on_broken: called with each worker whose connections break.
        """
        self._pool = pool
        self._pool.on_quarantine = self._give_up_on
        self._queue = queue
        self._upstream = upstream
        self._reader = reader
        self._config = config
        self._metrics = metrics
        self._tracer = tracer
        self._recall = recall
        self._on_broken = on_broken
        self._unanswered: dict[Worker, set[asyncio.Timeout]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request.

        Raises:
            NoWorkerError: no worker takes requests.
            QueueFullError, QueueTimeoutError, EndedInQueueError: none has room.
            UpstreamError, UpstreamTimeoutError: the workers that were tried gave no reply.
            UpstreamBrokenError: a worker broke off after `http.response.start` was sent, or ended a stream without `[DONE]`.
            ClientDisconnectedError: the client left; the worker's request is cancelled.
        """
        request = await self._reader.read(scope, receive)
        in_flight = request.in_flight
        attempts = Attempts(self._pool, self._config.retry, repeatable=request.repeatable)
        async with ClientConnection(receive) as client:
            while True:
                if attempts.count:
                    attempts.check(unwanted=in_flight is not None and in_flight.unwanted)
                lease = await self._lease(request, attempts)
                if lease is None:
                    continue
                self._metrics.decisions.counts[self._config.policy, lease.reason] += 1
                if attempts.reason is not None:
                    self._metrics.retries.labels(attempts.reason).inc()
                tracer = self._tracer
                traced = untraced if tracer is None else tracer.span("upstream", worker=lease.worker.url)
                with lease, traced as span:
                    wait = await self._attempt(request, attempts, lease, send, client, span)
                if wait is None:
                    return
                if wait:
                    await _pause(wait, request)

    async def _lease(self, request: OutboundRequest, attempts: Attempts) -> Lease | None:
        """Return a lease of the next worker; None if the caller has to try again, because a worker may be asked twice."""
        try:
            if not request.limited:
                return self._pool.lease(request.query, attempts.exclude, limited=False)
            if (lease := self._queue.at_once(request.query, attempts.exclude)) is not None:
                return lease
            request.state.record.enter(RequestPhase.QUEUED)
            return await self._queue.lease(
                request.key, request.query, attempts.exclude, again=attempts.count > 0, waiting=request.in_flight
            )
        except NoWorkerError as error:
            attempts.no_worker_left(error)
            return None

    async def _attempt(
        self,
        request: OutboundRequest,
        attempts: Attempts,
        lease: Lease,
        send: Send,
        client: ClientConnection,
        span: Span | None,
    ) -> float | None:
        """Ask one worker. Return None when the client has its reply, else the seconds to wait before the next attempt."""
        worker, in_flight = lease.worker, request.in_flight
        if in_flight is not None:
            in_flight.worker = worker
            if in_flight.some_to_end:
                request.leave_out(in_flight)
            if worker.id in attempts.asked:
                request.renew_ids()
        attempts.asked.add(worker.id)
        attempts.engine, attempts.count = worker.engine, attempts.count + 1
        request.state.record.sent_to(worker.url)
        headers = request.headers if span is None else span.inject(request.headers)
        try:
            reply = await self._ask(request, attempts, worker, headers)
        except UpstreamFailure as failure:
            why: Failure = "connect" if isinstance(failure, ConnectFailedError) else "lost"
            if span is not None:
                span.fail(why)
            kept = isinstance(failure, ClosedBeforeReplyError) and failure.kept
            self._failed(attempts, worker, why, str(failure), kept=kept)
            self._on_broken(worker)
            return 0.0
        except TimeoutError:
            if span is not None:
                span.fail("timeout")
            await self._took_too_long(request, attempts, worker)
            return 0.0
        with contextlib.closing(reply.response):
            status = reply.status
            if span is not None:
                span.set(status=status)
            if status in BUSY:
                if (wait := attempts.wait_after_busy(worker, status, retry_after(reply.response.headers))) is not None:
                    return wait
            elif status in FAULTY:
                if attempts.goes_on_after_error(worker, status):
                    return 0.0
            elif status in NONE_SUCH and in_flight is not None:
                if self._goes_on_elsewhere(attempts, worker, status, reply.first):
                    return 0.0
            elif status < 500:
                attempts.answered(worker)
                if status == 404:
                    request.check_served(reply.first)
            await self._relay(request, lease, reply, send, client)
        return None

    async def _ask(
        self, request: OutboundRequest, attempts: Attempts, worker: Worker, headers: HeaderList
    ) -> _BegunReply:
        """Return a reply with a whole event of a stream, or all of the body where the client waits for all of it.

        A client has no use for less; and if the reply breaks off before that, another worker can still start over.
        Raises TimeoutError when the reply took too long, or its worker was quarantined, and UpstreamFailure.
        """
        waiting = self._unanswered.setdefault(worker, set())
        timeout, seconds = asyncio.timeout(None), self._config.request_timeout
        waiting.add(timeout)
        try:
            async with timeout, contextlib.nullcontext() if seconds is None else patience(seconds):
                response = await self._upstream.send(
                    request.method, worker.url + request.target, headers, request.body, fresh=attempts.fresh
                )
                try:
                    return await _begun(response, request.in_flight)
                except BaseException:
                    response.close()
                    raise
        finally:
            waiting.discard(timeout)
            if not waiting:
                self._unanswered.pop(worker, None)

    def _give_up_on(self, worker: Worker) -> None:
        """Send the requests that a hanging worker has not begun to answer to another worker, if there is one."""
        if self._pool.routable:
            now = asyncio.get_running_loop().time()
            for timeout in self._unanswered.get(worker, ()):
                timeout.reschedule(now)

    async def _took_too_long(self, request: OutboundRequest, attempts: Attempts, worker: Worker) -> None:
        if worker.state is WorkerState.QUARANTINED:
            # It could not read a recall. It finds its connection closed when it goes on.
            self._failed(attempts, worker, "timeout", f"no reply, and it is quarantined: {worker.complaint}", gone=True)
            return
        if request.in_flight is not None:
            await self._recall(request.in_flight, request.scope)
        self._failed(attempts, worker, "timeout", f"no reply within {self._config.request_timeout} s")

    def _goes_on_elsewhere(self, attempts: Attempts, worker: Worker, status: int, body: bytes) -> bool:
        """Return whether another worker is asked, because this one seems to have no `/generate`.

        An engine that says so in its own words may mean something in the request.
        """
        if is_error(body):
            return attempts.goes_on_after_error(worker, status)
        logger.warning("worker %s answers /generate with %d: it is no engine", worker.url, status)
        self._metrics.failures.labels("no_engine").inc()
        self._on_broken(worker)
        return attempts.goes_on_without_engine(worker, status)

    def _failed(
        self, attempts: Attempts, worker: Worker, why: Failure, message: str, *, kept: bool = False, gone: bool = False
    ) -> None:
        logger.warning("worker %s gave no reply (%s): %s", worker.url, why, message)
        self._metrics.failures.labels(why).inc()
        attempts.failed(worker, why, message, kept=kept, gone=gone)

    async def _relay(
        self, request: OutboundRequest, lease: Lease, reply: _BegunReply, send: Send, client: ClientConnection
    ) -> None:
        """Stream the reply to the client."""
        worker, response = lease.worker, reply.response
        for editor in (request.left_out, request.ids):
            if editor is not None:
                send = EditedReply(editor, send).send
        if self._pool.listener is not None and response.status == 200:
            send = _heard(request, lease, reply, send)
        headers = reply_headers(response.headers, worker.url)
        headers.append((b"x-router-worker", worker.url.encode("ascii")))
        headers.append((b"x-router-reason", lease.reason.encode("latin-1", "replace")))
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        chunk, end = reply.first, b""
        while chunk:
            end = end[-END_BYTES:] + chunk[-END_BYTES:]
            if reply.complete:
                break
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            chunk = await self._next_piece(request, worker, response)
        if request.ends_with_done and response.status == 200 and response.stream and not has_ended(end):
            # A client recognizes a broken reply by a connection that ends before the reply does.
            raise UpstreamBrokenError(f"the stream of worker {worker.url} ended before its end")
        client.stop_watching()
        await send({"type": "http.response.body", "body": chunk, "more_body": False})

    async def _next_piece(self, request: OutboundRequest, worker: Worker, response: UpstreamResponse) -> bytes:
        """Return the next piece of a reply that has begun. Raises UpstreamBrokenError."""
        seconds = self._config.stream_idle_timeout
        try:
            if seconds is None:
                return await response.read()
            async with patience(seconds):
                return await response.read()
        except UpstreamBrokenError as error:
            self._on_broken(worker)
            raise UpstreamBrokenError(f"worker {worker.url} broke off in the middle of its reply: {error}") from error
        except TimeoutError:
            if request.in_flight is not None:
                await self._recall(request.in_flight, request.scope)
            raise UpstreamBrokenError(
                f"worker {worker.url} sent nothing for {seconds:g} s in the middle of its reply"
            ) from None


async def _begun(response: UpstreamResponse, in_flight: InFlight | None) -> _BegunReply:
    """Read a reply until enough of it has come: a piece, a whole event of generations, or the whole body.

    Raises UpstreamBrokenError.
    """
    stream, status = response.stream, response.status
    pieces = [await response.read()]
    last = b""  # the two bytes before a piece: an event may end between two pieces
    while pieces[-1] and in_flight is not None and (in_flight.whole or (stream and not has_event(last + pieces[-1]))):
        if not in_flight.whole:
            last = (last + pieces[-1])[-2:]
        pieces.append(await response.read())
    complete = not pieces[-1]
    first = b"".join(pieces[:-1] if complete else pieces)  # a single piece is not copied
    if status == 200 and stream:
        if complete and in_flight is not None and not has_ended(first):
            raise UpstreamBrokenError("its stream ended before its end")
        status = refusal_status(first) or 200
    return _BegunReply(response, status, first, complete)


def _heard(request: OutboundRequest, lease: Lease, reply: _BegunReply, send: Send) -> Send:
    """Report the replies to the policy. A middleware that knows the prompt reports them itself; others are read here."""
    in_flight, hint = request.in_flight, request.state.hint
    if hint is not None:
        hint.replied = lease.replied
    elif request.alone and in_flight is not None and (reply.response.stream or in_flight.whole):
        ids = request.query.token_ids is not None
        return WatchedReply(ReplyBeginnings(lease.replied, ids=ids, enough=ENOUGH_IDS), send).send
    return send


async def _pause(seconds: float, request: OutboundRequest) -> None:
    """Wait, but not for a request that is to end."""
    request.state.record.enter(RequestPhase.WAITING)
    in_flight = request.in_flight
    if in_flight is None:
        return await asyncio.sleep(seconds)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await in_flight.until_to_end(range(len(in_flight.names) or 1))
