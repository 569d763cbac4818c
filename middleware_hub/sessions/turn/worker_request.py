"""The `/generate` that one generation of a session sends to the layers inside."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Raw
from starlette.types import Message, Scope

from middleware_hub.sessions.turn.plan import TurnPlan
from router.engines.sglang.worker_request import WorkerRequest
from router.http.bodies import noted_as_read
from router.http.request_state import RouteHint, with_state

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
        "input_ids": Raw(ids.written),
        "sampling_params": Raw(msgspec.json.encode(plan.sampling)),
        "stream": Raw(b"true" if request.stream else b"false"),
    }
    if logprobs:
        fields["return_logprob"] = Raw(b"true")
        if request.top_logprobs:
            fields["top_logprobs_num"] = Raw(b"%d" % request.top_logprobs)
    # The layers inside read this request, and need not parse the body again.
    sent = WorkerRequest.single(fields, rid, stream=request.stream)
    # Generations of one session have a prefix in common, so its id routes them.
    hint = RouteHint(None, memoryview(ids.packed).cast("i"), plan.session_id or None)
    headers = [pair for pair in plan.scope["headers"] if pair[0] in _PASSED_HEADERS]
    headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(sent.body))]
    if not plan.lasting:
        headers += [pair for pair in plan.scope["headers"] if pair[0] in _PASSED_WITHOUT_SESSION]
        if plan.parent is not None:
            headers.append((b"x-radix-parent", plan.parent.encode()))
    inner = {
        **noted_as_read(with_state(plan.scope, kept=plan.lasting, hint=hint, request=sent)),
        "method": "POST",
        "path": "/generate",
        "raw_path": b"/generate",
        "query_string": b"",
        "headers": headers,
    }
    return inner, sent.body


async def never() -> Message:
    """Receive for a client that does not leave: the sender itself decides when the request is over."""
    await asyncio.Event().wait()
    raise AssertionError
