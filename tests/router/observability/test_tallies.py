"""Plain numbers look like the library's metrics when they are scraped."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.observability.tallies import CountTally, HistogramTally

BOUNDS = (0.001, 0.5, 1, 60)
VALUES = (0.0, 0.001, 0.0011, 0.5, 1.0, 59.9, 60.0, 61.0, 1e6)


def shown(registry: CollectorRegistry) -> list[str]:
    """What is scraped, without the times of creation, which the router switches off."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_they_look_like_the_librarys_own() -> None:
    """Byte for byte, values on a bound included."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    count, histogram = (
        CountTally(ours, "a_requests", "Some text.", ("route", "status")),
        HistogramTally(ours, "a_seconds", "Other text.", ("route",), BOUNDS),
    )
    counter = Counter("a_requests", "Some text.", ("route", "status"), registry=theirs)
    observed = Histogram("a_seconds", "Other text.", ("route",), registry=theirs, buckets=BOUNDS)
    assert shown(ours) == shown(theirs)
    for number, value in enumerate(VALUES):
        route = "ab"[number % 2]
        count.counts[route, "200"] += number
        counter.labels(route, "200").inc(number)
        histogram.observe((route,), value)
        observed.labels(route).observe(value)
    assert shown(ours) == shown(theirs)
    assert ours.get_sample_value("a_seconds_count", {"route": "b"}) == 4
