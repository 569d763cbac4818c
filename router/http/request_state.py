"""What is known of a request in flight: the record of how far it has come, who sent it, and the state that its layers share.

A `RequestRecord` lives as long as its request. The entrance makes it and drops it; the parts that move the request on (the
queue, the proxy) update it. Nothing decides by it: `GET /debug/requests` and the log show it.

The layers are ASGI applications around each other, and any application may stand between two of them. So they share one
`RequestState` in `scope["state"]`. It is frozen: a layer that adds to it calls the next one with a new scope
(`with_state`), and a layer that sends several requests inward gives each its own state.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

import msgspec

_KEY = "router"
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that the current task serves, for the log."""


class SessionKey(msgspec.Struct, frozen=True):
    """The key of a session, as a request has it (`router.auth.session_keys`)."""

    session_id: str
    secret: str


class Caller(msgspec.Struct, frozen=True):
    """The owner and the rights of a request.

    Attributes:
        tenant: whose texts are read and written.
        admin: may change the fleet, and what all tenants share.
        confined: sees only the generations of its tenant. Otherwise a request id means any generation of that id.
        session: the key by which it names a session. What serves sessions has yet to check it, and names the tenant then.
    """

    tenant: str = ""
    admin: bool = True
    confined: bool = False
    session: SessionKey | None = None


ANYBODY = Caller()
"""The caller where there are no keys: it may do everything."""


class RequestPhase(enum.Enum):
    """How far a request has come."""

    RECEIVING = "receiving"
    """The body arrives, or a middleware prepares the request."""
    QUEUED = "queued"
    """No worker has room."""
    AT_WORKER = "at_worker"
    """A worker has it, and has not begun to reply."""
    WAITING = "waiting"
    """Between two attempts."""
    ANSWERING = "answering"
    """The reply is on its way to the client."""


# Looked up once: in CPython 3.11, a look-up of a member is a call in Python.
_RECEIVING, _AT_WORKER, _ANSWERING = RequestPhase.RECEIVING, RequestPhase.AT_WORKER, RequestPhase.ANSWERING


class RequestRecord(msgspec.Struct, eq=False):
    """One request. Times are those of `time.monotonic()`, except `begun_at`, which is that of `time.time()`.

    Attributes:
        worker: the URL of the worker that has it, or that had it last.
        attempts: the number of times that it was sent to a worker.
        broken: whether its reply, which had begun, ends with an error.
    """

    id: str
    method: str
    path: str
    tenant: str = ""
    worker: str | None = None
    attempts: int = 0
    broken: bool = False
    phase: RequestPhase = _RECEIVING
    begun: float = msgspec.field(default_factory=time.monotonic)
    since: float = msgspec.field(default_factory=time.monotonic)
    begun_at: float = msgspec.field(default_factory=time.time)

    def enter(self, phase: RequestPhase) -> None:
        self.phase = phase
        self.since = time.monotonic()

    def answering(self) -> float:
        """Note that the reply begins. Return the seconds since the request came."""
        self.phase = _ANSWERING
        self.since = time.monotonic()
        return self.since - self.begun

    def sent_to(self, worker: str) -> None:
        self.worker = worker
        self.attempts += 1
        self.phase = _AT_WORKER
        self.since = time.monotonic()


class Requests:
    """All requests in flight, oldest first. The code that serves a request adds it to `records`, and removes it."""

    def __init__(self) -> None:
        self.records: dict[RequestRecord, None] = {}

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(tuple(self.records))


class RouteHint(msgspec.Struct):
    """What a middleware knows about a request that a routing policy may want to know.

    Attributes:
        text, token_ids, routing_key: those of the request; for a batch, of its first prompt.
        replied: set by the proxy if the policy wants to know of replies. The middleware calls it with the ids of each reply to
            that prompt, before the client has all of it.
        conversation, continues: see `RouteQuery`.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    routing_key: str | None = None
    replied: Callable[[Sequence[int]], None] | None = None
    conversation: Callable[[], bytes] | None = None
    continues: bool = False


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


def with_state(scope: MutableMapping[str, Any], **changes: Any) -> MutableMapping[str, Any]:
    """Return a copy of the scope whose state differs from the present one in these attributes."""
    given = scope.get("state") or {}
    state = msgspec.structs.replace(given.get(_KEY) or request_state(scope), **changes)
    return {**scope, "state": {**given, _KEY: state}}


def first_state(scope: MutableMapping[str, Any], record: RequestRecord) -> dict[str, Any]:
    """Return `scope["state"]` for a request that has just come in, with what the server keeps there."""
    return {**(scope.get("state") or {}), _KEY: RequestState(record)}
