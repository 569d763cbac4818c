"""All instruments of the router, named in one place, on the registry that they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.workers.worker import Worker

_ROUTE_CLASSES: Mapping[str, str] = {
    "/generate": "generate",
    "/retrieve_from_text": "retrieve",
    "/radix_tree/explain": "radix_tree",
    "/radix_tree/stats": "radix_tree",
    "/add_worker": "workers",
    "/remove_worker": "workers",
    "/list_workers": "workers",
    "/workers": "workers",
    "/health": "health",
    "/liveness": "health",
    "/readiness": "health",
    "/metrics": "metrics",
}

CLIENT_LEFT = "client_left"
"""The value of `status` for a request whose client was gone before the reply had ended."""

BROKEN = "broken"
"""The value of `status` for a reply that was broken off after its head had been sent."""


def route_class(path: str) -> str:
    """The label for a path. There are few of them, whatever paths clients invent."""
    return _ROUTE_CLASSES.get(path) or ("workers" if path.startswith("/workers/") else "other")


class RouterMetrics:
    """The instruments that are counted up by hand."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "tito_router_requests",
            "Requests that ended, by kind of route and status.",
            ("route", "status"),
            registry=registry,
        )
        self.failures = Counter(
            "tito_router_worker_failures",
            "Attempts to which a worker gave no reply: it could not be reached, or the connection was lost.",
            ("reason",),
            registry=registry,
        )
        self.abort_retries = Counter(
            "tito_router_abort_retries",
            "Requests with aborted generations: sent again, or given up after the last attempt.",
            ("outcome",),
            registry=registry,
        )


class WorkerCollector(Collector):
    """Reads the workers' state when it is asked, so that a worker which is gone leaves no series behind."""

    def __init__(self, workers: Callable[[], Iterable[Worker]]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        """The gauges of all workers."""
        inflight = GaugeMetricFamily(
            "tito_router_worker_inflight", "Requests that a worker is serving now.", labels=("worker",)
        )
        routable = GaugeMetricFamily(
            "tito_router_worker_routable", "1 while new requests are sent to a worker.", labels=("worker", "state")
        )
        for worker in self._workers():
            inflight.add_metric((worker.url,), worker.inflight)
            routable.add_metric((worker.url, worker.state.value), float(worker.routable))
        yield inflight
        yield routable
