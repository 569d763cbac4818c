"""What a routing policy is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from router.workers.worker import Worker


class RouteQuery(msgspec.Struct, frozen=True):
    """What is known of a request when its worker is chosen. Each may be missing."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    routing_key: str | None = None
    target_worker: str | None = None
    """The URL or the id of the worker that the client would like."""
    tenant: str = ""
    """Whose request it is. What a policy remembers of one tenant decides and tells nothing for another."""


class Decision(NamedTuple):
    """A worker, and why this one: a word for the metric `tito_router_decisions` and the header `x-router-reason`."""

    worker: Worker
    reason: str


class Policy(Protocol):
    """Chooses. It neither counts requests nor waits: the pool calls it and counts in one step."""

    def select(self, workers: Sequence[Worker], query: RouteQuery) -> Worker | Decision:
        """One of `workers`, which are all routable and never none. On a retry, those tried already are missing.

        A policy that always has the same reason returns the worker alone.
        """


ENOUGH_CHARACTERS = 512
ENOUGH_IDS = 128
"""Of a reply, to tell it from others to the same prompt."""


@runtime_checkable
class HearsReplies(Protocol):
    """A policy that wants to know how replies begin: the next turn of a conversation begins with that as well."""

    def replied(self, worker: Worker, query: RouteQuery, beginning: str | Sequence[int]) -> None:
        """A worker has replied to this prompt: text to a text, ids to ids. More than enough of it does no harm."""


@runtime_checkable
class Keeps(Protocol):
    """A policy under which some requests have to have a certain worker, and wait for it."""

    def keeper(self, query: RouteQuery) -> Worker | None:
        """That worker; None if any will do."""

    def over(self, query: RouteQuery) -> None:
        """A request that was given to a worker is not in flight any more."""


@runtime_checkable
class Remembers(Protocol):
    """A policy that keeps something of each worker, and is told when one is gone."""

    def forget(self, worker: Worker) -> None:
        """It has left the pool. If it comes back, it is another one."""
