"""The layer around the proxy for generations that a worker aborted, or whose client disconnected.

A worker aborts its generations when its weights change. Under the policy `retry`, the client does not notice: the router sends
the same request again, elsewhere or later, until it is answered. An abort that a client asked for through this router is
returned unchanged.

A generation whose client left occupies a GPU until its worker notices, which takes SGLang some seconds. So the router aborts it
at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import cast, get_args

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.config.abort import AbortConfig, AbortPolicy
from router.config.server import ServerConfig
from router.engines.form.limits import PromptLimits
from router.engines.form.outcome import may_be_aborted
from router.engines.form.worker_request import WorkerRequest
from router.engines.json_cost import LIGHT
from router.errors import BadRequestError, ClientDisconnectedError, EndedInQueueError
from router.generate.abort_retries import AbortedReplies, AbortedStream, Retries
from router.generate.fleet import Fleet
from router.http.bodies import read_json
from router.http.headers import header
from router.http.offload import offload
from router.http.reply import CollectedReply, EditedReply, send_whole
from router.http.request_state import RequestState, request_state
from router.observability.metrics import RouterMetrics
from router.proxy.in_flight import InFlight, with_in_flight
from router.proxy.request_ids import with_private_ids


class Generations:
    """Serves `/generate` by one attempt of the application inside, or by several."""

    def __init__(
        self,
        app: ASGIApp,
        others: ASGIApp,
        fleet: Fleet,
        metrics: RouterMetrics,
        abort: AbortConfig,
        server: ServerConfig,
        *,
        isolated: bool = False,
    ) -> None:
        """Wrap the proxy.

        Args:
            others: serves every other path. Generations are nearly all requests, and so skip the comparison with each route.
            fleet: knows the generations in flight, and aborts them at their workers.
            isolated: workers get ids that no client chose, because a client's id might abort generations of others.
        """
        self._app = app
        self._others = others
        self._isolated = isolated
        self._fleet = fleet
        self._retries = Retries(abort, metrics, fleet.may_retry)
        self._peers = fleet.peers
        self._metrics = metrics
        self._policy = abort.policy
        self._max_body_bytes = server.max_body_bytes
        self._limits = PromptLimits(server.max_batch)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises what the application inside raises, and BadRequestError for an unknown policy."""
        if scope["type"] != "http" or scope["path"] != "/generate":
            await self._others(scope, receive, send)
            return
        if scope["method"] not in ("POST", "PUT"):
            await self._app(scope, receive, send)
            return
        if self._peers.until < monotonic():
            await self._peers.look_again()
        asked = header(scope, b"x-abort-policy")
        policy = self._policy if asked is None else _checked(asked)
        state = request_state(scope)
        body = await read_json(scope, receive, self._max_body_bytes, ids=True)
        request = state.request
        if request is None or body is not request.body:
            if len(body) <= LIGHT:
                request = WorkerRequest.parse(body, self._limits)
            else:
                request = await offload(True, WorkerRequest.parse, body, self._limits)
            body = body if request is None else request.body
        names = () if request is None else request.rids
        overlap = request is not None and request.named and self._fleet.in_flight.overlap(names)
        if (self._isolated or overlap) and not _made_up_here(state, request):
            body, request, ids = with_private_ids(body, request)
            body = body if request is None else request.body
            send = send if ids is None else EditedReply(ids, send).send
        in_flight = InFlight(
            names,
            None if request is None else request.rids,
            tenant=state.caller.tenant,
            body=body,
            request=request,
        )
        in_flight.scope = scope
        inner = with_in_flight(scope, in_flight)
        self._fleet.in_flight.begin(in_flight)
        outcome = "failed"
        try:
            if request is not None and not request.stream and policy == "retry":
                reply = CollectedReply()
                await self._app(inner, receive, reply.send)
                if reply.start["status"] == 200 and may_be_aborted(reply.body):
                    again = AbortedReplies(self._app, self._retries, inner, receive, in_flight, request)
                    reply = await again.made_good(reply)
                await send_whole(send, reply.start, reply.body)
                outcome = "answered" if reply.start["status"] < 400 else "failed"
            else:
                watched = _Outcome(send)
                try:
                    if request is None or policy == "return" or request.listed:
                        await self._app(inner, receive, watched.send)
                    else:
                        stream = AbortedStream(self._app, self._retries, inner, receive, in_flight, request)
                        await stream.serve(watched.send)
                finally:
                    outcome = watched.word
        except EndedInQueueError:
            if request is None:
                raise
            await _send_ended(send, request, in_flight.names)
            outcome = "answered"
        except (ClientDisconnectedError, asyncio.CancelledError):
            outcome = "orphaned"
            self._fleet.abandon(in_flight, scope)
            raise
        finally:
            self._fleet.in_flight.over(in_flight)
            self._metrics.generations.counts[outcome,] += 1 if request is None else request.prompts * request.samples


def _checked(policy: str) -> AbortPolicy:
    if policy not in get_args(AbortPolicy):
        raise BadRequestError(f"x-abort-policy must be one of {', '.join(get_args(AbortPolicy))}, not {policy!r}")
    return cast(AbortPolicy, policy)


async def _send_ended(send: Send, request: WorkerRequest, names: Sequence[str]) -> None:
    kind = b"text/event-stream; charset=utf-8" if request.stream else b"application/json"
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
    await send_whole(send, start, request.ended_in_queue(names))


def _made_up_here(state: RequestState, request: WorkerRequest | None) -> bool:
    """Return whether the router made up the ids of the generation. A middleware may have written another body since."""
    if state.kept:
        return True
    made = state.request
    if made is None or made.named or request is None:
        return False
    return bool(request.rids) and request.rids == made.rids


class _Outcome:
    """The outcome of a request: `answered` once a good reply was sent to its end, else `failed`, unless it is set."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._good = False
        self.word = "failed"

    async def send(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self._good = message["status"] < 400
        elif self._good and not message.get("more_body", False):
            self.word = "answered"
