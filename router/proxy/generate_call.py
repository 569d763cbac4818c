"""A `/generate` as the layers inside of HTTP pass it on: a call with a typed reply, in which no layer reads a header twice."""

from __future__ import annotations

from typing import Protocol

import msgspec

from router.engines.form.worker_request import WorkerRequest
from router.http.headers import HeaderList
from router.http.request_state import ANYBODY, Caller, RequestRecord, RouteHint
from router.kv_cache.salts import Began, CallSalts
from router.proxy.worker_reply import WorkerReply


class GenerateCall(msgspec.Struct):
    """One `/generate` on its way to the workers.

    Attributes:
        body: the bytes that a worker gets: those of `request`, if there is one.
        request: the body as the router understands it; None if only a worker can decide what the body means.
        headers: those of the client's request. A worker gets them without the ones that are for the router.
        record: how far the client's request has come.
        caller: who sent it.
        hint: what a middleware reports to the routing policy.
        method, target: of the client's request line.
        named: the headers by name, each with its first value (`first_values`), if the caller has them; else the backend reads
            them.
        began: returns with which weight version the conversation of each prompt began; None if nothing is known of them.
        salts: of its prompts, once it is on its way; None if they have none.
    """

    body: bytes
    request: WorkerRequest | None
    headers: HeaderList
    record: RequestRecord
    caller: Caller = ANYBODY
    hint: RouteHint | None = None
    method: str = "POST"
    target: str = "/generate"
    named: dict[bytes, bytes] = {}
    began: Began | None = None
    salts: CallSalts | None = None


class Backend(Protocol):
    """Generates."""

    async def generate(self, call: GenerateCall) -> WorkerReply:
        """Return the reply to a call: all of it, or a stream whose first event is here. The caller closes it.

        Raises:
            RouterError: no worker gave a reply.
            UpstreamBrokenError: a worker broke off in the middle of a reply that should have come as a whole.
        """

    async def abort(self, rid: str, call: GenerateCall) -> None:
        """End the generations of a call that have this id: their workers return what they have sampled. Raises as above."""

    async def get(self, path: str, headers: HeaderList, caller: Caller) -> WorkerReply:
        """Return what one of the workers answers to a GET. The caller closes it. Raises as above."""
