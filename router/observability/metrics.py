"""All instruments of the router, named in one place, on the registry that they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.workers.breaker import BreakerState
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
    "/debug/requests": "debug",
}

# A reply out of memory takes a millisecond, a generation of an agent hours.
_REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400),
)
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

CLIENT_LEFT = "client_left"
"""The value of `status` for a request whose client was gone before the reply had ended."""

BROKEN = "broken"
"""The value of `status` for a reply that was broken off after its head had been sent."""


def route_class(path: str) -> str:
    """The label for a path. There are few of them, whatever paths clients invent."""
    found = _ROUTE_CLASSES.get(path)
    if found is not None:
        return found
    if path.startswith("/sessions"):
        return "turn" if path.endswith(("/chat/completions", "/messages")) else "sessions"
    return "workers" if path.startswith("/workers/") else "other"


class RouterMetrics:
    """The instruments that are counted up by hand."""

    def __init__(self, registry: CollectorRegistry, policy: str = "") -> None:
        requests = Counter(
            "tito_router_requests",
            "Requests that ended, by kind of route and status, which may be client_left or broken (off in mid-reply).",
            ("route", "status"),
            registry=registry,
        )
        durations = Histogram(
            "tito_router_request_duration_seconds",
            "From the head of a request to the end of its reply.",
            ("route",),
            registry=registry,
            buckets=_REQUEST_SECONDS,
        )
        first_bytes = Histogram(
            "tito_router_time_to_first_byte_seconds",
            "From the head of a request to the head of its reply, which comes with the first piece of the body.",
            ("route",),
            registry=registry,
            buckets=_REQUEST_SECONDS,
        )
        # `labels` itself costs as much as all the rest of counting.
        self._requests = cache(requests.labels)
        self._durations = cache(durations.labels)
        self._first_bytes = cache(first_bytes.labels)
        self.loop_lag = Histogram(
            "tito_router_event_loop_lag_seconds",
            "How much later than asked for the event loop got back to a task.",
            registry=registry,
            buckets=_LAG_SECONDS,
        )
        self.loop_lag_max = Gauge(
            "tito_router_event_loop_lag_max_seconds", "The worst of it in the last minute.", registry=registry
        )
        self.failures = Counter(
            "tito_router_worker_failures",
            "Attempts to which a worker gave no reply: it could not be reached (connect), the connection was lost (lost), "
            "it took too long (timeout), or it has no /generate (no_engine).",
            ("reason",),
            registry=registry,
        )
        for reason in ("connect", "lost", "timeout", "no_engine"):
            self.failures.labels(reason)
        self.retries = Counter(
            "tito_router_retries",
            "Further attempts of requests, by how the one before failed: no connection (connect), lost, timeout, "
            "a 5xx of the worker (error), 429 or 503 (busy), no /generate there (no_engine).",
            ("reason",),
            registry=registry,
        )
        for reason in ("connect", "lost", "timeout", "error", "busy", "no_engine"):
            self.retries.labels(reason)
        decisions = Counter(
            "tito_router_decisions",
            "Workers chosen, by why: by the policy among several, as the only one, as the trial of an open breaker, or "
            "(last_resort) though it has not answered yet; consistent_hashing says target, key, spilled or no_key instead of "
            "policy, cache_aware continued, cached, spilled, imbalance, least_loaded or no_prompt.",
            ("policy", "reason"),
            registry=registry,
        )
        self._decided = cache(partial(decisions.labels, policy))
        self._breakers = Counter(
            "tito_router_breaker_changes",
            "Changes of circuit breakers, by the new state: open, half_open, closed.",
            ("worker", "to"),
            registry=registry,
        )
        self._probes = Counter("tito_router_probes", "Probes of workers: good or bad.", ("outcome",), registry=registry)
        for outcome in ("good", "bad"):
            self._probes.labels(outcome)
        self._queue = Histogram(
            "tito_router_queue_seconds",
            "How long requests for which there was no room waited, by what came of it: served, full (no place in the "
            "queue), timeout, left.",
            ("outcome",),
            registry=registry,
            buckets=_REQUEST_SECONDS,
        )
        for outcome in ("served", "full", "timeout", "left"):
            self._queue.labels(outcome)
        self.generations = Counter(
            "tito_router_generations",
            "Generations that ended: answered, failed (an error, or a reply that broke off), or orphaned (nobody waits for it: "
            "the client left, or the router was stopped).",
            ("outcome",),
            registry=registry,
        )
        for outcome in ("answered", "failed", "orphaned"):
            self.generations.labels(outcome)
        self.abort_retries = Counter(
            "tito_router_abort_retries",
            "Requests with aborted generations: retried, once for each further attempt; or given_up after the last one.",
            ("outcome",),
            registry=registry,
        )
        for outcome in ("retried", "given_up"):
            self.abort_retries.labels(outcome)

    def decided(self, reason: str) -> None:
        """A worker was chosen."""
        self._decided(reason).inc()

    def breaker_moved(self, worker: Worker, state: BreakerState) -> None:
        """A circuit breaker opened, or let a trial through, or closed."""
        self._breakers.labels(worker.url, state.value).inc()

    def probed(self, good: bool) -> None:
        """A worker was probed."""
        self._probes.labels("good" if good else "bad").inc()

    def waited(self, seconds: float, outcome: str) -> None:
        """A request has left the queue."""
        self._queue.labels(outcome).observe(seconds)

    def answering(self, route: str, seconds: float) -> None:
        """The reply to a request has begun, so many seconds after the request."""
        self._first_bytes(route).observe(seconds)

    def ended(self, route: str, status: str, seconds: float) -> None:
        """A request is over."""
        self._requests(route, status).inc()
        self._durations(route).observe(seconds)


class WorkerCollector(Collector):
    """Reads the workers' state when it is asked, so that a worker which is gone leaves no series behind."""

    def __init__(self, workers: Callable[[], Iterable[Worker]], waiting: Sized = ()) -> None:
        """`waiting`: the requests for which there is no room."""
        self._workers = workers
        self._waiting = waiting

    def collect(self) -> Iterator[Metric]:
        """The gauges of all workers."""
        inflight = GaugeMetricFamily(
            "tito_router_worker_inflight", "Requests that a worker is serving now.", labels=("worker",)
        )
        routable = GaugeMetricFamily(
            "tito_router_worker_routable", "1 while new requests are sent to a worker.", labels=("worker", "state")
        )
        breakers = GaugeMetricFamily(
            "tito_router_worker_breaker_open",
            "1 while a worker's circuit breaker is open, or half open.",
            labels=("worker",),
        )
        for worker in self._workers():
            inflight.add_metric((worker.url,), worker.inflight)
            routable.add_metric((worker.url, worker.state.value), float(worker.routable))
            breakers.add_metric((worker.url,), float(worker.breaker.state is not BreakerState.CLOSED))
        yield inflight
        yield routable
        yield breakers
        yield GaugeMetricFamily(
            "tito_router_queue_length", "Requests that wait because no worker has room.", value=len(self._waiting)
        )
