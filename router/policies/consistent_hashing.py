"""The same worker for the same key.

Each worker has 150 places on a ring, and a key belongs to the first worker after it. A worker that joins or leaves therefore
moves only its own keys. The policy skips a worker with more than 1.25 times the mean number of requests in flight until it has
fewer (consistent hashing with bounded loads; Mirrokni, Thorup, Zadimoghaddam, 2016). Its keys go to the next worker on the
ring, which is always the same one, so they find their KV cache there as well.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from router.policies.least_inflight import LeastInflight
from router.workers.policy import Decision, RouteQuery
from router.workers.worker import Worker

PLACES = 150
BOUND = 1.25
"""A worker with this many times the mean number of requests in flight gets no further request for its keys."""


class ConsistentHashing:
    """Chooses the worker that the client names, else the worker of the routing key, else the least loaded one."""

    def __init__(self) -> None:
        self._least = LeastInflight()
        self._places: list[int] = []  # sorted
        self._owners: dict[int, str] = {}  # place -> URL
        self._known: set[str] = set()
        self._offered: Sequence[Worker] = ()
        self._by_url: dict[str, Worker] = {}

    def select(self, workers: Sequence[Worker], query: RouteQuery) -> Decision:
        """Return a worker with the reason `target`, `key`, `spilled` (the key's worker is overloaded) or `no_key`."""
        if workers is not self._offered or not isinstance(workers, tuple):
            self._place(workers)
        if query.target_worker is not None:
            target = query.target_worker.rstrip("/")  # as the URLs of workers, which may be added with a slash
            for worker in workers:
                if target in (worker.url, worker.id):
                    return Decision(worker, "target")
        if query.routing_key is None:
            return Decision(self._least.select(workers, query), "no_key")
        return self._by_key(workers, query.routing_key)

    def forget(self, worker: Worker) -> None:
        if worker.url in self._known:
            self._known.discard(worker.url)
            for place in _places_of(worker.url):
                del self._owners[place]
                del self._places[bisect_left(self._places, place)]
        self._offered, self._by_url = (), {}

    def _by_key(self, workers: Sequence[Worker], key: str) -> Decision:
        # Counting this request makes the bound at least BOUND, so the least loaded worker is always below it.
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

    def _place(self, workers: Sequence[Worker]) -> None:
        """Put new workers on the ring. Known workers that are not offered this time keep their places."""
        self._by_url = {worker.url: worker for worker in workers}
        self._offered = workers
        new = self._by_url.keys() - self._known
        if new:
            self._known |= new
            for url in sorted(new):
                taken = _places_of(url)
                self._owners |= dict.fromkeys(taken, url)
                self._places += taken
            self._places.sort()  # fast: the list is nearly sorted

    def __len__(self) -> int:
        return len(self._known)


def _places_of(url: str) -> list[int]:
    """Return the places of a worker: 64-bit hashes, so that two workers practically never share one."""
    return [xxh3_64_intdigest(f"{url}#{number}".encode()) for number in range(PLACES)]
