"""The same worker for the same key.

Each worker stands at 150 places of a ring, and a key belongs to the worker that stands next behind it. So a worker that
comes or goes moves only the keys that become or were its own. A worker that has more than 1.25 times the mean in flight is
passed over until it has less (consistent hashing with bounded loads; Mirrokni, Thorup, Zadimoghaddam, 2016): its keys go to
the next one on the ring, which is the same one each time, so that they find their cache there as well.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from router.policies.base import Decision, RouteQuery
from router.policies.least_inflight import LeastInflight
from router.workers.worker import Worker

PLACES = 150
BOUND = 1.25
"""Times the mean of what is in flight: more than that a worker does not get for a key."""


class ConsistentHashing:
    """By the worker that the client names, else by its routing key; without either, the least loaded."""

    def __init__(self) -> None:
        self._least = LeastInflight()
        self._places: list[int] = []  # in order
        self._owners: dict[int, str] = {}  # who stands at each
        self._known: set[str] = set()
        self._offered: Sequence[Worker] = ()
        self._by_url: dict[str, Worker] = {}

    def select(self, workers: Sequence[Worker], query: RouteQuery) -> Decision:
        """One of them, with the reason `target`, `key`, `spilled` (its worker has too much), or `no_key`."""
        if workers is not self._offered or not isinstance(workers, tuple):
            self._look_at(workers)
        if query.target_worker is not None:
            for worker in workers:
                if query.target_worker in (worker.url, worker.id):
                    return Decision(worker, "target")
        if query.routing_key is None:
            return Decision(self._least.select(workers, query), "no_key")
        return self._by_key(workers, query.routing_key)

    def forget(self, worker: Worker) -> None:
        """Its places are free."""
        if worker.url in self._known:
            self._known.discard(worker.url)
            for place in _places_of(worker.url):
                del self._owners[place]
                del self._places[bisect_left(self._places, place)]
        self._offered, self._by_url = (), {}

    def _by_key(self, workers: Sequence[Worker], key: str) -> Decision:
        # With this request, of which the worker's share is at least one.
        most = BOUND * (sum([worker.inflight for worker in workers]) + 1) / len(workers)
        at = bisect(self._places, xxh3_64_intdigest(key.encode("utf-8", "surrogatepass")))
        passed: set[str] = set()
        for offset in range(len(self._places)):
            url = self._owners[self._places[(at + offset) % len(self._places)]]
            if url in passed:
                continue
            worker = self._by_url.get(url)
            if worker is not None:
                if worker.inflight < most:
                    return Decision(worker, "spilled" if passed else "key")
                passed.add(url)
        raise AssertionError("the least loaded worker is always below the bound")

    def _look_at(self, workers: Sequence[Worker]) -> None:
        """The ring keeps those that are only not offered now; new ones get their places."""
        self._by_url = {worker.url: worker for worker in workers}
        self._offered = workers
        new = self._by_url.keys() - self._known
        if new:
            self._known |= new
            for url in sorted(new):
                taken = _places_of(url)
                self._owners |= dict.fromkeys(taken, url)
                self._places += taken
            self._places.sort()  # quick: nearly all of it is in order

    def __len__(self) -> int:
        return len(self._known)


def _places_of(url: str) -> list[int]:
    """Of 2^64, so that no two are ever the same."""
    return [xxh3_64_intdigest(f"{url}#{number}".encode()) for number in range(PLACES)]
