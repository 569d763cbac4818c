"""Gates, aborts, pauses and new weights."""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tests.support.asking import until
from tests.support.vocabularies import vocabulary
from tests.worker.talk import generate, request
from worker.worker import EmbeddedWorker


def test_a_held_request_is_queued_and_an_abort_leaves_it_empty(
    worker: EmbeddedWorker, pool: ThreadPoolExecutor
) -> None:
    worker.hold()
    waiting = pool.submit(generate, worker, rid="r1")
    worker.wait_for_arrivals(1)
    assert request(worker, "/abort_request", {"rid": "r1"})[0] == 200
    reply = waiting.result(20)
    assert (reply["text"], reply["output_ids"]) == ("", [])
    assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert "prompt_tokens" not in reply["meta_info"]


def test_an_abort_of_a_running_request_returns_what_there_is(worker: EmbeddedWorker, pool: ThreadPoolExecutor) -> None:
    """If the id is known, the abort takes all ids that begin with it: D1 aborts D12, too."""
    worker.hold(after=3)
    waiting = [pool.submit(generate, worker, rid=rid, return_logprob=True) for rid in ("D1", "D12", "E")]
    worker.wait_for_arrivals(3)
    request(worker, "/abort_request", {"rid": "D"})
    request(worker, "/abort_request", {"rid": "D1"})
    for one in waiting[:2]:
        meta = one.result(20)["meta_info"]
        reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        assert meta["finish_reason"] == reason
        assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == 3
    assert not waiting[2].done()
    worker.release()
    assert waiting[2].result(20)["meta_info"]["completion_tokens"] == 128


def test_release_with_a_count_lets_only_so_many_go_on(worker: EmbeddedWorker, pool: ThreadPoolExecutor) -> None:
    worker.hold()
    waiting = [pool.submit(generate, worker, rid=f"r{number}") for number in range(3)]
    worker.wait_for_arrivals(3)
    worker.release(1)
    worker.wait_for(lambda: worker.in_flight == 2)
    worker.release()
    assert all(one.result(20) for one in waiting)
    worker.wait_until_idle()


def test_a_pause_in_place_freezes_and_an_abort_waits_for_its_end(
    worker: EmbeddedWorker, pool: ThreadPoolExecutor
) -> None:
    worker.hold(after=2)
    running = [pool.submit(generate, worker, rid=rid) for rid in ("r1", "r2")]
    worker.wait_for_arrivals(2)
    request(worker, "/pause_generation", {"mode": "in_place"})
    worker.release()
    later = pool.submit(generate, worker, rid="r3", sampling_params={"max_new_tokens": 3})
    worker.wait_for_arrivals(3)
    request(worker, "/abort_request", {"rid": "r1"})
    assert worker.in_flight == 3
    request(worker, "/continue_generation", {})
    assert running[0].result(20)["meta_info"]["finish_reason"]["type"] == "abort"
    assert running[1].result(20)["meta_info"]["completion_tokens"] == 128
    assert later.result(20)["meta_info"]["completion_tokens"] == 3


