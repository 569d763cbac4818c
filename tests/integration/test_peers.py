"""Several real routers on one store: what is told to one of them holds at all of them when the call is answered.

Workers are added and removed, weights are updated and generations are ended at one router, and looked at through the others:
also those that were stopped meanwhile, killed, or started later.
"""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop

from middleware_hub.persistence.weight_versions import VersionLog
from middleware_hub.spans.versions import VersionClock, WorkerVersions
from middleware_hub.store.opening import open_store
from tests.support.asking import Asking, calls, until
from tests.support.client import Answer, call
from tests.support.programs import Program
from tests.support.redis_server import empty_redis, redis_server
from tests.support.usual import usual
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

LEASE = 5.0
Json = dict[str, Any]


class Routers:
    """Three routers with one store, and workers that some of them were told of."""

    def __init__(self, folder: Path, *flags: str, store: str | None = None) -> None:
        self.folder = folder
        self.store = store or f"sqlite:{folder / 'store'}/"
        self._flags = flags
        self._entered = contextlib.ExitStack()
        self.programs: list[Program] = []

    def __enter__(self) -> Routers:
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def worker(self, **options: Any) -> EmbeddedWorker:
        return self._entered.enter_context(EmbeddedWorker(stream_style="cumulative", **options))

    def start(self, count: int, *flags: str) -> list[Program]:
        common = ["--tokenizer-path", str(shipped_tokenizer())]
        common += ["--store", self.store, "--abort-retry-wait", "0.3", *self._flags]
        for _ in range(count):
            name = f"router-{len(self.programs)}"
            program = Program(name, *common, "--router-id", name, *flags, folder=self.folder)
            self.programs.append(program)
            self._entered.enter_context(program)
        for program in self.programs[-count:]:
            program.wait_until_up()
        return self.programs[-count:]

    @property
    def urls(self) -> list[str]:
        return [program.url for program in self.programs if program.alive]


@pytest.fixture(scope="module", params=usual(["sqlite", "redis"], "sqlite"))
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routers]:
    store = empty_redis() if request.param == "redis" else None
    with Routers(tmp_path_factory.mktemp("peers"), store=store) as routers:
        worker = routers.worker()
        routers.start(3, "--worker-urls", worker.url)
        routers.first = worker  # type: ignore[attr-defined]
        yield routers


def ok(answer: Answer) -> Any:
    assert answer.status < 300, answer.content
    return answer.json()


def listed(url: str) -> list[str]:
    return ok(call(f"{url}/list_workers"))["urls"]


def described(url: str) -> list[tuple[str, str, str]]:
    return [(one["id"], one["url"], one["state"]) for one in ok(call(f"{url}/workers"))["workers"]]


def delete(url: str) -> Answer:
    request = urllib.request.Request(url, method="DELETE")
    with urllib.request.urlopen(request, timeout=30) as response:
        return Answer(response.status, {}, response.read())


def metric(url: str, name: str) -> float:
    for line in call(f"{url}/metrics").content.decode().splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise KeyError(name)


def version(url: str) -> Any:
    return ok(call(f"{url}/radix_tree/stats"))["weight_version"]


def finish(reply: Json) -> str:
    return reply["meta_info"]["finish_reason"]["type"]


HEARD = {"told": True, "missing": [], "error": None}


# -- workers ------------------------------------------------------------------------------------------------------------


def test_an_added_worker_has_its_ranks_everywhere(started: Routers) -> None:
    one, *_ = started.urls
    with EmbeddedWorker(shipped_tokenizer(), dp_size=3) as worker:
        ok(call(f"{one}/add_worker", {"url": worker.url}))
        for url in started.urls:
            (told,) = [found for found in ok(call(f"{url}/workers"))["workers"] if found["url"] == worker.url]
            assert [target["rank"] for target in told["targets"]] == [0, 1, 2]
        ok(call(f"{one}/remove_worker", {"url": worker.url}))


