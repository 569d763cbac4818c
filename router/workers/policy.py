"""The contract of a routing policy.

Every policy is a `Policy`. A policy that needs more than `select` also implements one of the optional protocols below; the
worker pool finds out by `isinstance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from router.workers.worker import Target


class RouteQuery(msgspec.Struct, frozen=True):
    """A request as the router knows it when it chooses a worker. Every field but `tenant` may be None.

    Attributes:
        text: the prompt, if it came as text.
        token_ids: the prompt's token ids, if they are known.
        routing_key: the key that the client or a middleware gave.
        target_worker: the URL or id of the worker that the client prefers, or of one of its ranks (`URL@RANK`).
        tenant: who sends the request. A policy's memory of one tenant never influences a decision for another.
        rank: the data-parallel rank that the client named: no other is offered to the policy.
        salt: only requests with the same salt share what an engine has cached; empty for none.
        adapter: the name of the request's adapter: only requests with the same adapter share what an engine has cached. Empty
            for the base model.
        conversation: returns a word that all turns of a conversation have.
        continues: whether the prompt has a reply that was sampled in this conversation.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    routing_key: str | None = None
    target_worker: str | None = None
    tenant: str = ""
    rank: int | None = None
    salt: str = ""
    adapter: str = ""
    conversation: Callable[[], bytes] | None = None
    continues: bool = False


class Decision(NamedTuple):
    """A target and the reason for choosing it: one word for `tito_router_decisions` and the header `x-router-reason`."""

    target: Target
    reason: str


class Policy(Protocol):
    """Chooses a target. The pool calls it and counts the request in one synchronous step: a policy never awaits or counts."""

    def select(self, targets: Sequence[Target], query: RouteQuery) -> Target | Decision:
        """Return one of `targets`, which are all routable and never empty. On a retry, those already tried are missing.

        A policy that has only one reason returns the target alone.
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

    def replied(self, target: Target, query: RouteQuery, beginning: str | Sequence[int]) -> None:
        """Take the start of a target's reply: text if the prompt was text, ids if it was ids. It may be longer than needed."""


@runtime_checkable
class PinsKeys(Protocol):
    """A policy that sends some requests to one certain target; the pool lets such a request wait until that target has room."""

    def pinned_target(self, query: RouteQuery) -> Target | None:
        """Return the target that this request must go to; None if any target will do."""

    def released(self, query: RouteQuery) -> None:
        """Note that a request which `select` gave to a worker is no longer in flight."""


@runtime_checkable
class ForgetsTargets(Protocol):
    """A policy that keeps state per target."""

    def forget(self, target: Target) -> None:
        """Drop the state of a target whose worker left the pool, or lost this rank. If it comes back, it is a new one."""
