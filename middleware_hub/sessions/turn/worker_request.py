"""What a worker is asked for one generation: the `/generate` that goes to the layers inside."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec import Raw
from starlette.types import Message, Scope

from middleware_hub.chat.messages import ChatRequest
from middleware_hub.sessions.prompt.written_ids import Ids
from router.engines.sglang.worker_request import WorkerRequest
from router.http.request_state import RouteHint, with_state

_PASSED_HEADERS = frozenset({b"authorization", b"x-request-id", b"x-abort-policy", b"traceparent", b"tracestate"})
"""Of the client's; the others are about its own dialect."""
_PASSED_WITHOUT_SESSION = frozenset({b"x-radix-namespace", b"x-smg-routing-key", b"x-session-id"})


def worker_request(
    scope: Scope,
    request: ChatRequest,
    sampling: dict[str, Any],
    ids: Ids,
    rid: str,
    *,
    routing_key: str | None,
    logprobs: bool,
    kept: bool = True,
    parent: str | None = None,
) -> tuple[Scope, bytes]:
    """The scope and the body of a `/generate`.

    Args:
        scope: of the client's request.
        request: what it wants.
        sampling: `sampling_params`, complete.
        ids: the prompt.
        rid: the generation's id.
        routing_key: generations with the same one have a prefix in common.
        logprobs: whether the worker is to send them.
        kept: whoever asks keeps the reply. Else the layers inside record it, as they do any other.
        parent: the generation behind whose chain they are to record it.
    """
    fields: dict[str, Raw] = {
        **request.extra,
        "rid": Raw(b'"%b"' % rid.encode()),
        "input_ids": Raw(ids.written),
        "sampling_params": Raw(msgspec.json.encode(sampling)),
        "stream": Raw(b"true" if request.stream else b"false"),
    }
    if logprobs:
        fields["return_logprob"] = Raw(b"true")
        if request.top_logprobs:
            fields["top_logprobs_num"] = Raw(b"%d" % request.top_logprobs)
    headers = [pair for pair in scope["headers"] if pair[0] in _PASSED_HEADERS]
    headers.append((b"content-type", b"application/json"))
    if not kept:
        headers += [pair for pair in scope["headers"] if pair[0] in _PASSED_WITHOUT_SESSION]
        if parent is not None:
            headers.append((b"x-radix-parent", parent.encode()))
    hint = RouteHint(None, memoryview(ids.packed).cast("i"), routing_key)
    # What is in the body, for the layers inside, so that they need not read it again.
    sent = WorkerRequest.single(fields, rid, stream=request.stream)
    inner = {
        **with_state(scope, kept=kept, hint=hint, request=sent),
        "method": "POST",
        "path": "/generate",
        "raw_path": b"/generate",
        "query_string": b"",
        "headers": headers,
    }
    return inner, sent.body


async def never() -> Message:
    """A client that does not leave: whoever sends this decides by itself when it is over."""
    await asyncio.Event().wait()
    raise AssertionError