def test_an_added_worker_is_known_everywhere_when_the_call_is_answered(started: Routers) -> None:
    one, two, three = started.urls
    for number in range(5):
        with EmbeddedWorker(shipped_tokenizer()) as worker:
            added = ok(call(f"{one}/add_worker", {"url": worker.url}))
            assert added["routers"] == HEARD
            assert {tuple(described(url)) for url in (one, two, three)} == {tuple(described(one))}
            assert (added["worker"]["id"], worker.url, "healthy") in described(two)
            assert listed(two)[-1] == worker.url
            found = ok(call(f"{three}/workers/{added['worker']['id']}"))
            assert found["url"] == worker.url
            removed = ok(delete(f"{three}/workers/{added['worker']['id']}"))
            assert removed["routers"] == HEARD
            assert worker.url not in listed(one) + listed(two) + listed(three), number
            assert call(f"{two}/workers/{added['worker']['id']}").status == 404


def test_two_routers_that_add_the_same_worker_add_one(started: Routers) -> None:
    with EmbeddedWorker(shipped_tokenizer()) as worker, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda url: ok(call(f"{url}/add_worker", {"url": worker.url})), started.urls * 3))
        assert len({one["worker"]["id"] for one in found}) == 1
        assert [listed(url).count(worker.url) for url in started.urls] == [1, 1, 1]
        gone = list(pool.map(lambda url: call(f"{url}/remove_worker", {"url": worker.url}).status, started.urls))
        assert set(gone) <= {200, 404}
        assert 200 in gone
        assert [listed(url).count(worker.url) for url in started.urls] == [0, 0, 0]


def test_workers_are_listed_in_one_order(started: Routers) -> None:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(EmbeddedWorker(shipped_tokenizer())) for _ in range(6)]
        with ThreadPoolExecutor(6) as pool:
            urls = started.urls * 2
            asked = [
                pool.submit(call, f"{url}/add_worker", {"url": worker.url})
                for url, worker in zip(urls, workers, strict=True)
            ]
            for one in asked:
                ok(one.result())
        assert len({tuple(listed(url)) for url in started.urls}) == 1
        assert len(listed(started.urls[0])) == 7
        for worker in workers:
            ok(call(f"{started.urls[1]}/remove_worker", {"url": worker.url}))


def test_no_engine_is_refused_once_and_told_to_nobody(started: Routers) -> None:
    one, two, _ = started.urls
    answer = call(f"{one}/add_worker", {"url": "ftp://x"})
    assert answer.status == 400
    assert len(listed(one)) == len(listed(two)) == 1


def test_each_router_drains_its_own(started: Routers) -> None:
    """A worker that is removed at one router, while another one has a generation there."""
    one, two, three = started.urls
    ok(call(f"{one}/remove_worker", {"url": started.first.url}))  # type: ignore[attr-defined]
    with EmbeddedWorker(shipped_tokenizer()) as worker:
        try:
            ok(call(f"{one}/add_worker", {"url": worker.url}))
            worker.hold(after=1)
            asking = Asking(two, {"text": "A:", "sampling_params": {"max_new_tokens": 3}})
            worker.wait_for_arrivals(1)
            assert ok(call(f"{three}/remove_worker", {"url": worker.url}))["routers"] == HEARD
            assert listed(one) == listed(two) == listed(three) == []
            assert [state for _, _, state in described(two)] == ["draining"]
            assert described(one) == described(three) == []
            assert call(f"{one}/generate", {"text": "A:"}).status == 503
            worker.release()
            assert asking.answer().status == 200
            until(lambda: described(two) == [])
        finally:
            ok(call(f"{one}/add_worker", {"url": started.first.url}))  # type: ignore[attr-defined]


