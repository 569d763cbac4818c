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
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from router.config.workers import WorkersConfig
from router.engines.events import END_BYTES, has_ended, has_event
from router.engines.form.beginnings import ReplyBeginnings
from router.engines.form.joined_reply import JoinedReply
from router.engines.form.outcome import is_error, lacks_adapter, refusal_status
from router.engines.form.ranks import ranks_in_reply
from router.errors import BadRequestError, NoWorkerError
from router.http.disconnect import ClientConnection
from router.http.headers import HeaderList, retry_after
from router.http.request_state import Caller, RequestPhase
from router.http.time_limits import end_now, patience
from router.http.upstream import (
    ClosedBeforeReplyError,
    ConnectFailedError,
    Headers,
    Take,
    UpstreamBrokenError,
    UpstreamFailure,
    UpstreamResponse,
)
from router.observability.metrics import RouterMetrics
from router.observability.tracing import Span, Tracer
from router.proxy.attempts import BUSY, FAULTY, Attempts, Failure
from router.proxy.engine_upstream import EngineUpstream
from router.proxy.in_flight import InFlight
from router.proxy.legs import Abandon, LegRefusedError, Legs
from router.proxy.outbound import OutboundRequest, RequestReader
from router.proxy.worker_reply import WorkerReply
from router.workers.policy import ENOUGH_IDS
from router.workers.pool import Lease, WorkerPool
from router.workers.probe import NONE_SUCH
from router.workers.queue import RequestQueue
from router.workers.worker import Target, Worker, WorkerState

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GENERATES = frozenset(
    {"/v1/responses", "/v1/messages", "/api/generate", "/api/chat", "/invocations", "/vertex_generate"}
)
"""Paths, besides those whose streams end with `[DONE]`, at which a worker generates by itself."""


class _Attempt:
    """One attempt at one worker: what it occupies, what has come of the reply, and the rest of it.

    Attributes:
        response: the worker's, once its head is here.
        first: a piece of its body, or all of it if it is `complete`.
        status: what it means. The status of a stream is always 200; its first event shows the real one.
        legs: both of its legs, if it goes to two workers.
        joined: what the prefill leg adds to the reply.
    """

    def __init__(self, proxy: Proxy, request: OutboundRequest, lease: Lease, span: Span | None) -> None:
        self._proxy = proxy
        self._request = request
        self.lease = lease
        self.span = span
        self.response: UpstreamResponse | None = None
        self.first = b""
        self.complete = False
        self.status = 0
        self.legs: Legs | None = None
        self.joined: JoinedReply | None = None
        self._end = b""

    @property
    def culprit(self) -> Target:
        """The target that is at fault if the attempt fails."""
        return self.lease.target if self.legs is None else self.legs.culprit

    async def begin(self, response: UpstreamResponse) -> None:
        """Read a reply until enough of it has come.

        That is a whole event of a stream of generations, all of it where the client waits for all of it, else a piece. A client
        has no use for less, and if the reply breaks off before that, another worker can still start over.

        Raises UpstreamBrokenError.
        """
        self.response = response
        generations, events = self._request.in_flight, response.stream and response.status == 200
        pieces = [await response.read()]
        last = b""  # the two bytes before a piece: an event may end between two pieces
        while pieces[-1] and generations is not None:
            if not generations.whole:
                if not events or has_event(last + pieces[-1]):
                    break
                last = (last + pieces[-1])[-2:]
            pieces.append(await response.read())
        self.complete = not pieces[-1]
        self.first = b"".join(pieces[:-1] if self.complete else pieces)  # a single piece is not copied
        self.status = response.status
        if events:
            if self.complete and generations is not None and not has_ended(self.first):
                raise UpstreamBrokenError("its stream ended before its end")
            self.status = refusal_status(self.first) or 200
            self._end = self.first[-END_BYTES:]

    def reply(self) -> WorkerReply:
        """Return the reply for the client, which now has to close this attempt."""
        request, lease, response = self._request, self.lease, self.response
        assert response is not None
        if len(lease.worker.targets) > 1 and request.in_flight is not None and response.status == 200:
            lease.served_by(ranks_in_reply(self.first))
        if self.complete:
            self.close()
        reply = WorkerReply(
            response.status,
            response.headers,
            self.first,
            stream=response.stream and response.status == 200,
            worker=lease.worker.url,
            routed=lease.reason,
            rest=None if self.complete else self,
        )
        for editor in (self.joined, request.left_out, request.ids):
            if editor is not None:
                reply.edit(editor)
        if self.legs is not None:
            reply.added.append((b"x-router-prefill-worker", self.legs.prefill.url.encode("ascii")))
        return reply

    async def read(self) -> bytes:
        """Return the next piece of the reply, empty at its end. Raises UpstreamBrokenError."""
        assert self.response is not None
        piece = await self._proxy._in_time(self._request, self, self.response.read(), self._proxy.stream_limit())
        if piece:
            self._note(piece)
        elif (
            self._request.ends_with_done
            and self.response.status == 200
            and self.response.stream
            and not has_ended(self._end)
        ):
            # A client recognizes a broken reply by a connection that ends before the reply does.
            raise self.broken(f"the stream of worker {self.lease.worker.url} ended before its end")
        return piece

    async def flow(self, take: Take) -> None:
        """Hand on pieces as they come, like `UpstreamResponse.flow`. Raises UpstreamBrokenError."""
        assert self.response is not None
        limit = self._proxy.stream_limit()

        def noted(piece: bytes) -> bool:
            self._note(piece)
            if limit is not None:
                limit.renew()
            return take(piece)

        await self._proxy._in_time(self._request, self, self.response.flow(noted), limit)

    def _note(self, piece: bytes) -> None:
        """Keep the end of what has come: at least `END_BYTES`, if there is as much."""
        self._end = piece if len(piece) >= END_BYTES else self._end[-END_BYTES:] + piece

    def broken(self, message: str) -> UpstreamBrokenError:
        """Return the error for a reply that had begun and does not end as it should. The span has failed."""
        if self.span is not None:
            self.span.fail("broken")
        return UpstreamBrokenError(message)

    def close(self, error: BaseException | None = None) -> None:
        """Free the worker. `error`: what ended the attempt. A second call has no effect."""
        if self.response is not None:
            self.response.close()
        if self.legs is not None:
            self.legs.close()
        self.lease.release()
        if self.span is not None:
            span, self.span = self.span, None
            span.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)


