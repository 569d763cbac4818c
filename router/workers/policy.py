"""The contract of a routing policy.

Every policy is a `Policy`. A policy that needs more than `select` also implements one of the optional protocols below; the
worker pool finds out by `isinstance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from router.workers.worker import Worker


class RouteQuery(msgspec.Struct, frozen=True):
    """A request as the router knows it when it chooses a worker. Every field but `tenant` may be None.

    Attributes:
        text: the prompt, if it came as text.
        token_ids: the prompt's token ids, if they are known.
        routing_key: the key that the client or a middleware gave.
        target_worker: the URL or id of the worker that the client prefers.
        tenant: who sends the request. A policy's memory of one tenant never influences a decision for another.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    routing_key: str | None = None
    target_worker: str | None = None
    tenant: str = ""


class Decision(NamedTuple):
    """A worker and the reason for choosing it: one word for `tito_router_decisions` and the header `x-router-reason`."""

    worker: Worker
    reason: str


class Policy(Protocol):
    """Chooses a worker. The pool calls it and counts the request in one synchronous step: a policy never awaits or counts."""

    def select(self, workers: Sequence[Worker], query: RouteQuery) -> Worker | Decision:
        """Return one of `workers`, which are all routable and never empty. On a retry, workers already tried are missing.

        A policy that has only one reason returns the worker alone.
        """


ENOUGH_CHARACTERS = 512
"""Length of the start of a reply, in characters, that tells it from other replies to the same prompt."""

ENOUGH_IDS = 128
"""The same in token ids."""


@runtime_checkable
class ReadsPrompts(Protocol):
    """A policy that uses `RouteQuery.text` or `token_ids`. Only for it does the router read prompts itself, out of bodies."""

    reads_prompts: bool


@runtime_checkable
class LearnsReplies(Protocol):
    """A policy that learns how replies start, because the next turn of a conversation repeats them."""

    def replied(self, worker: Worker, query: RouteQuery, beginning: str | Sequence[int]) -> None:
        """Take the start of a worker's reply: text if the prompt was text, ids if it was ids. It may be longer than needed."""


@runtime_checkable
class PinsKeys(Protocol):
    """A policy that sends some requests to one certain worker; the pool lets such a request wait until that worker has room."""

    def pinned_worker(self, query: RouteQuery) -> Worker | None:
        """Return the worker that this request must go to; None if any worker will do."""

    def released(self, query: RouteQuery) -> None:
        """Note that a request which `select` gave to a worker is no longer in flight."""


@runtime_checkable
class ForgetsWorkers(Protocol):
    """A policy that keeps state per worker."""

    def forget(self, worker: Worker) -> None:
        """Drop the state of a worker that left the pool. A worker that comes back is a new one."""
