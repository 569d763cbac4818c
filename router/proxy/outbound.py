"""A client's request, as the workers are to get it."""

from __future__ import annotations

import msgspec
from starlette.types import Scope

from router.auth.callers import TENANT
from router.engines.sglang.route_prompt import PromptOf, prompt_of
from router.http.asgi import ROUTE_HINT, HeaderList, RouteHint, header, request_headers, request_target
from router.observability.requests import REQUEST, RequestRecord
from router.policies.base import RouteQuery
from router.proxy.in_flight import FLIGHT, Flight
from router.workers.queue import Key

_END_WITH_DONE = frozenset({"/generate", "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"})
"""Whose streams do. Others, those of Anthropic's dialect for one, end in other words."""


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
        hint: what a middleware knows; it tells of the replies, too.
        alone: whether the prompt was read here, and is the only one.
        flight: the generations that it asks for; None if it is about something else.
        record: where it is told how far it has come.
        body: what is sent; None if there is none.
        ends_with_done: whether a stream that answers it has failed if it ends without `[DONE]`.
    """

    scope: Scope
    method: str
    target: str
    headers: HeaderList
    repeatable: bool
    limited: bool
    key: Key
    query: RouteQuery
    hint: RouteHint | None
    alone: bool
    flight: Flight | None
    record: RequestRecord
    body: bytes | None
    ends_with_done: bool

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
        alone = False
        hint, tenant = state.get(ROUTE_HINT), state.get(TENANT, "")
        routing_key = header(scope, b"x-smg-routing-key") or header(scope, b"x-session-id")
        target = header(scope, b"x-smg-target-worker")
        if hint is not None:
            routing_key = hint.routing_key or routing_key
            query = RouteQuery(hint.text, hint.token_ids, routing_key, target, tenant)
        else:
            prompt = prompt_of(body) if reads_prompt and generation and body else PromptOf()
            query = RouteQuery(prompt.text, prompt.ids, routing_key, target, tenant)
            alone = prompt.alone
        return cls(
            scope=scope,
            method=method,
            target=request_target(scope),
            headers=request_headers(scope, forward_authorization=forward_authorization),
            repeatable=generation or method in ("GET", "HEAD"),
            limited=method in ("POST", "PUT"),
            key=(tenant, routing_key or ""),
            query=query,
            hint=hint,
            alone=alone,
            flight=state.get(FLIGHT),
            record=state.get(REQUEST) or RequestRecord("", method, scope["path"]),
            body=body,
            ends_with_done=scope["path"] in _END_WITH_DONE,
        )
