"""The health of workers: probes, and circuit breakers."""

from __future__ import annotations

from dataclasses import dataclass

from router.config.flag import Section, flag

_TITLE = "the health of workers"


@dataclass(frozen=True)
class HealthConfig(Section):
    """How workers are probed. Times are in seconds, thresholds are probes in a row."""

    TITLE = _TITLE

    interval: float = flag("--health-check-interval-secs", 10.0, "time between two probes of a worker")
    timeout: float = flag("--health-check-timeout-secs", 5.0, "how long a worker may take to answer a probe")
    failure_threshold: int = flag(
        "--health-failure-threshold", 3, "bad probes in a row after which a worker gets no more requests"
    )
    success_threshold: int = flag(
        "--health-success-threshold", 2, "good probes in a row after which it gets requests again"
    )
    version_gate: bool = flag(
        "--version-gate", False, "send nothing to a worker at another weight version than this router set last"
    )


@dataclass(frozen=True)
class BreakerConfig(Section):
    """The circuit breaker of each worker. `timeout` is in seconds, thresholds are requests in a row."""

    TITLE = _TITLE

    failure_threshold: int = flag(
        "--cb-failure-threshold", 10, "requests in a row, failed by a worker's fault, that open its circuit breaker"
    )
    timeout: float = flag(
        "--cb-timeout-duration-secs", 60.0, "how long a breaker stays open before it lets a trial request through"
    )
    success_threshold: int = flag("--cb-success-threshold", 3, "good trial requests in a row that close a breaker")
    enabled: bool = flag("--disable-circuit-breaker", True, "find bad workers by probes alone")