def test_calls_to_all_reach_a_worker_that_only_another_router_drains(started: Routers) -> None:
    """Else what was paused there stays paused for ever, and an end of all does not end it."""
    one, two, three = started.urls
    ok(call(f"{one}/remove_worker", {"url": started.first.url}))  # type: ignore[attr-defined]
    with EmbeddedWorker(shipped_tokenizer()) as worker:

        def removed(*, paused: bool) -> Asking:
            ok(call(f"{one}/add_worker", {"url": worker.url}))
            worker.hold(after=1)
            asking = Asking(two, {"text": "A:", "sampling_params": {"max_new_tokens": 3}})
            worker.wait_for_arrivals(1)
            if paused:
                ok(call(f"{one}/pause_generation", {"mode": "in_place"}))
                worker.release()
            ok(call(f"{three}/remove_worker", {"url": worker.url}))
            return asking

        def told(url: str, path: str, body: Json) -> list[tuple[str, int]]:
            return [(said["url"], said["status"]) for said in ok(call(url + path, body))["workers"]]

        try:
            asking = removed(paused=True)
            assert told(one, "/continue_generation", {}) == [(worker.url, 200)]
            assert finish(asking.answer().json()) != "abort"
            until(lambda: call(f"{three}/continue_generation", {}).status == 503, "it is drained everywhere")
            asking = removed(paused=False)
            assert told(three, "/abort_request", {"abort_all": True}) == [(worker.url, 200)]
            assert finish(asking.answer().json()) == "abort"
        finally:
            ok(call(f"{one}/add_worker", {"url": started.first.url}))  # type: ignore[attr-defined]
            ok(call(f"{one}/continue_generation", {}))


# -- weights ------------------------------------------------------------------------------------------------------------


def test_a_version_that_is_set_at_one_router_is_current_at_all(started: Routers) -> None:
    for number in range(100, 106):
        at = started.urls[number % 3]
        answer = ok(call(f"{at}/update_weight_version", {"new_version": str(number)}))
        assert answer["routers"] == HEARD
        assert [version(url) for url in started.urls] == [str(number)] * 3
        for url in started.urls:
            assert {one["weight_version"] for one in ok(call(f"{url}/workers"))["workers"]} == {str(number)}
            assert [one["version"] for one in ok(call(f"{url}/routers"))["routers"] if one["this"]] == [str(number)]


def test_updates_at_two_routers_take_turns(started: Routers) -> None:
    """Else some workers could end with one version and some with the other."""
    with EmbeddedWorker(shipped_tokenizer()) as worker:
        ok(call(f"{started.urls[0]}/add_worker", {"url": worker.url}))
        workers = [started.first, worker]  # type: ignore[attr-defined]
        with ThreadPoolExecutor(6) as pool:
            asked = [
                pool.submit(call, f"{started.urls[n % 3]}/update_weight_version", {"new_version": str(200 + n)})
                for n in range(12)
            ]
            for one in asked:
                ok(one.result())
        assert len({worker.weight_version for worker in workers}) == 1
        told = [[found["new_version"] for found in calls(w, "/update_weight_version")][-12:] for w in workers]
        assert told[0] == told[1]
        assert {version(url) for url in started.urls} == {workers[0].weight_version}
        ok(call(f"{started.urls[0]}/remove_worker", {"url": worker.url}))


# -- aborts -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(started: Routers) -> Iterator[EmbeddedWorker]:
    worker: EmbeddedWorker = started.first  # type: ignore[attr-defined]
    worker.forget_scripts()
    worker.hold(after=1)
    yield worker
    worker.release()
    worker.forget_scripts()
    worker.wait_until_idle()


def asked(url: str, rid: Any, **more: Any) -> Asking:
    body = {"text": "A:", "rid": rid, "sampling_params": {"max_new_tokens": 3}, **more}
    return Asking(url, body)


def replies_of(asking: Asking, *, stream: bool) -> list[Json]:
    if not stream:
        found = asking.answer().json()
        return found if isinstance(found, list) else [found]
    events = asking.events()
    asking.close()
    return events


def test_an_abort_reaches_the_router_that_has_the_generation(started: Routers, held: EmbeddedWorker) -> None:
    one, two, _ = started.urls
    asking = asked(two, "far")
    held.wait_for_arrivals(1)
    told = len(calls(held, "/abort_request"))
    answer = ok(call(f"{one}/abort_request", {"rid": "far"}))
    assert [found["status"] for found in answer["workers"]] == [200]
    assert calls(held, "/abort_request")[told:] == [{"rid": "far"}]
    reply = asking.answer().json()
    assert (finish(reply), reply["meta_info"]["id"]) == ("abort", "far")
    assert held.in_flight == 0


