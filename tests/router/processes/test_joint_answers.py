"""The answers of several processes to one GET."""

from __future__ import annotations

from typing import Any

from router.processes.joint_routes import join_for


def worker(name: str = "w", **differs: Any) -> dict[str, Any]:
    known = {"id": name, "is_healthy": True, "state": "healthy", "load": 1, "circuit_breaker": "closed"}
    known |= {"targets": [{"rank": 0, "load": differs.get("load", 1)}], "rank_mismatches": 0}
    return {**known, "weight_version": "1", "complaint": None, **differs}


def joined(path: str, *answers: Any) -> Any:
    join = join_for(path)
    assert join is not None
    return join(answers)


def test_other_paths_are_answered_alone() -> None:
    for path in ("/liveness", "/readiness", "/list_workers", "/sessions", "/generate", "/radix_tree/explain", "/"):
        assert join_for(path) is None


def test_a_worker_has_the_load_of_all_and_the_worst_state() -> None:
    well = worker(load=3)
    bad = worker(is_healthy=False, state="quarantined", complaint="gone", load=2, circuit_breaker="open")
    for answers in ((well, bad), (bad, well)):
        assert joined("/workers/w", *answers) == {**bad, "load": 5, "targets": [{"rank": 0, "load": 5}]}


def test_the_ranks_of_a_worker_have_their_loads_at_all_processes() -> None:
    """A process that has not asked it yet sees one rank."""
    one = worker(load=3, targets=[{"rank": 0, "load": 1}, {"rank": 1, "load": 2}], rank_mismatches=2)
    found = joined("/workers/w", one, worker(load=4, rank_mismatches=1))
    assert found["targets"] == [{"rank": 0, "load": 5}, {"rank": 1, "load": 2}]
    assert (found["load"], found["rank_mismatches"]) == (7, 3)


def test_an_open_breaker_shows_wherever_it_is() -> None:
    assert joined("/workers/w", worker(), worker(circuit_breaker="half_open"))["circuit_breaker"] == "half_open"


def test_the_kv_events_are_those_of_the_process_that_is_worst_off() -> None:
    connected, failed = ({"state": state, "error": error} for state, error in (("connected", None), ("failed", "no")))
    for answers in ((connected, failed), (failed, connected)):
        found = joined("/workers/w", *(worker(kv_events=one) for one in answers))
        assert found["kv_events"] == failed
    assert joined("/workers/w", worker(kv_events=None), worker(kv_events=None))["kv_events"] is None


def test_workers_are_listed_once() -> None:
    """One that has been added at one process and is not known at the other yet is there, too."""
    found = joined("/workers", {"workers": [worker("a")]}, {"workers": [worker("a"), worker("b")]})
    assert [(one["id"], one["load"]) for one in found["workers"]] == [("a", 2), ("b", 1)]
    assert found["total"] == 2


def test_health_is_that_of_the_least() -> None:
    assert joined("/health", {"status": "ok", "workers": 3}, {"status": "ok", "workers": 2})["workers"] == 2


def test_requests_are_shown_by_their_age() -> None:
    found = joined(
        "/debug/requests",
        {"requests": [{"begun_at": "2"}, {"begun_at": "4"}], "total": 2},
        {"requests": [{"begun_at": "3"}], "total": 1},
    )
    assert [one["begun_at"] for one in found["requests"]] == ["2", "3", "4"]
    assert found["total"] == 3


def test_trees_are_summed_and_their_store_is_one() -> None:
    tree = {"tokens": 5, "bytes": 10, "evictions": {"version": 1}, "weight_version": "2", "weight_versions": ["1", "2"]}
    one = {**tree, "store": {"bytes": 100, "records": 7, "saved": 3, "away": False, "lookups": {"found": 1}}}
    other = {
        **tree,
        "evictions": {"abandoned": 2},
        "store": {"bytes": 90, "records": 7, "saved": 4, "away": True, "lookups": {}},
    }
    assert joined("/radix_tree/stats", one, other) == {
        "tokens": 10,
        "bytes": 20,
        "evictions": {"version": 1, "abandoned": 2},
        "weight_version": "2",
        "weight_versions": ["1", "2"],
        "store": {"bytes": 100, "records": 7, "saved": 7, "away": True, "lookups": {"found": 1}},
    }


def test_a_store_that_one_cannot_ask_is_shown_as_far_as_it_is_known() -> None:
    found = joined("/radix_tree/stats", {"store": {"error": "away", "saved": 1}}, {"store": {"bytes": 5, "saved": 2}})
    assert found["store"] == {"error": "away", "saved": 3, "bytes": 5}
