"""The same worker for the same key.

Each worker has 150 places on a ring, and a key belongs to the first worker after it. A worker that joins or leaves therefore
moves only its own keys. The policy skips a worker with more than 1.25 times the mean number of requests in flight until it has
fewer (consistent hashing with bounded loads; Mirrokni, Thorup, Zadimoghaddam, 2016). Its keys go to the next worker on the
ring, which is always the same one, so they find their KV cache there as well.

What is said of workers here holds for targets: each rank of a worker with several has places of its own.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from router.policies.least_inflight import LeastInflight
from router.workers.policy import Decision, RouteQuery
from router.workers.worker import Target

PLACES = 150
BOUND = 1.25
"""A worker with this many times the mean number of requests in flight gets no further request for its keys."""


class ConsistentHashing:
    """Chooses the worker that the client names, else the worker of the routing key, else the least loaded one."""

    def __init__(self) -> None:
        self._least = LeastInflight()
        self._places: list[int] = []  # sorted
        self._owners: dict[int, str] = {}  # place -> name of the target
        self._known: set[str] = set()
        self._offered: Sequence[Target] = ()
        self._by_name: dict[str, Target] = {}

    def select(self, targets: Sequence[Target], query: RouteQuery) -> Decision:
        """Return a target with the reason `target`, `key`, `spilled` (the key's worker is overloaded) or `no_key`."""
        if targets is not self._offered or not isinstance(targets, tuple):
            self._place(targets)
        if query.target_worker is not None:
            named = query.target_worker.rstrip("/")  # as the URLs of workers, which may be added with a slash
            ranks = [one for one in targets if named in (one.worker.url, one.worker.id)]
            ranks = ranks or [one for one in targets if named == f"{one.worker.url}@{one.rank}"]
            if ranks:
                return Decision(_of_key(ranks, query.routing_key), "target")
        if query.routing_key is None:
            return Decision(self._least.select(targets, query), "no_key")
        return self._by_key(targets, query.routing_key)

    def forget(self, target: Target) -> None:
        if target.name in self._known:
            self._known.discard(target.name)
            for place in _places_of(target.name):
                del self._owners[place]
                del self._places[bisect_left(self._places, place)]
        self._offered, self._by_name = (), {}

    def _by_key(self, targets: Sequence[Target], key: str) -> Decision:
        # Counting this request makes the bound at least BOUND, so the least loaded target is always below it.
        most = BOUND * (sum([target.inflight for target in targets]) + 1) / len(targets)
        at = bisect(self._places, xxh3_64_intdigest(key.encode("utf-8", "surrogatepass")))
        passed: set[str] = set()
        for offset in range(len(self._places)):
            name = self._owners[self._places[(at + offset) % len(self._places)]]
            if name in passed:
                continue
            target = self._by_name.get(name)
            if target is not None:
                if target.inflight < most:
                    return Decision(target, "spilled" if passed else "key")
                passed.add(name)
        raise AssertionError("the least loaded target is always below the bound")

    def _place(self, targets: Sequence[Target]) -> None:
        """Put new targets on the ring. Known targets that are not offered this time keep their places."""
        self._by_name = {target.name: target for target in targets}
        self._offered = targets
        new = self._by_name.keys() - self._known
        if new:
            self._known |= new
            for name in sorted(new):
                taken = _places_of(name)
                self._owners |= dict.fromkeys(taken, name)
                self._places += taken
            self._places.sort()  # fast: the list is nearly sorted

    def __len__(self) -> int:
        return len(self._known)


def _places_of(name: str) -> list[int]:
    """Return the places of a target: 64-bit hashes, so that two targets practically never share one."""
    return [xxh3_64_intdigest(f"{name}#{number}".encode()) for number in range(PLACES)]


def _of_key(ranks: Sequence[Target], key: str | None) -> Target:
    """Return the target of a key among the ranks of one worker, the least loaded one without a key."""
    if key is None:
        return min(ranks, key=lambda target: target.inflight)
    spelled = key.encode("utf-8", "surrogatepass")
    return max(ranks, key=lambda target: xxh3_64_intdigest(spelled, target.rank))