def test_a_whole_name_goes_before_a_beginning_also_of_another_router(started: Routers, held: EmbeddedWorker) -> None:
    one, two, three = started.urls
    longer = asked(one, "name-and-more")
    exact = asked(two, "name")
    held.wait_for_arrivals(2)
    ok(call(f"{one}/abort_request", {"rid": "nam"}))  # a beginning of both
    assert [finish(asking.answer().json()) for asking in (longer, exact)] == ["abort", "abort"]
    longer, exact = asked(one, "x" * 40 + "-and-more"), asked(two, "x" * 40)
    held.wait_for_arrivals(2)
    ok(call(f"{three}/abort_request", {"rid": "x" * 40}))
    # The worker itself ends all that begin so. The router sends again what was not meant.
    assert finish(exact.answer().json()) == "abort"
    held.release()
    assert finish(longer.answer().json()) == "length"


def test_one_of_a_batch_is_ended_from_elsewhere(started: Routers, held: EmbeddedWorker) -> None:
    one, _, three = started.urls
    rids = ["batch-first-" + "a" * 30, "batch-second-" + "b" * 30]
    asking = asked(three, rids, text=["A:", "B:"])
    held.wait_for_arrivals(2)
    ok(call(f"{one}/abort_request", {"rid": rids[1]}))
    held.release()
    assert [finish(reply) for reply in asking.answer().json()] == ["length", "abort"]


def test_an_abort_between_two_attempts_reaches_the_router_that_waits(tmp_path: Path) -> None:
    """Its client would wait for half a minute, and the attempt would come after an hour."""
    with Routers(tmp_path, "--abort-retry-wait", "3600") as routers:
        worker = routers.worker()
        one, two = routers.start(2, "--worker-urls", worker.url)
        worker.script([11], finish="abort")
        asking = asked(two.url, "waits")
        until(lambda: "sent again in" in two.log)
        ok(call(f"{one.url}/abort_request", {"rid": "waits"}))
        reply = asking.answer().json()
        assert (finish(reply), reply["meta_info"]["id"]) == ("abort", "waits")
        assert len(worker.log) == 1


@pytest.mark.parametrize(
    ("here", "stream"), usual([(True, False), (True, True), (False, False), (False, True)], (False, True))
)
def test_an_abort_in_the_queue_of_a_router_ends_the_waiting(tmp_path: Path, here: bool, stream: bool) -> None:
    """The client gets what a worker answers from its own queue; no worker ever hears of the generation."""
    with Routers(tmp_path, "--max-inflight-per-worker", "1") as routers:
        worker = routers.worker()
        one, two = routers.start(2, "--worker-urls", worker.url)
        worker.hold(after=1)
        first = asked(two.url, "first")
        worker.wait_for_arrivals(1)
        body = {"text": "A:", "rid": "queued", "return_logprob": True, "stream": stream}
        queued = Asking(two.url, body)
        batch = Asking(two.url, {"text": ["A:", "B:"], "stream": stream})
        until(lambda: metric(two.url, "tito_router_queue_length") == 2)
        ok(call(f"{(two if here else one).url}/abort_request", {"rid": "queued"}))
        (reply,) = replies_of(queued, stream=stream)
        assert (finish(reply), reply["meta_info"]["id"]) == ("abort", "queued")
        assert (reply["text"], reply["output_ids"]) == ("", [])
        assert metric(two.url, "tito_router_queue_length") == 1
        ok(call(f"{(two if here else one).url}/abort_request", {"abort_all": True}))
        replies = replies_of(batch, stream=stream)
        assert [finish(reply) for reply in replies] == ["abort", "abort"]
        assert finish(first.answer().json()) == "abort"
        assert len(worker.log) == 1
        worker.release()
        assert finish(asked(two.url, "next").answer().json()) == "length"