def test_a_pause_that_retracts_puts_back_into_the_queue_where_an_abort_works_at_once(
    worker: EmbeddedWorker, pool: ThreadPoolExecutor
) -> None:
    """The reply has what the scheduler had passed on: without a stream, every fiftieth token."""
    worker.hold(after=60)
    running = [pool.submit(generate, worker, rid=rid) for rid in ("r1", "r2")]
    worker.wait_for_arrivals(2)
    request(worker, "/pause_generation", {"mode": "retract"})
    request(worker, "/abort_request", {"rid": "r1"})
    reply = running[0].result(20)
    assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    (record,) = [record for record in worker.log if record.rid == "r1"]
    assert reply["output_ids"] == record.output_ids[:50]
    assert len(record.output_ids) == 60
    assert reply["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 50}]
    worker.release()
    request(worker, "/continue_generation", {})
    assert running[1].result(20)["meta_info"]["completion_tokens"] == 128


def test_a_pause_that_aborts_returns_when_nothing_runs_and_what_comes_then_cannot_be_aborted(
    worker: EmbeddedWorker, pool: ThreadPoolExecutor
) -> None:
    worker.hold(after=2)
    running = pool.submit(generate, worker, rid="r1")
    worker.wait_for_arrivals(1)
    request(worker, "/pause_generation", {"mode": "abort"})
    assert worker.in_flight == 0
    assert running.result(20)["meta_info"]["completion_tokens"] == 2
    worker.release()
    later = pool.submit(generate, worker, rid="r2", sampling_params={"max_new_tokens": 3})
    worker.wait_for_arrivals(1)
    request(worker, "/abort_request", {"rid": "r2"})
    request(worker, "/abort_request", {"abort_all": True})
    request(worker, "/continue_generation", {})
    assert later.result(20)["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


def test_a_client_that_leaves_ends_its_request(worker: EmbeddedWorker) -> None:
    worker.hold(after=2)
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=30)
    connection.request("POST", "/generate", json.dumps({"text": "Hi"}), {"content-type": "application/json"})
    worker.wait_for_arrivals(1)
    connection.close()
    worker.wait_until_idle()
    assert worker.log[0].disconnected
    assert len(worker.log[0].output_ids) == 2


def test_an_update_in_flight_makes_spans(worker: EmbeddedWorker, pool: ThreadPoolExecutor) -> None:
    """The single version of the reply is the one at its end."""
    worker.hold(after=4)
    running = pool.submit(generate, worker, sampling_params={"max_new_tokens": 6})
    worker.wait_for_arrivals(1)
    request(worker, "/update_weight_version", {"new_version": "7", "abort_all_requests": False})
    worker.release()
    meta = running.result(20)["meta_info"]
    old, new = {"version": "default", "start": 0, "end": 4}, {"version": "7", "start": 4, "end": 6}
    assert meta["weight_versions"] == [old, new]
    assert meta["weight_version"] == "7"
    assert worker.log[0].versions == ["default"] * 4 + ["7"] * 2


def test_an_update_without_a_pause_is_not_overtaken(worker: EmbeddedWorker, pool: ThreadPoolExecutor) -> None:
    """It waits for what is in flight, and later requests wait for it. Else it would wait for as long as there are any."""
    short = {"max_new_tokens": 3}
    worker.hold(after=2)
    before = pool.submit(generate, worker, rid="before", sampling_params=short)
    worker.wait_for_arrivals(1)
    updating = pool.submit(request, worker, "/update_weights_from_disk", {"model_path": "x", "weight_version": "new"})
    until(lambda: worker.calls)
    after = [pool.submit(generate, worker, rid=rid, sampling_params=short) for rid in ("after1", "after2")]
    worker.wait_for_arrivals(3)
    assert not updating.done()
    worker.release(1)
    assert before.result(20)["meta_info"]["weight_version"] == "default"
    assert updating.result(20)[0] == 200
    worker.release()
    for one in after:
        spans = one.result(20)["meta_info"]["weight_versions"]
        assert spans == [{"version": "new", "start": 0, "end": 3}]


def test_an_update_aborts_everything_unless_the_request_says_no(
    worker: EmbeddedWorker, pool: ThreadPoolExecutor
) -> None:
    worker.hold(after=4)
    running = pool.submit(generate, worker)
    worker.wait_for_arrivals(1)
    request(worker, "/update_weight_version", {"new_version": "7"})
    assert running.result(20)["meta_info"]["finish_reason"]["type"] == "abort"
    for path in ("/model_info", "/get_model_info"):
        assert json.loads(request(worker, path)[1])["weight_version"] == "7"


def test_new_weights_bring_their_version(worker: EmbeddedWorker) -> None:
    body = {"model_path": "x", "weight_version": "8"}
    assert json.loads(request(worker, "/update_weights_from_disk", body)[1])["success"] is True
    assert generate(worker)["meta_info"]["weight_version"] == "8"
    assert [call.path for call in worker.calls] == ["/update_weights_from_disk"]


def test_many_at_once(worker: EmbeddedWorker, pool: ThreadPoolExecutor) -> None:
    """The log has one record per reply, no two are mixed up, and the worker starts no thread for a request."""
    before = set(threading.enumerate())
    waiting: list[Future[Any]] = [
        pool.submit(generate, worker, f"prompt {number}", rid=f"r-{number}") for number in range(40)
    ]
    replies = {reply["meta_info"]["id"]: reply for reply in (one.result(30) for one in waiting)}
    assert len(replies) == len(worker.log) == 40
    for record in worker.log:
        assert replies[record.rid]["output_ids"] == record.output_ids
    started = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in started if not name.startswith("client")}


def test_tokens_can_take_time(pool: ThreadPoolExecutor) -> None:
    """A reply takes as long as all of its tokens, whatever else runs."""
    with EmbeddedWorker(vocabulary("qwen"), token_delay=0.002) as worker:
        begun = time.monotonic()
        replies = [pool.submit(generate, worker, sampling_params={"max_new_tokens": 100}) for _ in range(8)]
        assert all(len(one.result(20)["output_ids"]) == 100 for one in replies)
        assert time.monotonic() - begun > 0.1
