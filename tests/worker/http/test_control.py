"""All routes except /generate."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.vocabularies import vocabulary
from tests.worker.talk import generate, request
from worker.worker import EmbeddedWorker


def test_health_blocks_while_paused() -> None:
    with EmbeddedWorker(vocabulary("qwen"), health_timeout=0.05) as worker:
        assert request(worker, "/health")[0] == 200
        request(worker, "/pause_generation", {})
        assert request(worker, "/health")[0] == 503


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/generate", 405), ("GET", "/abort_request", 405), ("POST", "/ping", 405)],
)
def test_other_paths_are_404_and_other_methods_405(worker: EmbeddedWorker, method: str, path: str, status: int) -> None:
    found, content, _ = request(worker, path, None if method == "GET" else {})
    assert found == status
    assert json.loads(content) == {"detail": {404: "Not Found", 405: "Method Not Allowed"}[status]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_request", {"rid": 5}),
        ("/pause_generation", {"mode": "nap"}),
        ("/update_weight_version", {}),
        ("/update_weight_version", {"new_version": 7}),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_tensor", {}),
        ("/update_weights_from_distributed", {"names": []}),
        ("/update_weights_from_ipc", {}),
    ],
)
def test_an_incomplete_command_is_refused(worker: EmbeddedWorker, path: str, body: dict[str, Any]) -> None:
    status, content, _ = request(worker, path, body)
    assert (status, json.loads(content)["object"]) == (400, "error")


def test_an_unhealthy_worker_answers_503(worker: EmbeddedWorker) -> None:
    worker.control.unhealthy = True
    assert [request(worker, path)[0] for path in ("/ping", "/ready", "/health")] == [503, 503, 503]


def test_in_a_pause_ready_is_503_and_ping_is_200(worker: EmbeddedWorker) -> None:
    request(worker, "/pause_generation", {"mode": "in_place"})
    assert [request(worker, path)[0] for path in ("/ready", "/ping")] == [503, 200]
    request(worker, "/continue_generation", {})
    assert [request(worker, path)[0] for path in ("/ready", "/ping")] == [200, 200]


def test_a_cache_is_flushed_when_nothing_runs(worker: EmbeddedWorker, pool: ThreadPoolExecutor) -> None:
    worker.hold(after=1)
    running = pool.submit(generate, worker)
    worker.wait_for_arrivals(1)
    assert request(worker, "/flush_cache", {})[0] == 400
    worker.release()
    running.result(20)
    assert request(worker, "/flush_cache", {})[0] == 200


def test_models(worker: EmbeddedWorker) -> None:
    (card,) = json.loads(request(worker, "/v1/models")[1])["data"]
    assert (card["id"], card["max_model_len"]) == (worker.tokenizer_path, 32768)
