"""The layer around the proxy for generations that a worker aborted, or whose client disconnected.

A worker aborts its generations when its weights change. Under the policy `retry`, the client does not notice: the router sends
the same request again, elsewhere or later, until it is answered. An abort that a client asked for through this router is
returned unchanged.

A generation whose client left occupies a GPU until its worker notices, which takes SGLang some seconds. So the router aborts it
at once.
"""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic
from typing import cast, get_args

from starlette.types import ASGIApp, Receive, Scope, Send

from router.config.server import ServerConfig
from router.config.workers import AbortConfig, AbortPolicy
from router.engines.form.limits import PromptLimits
from router.engines.form.outcome import may_be_aborted
from router.engines.form.worker_request import WorkerRequest
from router.engines.json_cost import LIGHT
from router.errors import BadRequestError, ClientDisconnectedError, EndedInQueueError
from router.generate.abort_retries import AbortedReplies, AbortedStream, Retries
from router.generate.fleet import Fleet
from router.http.bodies import read_json
from router.http.disconnect import ClientConnection
from router.http.headers import HeaderList, first_values, request_target
from router.http.offload import offload
from router.http.request_state import Caller, request_state
from router.kv_cache.salts import HEADER as SALT
from router.kv_cache.salts import KvSalts
from router.observability.metrics import RouterMetrics
from router.proxy.generate_call import GenerateCall
from router.proxy.in_flight import InFlight
from router.proxy.proxy import Proxy
from router.proxy.request_ids import with_private_ids
from router.proxy.worker_reply import ReplyState, WorkerReply


class Generations:
    """Generates by one attempt of the proxy, or by several: the `Backend` of the middlewares, and the route `/generate`."""

    def __init__(
        self,
        proxy: Proxy,
        others: ASGIApp,
        fleet: Fleet,
        metrics: RouterMetrics,
        abort: AbortConfig,
        server: ServerConfig,
        *,
        isolated: bool = False,
        salts: KvSalts,
    ) -> None:
        """Wrap the proxy.

        Args:
            others: serves every other path. Generations are nearly all requests, and so skip the comparison with each route.
            fleet: knows the generations in flight, and aborts them at their workers.
            isolated: workers get ids that no client chose, because a client's id might abort generations of others.
        """
        self._proxy = proxy
        self._others = others
        self._isolated = isolated
        self._salts = salts
        self._fleet = fleet
        self._retries = Retries(abort, metrics, fleet.may_retry)
        self._peers = fleet.peers
        self._counts = metrics.generations.counts
        self._policy = abort.policy
        self._max_body_bytes = server.max_body_bytes
        self._limits = PromptLimits(server.max_batch)
        self.abort = fleet.abort

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises what `generate` raises, and ClientDisconnectedError."""
        if scope["type"] != "http" or scope["path"] != "/generate":
            await self._others(scope, receive, send)
            return
        if scope["method"] not in ("POST", "PUT"):
            await self._proxy(scope, receive, send)
            return
        body, state = await read_json(scope, receive, self._max_body_bytes, ids=True), request_state(scope)
        request = await self.parsed(body)
        call = GenerateCall(
            body if request is None else request.body,
            request,
            scope["headers"],
            state.record,
            state.caller,
            state.hint,
            method=scope["method"],
            target=request_target(scope),
        )
        async with ClientConnection(receive) as client:
            reply = await self.generate(call)
            try:
                await reply.answer(send, client)
            finally:
                reply.close()

    async def parsed(self, body: bytes) -> WorkerRequest | None:
        """Return a body as the router understands it; None if only a worker can decide what it means.

        Raises BadRequestError for more replies than one request may ask for, and BodyTooLargeError.
        """
        return await offload(len(body) > LIGHT, WorkerRequest.parse, body, self._limits)

    async def generate(self, call: GenerateCall) -> WorkerReply:
        """See `Backend`. Raises BadRequestError for an unknown policy for aborts, too."""
        if self._peers.until < monotonic():
            await self._peers.look_again()
        if not call.named:
            call.named = first_values(call.headers)
        asked, request = call.named.get(b"x-abort-policy"), call.request
        policy = self._policy if asked is None else _checked(asked.decode("latin-1"))
        names, ids = () if request is None else request.rids, None
        if request is None:
            private = self._isolated
        else:  # ids that the router has made up stand in nobody's way
            private = request.named and (self._isolated or self._fleet.in_flight.overlap(names))
        if private:
            call.body, request, ids = with_private_ids(call.body, request)
            call.request = request
        if self._salts.on or SALT in call.named:
            call.salts = self._salts.of(call.named.get(SALT), call.caller.tenant, call.began, request)
        in_flight = InFlight(names, None if request is None else request.rids, tenant=call.caller.tenant, call=call)
        self._fleet.in_flight.begin(in_flight)
        try:
            reply = await self._proxy.generate(in_flight)
            if call.salts is not None and reply.status == 200:
                call.salts.answered(aborted=may_be_aborted(reply.body))
            if request is not None and policy == "retry":
                reply = await self._made_good(reply, in_flight, request)
        except EndedInQueueError:
            if request is None:
                self._over("failed", in_flight)
                raise
            reply = _ended(request, in_flight)
        except (ClientDisconnectedError, asyncio.CancelledError):
            self._fleet.abandon(in_flight)
            self._over("orphaned", in_flight)
            raise
        except BaseException:
            self._over("failed", in_flight)
            raise
        if ids is not None:
            reply.edit(ids)
        if reply.complete and not reply.stream:
            self._over("answered" if reply.status < 400 else "failed", in_flight)
        else:
            reply.when_closed(partial(self._closed, in_flight))
        return reply

    async def get(self, path: str, headers: HeaderList, caller: Caller) -> WorkerReply:
        """See `Backend`."""
        return await self._proxy.get(path, headers, caller)

    async def _made_good(self, reply: WorkerReply, in_flight: InFlight, request: WorkerRequest) -> WorkerReply:
        """Return a reply in which nothing is aborted, as far as further attempts can bring that about."""
        if reply.stream:
            if request.listed:
                return reply
            return await AbortedStream(self._proxy.generate, self._retries, in_flight, request).made_good(reply)
        if reply.status != 200 or not may_be_aborted(reply.body):
            return reply
        return await AbortedReplies(self._proxy.generate, self._retries, in_flight, request).made_good(reply)

    def _closed(self, in_flight: InFlight, reply: WorkerReply) -> None:
        """Note the end of a reply that came in pieces. If it was closed before, its client has left."""
        outcome = "answered" if reply.state is ReplyState.ENDED and reply.status < 400 else "failed"
        if reply.state is ReplyState.BEGUN:
            outcome = "orphaned"
            self._fleet.abandon(in_flight)
        self._over(outcome, in_flight)

    def _over(self, outcome: str, in_flight: InFlight) -> None:
        self._fleet.in_flight.over(in_flight)
        self._counts[outcome,] += in_flight.replies


def _checked(policy: str) -> AbortPolicy:
    if policy not in get_args(AbortPolicy):
        raise BadRequestError(f"x-abort-policy must be one of {', '.join(get_args(AbortPolicy))}, not {policy!r}")
    return cast(AbortPolicy, policy)


def _ended(request: WorkerRequest, in_flight: InFlight) -> WorkerReply:
    """Return the reply to generations that were aborted before a worker had them."""
    kind = b"text/event-stream; charset=utf-8" if request.stream else b"application/json"
    body = request.ended_in_queue(in_flight.names)
    return WorkerReply(200, [(b"content-type", kind)], body, stream=request.stream)
