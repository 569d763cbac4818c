"""A worker's address and its states."""

from __future__ import annotations

import pytest

from router.config import BreakerConfig, HealthConfig
from router.errors import BadRequestError
from router.workers.breaker import Breaker, BreakerState
from router.workers.worker import TRANSITIONS, Worker, WorkerState, normalize_url, worker_id


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("http://10.0.0.1:30001", "http://10.0.0.1:30001"),
        ("http://10.0.0.1:30001/", "http://10.0.0.1:30001"),
        ("HTTP://Host_1.Example:80", "http://host_1.example:80"),
        ("https://host", "https://host"),
        ("http://[::1]:30001", "http://[::1]:30001"),
        ("http://[::1]", "http://[::1]"),
        ("http://host:", "http://host"),
        ("http://w-0.workers.default.svc.:80", "http://w-0.workers.default.svc.:80"),
        (f"http://{'a' * 63}.7b:80", f"http://{'a' * 63}.7b:80"),
    ],
)
def test_urls_have_one_spelling(given: str, normal: str) -> None:
    assert normalize_url(given) == normal
    assert normalize_url(normal) == normal


BAD_URLS = [
    ("", "http://"),
    ("localhost:30000", "http://"),
    ("10.0.0.1:30000", "http://"),
    ("ftp://host", "http://"),
    ("http:host", "http://"),
    ("file:///etc/passwd", "http://"),
    ("http://a:1,http://b:2", "separate them with spaces"),
    ("http://", "no host"),
    ("http://:8000", "no host"),
    ("http://user:pw@host", "credentials"),
    ("http://host/path", "end after host and port"),
    ("http://host?x=1", "end after host and port"),
    ("http://host?", "end after host and port"),
    ("http://host#x", "end after host and port"),
    ("http://host:0", "port 0"),
    ("http://host:99999", "ort"),
    ("http://host:abc", "ort"),
    ("http://host\n:80", "control"),
    ("http://ho st", "spaces"),
    ("http://hôst", "non-ASCII"),
    ("http://host\\evil", "not a host name"),
    ("http://[::1", "bad worker URL"),
    ("http://[1.2.3]", "bad worker URL"),
    ("http://worker..svc:80", "not a host name"),
    ("http://.svc:80", "not a host name"),
    (f"http://{'a' * 64}.svc:80", "not a host name"),
    ("http://1.2.3.4.5:80", "address"),
    ("http://10.0.0.256:80", "address"),
]


@pytest.mark.parametrize(("url", "reason"), BAD_URLS)
def test_the_error_of_a_bad_url_says_what_is_wrong(url: str, reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason):
        normalize_url(url)


def test_ids_are_stable_and_fit_in_a_path() -> None:
    assert worker_id("http://a:1") == worker_id("http://a:1") != worker_id("http://a:2")
    assert worker_id("http://a:1").isalnum()


def test_only_steps_of_the_table_are_taken() -> None:
    assert set(TRANSITIONS) == set(WorkerState)
    for before, allowed in TRANSITIONS.items():
        for after in WorkerState:
            worker = Worker("http://a:1")
            worker.state = before
            if after in allowed:
                worker.move_to(after)
                assert worker.state is after
            else:
                with pytest.raises(AssertionError):
                    worker.move_to(after)


def test_repr_shows_the_state() -> None:
    worker = Worker("http://a:1")
    worker.inflight = 3
    assert repr(worker) == "<Worker http://a:1 starting inflight=3>"


def walk(probes: str, config: HealthConfig | None = None) -> list[str]:
    """Return the state after each probe; `+` is a good one, `-` a bad one."""
    worker, states = Worker("http://a:1"), []
    for sign in probes:
        before = worker.state
        moved = worker.probed(None if sign == "+" else "no answer", config or HealthConfig())
        assert moved == (worker.state is not before)
        assert (worker.complaint is None) == (sign == "+")
        states.append(worker.state.value)
    return states


def test_three_bad_probes_in_a_row_quarantine_and_two_good_ones_take_back() -> None:
    assert walk("--+") == ["starting", "starting", "healthy"]
    assert walk("+--+") == ["healthy", "suspect", "suspect", "healthy"]
    assert walk("+---") == ["healthy", "suspect", "suspect", "quarantined"]
    assert walk("+---+-++")[3:] == ["quarantined", "quarantined", "quarantined", "quarantined", "healthy"]


def test_thresholds_are_as_configured() -> None:
    config = HealthConfig(failure_threshold=1, success_threshold=1)
    assert walk("+-+", config) == ["healthy", "quarantined", "healthy"]


def test_probes_do_not_bring_a_draining_worker_back() -> None:
    worker = Worker("http://a:1")
    worker.move_to(WorkerState.DRAINING)
    assert not worker.probed(None, HealthConfig())
    assert worker.state is WorkerState.DRAINING


def test_a_suspect_still_gets_requests_and_a_quarantined_worker_none() -> None:
    worker = Worker("http://a:1")
    assert not worker.routable
    for complaint, routable in ((None, True), ("x", True), ("x", True), ("x", False)):
        worker.probed(complaint, HealthConfig())
        assert worker.routable is routable


@pytest.mark.parametrize("absent", [True, False])
def test_a_breaker_is_reset_for_a_new_process_and_not_after_a_hang(absent: bool) -> None:
    worker = Worker("http://a:1", Breaker(BreakerConfig(failure_threshold=1)))
    worker.probed(None, HealthConfig())
    worker.breaker.failed()
    for _ in range(3):
        worker.probed("no answer", HealthConfig(), absent=absent)
    for _ in range(2):
        assert worker.breaker.state is BreakerState.OPEN
        worker.probed(None, HealthConfig())
    assert worker.state is WorkerState.HEALTHY
    assert worker.routable == absent


def test_requests_that_came_before_a_worker_was_there_keep_no_breaker_open() -> None:
    worker = Worker("http://a:1", Breaker(BreakerConfig(failure_threshold=1)))
    worker.probed("connection refused", HealthConfig(), absent=True)
    worker.breaker.failed()
    assert worker.breaker.state is BreakerState.OPEN
    worker.probed(None, HealthConfig())
    assert worker.routable


def test_a_worker_that_has_come_back_may_hang_later() -> None:
    """Its first absence resets its breaker once."""
    worker = Worker("http://a:1", Breaker(BreakerConfig(failure_threshold=1)))
    for absent in (True, False):
        worker.probed(None, HealthConfig())
        for _ in range(3):
            worker.probed("no answer", HealthConfig(), absent=absent)
        worker.breaker.failed()
        for _ in range(2):
            worker.probed(None, HealthConfig())
        assert worker.state is WorkerState.HEALTHY
        assert worker.routable == absent


def test_a_refused_connection_alone_resets_no_breaker() -> None:
    """A process that has ended misses more probes than one."""
    worker = Worker("http://a:1", Breaker(BreakerConfig(failure_threshold=1)))
    worker.probed(None, HealthConfig())
    worker.breaker.failed()
    worker.probed("no answer", HealthConfig(), absent=True)
    worker.probed(None, HealthConfig())
    assert worker.state is WorkerState.HEALTHY
    assert not worker.routable
