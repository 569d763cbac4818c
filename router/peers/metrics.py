"""Metrics of the other routers."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.peers.peers import Peers


class PeersCollector(Collector):
    """Reads the state at each scrape."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def collect(self) -> Iterator[Metric]:
        peers = self._peers
        there = 1 if peers.kind is None or peers.away else 1 + len(peers.presence.others)
        yield GaugeMetricFamily("tito_router_routers", "Live routers of the fleet, this one included.", value=there)
        entries = CounterMetricFamily(
            "tito_router_control_entries",
            "Entries of the control log that this router has read, by kind; lost: they were damaged, or gone.",
            labels=("kind",),
        )
        for kind, count in {"lost": 0, **peers.log.entries}.items():
            entries.add_metric((kind or "damaged",), count)
        yield entries
        behind = 0.0 if peers.kind is None else max(0.0, time.monotonic() - peers.log.heard_at)
        yield GaugeMetricFamily(
            "tito_router_control_lag_seconds",
            "Seconds since this router last knew that it had read the control log to its end: at most 2, if all is well.",
            value=behind,
        )
