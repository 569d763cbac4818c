"""What the policy cache_aware remembers, and what workers told it, read when it is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.kv_cache.subscriptions import KvSubscriptions
from router.policies.cache_aware import CacheAware


class PolicyCollector(Collector):
    """Registered where that policy routes."""

    def __init__(self, policy: CacheAware, subscriptions: KvSubscriptions | None) -> None:
        self._policy = policy
        self._subscriptions = subscriptions

    def collect(self) -> Iterator[Metric]:
        """A gauge and a counter."""
        remembered = GaugeMetricFamily(
            "tito_router_policy_remembered",
            "What cache_aware remembers of prompts, in characters and in ids: what several workers have counts for each.",
            labels=("unit",),
        )
        remembered.add_metric(("characters",), self._policy.texts.size)
        remembered.add_metric(("ids",), self._policy.ids.size)
        yield remembered
        events = CounterMetricFamily(
            "tito_router_kv_events",
            "What came of following the workers' KV events: batches, and what went wrong with them (gaps, lost, ...).",
            labels=("kind",),
        )
        for kind, count in sorted(self._counts().items()):
            events.add_metric((kind,), count)
        yield events

    def _counts(self) -> Counter[str]:
        index, subscriptions = self._policy.index, self._subscriptions
        return Counter() if index is None or subscriptions is None else index.counts + subscriptions.counts
