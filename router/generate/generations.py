"""What happens to a generation that its worker aborted, or whose client left: the layer around the proxy.

A worker aborts what it has when its weights are changed. Under the policy `retry` the client never learns of it: the same
request goes out again until it is answered, elsewhere or later. But an abort that was asked for through this router is
what somebody wanted, and is returned as it came.

A generation whose client left costs a GPU until its worker notices, which takes SGLang some seconds: it is told at once.
"""

from __future__ import annotations

import asyncio
from typing import cast, get_args

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.auth.callers import caller_of
from router.config import AbortConfig, AbortPolicy
from router.engines.sglang.attempt import ATTEMPT, Attempt
from router.engines.sglang.limits import PromptLimits
from router.errors import BadRequestError, ClientDisconnectedError
from router.generate.abort_retries import Retries, StreamJob, WholeJob
from router.generate.fleet import Fleet
from router.generate.request_ids import disguised
from router.generate.resend import send_on
from router.http.asgi import KEPT, header, read_json
from router.http.json_cost import LIGHT
from router.http.offload import beside
from router.http.reply import EditedReply
from router.observability.metrics import RouterMetrics
from router.proxy.in_flight import Flight


class Generations:
    """Serves `/generate` by one attempt of the application inside, or by several."""

    def __init__(
        self,
        app: ASGIApp,
        fleet: Fleet,
        metrics: RouterMetrics,
        abort: AbortConfig,
        *,
        max_body_bytes: int,
        max_batch: int,
        isolated: bool = False,
    ) -> None:
        """`isolated`: workers are given ids that no client has chosen, for there are others whom those might hit."""
        self._app = app
        self._isolated = isolated
        self._fleet = fleet
        self._retries = Retries(abort, metrics)
        self._outcomes = metrics.generations
        self._abort = abort
        self._max_body_bytes = max_body_bytes
        self._limits = PromptLimits(max_batch)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises what the application inside raises, and BadRequestError for an unknown policy."""
        if scope["method"] not in ("POST", "PUT"):
            await self._app(scope, receive, send)
            return
        policy = self._policy(scope)
        body = await read_json(scope, receive, self._max_body_bytes, ids=True)
        state = scope.get("state") or {}
        made = state.get(ATTEMPT)
        # A middleware in between may have written another body.
        attempt: Attempt | None = made[1] if made is not None and made[0] is body else None
        if attempt is None:
            attempt = await beside(len(body) > LIGHT, Attempt.first, body, self._limits)
        names = () if attempt is None else attempt.rids
        if self._isolated and not state.get(KEPT) and not _made_up_here(made, attempt):
            body, attempt, disguise = disguised(body, attempt)
            send = send if disguise is None else EditedReply(disguise, send).send
        flight = Flight(names, None if attempt is None else attempt.rids, tenant=caller_of(scope).tenant)
        flight.whole = attempt is not None and not attempt.stream
        flights = self._fleet.flights
        flights.begin(flight)
        account = _Account(send)
        try:
            if attempt is None or policy == "return":
                await send_on(self._app, scope, receive, account.send, flight, body if attempt is None else attempt)
            elif not attempt.stream:
                await WholeJob(self._app, self._retries, scope, receive, flight, attempt).serve(account.send)
            elif not attempt.listed:
                await StreamJob(self._app, self._retries, scope, receive, flight, attempt).serve(account.send)
            else:
                await send_on(self._app, scope, receive, account.send, flight, attempt)
        except (ClientDisconnectedError, asyncio.CancelledError):
            account.outcome = "orphaned"
            self._fleet.abandon(flight, scope)
            raise
        finally:
            flights.over(flight)
            self._outcomes.labels(account.outcome).inc(1 if attempt is None else attempt.replies)

    def _policy(self, scope: Scope) -> AbortPolicy:
        asked = header(scope, b"x-abort-policy")
        if asked is None:
            return self._abort.policy
        if asked not in get_args(AbortPolicy):
            raise BadRequestError(f"x-abort-policy must be one of {', '.join(get_args(AbortPolicy))}, not {asked!r}")
        return cast(AbortPolicy, asked)


def _made_up_here(made: tuple[bytes, Attempt] | None, attempt: Attempt | None) -> bool:
    """Whether a middleware gave the generation its id. The layers in between may have written another body since."""
    return made is not None and attempt is not None and bool(attempt.rids) and attempt.rids == made[1].rids


class _Account:
    """What came of a request: `answered` when a good reply has gone out to its end, else `failed`; or what it is set to."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._good = False
        self.outcome = "failed"

    async def send(self, message: Message) -> None:
        """To the client."""
        await self._send(message)
        if message["type"] == "http.response.start":
            self._good = message["status"] < 400
        elif self._good and not message.get("more_body", False):
            self.outcome = "answered"
