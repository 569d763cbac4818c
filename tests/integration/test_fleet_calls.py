"""Calls that mean all workers: each of them gets it, the answer tells what each said, and the memory knows the version."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from router.config import AbortConfig, HealthConfig
from tests.support.asking import Asking, assert_kept, calls, settle, until
from tests.support.client import Answer, call
from tests.support.oracle import versions_of
from tests.support.serving import dead_url, read_request, serving_socket
from tests.support.stack import Reply, Stack, stack
from worker.worker import EmbeddedWorker

UNCERTAIN = "version_uncertain"


@pytest.fixture(scope="module")
def started() -> Iterator[Stack]:
    abort = AbortConfig(policy="return", attempts=1, wait=0)
    with stack("qwen", styles=("cumulative",) * 2, version_spans=False, abort=abort) as served:
        yield served


@pytest.fixture
def served(started: Stack) -> Iterator[Stack]:
    """Two workers that tell only the version at the end of a reply. At the end nothing is in flight."""
    for worker in started.workers:
        # Tests go up from here, and the next one starts over: the first version of a run that is resumed.
        worker.set_weight_version("1")
    assert started.post("/update_weight_version", {"new_version": "1"}).status == 200
    yield started
    settle(started)
    assert all(not worker.out_of_range for worker in started.workers)


def say(served: Stack, space: str, text: str = "A:", tokens: int = 3) -> Reply:
    body = {"text": text, "sampling_params": {"max_new_tokens": tokens}}
    return served.generate(body, headers={"x-radix-namespace": space})


def begin(served: Stack, asks: list[Asking], space: str, text: str = "A:", **more: Any) -> Asking:
    body = {"text": text, "sampling_params": {"max_new_tokens": 5}, **more}
    asks.append(Asking(served.url, body, headers={"x-radix-namespace": space}))
    return asks[-1]


def holder(served: Stack) -> EmbeddedWorker:
    """The worker that has the only generation in flight."""
    until(lambda: any(worker.in_flight for worker in served.workers))
    return next(worker for worker in served.workers if worker.in_flight)


def current(served: Stack) -> Any:
    return served.get("/radix_tree/stats").json()["weight_version"]


# -- who gets a call, and what is said of it ----------------------------------------------------------------------------

CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/pause_generation", {"mode": "retract"}),
    ("POST", "/continue_generation", {}),
    ("GET", "/flush_cache", {}),
    ("POST", "/flush_cache", {}),
    ("POST", "/update_weights_from_disk", {"model_path": "x", "weight_version": "2"}),
    ("POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["x"], "weight_version": "3"}),
    ("POST", "/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": [], "weight_version": "4"}),
    ("POST", "/update_weights_from_ipc", {"zmq_handles": {}, "weight_version": "5"}),
    ("POST", "/update_weight_version", {"new_version": "6"}),
    ("POST", "/abort_request", {"abort_all": True}),
]


QUESTIONS = frozenset({"/tokenize", "/v1/models", "/model_info"})
"""What a router asks a worker that joins, in its own time."""


def send(served: Stack, method: str, path: str, body: dict[str, Any]) -> Any:
    return served.get(path) if method == "GET" else served.post(path, body)


@pytest.mark.parametrize(("method", "path", "body"), [pytest.param(*row, id=f"{row[0]} {row[1]}") for row in CALLS])
def test_a_call_reaches_every_worker_and_brings_each_ones_answer(
    served: Stack, method: str, path: str, body: dict[str, Any]
) -> None:
    before = [len(worker.calls) for worker in served.workers]
    answer = send(served, method, path, body)
    assert answer.status == 200, answer.content
    found = answer.json()
    assert found["success"] is True
    assert {one["url"] for one in found["workers"]} == {worker.url for worker in served.workers}
    assert [one["status"] for one in found["workers"]] == [200, 200]
    for worker, start in zip(served.workers, before, strict=True):
        (got,) = (call for call in worker.calls[start:] if call.path not in QUESTIONS)
        assert (got.method, got.path) == (method, path)
        assert (got.body or {}) == body
    if path.startswith("/update"):
        assert [one["body"]["success"] for one in found["workers"]] == [True, True]
    if path == "/pause_generation":
        assert served.post("/continue_generation", {}).status == 200


def test_a_call_keeps_its_query_and_its_fields(served: Stack) -> None:
    assert served.post("/flush_cache?timeout=3&x=%2F", {"a": [1, None]}).status == 200
    for worker in served.workers:
        assert worker.calls[-1].query == {"timeout": ["3"], "x": ["/"]}
        assert worker.calls[-1].body == {"a": [1, None]}


@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation", "/abort_request"])
def test_a_wrong_method_is_refused_here(served: Stack, path: str) -> None:
    before = [len(worker.calls) for worker in served.workers]
    assert served.get(path).status == 405
    assert [len(worker.calls) for worker in served.workers] == before


def test_a_draining_worker_gets_it_too(served: Stack, asks: list[Asking], space: str) -> None:
    """What it still has in flight is to pause as well."""
    for worker in served.workers:
        worker.hold(after=1)
    asking = begin(served, asks, space)
    leaving = holder(served)
    assert served.post("/remove_worker", {"url": leaving.url}).status == 200
    try:
        before = [len(calls(worker, "/pause_generation")) for worker in served.workers]
        answer = served.post("/pause_generation", {"mode": "in_place"})
        assert answer.status == 200
        assert {one["url"] for one in answer.json()["workers"]} == {worker.url for worker in served.workers}
        assert [len(calls(worker, "/pause_generation")) for worker in served.workers] == [n + 1 for n in before]
        leaving.release()
        assert leaving.in_flight == 1
        assert served.post("/continue_generation", {}).status == 200
        assert asking.answer().status == 200
    finally:
        assert served.post("/add_worker", {"url": leaving.url}).status == 200


def test_workers_that_differ_are_207(served: Stack, asks: list[Asking], space: str) -> None:
    """One is busy and cannot flush; each says so for itself."""
    for worker in served.workers:
        worker.hold(after=1)
    asking = begin(served, asks, space)
    busy = holder(served)
    busy.wait_for_arrivals(1)
    answer = served.post("/flush_cache", {})
    assert answer.status == 207
    found = answer.json()
    assert found["success"] is False
    assert {one["url"]: one["status"] for one in found["workers"]} == {
        worker.url: 400 if worker is busy else 200 for worker in served.workers
    }
    assert "1 of 2" in found["message"]
    busy.release()
    assert asking.answer().status == 200


@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation"])
def test_a_call_without_a_body_is_one_without_options(served: Stack, path: str) -> None:
    """`curl -X POST`: SGLang wants an object there."""
    try:
        answer = served.post(path, None, raw=b"", headers={"content-type": "text/plain"})
        assert answer.status == 200, answer.content
    finally:
        assert served.post("/continue_generation", {}).status == 200


def test_a_dead_worker_makes_it_207(served: Stack) -> None:
    alive, dead = served.workers
    dead.kill()
    try:
        answer = served.post("/continue_generation", {})
        assert answer.status == 207
        found = {one["url"]: one for one in answer.json()["workers"]}
        assert found[alive.url]["status"] == 200
        assert found[dead.url]["status"] is None
        assert found[dead.url]["error"]
        assert calls(alive, "/continue_generation")
    finally:
        dead.restart()


def test_a_version_that_not_all_workers_took_is_not_the_current_one(served: Stack) -> None:
    before = current(served)
    served.workers[1].kill()
    try:
        assert served.post("/update_weight_version", {"new_version": "77"}).status == 207
        assert current(served) == before
    finally:
        served.workers[1].restart()
    assert served.post("/update_weight_version", {"new_version": "77"}).status == 200
    assert current(served) == "77"


def test_all_dead_is_502(served: Stack) -> None:
    for worker in served.workers:
        worker.kill()
    try:
        answer = served.post("/continue_generation", {})
        assert answer.status == 502
        assert [one["status"] for one in answer.json()["workers"]] == [None, None]
    finally:
        for worker in served.workers:
            worker.restart()


@pytest.mark.parametrize(
    ("path", "body"),
    [("/pause_generation", {"mode": "nap"}), ("/update_weight_version", {"version": "7"})],
)
def test_what_all_workers_refuse_is_refused_with_their_words(served: Stack, path: str, body: dict[str, Any]) -> None:
    before = current(served)
    answer = served.post(path, body)
    assert answer.status == 400
    found = answer.json()
    assert [one["status"] for one in found["workers"]] == [400, 400]
    assert all(one["body"]["message"] in found["message"] for one in found["workers"])
    assert current(served) == before


def test_without_workers_it_is_503(started: Stack) -> None:
    """And nothing hangs."""
    for worker in started.workers:
        assert started.post("/remove_worker", {"url": worker.url}).status == 200
    try:
        for method, path, body in CALLS:
            answer = send(started, method, path, body)
            assert answer.status == 503, (path, answer.content)
            assert answer.json()["error"]["message"]
    finally:
        for worker in started.workers:
            assert started.post("/add_worker", {"url": worker.url}).status == 200


def test_a_worker_that_cannot_be_reached_does_not_delay_the_others(served: Stack) -> None:
    nobody = dead_url()
    assert served.post("/add_worker", {"url": nobody}).status == 200
    try:
        answer = served.post("/update_weight_version", {"new_version": "2"})
        assert answer.status == 207
        assert [one["status"] for one in answer.json()["workers"]] == [200, 200, None]
        assert [worker.weight_version for worker in served.workers] == ["2", "2"]
    finally:
        assert served.post("/remove_worker", {"url": nobody}).status == 200


@pytest.mark.slow
def test_one_that_is_quarantined_already_is_waited_for_three_seconds() -> None:
    """Whatever `--fleet-timeout` is: it is known to hang. It is named, and told nothing later."""
    health = HealthConfig(interval=0.05, timeout=0.2)
    with stack("qwen", styles=("cumulative",) * 2, workers={"health": health}) as served, ThreadPoolExecutor(4) as many:
        well, hung = served.workers
        with hung.hanging():
            until(lambda: served.get("/workers").json()["workers"][1]["state"] == "quarantined", "it is noticed")
            begun = time.monotonic()
            asked = [
                many.submit(served.post, path, body)
                for path, body in (
                    ("/update_weights_from_disk", {"model_path": "x", "weight_version": "2"}),
                    ("/flush_cache", {}),
                    ("/continue_generation", {}),
                )
            ]
            answers = [one.result(60) for one in asked]
            took = time.monotonic() - begun
            (again := many.submit(served.post, "/update_weight_version", {"new_version": "3"})).result(60)
        assert 2.5 < took < 8
        for answer in (*answers, again.result()):
            assert answer.status == 207
            first, second = answer.json()["workers"]
            assert (first["status"], second["status"]) == (200, None)
            assert "within 3 s" in second["error"]
        until(lambda: served.get("/workers").json()["workers"][1]["state"] == "healthy", "it is back")
        assert {one.path for one in hung.calls} & {"/update_weights_from_disk", "/update_weight_version"} == set()
        assert (well.weight_version, hung.weight_version) == ("3", "default")


def test_a_connection_that_was_just_closed_is_no_dead_worker(served: Stack) -> None:
    """Workers close what was idle for five seconds. Who is told to pause must not miss it because of that."""
    heard = []

    async def one_request_a_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        heard.append(head.split(" ")[1])
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 18\r\n\r\n{"model_path":"m"}')
        await read_request(reader)

    async def talk() -> tuple[Answer, Answer]:
        async with serving_socket(one_request_a_connection) as url:
            assert (await asyncio.to_thread(served.post, "/add_worker", {"url": url})).status == 200
            try:
                first = await asyncio.to_thread(served.post, "/pause_generation", {"mode": "in_place"})
                return first, await asyncio.to_thread(served.post, "/continue_generation", {})
            finally:
                await asyncio.to_thread(served.post, "/remove_worker", {"url": url})

    for answer in asyncio.run(talk()):
        assert answer.status == 200, answer.content
    assert [path for path in heard if path not in QUESTIONS] == [
        "/server_info",
        "/pause_generation",
        "/continue_generation",
    ]


def test_a_paused_fleet_goes_on_where_it_was(served: Stack, asks: list[Asking], space: str) -> None:
    """What was running, and what came meanwhile."""
    for worker in served.workers:
        worker.hold(after=2)
    running = begin(served, asks, space)
    at = holder(served)
    at.wait_for_arrivals(1)
    assert served.post("/pause_generation", {"mode": "in_place"}).status == 200
    for worker in served.workers:
        worker.release()
    late = begin(served, asks, space, "B:")
    until(lambda: sum(worker.in_flight for worker in served.workers) == 2)
    assert len(at.log[-1].output_ids) <= 2
    assert served.post("/continue_generation", {}).status == 200
    for asking, text in ((running, "A:"), (late, "B:")):
        reply = asking.answer().json()
        record = next(r for worker in served.workers for r in worker.log if r.rid == reply["meta_info"]["id"])
        assert reply["output_ids"] == record.output_ids
        assert_kept(served.retrieve(text + reply["text"], namespace=space), record)


def test_the_memory_outlives_a_flush(served: Stack, space: str) -> None:
    record = say(served, space).record
    assert served.post("/flush_cache", {}).status == 200
    assert_kept(served.retrieve("A:" + record.text, namespace=space), record)


# -- versions ------------------------------------------------------------------------------------------------------------


def new_version(served: Stack, version: str, path: str = "/update_weight_version") -> None:
    (body,) = [body for _, known, body in CALLS if known == path]
    name = "new_version" if path == "/update_weight_version" else "weight_version"
    assert served.post(path, {**body, name: version}).status == 200


@pytest.mark.parametrize("path", [path for _, path, body in CALLS if path.startswith("/update")])
def test_a_version_set_through_the_router_is_the_current_one(served: Stack, space: str, path: str) -> None:
    """Before any reply came with it; and what was sampled before is so many versions old."""
    record = say(served, space).record
    asked = {"text": "A:" + record.text, "max_staleness": 1}
    for version, stale in (("2", 0), ("3", 3)):
        new_version(served, version, path)
        assert current(served) == version
        assert served.retrieve(asked["text"], namespace=space, max_staleness=1)["stale_tokens"] == stale
    answer = served.post("/retrieve_from_text", {**asked, "strict": True}, headers={"x-radix-namespace": space})
    assert answer.status == 409
    assert answer.json()["error"]["stale_tokens"] == 3


def test_a_version_may_go_back(served: Stack, space: str) -> None:
    """A run that is resumed: what was sampled under the later version is not stale."""
    new_version(served, "50")
    record = say(served, space).record
    new_version(served, "40")
    assert current(served) == "40"
    found = served.retrieve("A:" + record.text, namespace=space, max_staleness=0)
    assert found["stale_tokens"] == 0


def test_an_update_without_a_version_changes_none(served: Stack) -> None:
    before = current(served)
    assert served.post("/update_weights_from_disk", {"model_path": "x"}).status == 200
    assert current(served) == before


def test_a_reply_after_a_version_was_set_is_certain(served: Stack, space: str) -> None:
    """Every worker is known to have it, though none has answered since."""
    for version in ("2", "3", "4"):
        new_version(served, version)
        for _ in served.workers:
            space = uuid.uuid4().hex
            record = say(served, space).record
            found = served.retrieve("A:" + record.text, namespace=space)
            assert UNCERTAIN not in found["reasons"]
            assert {name for _, name in versions_of(found["weight_versions"])} == {version}
            assert found["exact"]


@pytest.mark.parametrize("through", ["router", "worker"])
def test_a_version_that_changed_under_a_reply_is_uncertain(
    served: Stack, asks: list[Asking], space: str, through: str
) -> None:
    """The engine says only the version at the end; the reply after it is certain again."""
    for _ in served.workers:
        say(served, space, "B:")
    for worker in served.workers:
        worker.hold(after=2)
    asking = begin(served, asks, space)
    at = holder(served)
    at.wait_for_arrivals(1)
    if through == "router":
        body = {"new_version": "8", "abort_all_requests": False}
        assert served.post("/update_weight_version", body).status == 200
    else:
        at.set_weight_version("8")
    for worker in served.workers:
        worker.release()
    reply = asking.answer().json()
    found = served.retrieve("A:" + reply["text"], namespace=space)
    assert found["tokens"][-5:] == reply["output_ids"]
    assert UNCERTAIN in found["reasons"]
    later = {}
    while at.url not in later:
        own = uuid.uuid4().hex
        answer = say(served, own)
        later[answer.answer.headers["x-router-worker"]] = served.retrieve("A:" + answer.body["text"], namespace=own)
    assert UNCERTAIN not in later[at.url]["reasons"]
    assert {name for _, name in versions_of(later[at.url]["weight_versions"])} == {"8"}


def test_workers_at_different_versions_do_not_disturb_each_other(served: Stack) -> None:
    """Each is judged by what it itself was last seen with."""
    served.workers[0].set_weight_version("5")
    served.workers[1].set_weight_version("6")
    for turn in range(8):
        space = uuid.uuid4().hex
        reply = say(served, space)
        worker = next(w for w in served.workers if w.url == reply.answer.headers["x-router-worker"])
        found = served.retrieve("A:" + reply.body["text"], namespace=space)
        assert {name for _, name in versions_of(found["weight_versions"])} == {worker.weight_version}
        # Whoever answers with it for the first time may have changed in the middle of the reply.
        assert (UNCERTAIN in found["reasons"]) == (turn < 2)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_replies_of_the_old_version_that_come_late_do_not_turn_the_clock_back(
    served: Stack, asks: list[Asking], count: int
) -> None:
    """They were sampled, and sent, before the version was set, however many of them there are."""
    new_version(served, "60")
    spaces = [uuid.uuid4().hex for _ in range(count)]
    for worker in served.workers:
        worker.hold(after=2)
        worker.wire.version_spans = True
    try:
        under_way = [begin(served, asks, one) for one in spaces]
        until(lambda: sum(worker.in_flight for worker in served.workers) == count)
        for worker in served.workers:
            worker.wait_for_arrivals(worker.in_flight)
        body = {"new_version": "61", "abort_all_requests": False}
        assert served.post("/update_weight_version", body).status == 200
        for worker in served.workers:
            assert call(worker.url + "/abort_request", {"abort_all": True}).status == 200
        for asking, space in zip(under_way, spaces, strict=True):
            reply = asking.answer().json()
            found = served.retrieve("A:" + reply["text"], namespace=space, max_staleness=0)
            assert {name for _, name in versions_of(found["weight_versions"])} == {"60"}
    finally:
        for worker in served.workers:
            worker.wire.version_spans = False
    assert current(served) == "61"