class Proxy:
    """The innermost application: every request that is not the router's own goes to one worker as it is."""

    def __init__(
        self,
        pool: WorkerPool,
        queue: RequestQueue,
        upstream: EngineUpstream,
        reader: RequestReader,
        config: WorkersConfig,
        metrics: RouterMetrics,
        tracer: Tracer | None = None,
        *,
        recall: Callable[[InFlight], Awaitable[object]],
        abandon: Abandon,
        legs_at_once: Callable[[], bool],
        on_broken: Callable[[Worker], None],
    ) -> None:
        """Make the proxy of a pool.

        Args:
            recall: aborts a generation at workers that took too long, and waits a moment. Failures are only logged.
            abandon: aborts a generation at one of two workers.
            legs_at_once: whether a prefill and a decode worker get a request at the same time.
            on_broken: called with each worker whose connections break.
        """
        self._pool = pool
        self._pool.on_quarantine = self._give_up_on
        self._pool.on_switched = self._end_unanswered
        self._queue = queue
        self._upstream = upstream
        self._reader = reader
        self._config = config
        self._metrics = metrics
        self._tracer = tracer
        self._policy = config.decode_policy or config.policy
        self._prefill_policy = config.prefill_policy or config.policy
        self._recall = recall
        self._abandon = abandon
        self._legs_at_once = legs_at_once
        self._on_broken = on_broken
        self._unanswered: dict[Worker, set[asyncio.Timeout | patience]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request that is no `/generate`.

        Raises what `generate` raises, and ClientDisconnectedError: the client left, and the worker's request is cancelled.
        """
        request = await self._reader.read(scope, receive)
        async with ClientConnection(receive) as client:
            reply = await self._reply(request)
            try:
                await reply.answer(send, client)
            finally:
                reply.close()

    def generate(self, in_flight: InFlight) -> Awaitable[WorkerReply]:
        """Return the reply to one attempt of a `/generate`: all of it, or a stream whose first event has come.

        Raises:
            NoWorkerError: no worker takes requests.
            QueueFullError, QueueTimeoutError, EndedInQueueError: none has room.
            UpstreamError, UpstreamTimeoutError: the workers that were tried gave no reply.
        """
        return self._reply(self._reader.generation(in_flight))

    def get(self, path: str, headers: HeaderList, caller: Caller) -> Awaitable[WorkerReply]:
        """Return what one of the workers answers to a GET of the router's own. Raises what `generate` raises."""
        return self._reply(self._reader.get(path, headers, caller))

    async def _reply(self, request: OutboundRequest) -> WorkerReply:
        in_flight = request.in_flight
        attempts = Attempts(self._pool, self._config.retry, repeatable=request.repeatable, rank=request.query.rank)
        while True:
            if attempts.count:
                attempts.check(unwanted=in_flight is not None and in_flight.unwanted)
            lease = await self._lease(request, attempts)
            if lease is None:
                continue
            if lease.prefill is not None and in_flight is None:
                _leave_pair(request, lease)
            self._metrics.decisions.counts[self._policy, lease.reason] += 1
            if lease.prefill is not None:
                self._metrics.decisions.counts[self._prefill_policy, lease.prefill.reason] += 1
            if attempts.reason is not None:
                self._metrics.retries.labels(attempts.reason).inc()
            tracer, url = self._tracer, lease.worker.url
            span = None if tracer is None else tracer.span("upstream", worker=url).__enter__()
            attempt = _Attempt(self, request, lease, span)
            try:
                wait = await self._try(request, attempts, attempt)
            except BaseException as error:
                attempt.close(error)
                raise
            if wait is None:
                reply = attempt.reply()
                if self._pool.listener is not None and reply.status == 200:
                    _report(request, lease, reply)
                return reply
            attempt.close()
            if attempt.legs is not None:
                await attempt.legs.until_told()
            if wait:
                await _pause(wait, request)

    async def _lease(self, request: OutboundRequest, attempts: Attempts) -> Lease | None:
        """Return a lease of the next worker; None if the caller has to try again, because a worker may be asked twice."""
        try:
            if not request.limited:
                return self._pool.lease(request.query, attempts.exclude, limited=False)
            if (lease := self._queue.at_once(request.query, attempts.exclude)) is not None:
                return lease
            request.record.enter(RequestPhase.QUEUED)
            return await self._queue.lease(
                request.key, request.query, attempts.exclude, again=attempts.count > 0, waiting=request.in_flight
            )
        except NoWorkerError as error:
            attempts.no_worker_left(error)
            return None

    async def _try(self, request: OutboundRequest, attempts: Attempts, attempt: _Attempt) -> float | None:
        """Ask one worker. Return the seconds to wait before the next attempt, or None if its reply is for the client."""
        lease, span, in_flight = attempt.lease, attempt.span, request.in_flight
        target, worker = lease.target, lease.worker
        if in_flight is not None:
            in_flight.worker = worker
            if in_flight.some_to_end:
                request.leave_out(in_flight)
            if worker.id in attempts.asked or (lease.prefill is not None and lease.prefill.worker.id in attempts.asked):
                request.renew_ids()
            if in_flight.call is not None and in_flight.call.salts is not None:
                request.salt(in_flight, in_flight.call.salts)
            if lease.prefill is not None:
                in_flight.prefill = lease.prefill.worker
                attempts.asked.add(in_flight.prefill.id)
                attempt.legs = Legs(
                    *(self._upstream, self._abandon, in_flight, lease),
                    target=request.target,
                    sent=request.sent(in_flight),
                    body=request.body or b"",
                    at_once=self._legs_at_once(),
                )
        attempts.asked.add(worker.id)
        attempts.engine, attempts.count = worker.engine, attempts.count + 1
        request.record.sent_to(worker.url)
        headers = request.headers if span is None else span.inject(request.headers)
        try:
            await self._ask(request, attempts, attempt, headers)
        except UpstreamFailure as failure:
            why: Failure = "connect" if isinstance(failure, ConnectFailedError) else "lost"
            if span is not None:
                span.fail(why)
            kept = isinstance(failure, ClosedBeforeReplyError) and failure.kept
            avoided = None if attempt.legs is None else attempt.legs.avoided
            self._failed(attempts, attempt.culprit, why, str(failure), kept=kept, avoided=avoided)
            self._on_broken(attempt.culprit.worker)
            return 0.0
        except TimeoutError:
            if span is not None:
                span.fail("timeout")
            await self._took_too_long(request, attempts, attempt)
            return 0.0
        if attempt.legs is not None:
            target = attempt.culprit
            worker = target.worker
        status, first = attempt.status, attempt.first
        if span is not None:
            span.set(status=status)
        if status in BUSY:
            assert attempt.response is not None
            return attempts.wait_after_busy(target, status, retry_after(attempt.response.headers))
        if status in FAULTY:
            goes_on = attempts.goes_on_after_error(target, status)
        elif status in NONE_SUCH and in_flight is not None:
            goes_on = self._goes_on_elsewhere(attempts, target, status, first)
        else:
            goes_on = False
            if status < 500:
                attempts.answered(worker)
                if lease.prefill is not None and worker is lease.worker:
                    lease.prefill.worker.breaker.succeeded()
                if status == 404:
                    request.check_served(first)
                asked = None if in_flight is None else in_flight.request
                if status == 400 and asked is not None and "lora_path" in asked.fields and lacks_adapter(first):
                    goes_on = attempts.goes_on_without_adapter(target)
                    if goes_on:
                        logger.info("worker %s has not loaded the adapter of a request", worker.url)
        return 0.0 if goes_on else None

    async def _ask(self, request: OutboundRequest, attempts: Attempts, attempt: _Attempt, headers: HeaderList) -> None:
        """Send a request to a worker, and wait until its reply has begun.

        Raises TimeoutError when the reply took too long, or its worker was quarantined, and UpstreamFailure.
        """
        worker, body = attempt.lease.worker, request.body
        named: Headers = headers
        if len(worker.targets) > 1:
            named, body = self._upstream.ranked(request.path, headers, body, attempt.lease.target.rank)
        waiting = self._unanswered.setdefault(worker, set())
        seconds = self._config.request_timeout
        timeout = asyncio.timeout(None) if seconds is None else patience(seconds)
        waiting.add(timeout)
        try:
            async with timeout:
                if attempt.legs is not None:
                    await self._ask_both(attempts, attempt, attempt.legs, headers)
                    return
                response = await self._upstream.send(
                    request.method, worker.url + request.target, named, body, fresh=attempts.fresh
                )
                try:
                    await attempt.begin(response)
                except BaseException:
                    response.close()
                    raise
        finally:
            waiting.discard(timeout)
            if not waiting:
                self._unanswered.pop(worker, None)

    async def _ask_both(self, attempts: Attempts, attempt: _Attempt, legs: Legs, headers: HeaderList) -> None:
        """Send a request to a prefill and a decode worker, until the reply has begun and the prefill leg is over."""
        waiting = self._unanswered.setdefault(legs.prefill, set())
        timeout = asyncio.timeout(None)
        waiting.add(timeout)
        try:
            try:
                async with timeout:
                    await legs.begin(headers, timeout, fresh=attempts.fresh)
                    await attempt.begin(legs)
                    attempt.joined = await legs.joined(attempt.status, attempt.first)
            except TimeoutError:
                raise legs.failure or TimeoutError from None
        except LegRefusedError as refused:
            legs.close()
            await attempt.begin(refused.response)
        finally:
            waiting.discard(timeout)
            if not waiting:
                self._unanswered.pop(legs.prefill, None)

    def _give_up_on(self, worker: Worker) -> None:
        """Send the requests that a hanging worker has not begun to answer to another worker, if there is one."""
        if self._pool.routable:
            self._end_unanswered(worker)

    def _end_unanswered(self, worker: Worker) -> None:
        for timeout in self._unanswered.get(worker, ()):
            end_now(timeout)

    async def _took_too_long(self, request: OutboundRequest, attempts: Attempts, attempt: _Attempt) -> None:
        legs = attempt.legs
        if legs is not None and (switched := legs.switched) is not None:
            if request.in_flight is not None:
                await self._recall(request.in_flight)
            attempts.switched(switched.worker)
            return
        target, avoided = (attempt.culprit, None) if legs is None else self._late_leg(request, attempts, legs)
        worker = target.worker
        if worker.state is WorkerState.QUARANTINED:
            # It could not read a recall. It finds its connection closed when it goes on.
            if legs is not None and legs.both_late:
                legs.end_decode()
            self._failed(attempts, target, "timeout", f"no reply, and it is quarantined: {worker.complaint}", gone=True)
            return
        if request.in_flight is not None:
            await self._recall(request.in_flight)
        message = f"no reply within {self._config.request_timeout} s"
        self._failed(attempts, target, "timeout", message, avoided=avoided)

    def _late_leg(self, request: OutboundRequest, attempts: Attempts, legs: Legs) -> tuple[Target, Target | None]:
        """Return which of both legs took too long, and the other one if that may be at fault as well."""
        both = legs.decode_target, legs.prefill_target
        for one in both:
            if one.worker.state is WorkerState.QUARANTINED:
                return one, None
        if not legs.both_late:
            return legs.culprit, None
        one, other = both
        if self._pool.has_other(attempts.exclude | {one.worker.id}, request.query.rank):
            return one, other
        return other, one

    def _goes_on_elsewhere(self, attempts: Attempts, target: Target, status: int, body: bytes) -> bool:
        """Return whether another worker is asked, because this one seems to have no `/generate`.

        An engine that says so in its own words may mean something in the request.
        """
        worker = target.worker
        if is_error(body):
            return attempts.goes_on_after_error(target, status)
        logger.warning("worker %s answers /generate with %d: it is no engine", worker.url, status)
        self._metrics.failures.labels("no_engine").inc()
        self._on_broken(worker)
        return attempts.goes_on_without_engine(target, status)

    def _failed(
        self,
        attempts: Attempts,
        target: Target,
        why: Failure,
        message: str,
        *,
        kept: bool = False,
        gone: bool = False,
        avoided: Target | None = None,
    ) -> None:
        logger.warning("worker %s gave no reply (%s): %s", target.worker.url, why, message)
        self._metrics.failures.labels(why).inc()
        attempts.failed(target, why, message, kept=kept, gone=gone, avoided=avoided)

    def stream_limit(self) -> patience | None:
        """Return a limit of the time in which something has to come of a reply that has begun; None without one."""
        seconds = self._config.stream_idle_timeout
        return None if seconds is None else patience(seconds)

    async def _in_time(
        self, request: OutboundRequest, attempt: _Attempt, coming: Awaitable[T], limit: patience | None
    ) -> T:
        """Return what comes of a reply that has begun. Raises UpstreamBrokenError."""
        worker = attempt.lease.worker
        try:
            if limit is None:
                return await coming
            async with limit:
                return await coming
        except UpstreamBrokenError as error:
            self._on_broken(worker)
            raise attempt.broken(f"worker {worker.url} broke off in the middle of its reply: {error}") from error
        except TimeoutError:
            if request.in_flight is not None:
                await self._recall(request.in_flight)
            raise attempt.broken(
                f"worker {worker.url} sent nothing for {self._config.stream_idle_timeout:g} s in the middle of its reply"
            ) from None


def _leave_pair(request: OutboundRequest, lease: Lease) -> None:
    """Let the decode worker answer alone what is no `/generate`. Raises BadRequestError for what generates."""
    assert lease.prefill is not None
    lease.prefill.release()
    lease.prefill = None
    if request.ends_with_done or request.path in _GENERATES:
        lease.release()
        raise BadRequestError(
            f"{request.path} is not served by prefill and decode workers: send /generate, or run the router with sessions,"
            " which serve chats and completions by it"
        )


def _report(request: OutboundRequest, lease: Lease, reply: WorkerReply) -> None:
    """Report a reply to the policy. A middleware that knows the prompt reports it itself; others are read here."""
    if request.hint is not None:
        request.hint.replied = lease.replied
    elif request.alone and request.in_flight is not None:
        ids = request.query.token_ids is not None
        reply.watch(ReplyBeginnings(lease.replied, ids=ids, enough=ENOUGH_IDS))


async def _pause(seconds: float, request: OutboundRequest) -> None:
    """Wait, but not for a request that is to end."""
    request.record.enter(RequestPhase.WAITING)
    in_flight = request.in_flight
    if in_flight is None:
        return await asyncio.sleep(seconds)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await in_flight.until_to_end(range(len(in_flight.names) or 1))