def test_what_nobody_knows_is_asked_of_all_workers(started: Routers, held: EmbeddedWorker) -> None:
    told = len(calls(held, "/abort_request"))
    answer = ok(call(f"{started.urls[0]}/abort_request", {"rid": "nobody's"}))
    assert len(answer["workers"]) == 1
    assert calls(held, "/abort_request")[told:] == [{"rid": "nobody's"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_request", {"abort_all": True}),
        ("/pause_generation", {"mode": "abort"}),
        ("/update_weight_version", {"new_version": "900", "abort_all_requests": True}),
    ],
)
def test_what_ends_all_is_not_sent_again_by_other_routers(
    started: Routers, held: EmbeddedWorker, path: str, body: Json
) -> None:
    """Many times, because what matters is who is faster: the worker's reply, or the news."""
    for number in range(8):
        logged = len(held.log)
        asking = [asked(url, f"all-{path}-{number}-{at}") for at, url in enumerate(started.urls)]
        held.wait_for_arrivals(3)
        ok(call(started.urls[number % 3] + path, body))
        if path == "/pause_generation":
            ok(call(f"{started.urls[0]}/continue_generation", {}))
        assert [finish(one.answer().json()) for one in asking] == ["abort"] * 3
        assert len(held.log) == logged + 3


def test_an_abort_that_nobody_asked_for_is_sent_again(started: Routers, held: EmbeddedWorker) -> None:
    """Right after one that was asked for, which is over."""
    one, two, _ = started.urls
    ok(call(f"{one}/abort_request", {"abort_all": True}))
    logged = len(held.log)
    asking = asked(two, "goes-on")
    held.wait_for_arrivals(1)
    assert call(f"{held.url}/abort_request", {"rid": "goes-on"}).status == 200
    until(lambda: len(held.log) == logged + 2)
    held.release()
    assert finish(asking.answer().json()) == "length"


# -- who is there -------------------------------------------------------------------------------------------------------


def test_all_routers_are_listed(started: Routers, held: EmbeddedWorker) -> None:
    one, two, three = started.urls
    asking = asked(two, "seen")
    held.wait_for_arrivals(1)

    def seen(url: str) -> dict[str, Json]:
        return {found["id"]: found for found in ok(call(f"{url}/routers"))["routers"]}

    until(lambda: seen(one)["router-1"]["inflight"] == 1)
    found = seen(one)
    assert set(found) == {"router-0", "router-1", "router-2"}
    assert [name for name, router in found.items() if router["this"]] == ["router-0"]
    assert {router["url"] for router in found.values()} == {one, two, three}
    assert {router["pid"] for router in found.values()} == {program.pid for program in started.programs}
    assert {(router["workers"], router["store"]) for router in found.values()} == {(1, started.store.partition(":")[0])}
    assert all(0 <= router["seen_seconds_ago"] < LEASE for router in found.values())
    assert [metric(url, "tito_router_routers") for url in (one, two, three)] == [3, 3, 3]
    assert metric(two, "tito_router_control_lag_seconds") < LEASE
    held.release()
    asking.answer()


# -- routers that come and go -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_routers_that_start_later_and_again_know_the_workers(tmp_path: Path) -> None:
    with Routers(tmp_path) as routers:
        named, added, removed = routers.worker(), routers.worker(), routers.worker()
        (one,) = routers.start(1, "--worker-urls", named.url, removed.url)
        ok(call(f"{one.url}/add_worker", {"url": added.url}))
        ok(call(f"{one.url}/remove_worker", {"url": removed.url}))
        ok(call(f"{one.url}/update_weight_version", {"new_version": "7"}))
        (two,) = routers.start(1)
        assert listed(two.url) == listed(one.url) == [named.url, added.url]
        assert version(two.url) == "7"
        one.kill()
        one.start()
        one.wait_until_up()
        # What was removed by a call does not come back by itself.
        assert listed(one.url) == [named.url, added.url]
        assert f"POST /add_worker?url={removed.url}" in one.log
        ok(call(f"{one.url}/add_worker", {"url": removed.url}))
        assert set(listed(two.url)) == {named.url, added.url, removed.url}
        own = routers.worker()
        (three,) = routers.start(1, "--worker-urls", own.url)
        until(lambda: own.url in listed(one.url))
        assert set(listed(three.url)) == set(listed(one.url)) == set(listed(two.url))


