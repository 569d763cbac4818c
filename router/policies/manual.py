"""The same worker for the same key, whatever the load.

Unlike `consistent_hashing`, this policy remembers: a new key goes to the least loaded worker and stays there until that worker
is lost or the key has been idle for a while. A worker that joins changes nothing. Several routers do not share their keys, and
a router knows no keys after a restart.

What is said of workers here holds for targets: a key stays on one rank of a worker.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import blake3
import msgspec

from router.config.flag import flag
from router.policies.base import PolicyParameters
from router.policies.least_inflight import LeastInflight
from router.workers.policy import Decision, RouteQuery
from router.workers.worker import Target

MOST_KEYS = 1 << 20
"""Limit of remembered keys. Beyond it, the least recently used key is forgotten."""


class _Pin(msgspec.Struct):
    """The target of a key, when the key was last used, and how many of its requests are in flight."""

    target: Target
    used: float
    inflight: int = 0


@dataclass(frozen=True)
class ManualParameters(PolicyParameters):
    """Times are in seconds."""

    TITLE = "the policy manual"

    max_idle: float = flag("--max-idle-secs", 3600.0, "how long to remember a key that is not used")


class Manual:
    """Chooses the worker of the routing key; without a key, the least loaded one."""

    PARAMETERS = ManualParameters

    def __init__(self, parameters: ManualParameters | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """A key with a request in flight is in use, so it is not forgotten."""
        self._max_idle = (parameters or ManualParameters()).max_idle
        self._clock = clock
        self._least = LeastInflight()
        self._pins: OrderedDict[bytes, _Pin] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._pins)

    def select(self, targets: Sequence[Target], query: RouteQuery) -> Decision:
        """Return a target with the reason.

        `key`: the worker has this key. `new_key`: it has it from now on. `moved`: it has it from now on, because the previous
        worker is lost. `elsewhere`: the key's worker is well but not offered this time; the key stays there. `no_key`: the
        request has no key.
        """
        key, now = _digest(query), self._clock()
        if key is None:
            return Decision(self._least.select(targets, query), "no_key")
        self._forget_idle(now)
        pin = self._pins.get(key)
        if pin is None:
            pin = self._pins[key] = _Pin(self._least.select(targets, query), now)
            reason = "new_key"
        elif pin.target in targets:
            reason = "key"
        elif pin.target.routable:
            reason = "elsewhere"
        else:
            pin.target, reason = self._least.select(targets, query), "moved"
        pin.used = now
        pin.inflight += 1
        self._pins.move_to_end(key)
        if len(self._pins) > MOST_KEYS:
            self._pins.popitem(last=False)
        return Decision(self._least.select(targets, query) if reason == "elsewhere" else pin.target, reason)

    def pinned_target(self, query: RouteQuery) -> Target | None:
        pin = self._pins.get(_digest(query) or b"")
        return None if pin is None else pin.target

    def released(self, query: RouteQuery) -> None:
        """Note the end of a request: its key was in use until now."""
        key = _digest(query) or b""
        pin = self._pins.get(key)
        if pin is not None:
            pin.inflight = max(0, pin.inflight - 1)
            pin.used = self._clock()
            self._pins.move_to_end(key)

    def _forget_idle(self, now: float) -> None:
        while self._pins:
            key, pin = next(iter(self._pins.items()))
            if now - pin.used <= self._max_idle:
                return
            if pin.inflight:
                pin.used = now
                self._pins.move_to_end(key)
            else:
                del self._pins[key]


def _digest(query: RouteQuery) -> bytes | None:
    """Return the key as it is remembered: specific to its tenant, and short however long the client's key is."""
    if not query.routing_key:
        return None
    spelled = f"{len(query.tenant)}:{query.tenant}{query.routing_key}"
    return blake3.blake3(spelled.encode("utf-8", "surrogatepass")).digest(16)
