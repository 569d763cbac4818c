"""The metrics of the router."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.observability.tallies import CountTally, HistogramTally
from router.workers.breaker import BreakerState
from router.workers.worker import Worker

# A reply from memory takes a millisecond, a generation for an agent can take hours.
_REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400),
)
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

CLIENT_LEFT = "client_left"
"""The value of `status` for a request whose client left before the end of the reply."""

BROKEN = "broken"
"""The value of `status` for a reply that broke off, or ended with an error, after its head."""


class RouterMetrics:
    """The metrics that the parts of the router count."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = CountTally(
            registry,
            "tito_router_requests",
            "Requests that ended, by kind of route and status; client_left and broken (after the head of the reply) count as"
            " statuses.",
            ("route", "status"),
        )
        self.durations = HistogramTally(
            registry,
            "tito_router_request_duration_seconds",
            "From the head of a request to the end of its reply.",
            ("route",),
            _REQUEST_SECONDS,
        )
        self.first_bytes = HistogramTally(
            registry,
            "tito_router_time_to_first_byte_seconds",
            "From the head of a request to the head of its reply, which comes with the first piece of the body.",
            ("route",),
            _REQUEST_SECONDS,
        )
        self.loop_lag = Histogram(
            "tito_router_event_loop_lag_seconds",
            "Delay of the event loop: how much later than scheduled a task ran.",
            registry=registry,
            buckets=_LAG_SECONDS,
        )
        self.loop_lag_max = Gauge(
            "tito_router_event_loop_lag_max_seconds", "The longest such delay in the last minute.", registry=registry
        )

        def counter(name: str, text: str, label: str, *values: str) -> Counter:
            """Return a counter whose series for these values exist from the start."""
            made = Counter(name, text, (label,), registry=registry)
            for value in values:
                made.labels(value)
            return made

        self.failures = counter(
            "tito_router_worker_failures",
            "Attempts without a reply: the worker could not be reached (connect), the connection was lost (lost), the worker "
            "took too long (timeout), or it has no /generate (no_engine).",
            "reason",
            *("connect", "lost", "timeout", "no_engine"),
        )
        self.retries = counter(
            "tito_router_retries",
            "Further attempts, by why the one before failed: no connection (connect), lost, timeout, a 5xx of the worker "
            "(error), 429 or 503 (busy), no /generate there (no_engine), the adapter is not loaded there (no_adapter).",
            "reason",
            *("connect", "lost", "timeout", "error", "busy", "no_engine", "no_adapter"),
        )
        self.decisions = CountTally(
            registry,
            "tito_router_decisions",
            "Choices of a worker, by reason: policy (one of several), only_one, trial (of an open breaker), last_resort (it "
            "has not answered yet). Instead of policy, consistent_hashing gives target, key, spilled or no_key; cache_aware "
            "gives continued, cached, spilled, imbalance, least_loaded or no_prompt.",
            ("policy", "reason"),
        )
        self._breakers = Counter(
            "tito_router_breaker_changes",
            "Changes of circuit breakers, by the new state: open, half_open, closed.",
            ("worker", "to"),
            registry=registry,
        )
        self._probes = counter("tito_router_probes", "Probes of workers: good or bad.", "outcome", "good", "bad")
        self._queue = Histogram(
            "tito_router_queue_seconds",
            "Time that requests without room waited, by outcome: served, full (no place in the queue), timeout, left.",
            ("outcome",),
            registry=registry,
            buckets=_REQUEST_SECONDS,
        )
        for outcome in ("served", "full", "timeout", "left"):
            self._queue.labels(outcome)
        self.generations = CountTally(
            registry,
            "tito_router_generations",
            "Generations that ended: answered, failed (an error, or a reply that broke off), or orphaned (the client left, or "
            "the router was stopped).",
            ("outcome",),
        )
        for outcome in ("answered", "failed", "orphaned"):
            self.generations.counts[outcome,] = 0
        self.kv_salts = CountTally(
            registry,
            "tito_router_kv_salts",
            "Generations that were answered, by the salt with which they were sent: version, rollout, own (no version was that"
            " of all workers: nothing shares their cache), unknown (nobody told a version), tenant (only the tenant).",
            ("salt",),
        )
        self.abort_retries = counter(
            "tito_router_abort_retries",
            "Retries of requests with aborted generations: retried (once per further attempt), given_up (after the last one).",
            "outcome",
            *("retried", "given_up"),
        )

    def breaker_moved(self, worker: Worker, state: BreakerState) -> None:
        self._breakers.labels(worker.url, state.value).inc()

    def probed(self, good: bool) -> None:
        self._probes.labels("good" if good else "bad").inc()

    def waited(self, seconds: float, outcome: str) -> None:
        self._queue.labels(outcome).observe(seconds)


class WorkerCollector(Collector):
    """Reads the state of the workers at each scrape, so that a worker that is gone leaves no series."""

    def __init__(self, workers: Callable[[], Iterable[Worker]], waiting: Sized = ()) -> None:
        """`waiting` has as its length the number of requests in the queue."""
        self._workers = workers
        self._waiting = waiting

    def collect(self) -> Iterator[Metric]:
        inflight = GaugeMetricFamily(
            "tito_router_worker_inflight", "Requests in flight at a worker.", labels=("worker",)
        )
        ranks = GaugeMetricFamily(
            "tito_router_rank_inflight",
            "Requests in flight at a data-parallel rank, of workers with several.",
            labels=("worker", "rank"),
        )
        mismatches = CounterMetricFamily(
            "tito_router_rank_mismatch",
            "Generations that another data-parallel rank than the one that was asked has served, by their replies.",
            labels=("worker",),
        )
        routable = GaugeMetricFamily(
            "tito_router_worker_routable", "1 while a worker gets new requests.", labels=("worker", "state")
        )
        breakers = GaugeMetricFamily(
            "tito_router_worker_breaker_open",
            "1 while the circuit breaker of a worker is open or half open.",
            labels=("worker",),
        )
        for worker in self._workers():
            inflight.add_metric((worker.url,), worker.inflight)
            mismatches.add_metric((worker.url,), worker.rank_mismatches)
            for target in worker.targets if len(worker.targets) > 1 else ():
                ranks.add_metric((worker.url, str(target.rank)), target.inflight)
            routable.add_metric((worker.url, worker.state.value), float(worker.routable))
            breakers.add_metric((worker.url,), float(worker.breaker.state is not BreakerState.CLOSED))
        yield inflight
        yield ranks
        yield mismatches
        yield routable
        yield breakers
        yield GaugeMetricFamily(
            "tito_router_queue_length", "Requests that wait for a worker with room.", value=len(self._waiting)
        )
