"""What a routing policy is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from router.workers.worker import Worker


class RouteQuery(msgspec.Struct, frozen=True):
    """What is known of a request when its worker is chosen. Each may be missing."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    routing_key: str | None = None


class Policy(Protocol):
    """Chooses. It neither counts requests nor waits: the pool calls it and counts in one step."""

    def select(self, workers: Sequence[Worker], query: RouteQuery) -> Worker:
        """One of `workers`, which are all routable and never none. On a retry, those tried already are missing."""
