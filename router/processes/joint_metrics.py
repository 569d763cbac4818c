"""The metrics of all processes as those of one router.

Counters and histograms are summed, and what a process had counted when it died stays in the sum: a sum must not fall when a
process is started again. A gauge is joined by what it means; one that is not named here is summed, because most of them count
what a process holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.processes.messages import Family, MetricSample

PARENT = 0
"""The number of the parent among the processes."""

_JOINS: Mapping[str, Callable[[Iterable[float]], float]] = {
    # The worst of them: one loop that stands still is not made better by the others.
    "tito_router_event_loop_lag_max_seconds": max,
    # Each process sees the same worker: it counts once, and an open breaker anywhere shows.
    "tito_router_worker_breaker_open": max,
    "tito_router_kv_workers": max,
    # All processes have the same store, and see the same routers through it.
    "tito_router_routers": max,
    "tito_router_control_lag_seconds": max,
    "tito_store_away": max,
    "tito_store_bytes": max,
    "tito_store_records": max,
    "tito_groups_waiting": max,
    "tito_groups_waiting_members": max,
    "process_start_time_seconds": min,
}
_STATE = "tito_router_worker_routable"
"""Has one series for each worker, whose labels hold its state: the worst that any process reports."""

Key = tuple[str, tuple[tuple[str, str], ...]]


def families_of(registry: CollectorRegistry) -> list[Family]:
    """Return all metrics of a registry, for the parent."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            [MetricSample(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


class JointMetrics(Collector):
    """The last metrics of each process, and the counts of processes that are gone."""

    def __init__(self) -> None:
        self._latest: dict[int, list[Family]] = {}
        self._gone: list[Family] = []
        self._told: dict[Key, float] = {}

    def heard(self, number: int, families: list[Family]) -> None:
        """Note the counts of a process since it was started."""
        self._latest[number] = families

    def gone(self, number: int) -> None:
        """Keep the counts of a process that has ended; its gauges mean nothing any more."""
        counted = [family for family in self._latest.pop(number, ()) if family.kind != "gauge"]
        self._gone = _joined([self._gone, counted])

    def text(self) -> bytes:
        """Return the metrics of all, as Prometheus text."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        for family in _joined([*self._latest.values(), self._gone]):
            metric = Metric(family.name, family.text, family.kind)
            for sample in family.samples:
                value = sample.value if family.kind == "gauge" else self._not_less(sample)
                metric.add_sample(sample.name, sample.labels, value)
            yield metric

    def _not_less(self, sample: MetricSample) -> float:
        """Return the value, never less than the one before: summed in another order, seconds differ in their last bit.

        Prometheus takes the smallest step back for a new start, and counts everything once more.
        """
        key = _key(sample)
        value = self._told[key] = max(sample.value, self._told.get(key, 0.0))
        return value


def _joined(sources: Iterable[list[Family]]) -> list[Family]:
    """Return one family for each name, in the order in which names came first."""
    found: dict[str, list[Family]] = {}
    for families in sources:
        for family in families:
            found.setdefault(family.name, []).append(family)
    return [_one(same) for same in found.values()]


def _one(same: list[Family]) -> Family:
    first = same[0]
    samples = [sample for family in same for sample in family.samples]
    if first.name == _STATE:
        joined = _least(samples)
    else:
        join = _JOINS.get(first.name, sum) if first.kind == "gauge" else sum
        values: dict[Key, tuple[MetricSample, list[float]]] = {}
        for sample in samples:
            values.setdefault(_key(sample), (sample, []))[1].append(sample.value)
        joined = [MetricSample(sample.name, sample.labels, join(each)) for sample, each in values.values()]
    return Family(first.name, first.kind, first.text, joined)


def _least(samples: list[MetricSample]) -> list[MetricSample]:
    found: dict[str, MetricSample] = {}
    for sample in samples:
        known = found.get(sample.labels["worker"])
        if known is None or sample.value < known.value:
            found[sample.labels["worker"]] = sample
    return list(found.values())


def _key(sample: MetricSample) -> Key:
    return sample.name, tuple(sorted(sample.labels.items()))
