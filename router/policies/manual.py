"""The same worker for the same key, whatever the load: the one that it got first.

Unlike `consistent_hashing` this remembers: a key is given to the least loaded worker, and stays there until that is lost or
nobody has used the key for a while. A worker that comes changes nothing. Several routers do not agree on it, and none knows a
key after its restart.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import blake3
import msgspec

from router.policies.base import Decision, RouteQuery
from router.policies.least_inflight import LeastInflight
from router.workers.worker import Worker

MOST_KEYS = 1 << 20
"""That are remembered at once: of more, those go that were used least recently."""


class _Kept(msgspec.Struct):
    """A key's worker; when the key was used last; how many of its requests are in flight."""

    worker: Worker
    used: float
    inflight: int = 0


class Manual:
    """By the routing key; without one, the least loaded worker."""

    def __init__(self, max_idle: float = 3600.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_idle`: seconds after which a key that nobody uses is forgotten. What is in flight uses its key."""
        self._max_idle = max_idle
        self._clock = clock
        self._least = LeastInflight()
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def select(self, workers: Sequence[Worker], query: RouteQuery) -> Decision:
        """One of them, with the reason.

        `key`: it has this key. `new_key`: it has it from now on. `moved`: the same, and who had it is lost. `elsewhere`: who
        has it is there, but must not be asked now; the key stays there. `no_key`: there is none.
        """
        key, now = _name(query), self._clock()
        if key is None:
            return Decision(self._least.select(workers, query), "no_key")
        self._forget_idle(now)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _Kept(self._least.select(workers, query), now)
            reason = "new_key"
        elif kept.worker in workers:
            reason = "key"
        elif kept.worker.routable:
            reason = "elsewhere"
        else:
            kept.worker, reason = self._least.select(workers, query), "moved"
        kept.used = now
        kept.inflight += 1
        self._kept.move_to_end(key)
        if len(self._kept) > MOST_KEYS:
            self._kept.popitem(last=False)
        return Decision(self._least.select(workers, query) if reason == "elsewhere" else kept.worker, reason)

    def keeper(self, query: RouteQuery) -> Worker | None:
        """Who has the key."""
        key = _name(query)
        kept = None if key is None else self._kept.get(key)
        return None if kept is None else kept.worker

    def over(self, query: RouteQuery) -> None:
        """A request is not in flight any more. Its key was in use until now."""
        key = _name(query)
        kept = None if key is None else self._kept.get(key)
        if key is not None and kept is not None:
            kept.inflight = max(0, kept.inflight - 1)
            kept.used = self._clock()
            self._kept.move_to_end(key)

    def _forget_idle(self, now: float) -> None:
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            if now - kept.used <= self._max_idle:
                return
            if kept.inflight and kept.worker.inflight:
                kept.used = now
                self._kept.move_to_end(key)
            else:
                del self._kept[key]


def _name(query: RouteQuery) -> bytes | None:
    """The key as it is remembered: of its tenant, and short however long it is."""
    if not query.routing_key:
        return None
    spelled = f"{len(query.tenant)}:{query.tenant}{query.routing_key}"
    return blake3.blake3(spelled.encode("utf-8", "surrogatepass")).digest(16)
