"""A client's request, as the workers are to get it."""

from __future__ import annotations

import msgspec
from starlette.types import Scope

from router.asgi import ROUTE_HINT, HeaderList, header, request_headers, request_target
from router.callers import TENANT
from router.flights import FLIGHT, Flight
from router.policies.base import RouteQuery
from router.requests import REQUEST, RequestRecord
from router.sglang.route_prompt import prompt_of
from router.workers.queue import Key


class OutboundRequest(msgspec.Struct):
    """What is sent, and what has to be known to send it to one worker after the other.

    Attributes:
        scope: the client's.
        method: of HTTP.
        target: path and query, as the client wrote them.
        headers: those that may pass.
        repeatable: whether sending it twice does no harm.
        limited: whether it is work, for which there may have to be room.
        key: the line that it stands in when there is none.
        query: what a routing policy may want to know.
        flight: the generations that it asks for; None if it is about something else.
        record: where it is told how far it has come.
        body: what is sent; None if there is none.
    """

    scope: Scope
    method: str
    target: str
    headers: HeaderList
    repeatable: bool
    limited: bool
    key: Key
    query: RouteQuery
    flight: Flight | None
    record: RequestRecord
    body: bytes | None

    @classmethod
    def of(
        cls,
        scope: Scope,
        body: bytes | None,
        *,
        generation: bool,
        forward_authorization: bool,
        reads_prompt: bool = False,
    ) -> OutboundRequest:
        """Raises BadRequestError for a target that is no path.

        `generation`: it is one, so that it may be sent twice. `reads_prompt`: the policy wants what no middleware has told.
        """
        method, state = scope["method"], scope.get("state") or {}
        hint = state.get(ROUTE_HINT)
        routing_key = header(scope, b"x-smg-routing-key") or header(scope, b"x-session-id")
        target = header(scope, b"x-smg-target-worker")
        if hint is not None:
            routing_key = hint.routing_key or routing_key
            query = RouteQuery(hint.text, hint.token_ids, routing_key, target)
        else:
            text, ids = prompt_of(body) if reads_prompt and generation and body else (None, None)
            query = RouteQuery(text, ids, routing_key, target)
        return cls(
            scope=scope,
            method=method,
            target=request_target(scope),
            headers=request_headers(scope, forward_authorization=forward_authorization),
            repeatable=generation or method in ("GET", "HEAD"),
            limited=method in ("POST", "PUT"),
            key=(state.get(TENANT, ""), routing_key or ""),
            query=query,
            flight=state.get(FLIGHT),
            record=state.get(REQUEST) or RequestRecord("", method, scope["path"]),
            body=body,
        )
