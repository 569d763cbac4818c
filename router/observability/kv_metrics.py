"""Metrics of the cache events of workers, where a policy follows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.kv_cache.index import KvIndex
from router.kv_cache.subscriptions import KvSubscriptions
from router.workers.worker import KvState, Worker


class KvCollector(Collector):
    """Reads the index of a policy and the subscriptions at each scrape."""

    def __init__(
        self,
        index: KvIndex | None,
        subscriptions: KvSubscriptions | None,
        workers: Callable[[], Iterable[Worker]] = list,
    ) -> None:
        self._workers = workers
        self._index = index
        self._subscriptions = subscriptions

    def collect(self) -> Iterator[Metric]:
        events = CounterMetricFamily(
            "tito_router_kv_events",
            "KV events of workers: batches, and what went wrong with them (gaps, lost, ...).",
            labels=("kind",),
        )
        for kind, count in sorted(self._counts().items()):
            events.add_metric((kind,), count)
        yield events
        followed = GaugeMetricFamily(
            "tito_router_kv_workers",
            "Workers by how far this router is with their KV events, as in GET /workers.",
            labels=("state",),
        )
        states = Counter(worker.kv_events.state for worker in self._workers() if worker.kv_events is not None)
        for state in KvState:
            followed.add_metric((state.value,), states[state])
        yield followed

    def _counts(self) -> Counter[str]:
        index, subscriptions = self._index, self._subscriptions
        return Counter() if index is None or subscriptions is None else index.counts + subscriptions.counts
