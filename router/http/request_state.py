"""The state that the layers of one request share, behind one accessor.

The layers are ASGI applications around each other, and any application may stand between two of them. So they share one
`RequestState` in `scope["state"]`. It is frozen: a layer that adds to it calls the next one with a new scope
(`with_state`), and a layer that sends several requests inward gives each its own state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.types import Scope

from router.http.request_record import ANYBODY, Caller, RequestRecord

_KEY = "router"


class RouteHint(msgspec.Struct):
    """What a middleware knows about a request that a routing policy may want to know.

    Attributes:
        text, token_ids, routing_key: those of the request; for a batch, of its first prompt.
        replied: set by the proxy if the policy wants to know of replies. The middleware calls it with the ids of each reply to
            that prompt, before the client has all of it.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    routing_key: str | None = None
    replied: Callable[[Sequence[int]], None] | None = None


class RequestState(msgspec.Struct, frozen=True):
    """What is known of a request.

    Attributes:
        record: how far the request has come.
        caller: who sent it.
        hint: what a middleware reports to the routing policy.
        body_read: a layer has read the body within the limits. What a middleware made of it may be longer.
    """

    record: RequestRecord
    caller: Caller = ANYBODY
    hint: RouteHint | None = None
    body_read: bool = False


def request_state(scope: Mapping[str, Any]) -> RequestState:
    """Return the state of a request. Without one, the caller is `ANYBODY`."""
    found: RequestState | None = (scope.get("state") or {}).get(_KEY)
    return RequestState(RequestRecord("", scope.get("method", ""), scope.get("path", ""))) if found is None else found


def with_state(scope: Scope, **changes: Any) -> Scope:
    """Return a copy of the scope whose state differs from the present one in these attributes."""
    given = scope.get("state") or {}
    state = msgspec.structs.replace(given.get(_KEY) or request_state(scope), **changes)
    return {**scope, "state": {**given, _KEY: state}}


def first_state(scope: Scope, record: RequestRecord) -> dict[str, Any]:
    """Return `scope["state"]` for a request that has just come in, with what the server keeps there."""
    return {**(scope.get("state") or {}), _KEY: RequestState(record)}
