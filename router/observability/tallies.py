"""Counters and histograms for events of every request: plain numbers, which become metrics when they are scraped.

prometheus_client's own ones take a lock, and walk all buckets, at each step. Here everything happens in one thread, the
event loop's, scrapes included.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
"""The values of a series' labels, in the order of their names."""


class CountTally(Collector):
    """Counts by the values of some labels.

    Attributes:
        counts: the counts so far. Callers add to it; a series exists from the first time on.
    """

    def __init__(self, registry: CollectorRegistry, name: str, text: str, labels: Sequence[str]) -> None:
        self._about = (name, text)
        self._labels = labels
        self.counts: defaultdict[Labels, float] = defaultdict(float)
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        yield CounterMetricFamily(*self._about, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(*self._about, labels=self._labels)
        for labels, count in self.counts.items():
            family.add_metric(labels, count)
        yield family


class HistogramTally(Collector):
    """Counts values by bucket, and adds them up, by the values of some labels."""

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> None:
        """`buckets`: the upper bounds, which belong to their buckets; one without a bound is added."""
        self._about = (name, text)
        self._labels = labels
        self._bounds = tuple(buckets)
        self._series: dict[Labels, tuple[list[int], list[float]]] = {}
        if not labels:
            self._begun(())
        registry.register(self)

    def observe(self, labels: Labels, value: float) -> None:
        counts, total = self._series.get(labels) or self._begun(labels)
        counts[bisect_left(self._bounds, value)] += 1
        total[0] += value

    def _begun(self, labels: Labels) -> tuple[list[int], list[float]]:
        found = self._series[labels] = [0] * (len(self._bounds) + 1), [0.0]
        return found

    def describe(self) -> Iterable[Metric]:
        yield HistogramMetricFamily(*self._about, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(*self._about, labels=self._labels)
        bounds = (*self._bounds, float("inf"))
        names = [str(floatToGoString(bound)) for bound in bounds]  # type: ignore[no-untyped-call]  # a library without types
        for labels, (counts, total) in self._series.items():
            family.add_metric(labels, list(zip(names, accumulate(counts), strict=True)), total[0])
        yield family
