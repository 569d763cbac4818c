"""Whether one weight version is that of all workers."""

from __future__ import annotations

import pytest

from router.policies.least_inflight import LeastInflight
from router.workers.fleet_version import FleetVersion
from router.workers.pool import WorkerPool
from router.workers.worker import Worker

URLS = ("http://one:1", "http://two:1")


@pytest.fixture
def pool() -> WorkerPool:
    """Two workers, which have told the same version."""
    made = WorkerPool(LeastInflight())
    for url in URLS:
        made.probed(made.add(url), None, "7")
    return made


def both(pool: WorkerPool) -> tuple[Worker, Worker]:
    one, other = pool.list()
    return one, other


def test_a_worker_that_did_not_answer_an_update_may_have_any_version(pool: WorkerPool) -> None:
    one, other = both(pool)
    fleet = FleetVersion(pool.list)
    assert (fleet.settled, fleet.current) == (True, "7")
    pool.new_version("8", {one.id}, unsure={other.id})
    fleet.called()
    assert not fleet.settled, "it may run the old weights, or the new ones"
    pool.probed(other, None, "8")
    assert (fleet.settled, fleet.current) == (True, "8")


def test_a_worker_that_may_have_been_restarted_has_any_version_until_a_probe(pool: WorkerPool) -> None:
    one, other = both(pool)
    fleet = FleetVersion(pool.list)
    fleet.shown = {one.url: "9", other.url: "9"}.get  # a trainer that updates each worker itself
    assert fleet.settled
    pool.may_have_restarted(other)
    assert not fleet.settled
    pool.probed(other, None, "default")
    assert not fleet.settled, "what its replies showed before is not what it has"
    pool.probed(other, None, "9")
    assert fleet.settled


def test_workers_that_never_tell_a_version_are_no_obstacle() -> None:
    pool = WorkerPool(LeastInflight())
    for url in URLS:
        pool.probed(pool.add(url), None)
    fleet = FleetVersion(pool.list)
    pool.may_have_restarted(pool.list()[0])
    assert (fleet.settled, fleet.current) == (True, None)


def test_a_pause_is_what_the_workers_say(pool: WorkerPool) -> None:
    fleet = FleetVersion(pool.list)
    for number, (path, said, paused) in enumerate(
        [
            ("/sleep", True, True),
            ("/wake_up", True, True),
            ("/wake_up", False, False),
            ("/resume_memory_occupation", None, False),
            ("/release_memory_occupation", True, True),
            ("/update_weight_version", None, True),
            ("/resume_memory_occupation", False, False),
        ]
    ):
        fleet.begins(str(number), path)
        assert not fleet.settled
        fleet.over(str(number), paused=said)
        fleet.over(str(number), paused=not paused)
        assert (fleet.paused, fleet.settled) == (paused, not paused), number
    assert fleet.pauses == 2, "a reply shows in which of them it was sent"


def test_what_a_removed_worker_had_is_no_obstacle(pool: WorkerPool) -> None:
    _, other = both(pool)
    fleet = FleetVersion(pool.list)
    assert fleet.settled
    pool.may_have_restarted(other)
    pool.remove(other.id)
    assert fleet.settled