@pytest.mark.slow
def test_a_killed_router_is_waited_for_until_its_time_is_over(tmp_path: Path) -> None:
    with Routers(tmp_path) as routers:
        worker, other = routers.worker(), routers.worker()
        one, two = routers.start(2, "--worker-urls", worker.url)
        two.kill()
        added = ok(call(f"{one.url}/add_worker", {"url": other.url}))
        assert added["routers"]["missing"] == ["router-1"]
        assert [found["id"] for found in ok(call(f"{one.url}/routers"))["routers"]] == ["router-0"]
        assert ok(call(f"{one.url}/remove_worker", {"url": other.url}))["routers"] == HEARD
        two.start()
        two.wait_until_up()
        assert listed(two.url) == [worker.url]
        two.terminate()
        two.exit_code()
        added = ok(call(f"{one.url}/add_worker", {"url": other.url}))
        assert added["routers"] == HEARD, "one that stops says good-bye, and is not waited for"


@pytest.mark.slow
def test_a_stopped_router_reads_on_before_it_serves(tmp_path: Path) -> None:
    """A generation that it gets when it goes on does not go to a worker that was removed meanwhile."""
    with Routers(tmp_path) as routers:
        old, new = routers.worker(), routers.worker()
        one, two = routers.start(2, "--worker-urls", old.url)
        two.freeze()
        ok(call(f"{one.url}/add_worker", {"url": new.url}))
        removed = ok(call(f"{one.url}/remove_worker", {"url": old.url}))
        assert old.url not in removed["urls"]
        logged = len(old.log)
        asking = [asked(two.url, f"late-{number}") for number in range(8)]
        two.thaw()
        assert [one.answer().headers["x-router-worker"] for one in asking] == [new.url] * 8
        assert len(old.log) == logged
        assert listed(two.url) == [new.url]


@pytest.mark.slow
def test_an_abort_asked_for_while_a_router_was_stopped_is_not_sent_again(tmp_path: Path) -> None:
    """It has the aborted replies when it goes on, sends again at once, and has read nothing of the abort."""
    with Routers(tmp_path, "--abort-retry-wait", "0") as routers:
        worker = routers.worker()
        one, two = routers.start(2, "--worker-urls", worker.url)
        worker.hold(after=1)
        for number in range(3):
            asking = [asked(two.url, f"stopped-{number}-{each}") for each in range(16)]
            worker.wait_for_arrivals(16)
            two.freeze()
            ok(call(f"{one.url}/abort_request", {"abort_all": True}))
            worker.wait_until_idle()
            two.thaw()
            assert [finish(each.answer().json()) for each in asking] == ["abort"] * 16
            assert len(worker.log) == 16 * (number + 1)


@pytest.mark.slow
def test_an_update_of_a_router_that_was_killed_is_over(tmp_path: Path) -> None:
    """The others do not wait for it, and what they generate is sent again as always."""
    with Routers(tmp_path) as routers:
        worker = routers.worker()
        one, two = routers.start(2, "--worker-urls", worker.url)
        with worker.hanging():
            asking = Asking(one.url, {"new_version": "5", "abort_all_requests": True}, path="/update_weight_version")
            until(lambda: b'"/update_weight_version"' in store_bytes(tmp_path))
            one.kill()
            asking.close()
        ok(call(f"{two.url}/update_weight_version", {"new_version": "6"}))
        assert version(two.url) == "6"
        until(lambda: "is gone" in two.log)
        worker.hold(after=1)
        reply = asked(two.url, "again")
        worker.wait_for_arrivals(1)
        assert call(f"{worker.url}/abort_request", {"rid": "again"}).status == 200
        until(lambda: len(worker.log) == 2)
        worker.release()
        assert finish(reply.answer().json()) == "length"


def store_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in (folder / "store").iterdir() if path.suffix != ".sqlite3-shm")


