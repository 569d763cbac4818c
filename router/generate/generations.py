"""What happens to a generation that its worker aborted, or whose client left: the layer around the proxy.

A worker aborts what it has when its weights are changed. Under the policy `retry` the client never learns of it: the same
request goes out again until it is answered, elsewhere or later. But an abort that a client asked for through this router is
returned as it came.

A generation whose client left costs a GPU until its worker notices, which takes SGLang some seconds. So the worker hears of it
at once.
"""

from __future__ import annotations

import asyncio
from typing import cast, get_args

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.config import AbortConfig, AbortPolicy, ServerConfig
from router.engines.sglang.limits import PromptLimits
from router.engines.sglang.worker_request import WorkerRequest
from router.errors import BadRequestError, ClientDisconnectedError
from router.generate.abort_retries import AbortedReplies, AbortedStream, Retries
from router.generate.fleet import Fleet
from router.http.asgi import header, read_json
from router.http.json_cost import LIGHT
from router.http.offload import offload
from router.http.reply import CollectedReply, EditedReply, send_whole
from router.http.request_state import RequestState, request_state, with_state
from router.observability.metrics import RouterMetrics
from router.proxy.in_flight import InFlight
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
            app: what sends a generation to a worker.
            others: serves every other path. Generations, which are nearly everything, need not be compared with each route.
            fleet: knows the generations in flight, and tells workers to end them.
            metrics: what is counted.
            abort: what happens to aborted generations, and how often they are sent again.
            server: the limits for a body.
            isolated: workers get ids that no client has chosen, because those might hit the generations of others.
        """
        self._app = app
        self._others = others
        self._isolated = isolated
        self._fleet = fleet
        self._retries = Retries(abort, metrics)
        self._outcomes = metrics.generations
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
        asked = header(scope, b"x-abort-policy")
        policy = self._policy if asked is None else _checked(asked)
        state = request_state(scope)
        body = await read_json(scope, receive, self._max_body_bytes, ids=True)
        request = state.request
        if request is None or request.body is not body:
            request = await offload(len(body) > LIGHT, WorkerRequest.parse, body, self._limits)
        names = () if request is None else request.rids
        if self._isolated and not _made_up_here(state, request):
            body, request, ids = with_private_ids(body, request)
            send = send if ids is None else EditedReply(ids, send).send
        in_flight = InFlight(
            names,
            None if request is None else request.rids,
            tenant=state.caller.tenant,
            body=body if request is None else request.body,
            request=request,
        )
        inner = with_state(scope, body_read=True, in_flight=in_flight)
        self._fleet.in_flight.begin(in_flight)
        outcome = _Outcome(send)
        try:
            if request is None or policy == "return" or (request.stream and request.listed):
                await self._app(inner, receive, outcome.send)
            elif request.stream:
                await AbortedStream(self._app, self._retries, inner, receive, in_flight).serve(outcome.send)
            else:
                reply = CollectedReply()
                await self._app(inner, receive, reply.send)
                if reply.start["status"] == 200 and b'"abort"' in reply.body:
                    again = AbortedReplies(self._app, self._retries, inner, receive, in_flight)
                    reply = await again.made_good(reply)
                await send_whole(outcome.send, reply.start, reply.body)
        except (ClientDisconnectedError, asyncio.CancelledError):
            outcome.word = "orphaned"
            self._fleet.abandon(in_flight, scope)
            raise
        finally:
            self._fleet.in_flight.over(in_flight)
            self._outcomes.labels(outcome.word).inc(1 if request is None else request.replies)


def _checked(policy: str) -> AbortPolicy:
    if policy not in get_args(AbortPolicy):
        raise BadRequestError(f"x-abort-policy must be one of {', '.join(get_args(AbortPolicy))}, not {policy!r}")
    return cast(AbortPolicy, policy)


def _made_up_here(state: RequestState, request: WorkerRequest | None) -> bool:
    """Return whether the router gave the generation its id. A middleware may have written another body since."""
    if state.kept:
        return True
    made = state.request
    if made is None or made.named or request is None:
        return False
    return bool(request.rids) and request.rids == made.rids


class _Outcome:
    """What came of a request: `answered` when a good reply has gone out to its end, else `failed`; or what it is set to."""

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
