"""The requests in flight: what each is called, where it is, and since when.

One `RequestRecord` lives as long as its request. The boundary around the application makes it and lets go of it; whoever
moves the request on (the queue, the proxy) says so on it. Nothing here decides anything: it is what `GET /debug/requests`
and the log lines tell.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from contextvars import ContextVar

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""What the request is called that is being served here, for whoever writes the log."""


class Phase(enum.Enum):
    """How far a request has come."""

    RECEIVING = "receiving"
    """Its body, and what a middleware does before a worker is asked."""
    QUEUED = "queued"
    """No worker has room for it."""
    AT_WORKER = "at_worker"
    """A worker has it, and has not begun to answer."""
    WAITING = "waiting"
    """Between two attempts."""
    ANSWERING = "answering"
    """The answer is on its way to the client."""


class RequestRecord:
    """One request. Times are `time.monotonic()`, but for `begun_at`, which is `time.time()`."""

    __slots__ = ("attempts", "begun", "begun_at", "id", "method", "path", "phase", "since", "tenant", "worker")

    def __init__(self, request_id: str, method: str, path: str) -> None:
        self.id = request_id
        self.method = method
        self.path = path
        self.tenant = ""
        self.worker: str | None = None
        """The URL of the worker that has it, or had it last."""
        self.attempts = 0
        """How often it was sent to a worker."""
        self.phase = Phase.RECEIVING
        self.begun = self.since = time.monotonic()
        self.begun_at = time.time()

    def enter(self, phase: Phase) -> None:
        """It has come so far now."""
        self.phase = phase
        self.since = time.monotonic()

    def sent_to(self, worker: str) -> None:
        """A worker is asked."""
        self.worker = worker
        self.attempts += 1
        self.enter(Phase.AT_WORKER)


class Requests:
    """All that are in flight, oldest first."""

    def __init__(self) -> None:
        self._records: dict[int, RequestRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(tuple(self._records.values()))

    def begin(self, record: RequestRecord) -> None:
        """It has come in."""
        self._records[id(record)] = record

    def over(self, record: RequestRecord) -> None:
        """It has its answer, or nobody waits for it any more."""
        self._records.pop(id(record), None)
