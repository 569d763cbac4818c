"""The metrics of several processes are those of one router."""

from __future__ import annotations

import random
from collections import Counter as Sums
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from router.processes.joint_metrics import PARENT, JointMetrics, families_of
from scripts.make_reference import metrics
from tests.support.usual import usual

SUM, MAX, MIN, WORST = "sum", "max", "min", "worst"

GAUGES = {
    "tito_router_event_loop_lag_max_seconds": MAX,
    "tito_router_worker_inflight": SUM,
    "tito_router_rank_inflight": SUM,
    "tito_router_worker_routable": WORST,
    "tito_router_worker_breaker_open": MAX,
    "tito_router_queue_length": SUM,
    "tito_router_policy_remembered": SUM,
    "tito_router_routers": MAX,
    "tito_router_control_lag_seconds": MAX,
    "tito_router_processes": SUM,  # of the parent alone
    "process_virtual_memory_bytes": SUM,
    "process_resident_memory_bytes": SUM,
    "process_start_time_seconds": MIN,
    "process_open_fds": SUM,
    "process_max_fds": SUM,
    "tito_router_kv_workers": MAX,
    "tito_radix_held_tokens": SUM,
    "tito_radix_generations": SUM,
    "tito_radix_nodes": SUM,
    "tito_radix_bytes": SUM,
    "tito_media_bytes": SUM,
    "tito_media_pictures": SUM,
    "tito_store_waiting": SUM,
    "tito_store_waiting_bytes": SUM,
    "tito_store_held_bytes": SUM,
    "tito_store_away": MAX,
    "tito_store_bytes": MAX,
    "tito_store_records": MAX,
    "tito_groups_waiting": MAX,
    "tito_groups_waiting_members": MAX,
    "tito_sessions_open": SUM,
    "tito_sessions_nodes": SUM,
    "tito_sessions_samples": SUM,
    "tito_sessions_tokens": SUM,
}
"""What each gauge means for several processes. A new one is entered here, and in `joint_metrics` if it is no sum."""


def read(joint: JointMetrics) -> dict[Any, float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(joint.text().decode())
        for sample in family.samples
    }


def test_each_gauge_was_thought_about() -> None:
    assert {name for name, kind, _, _ in metrics() if kind == "gauge"} <= GAUGES.keys()


@pytest.mark.parametrize(("name", "how"), [(name, how) for name, how in GAUGES.items() if how != WORST])
def test_gauges_are_joined_by_what_they_mean(name: str, how: str) -> None:
    joint = JointMetrics()
    for number, value in ((1, 5.0), (2, 3.0)):
        registry = CollectorRegistry()
        Gauge(name, "-", registry=registry).set(value)
        joint.heard(number, families_of(registry))
    assert read(joint) == {(name,): {SUM: 8.0, MAX: 5.0, MIN: 3.0}[how]}


def test_a_worker_is_in_one_state() -> None:
    """That of the process which thinks least of it; a worker that only one process knows is there, too."""
    joint = JointMetrics()
    for number, states in ((1, {"a": ("healthy", 1), "b": ("suspect", 1)}), (2, {"a": ("quarantined", 0)})):
        registry = CollectorRegistry()
        gauge = Gauge("tito_router_worker_routable", "-", ("worker", "state"), registry=registry)
        for worker, (state, value) in states.items():
            gauge.labels(worker, state).set(value)
        joint.heard(number, families_of(registry))
    assert read(joint) == {
        ("tito_router_worker_routable", ("state", "quarantined"), ("worker", "a")): 0.0,
        ("tito_router_worker_routable", ("state", "suspect"), ("worker", "b")): 1.0,
    }


class OneProcess:
    """What one process has counted since it was started."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.counter = Counter("c", "-", ("kind",), registry=self.registry)
        self.histogram = Histogram("h", "-", registry=self.registry, buckets=(1, 2))
        self.gauge = Gauge("g", "-", registry=self.registry)


@pytest.mark.parametrize("seed", usual(range(20), *range(5)))
def test_sums_never_fall_and_lose_nothing_that_was_heard(seed: int) -> None:
    """Against a naive sum, over random counting, deaths and restarts."""
    dice = random.Random(seed)
    joint, living, gone = JointMetrics(), {n: OneProcess() for n in (1, 2, 3)}, Sums[str]()
    counted, heard = ({n: Sums[str]() for n in living} for _ in range(2))
    before: dict[Any, float] = {}
    for _ in range(200):
        number = dice.choice((1, 2, 3))
        process = living[number]
        match dice.randrange(4):
            case 0 | 1:
                kind = dice.choice("xyz")
                process.counter.labels(kind).inc()
                process.histogram.observe(dice.uniform(0, 3))
                process.gauge.set(dice.random())
                counted[number] += Sums({kind: 1, "h": 1})
            case 2:
                joint.heard(number, families_of(process.registry))
                heard[number] = Sums(counted[number])
            case 3:
                joint.gone(number)
                gone += heard[number]
                living[number], counted[number], heard[number] = OneProcess(), Sums(), Sums()
        now = read(joint)
        sums = {key: value for key, value in now.items() if key[0] != "g" and not key[0].endswith("_created")}
        assert all(sums[key] >= value for key, value in before.items())
        before = sums
        total = gone + heard[1] + heard[2] + heard[3]
        assert {key[1][1]: value for key, value in sums.items() if key[0] == "c_total"} == {
            kind: total[kind] for kind in "xyz" if total[kind]
        }
        assert sums.get(("h_count",), 0) == total["h"]


def test_gauges_of_a_process_end_with_it() -> None:
    joint = JointMetrics()
    for number in (PARENT, 1):
        process = OneProcess()
        process.gauge.set(3)
        joint.heard(number, families_of(process.registry))
    joint.gone(1)
    assert read(joint)[("g",)] == 3.0
