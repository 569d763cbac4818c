"""A worker that is stopped (SIGSTOP) and goes on: calls to the whole fleet meanwhile, and what it does of them afterwards."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Answer, call
from tests.support.fleet import Fleet, until
from tests.support.programs import Program
from worker.models.ngram import shipped_tokenizer

pytestmark = pytest.mark.slow
FLEET_TIMEOUT = 2.0
SLACK = 20.0
"""Seconds that a slow machine may take for what takes none: far below what a call took that waited for the worker."""

CALLS: dict[str, dict[str, Any]] = {
    "/pause_generation": {"mode": "in_place"},
    "/flush_cache": {},
    "/update_weight_version": {"new_version": "5"},
    "/update_weights_from_disk": {"model_path": "x", "weight_version": "6"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["x"]},
    "/abort_request": {"abort_all": True},
}


def flags(number: int) -> tuple[str, ...]:
    return "--seed", str(number), "--tokens-per-second", "100", "--incremental-streaming-output"


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Program]]:
    folder = tmp_path_factory.mktemp("workers")
    with contextlib.ExitStack() as running:
        started = [
            running.enter_context(Program(f"worker-{number}", "demo-worker", *flags(number), folder=folder))
            for number in range(2)
        ]
        for worker in started:
            worker.wait_until_up()
        yield started


@contextlib.contextmanager
def router(folder: Path, workers: list[Program], *flags: str) -> Iterator[Fleet]:
    """In front of a worker that is well and one that will hang, both at version 1."""
    urls = [worker.url for worker in workers]
    common = ("--tokenizer-path", str(shipped_tokenizer()), "--fleet-timeout", str(FLEET_TIMEOUT))
    try:
        with Program("router", *common, *flags, "--worker-urls", *urls, folder=folder) as program:
            program.wait_until_up()
            fleet = Fleet(program, workers)
            until(lambda: fleet.states() == {"healthy": 2}, "both are well")
            fleet.post("/update_weight_version", {"new_version": "1"})
            yield fleet
    finally:
        for worker in workers:
            worker.thaw()
            call(worker.url + "/continue_generation", {})


def version_at(worker: Program) -> str:
    found: str = call(worker.url + "/model_info").json()["weight_version"]
    return found


def timed(fleet: Fleet, path: str, body: dict[str, Any]) -> tuple[float, Answer]:
    begun = time.monotonic()
    answer = call(fleet.url + path, body)
    return time.monotonic() - begun, answer


def assert_named(answer: Answer, well: Program, hung: Program) -> dict[str, Any]:
    """The answer is a 207, and says that one worker did it and why the other did not. Returns what it says of the other."""
    found = answer.json()
    assert (answer.status, found["success"]) == (207, False), found
    by_url = {one["url"]: one for one in found["workers"]}
    assert by_url[well.url]["status"] == 200
    assert by_url[hung.url]["status"] is None
    assert hung.url in found["message"]
    named: dict[str, Any] = by_url[hung.url]
    return named


def test_a_quarantined_worker_that_hangs_holds_up_no_call_and_does_nothing_of_it_later(
    workers: list[Program], tmp_path: Path
) -> None:
    """All of them at once; updates wait for each other. When it goes on, it has the weights that it had, and is not paused."""
    well, hung = workers
    probes = ("--health-check-interval-secs", "0.2", "--health-check-timeout-secs", "0.5")
    with router(tmp_path, workers, *probes) as fleet:
        hung.freeze()
        fleet.until_state(hung.url, "quarantined")
        with ThreadPoolExecutor(len(CALLS)) as clients:
            told = list(clients.map(lambda one: timed(fleet, *one), CALLS.items()))
        for seconds, answer in told:
            error = assert_named(answer, well, hung)["error"]
            assert "not told" in error
            assert seconds < 2 * FLEET_TIMEOUT + SLACK
        seen = fleet.seen()
        assert {seen[well.url]["weight_version"], version_at(well)} <= {"5", "6"}
        assert seen[hung.url]["weight_version"] == "1"
        hung.thaw()
        fleet.until_state(hung.url, "healthy")
        assert version_at(hung) == "1"
        body = {"text": "A:", "sampling_params": {"max_new_tokens": 2}}
        assert call(hung.url + "/generate", body).status == 200, "it is not paused"
        fleet.post("/continue_generation", {})
        fleet.post("/update_weight_version", {"new_version": "7"})
        assert {one["weight_version"] for one in fleet.seen().values()} == {"7"}


def test_a_worker_that_hangs_and_was_not_found_out_is_given_up_and_not_trusted(
    workers: list[Program], tmp_path: Path
) -> None:
    """It does what it was told when it goes on. Its late answer does not count, what it says of its weights does."""
    well, hung = workers
    probes = ("--health-check-interval-secs", "0.2", "--health-check-timeout-secs", "3600", "--version-gate")
    with router(tmp_path, workers, *probes) as fleet:
        hung.freeze()
        seconds, answer = timed(fleet, "/update_weight_version", {"new_version": "5"})
        assert assert_named(answer, well, hung)["error"] == f"no answer within {FLEET_TIMEOUT:g} s"
        assert seconds < FLEET_TIMEOUT + SLACK
        seen = fleet.seen()
        assert (seen[well.url]["weight_version"], seen[well.url]["is_healthy"]) == ("5", True)
        assert (seen[hung.url]["weight_version"], seen[hung.url]["is_healthy"]) == (None, False)
        hung.thaw()
        until(lambda: fleet.seen()[hung.url]["weight_version"] == version_at(hung) == "5", "it tells what it has")
        until(lambda: fleet.seen()[hung.url]["is_healthy"], "it has the fleet's weights")


def test_a_worker_that_may_run_a_pause_when_it_goes_on_is_told_to_continue(
    workers: list[Program], tmp_path: Path
) -> None:
    """It was told the one before anybody knew that it hangs: without the other, its requests would wait without end."""
    well, hung = workers
    probes = ("--health-check-interval-secs", "0.2", "--health-check-timeout-secs", "4")
    with router(tmp_path, workers, *probes) as fleet:
        hung.freeze()
        assert_named(timed(fleet, "/pause_generation", {"mode": "in_place"})[1], well, hung)
        fleet.until_state(hung.url, "quarantined")
        assert_named(timed(fleet, "/continue_generation", {})[1], well, hung)
        hung.thaw()
        fleet.until_state(hung.url, "healthy")
        body = {"text": "A:", "sampling_params": {"max_new_tokens": 2}}
        assert call(hung.url + "/generate", body).status == 200, "it is not paused"


def test_an_abort_of_a_generation_at_a_worker_that_hangs_comes_back(workers: list[Program], tmp_path: Path) -> None:
    with router(tmp_path, workers, "--health-check-interval-secs", "3600") as fleet, ThreadPoolExecutor(1) as clients:
        rid = uuid.uuid4().hex
        sampling = {"max_new_tokens": 20_000, "ignore_eos": True}
        body = {"text": "A:", "rid": rid, "stream": True, "sampling_params": sampling}
        asked = clients.submit(call, fleet.url + "/generate", body)
        until(lambda: fleet.phases()["answering"] == 1, "it has begun")
        hung = next(worker for worker in workers if fleet.load(worker))
        hung.freeze()
        seconds, answer = timed(fleet, "/abort_request", {"rid": rid})
        assert answer.status == 502
        assert [one["url"] for one in answer.json()["workers"]] == [hung.url]
        assert seconds < FLEET_TIMEOUT + SLACK
        hung.thaw()
        last = asked.result().content.split(b"\n\n")[-3]
        assert b'"type":"abort"' in last, "it heard of it when it went on"
