"""The `/generate` that one generation of a session sends to the layers inside."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Raw
from starlette.types import Message, Scope

from middleware_hub.sessions.turn.plan import TurnPlan
from router.engines.sglang.attempt import ATTEMPT, Attempt
from router.http.asgi import KEPT, ROUTE_HINT, RouteHint

_PASSED_HEADERS = frozenset({b"authorization", b"x-request-id", b"x-abort-policy", b"traceparent", b"tracestate"})
"""The client's headers that go to the worker; the others are about its own dialect."""
_PASSED_WITHOUT_SESSION = frozenset({b"x-radix-namespace", b"x-smg-routing-key", b"x-session-id"})


def worker_request(plan: TurnPlan, rid: str, *, logprobs: bool) -> tuple[Scope, bytes]:
    """Return the scope and the body of a `/generate`.

    Args:
        plan: of the turn.
        rid: the generation's id.
        logprobs: whether the worker returns logprobs.
    """
    request, ids = plan.request, plan.prompt.ids
    fields: dict[str, Raw] = {
        **request.extra,
        "rid": Raw(b'"%b"' % rid.encode()),
        "input_ids": Raw(ids.written),
        "sampling_params": Raw(msgspec.json.encode(plan.sampling)),
        "stream": Raw(b"true" if request.stream else b"false"),
    }
    if logprobs:
        fields["return_logprob"] = Raw(b"true")
        if request.top_logprobs:
            fields["top_logprobs_num"] = Raw(b"%d" % request.top_logprobs)
    body = msgspec.json.encode(fields)
    headers = [pair for pair in plan.scope["headers"] if pair[0] in _PASSED_HEADERS]
    headers.append((b"content-type", b"application/json"))
    if not plan.lasting:
        headers += [pair for pair in plan.scope["headers"] if pair[0] in _PASSED_WITHOUT_SESSION]
        if plan.parent is not None:
            headers.append((b"x-radix-parent", plan.parent.encode()))
    state = {
        **(plan.scope.get("state") or {}),
        **({KEPT: True} if plan.lasting else {}),
        # The session's id: generations of one session have a prefix in common.
        ROUTE_HINT: RouteHint(None, memoryview(ids.packed).cast("i"), plan.session_id or None),
        # What the body says, so that the layers inside need not parse it again.
        ATTEMPT: (body, Attempt.single(fields, rid, stream=request.stream)),
    }
    inner = {
        **plan.scope,
        "method": "POST",
        "path": "/generate",
        "raw_path": b"/generate",
        "query_string": b"",
        "headers": headers,
        "state": state,
    }
    return inner, body


async def never() -> Message:
    """Receive for a client that does not leave: the sender itself decides when the request is over."""
    await asyncio.Event().wait()
    raise AssertionError
