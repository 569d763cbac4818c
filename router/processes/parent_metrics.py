"""The parent's own metrics."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class ParentMetrics:
    """Two metrics that only a router of several processes has."""

    def __init__(self, registry: CollectorRegistry, serving: Callable[[], int]) -> None:
        """`serving` returns how many processes accept connections."""
        Gauge(
            "tito_router_processes",
            "With --processes: those that accept connections. One that hangs counts until it is killed.",
            registry=registry,
        ).set_function(serving)
        self._restarts = Counter(
            "tito_router_process_restarts",
            "With --processes: those that were started again, by why: ended (by itself, or killed from outside), hung"
            " (--hang-timeout-secs).",
            ("reason",),
            registry=registry,
        )
        for reason in ("ended", "hung"):
            self._restarts.labels(reason)

    def restarted(self, *, hung: bool) -> None:
        self._restarts.labels("hung" if hung else "ended").inc()