@pytest.mark.slow
def test_a_store_that_is_away_for_a_while(tmp_path: Path) -> None:
    """Calls take effect where they are made, say so, and are told in their order when it is back."""
    with redis_server(tmp_path / "redis") as redis, Routers(tmp_path, store=redis.address) as routers:
        first, second, third = routers.worker(), routers.worker(), routers.worker()
        one, two = routers.start(2, "--worker-urls", first.url)
        redis.kill()
        added = ok(call(f"{one.url}/add_worker", {"url": second.url}))
        assert added["routers"]["told"] is False
        assert added["routers"]["error"]
        assert ok(call(f"{one.url}/remove_worker", {"url": first.url}))["routers"]["told"] is False
        assert ok(call(f"{two.url}/add_worker", {"url": third.url}))["routers"]["told"] is False
        assert (listed(one.url), set(listed(two.url))) == ([second.url], {first.url, third.url})
        ok(call(f"{one.url}/update_weight_version", {"new_version": "3"}))
        assert [router["store"] for router in ok(call(f"{one.url}/routers"))["routers"]] == ["unreachable"]
        assert ok(call(f"{one.url}/abort_request", {"rid": "of another router"}))["routers"]["told"] is False
        assert asked(one.url, "alone").answer().headers["x-router-worker"] == second.url
        redis.start()
        until(lambda: set(listed(one.url)) == set(listed(two.url)) == {second.url, third.url}, seconds=30.0)
        until(lambda: version(two.url) == version(one.url) == "3")
        until(lambda: len(ok(call(f"{two.url}/routers"))["routers"]) == 2)
        assert ok(call(f"{two.url}/add_worker", {"url": first.url}))["routers"] == HEARD
        assert len(listed(one.url)) == 3


def test_a_version_that_comes_from_the_spool_after_the_call_is_shown(tmp_path: Path) -> None:
    """The routers are told of the call, and read the log of versions, before the spool of the other router is handed over."""
    with Routers(tmp_path, store=f"sqlite:{tmp_path}/store/") as routers:
        (one,) = routers.start(1, "--worker-urls", routers.worker().url)
        assert version(one.url) is None
        uvloop.run(_hand_over("7", f"sqlite:{tmp_path}/store/"))
        assert version(one.url) == "7"


async def _hand_over(current: str, address: str) -> None:
    store, clock = open_store(address), VersionClock()
    await store.open(None)
    log = VersionLog(store, clock, WorkerVersions())
    clock.set(current)
    await log.write()
    await store.close()


# -- tenants ------------------------------------------------------------------------------------------------------------


def test_a_tenant_ends_only_its_own_at_other_routers(tmp_path: Path) -> None:
    keys = ("--api-key", "red:r", "--api-key", "blue:b", "--admin-key", "boss")
    with Routers(tmp_path, *keys) as routers:
        worker = routers.worker()
        one, two = routers.start(2, "--worker-urls", worker.url)
        worker.hold(after=1)

        def key(name: str) -> dict[str, str]:
            return {"authorization": f"Bearer {name}"}

        body = {"text": "A:", "rid": "same", "sampling_params": {"max_new_tokens": 3}}
        red, blue = (Asking(two.url, body, headers=key(name)) for name in "rb")
        worker.wait_for_arrivals(2)
        ok(call(f"{one.url}/abort_request", {"rid": "same"}, headers=key("r")))
        assert finish(red.answer().json()) == "abort"
        assert worker.in_flight == 1
        assert call(f"{one.url}/routers", headers=key("x")).status == 401
        assert len(ok(call(f"{one.url}/routers", headers=key("boss")))["routers"]) == 2
        ok(call(f"{one.url}/abort_request", {"rid": "same"}, headers=key("boss")))
        assert finish(blue.answer().json()) == "abort"
        assert b'"authorization"' not in json.dumps(store_bytes(tmp_path).decode("latin-1")).encode()


@pytest.mark.slow
def test_routers_that_make_other_prompts_of_one_conversation_say_so(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    with Routers(tmp_path) as routers:
        worker = routers.worker()
        (one,) = routers.start(1, "--worker-urls", worker.url)
        (two,) = routers.start(1, "--chat-template", str(template), "--add-special-tokens", "never")
        until(lambda: "has another --chat-template" in one.log)
        assert "router router-0 on this store has another" in two.log
        (other,) = (router for router in ok(call(f"{one.url}/routers"))["routers"] if not router["this"])
        assert "--chat-template" in other["differs"]
        assert "--history" not in other["differs"]
