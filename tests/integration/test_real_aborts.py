"""Aborts, pauses, weight updates and clients that leave, on real workers.

What is long here has `ignore_eos`: nothing ends it but what a test does to it.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.conftest import RouterFor
from tests.support.asking import said_once
from tests.support.client import call, stream
from tests.support.engine_server import EngineServer
from tests.support.engines import Engine

ENGINES = ("sglang", "vllm")

Json = dict[str, Any]
LONG = {"max_new_tokens": 3_900, "ignore_eos": True}
WANTED = {"return_logprob": True, "return_prompt_token_ids": True}


@pytest.fixture(scope="module")
def router(router_for: RouterFor) -> str:
    return router_for(0, 1, flags=("--abort-retry-wait", "0.05", "--abort-retries", "20"))


@pytest.fixture(autouse=True)
def idle_before_and_after(engine: Engine, workers: list[EngineServer], router: str) -> Iterator[None]:
    yield
    for worker in workers:
        until_idle(engine, worker)
    assert [one["load"] for one in call(f"{router}/workers").json()["workers"]] == [0, 0]


def until_idle(engine: Engine, worker: EngineServer, seconds: float = 30.0) -> float:
    """How long it takes until nothing runs there."""
    begun = time.monotonic()
    while not engine.is_idle(worker):
        assert time.monotonic() - begun < seconds, "it never became idle"
        time.sleep(0.05)  # a poll of another process: there is nothing to wait on
    return time.monotonic() - begun


def aborts_heard(engine: Engine, workers: list[EngineServer]) -> int:
    """How often workers were told to abort, by their own access logs."""
    return sum(map(engine.aborts_heard, workers))


def until_heard(engine: Engine, workers: list[EngineServer], count: int) -> None:
    deadline = time.monotonic() + 10
    while aborts_heard(engine, workers) < count:
        assert time.monotonic() < deadline, "no worker was told that its client had left"
        time.sleep(0.05)  # a poll of another process's log


def generate(url: str, text: Any, params: Json, *, headers: dict[str, str] | None = None, **body: Any) -> Any:
    answer = call(f"{url}/generate", {"text": text, "sampling_params": params, **WANTED, **body}, headers=headers)
    assert answer.status == 200, answer.content
    return answer.json()


def retrieve(url: str, text: str, **body: Any) -> Json:
    answer = call(f"{url}/retrieve_from_text", {"text": text, **body})
    assert answer.status == 200, answer.content
    return answer.json()


def busy(engine: Engine, workers: list[EngineServer], asked: Future[Any] | None = None) -> EngineServer:
    """The worker that samples something: waits until one does, and raises TooLateError if `asked` has its reply before.

    To run is not enough: what is aborted between its arrival and its first token has no token to be kept.
    """
    deadline = time.monotonic() + 20
    before = [(0, 0)] * len(workers)
    while time.monotonic() < deadline:
        for number, worker in enumerate(workers):
            running, tokens = engine.progress(worker)
            if running and running == before[number][0] and tokens > before[number][1]:
                return worker  # the same ones as before, and longer
            before[number] = running, tokens
        if asked is not None and asked.done():
            raise TooLateError
        time.sleep(0.01)  # a poll of another process: there is nothing to wait on
    raise AssertionError("nothing is sampled")


class TooLateError(Exception):
    """The reply came before it was seen that a worker sampled."""


def caught(
    pool: ThreadPoolExecutor, engine: Engine, workers: list[EngineServer], *args: Any, **kwargs: Any
) -> tuple[Future[Any], EngineServer]:
    """Generate in the background. Return what will be the reply, and the worker that samples it.

    An engine may have said all of it before a slow machine comes to look: then it is asked once more.
    """
    for _ in range(10):
        asked = in_background(pool, *args, **kwargs)
        try:
            return asked, busy(engine, workers, asked)
        except TooLateError:
            asked.result()
    raise AssertionError("each reply came before it was seen that a worker sampled it")


def aborted(pool: ThreadPoolExecutor, abort: Callable[[], None], *args: Any, **kwargs: Any) -> Json:
    """Generate, and abort it while it is sampled. Return the reply.

    An engine may have sampled all of it before the abort comes to it, ahead of what it has said: then it is asked once more.
    """
    for _ in range(5):
        running, _worker = caught(pool, *args, **kwargs)
        abort()
        reply: Json = running.result()
        if reply["meta_info"]["finish_reason"]["type"] == "abort":
            return reply
    raise AssertionError("each reply went on to its last token")


def in_background(pool: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> Future[Any]:
    return pool.submit(generate, *args, **kwargs)


def check(url: str, text: str, reply: Json, **body: Any) -> Json:
    """What is retrieved is what the worker says it read and sampled."""
    found = retrieve(url, text + reply["text"], **body)
    sampled = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    assert found["tokens"] == reply["prompt_token_ids"] + reply["output_ids"]
    assert found["rollout_logp"][-len(sampled) :] == sampled
    assert found["exact"]
    return found


def test_an_abort_that_was_asked_for_is_returned(router: str, engine: Engine, workers: list[EngineServer]) -> None:
    def abort() -> None:
        answer = call(f"{router}/abort_request", {"rid": "abort-me"})
        assert answer.status == 200
        assert len(answer.json()["workers"]) == 1

    with ThreadPoolExecutor() as pool:
        partial = aborted(pool, abort, engine, workers, router, "Abort me", LONG, rid="abort-me")
    assert partial["meta_info"]["id"] == "abort-me"
    assert 0 < len(partial["output_ids"]) < 3_900
    check(router, "Abort me", partial, request_id="abort-me")


def test_an_abort_that_nobody_asked_for_here_is_not_seen(
    router: str, engine: Engine, workers: list[EngineServer]
) -> None:
    """Another client ended it, at the worker itself: it is sent again, and the client's id goes on to name it."""
    params = {"max_new_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        reply, worker = caught(pool, engine, workers, router, "Again", params, rid="once-more")
        engine.abort(worker)
        whole = reply.result()
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 400}
    assert whole["meta_info"]["id"] == "once-more"
    assert 'tito_router_abort_retries_total{outcome="retried"}' in call(f"{router}/metrics").content.decode()
    check(router, "Again", whole, request_id="once-more")


def test_of_a_batch_only_what_was_aborted_is_sent_again(
    router: str, engine: Engine, workers: list[EngineServer]
) -> None:
    texts = [f"Item {number}" for number in range(4)]
    rids = [f"batch-{number}" for number in "abcd"]
    params = {"max_new_tokens": 600, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        replies, worker = caught(pool, engine, workers, router, texts, params, rid=rids)
        engine.abort(worker, "batch-c")
        found = replies.result()
    assert [reply["meta_info"]["id"] for reply in found] == rids
    assert [len(reply["output_ids"]) for reply in found] == [600] * 4
    for text, rid, reply in zip(texts, rids, found, strict=True):
        check(router, text, reply, request_id=rid)


def test_a_partial_rollout_goes_on_under_new_weights(router: str, engine: Engine, workers: list[EngineServer]) -> None:
    """The update aborts, as it does by default; the text so far continues from exactly the ids that were sampled."""
    text, versions = "A story:", [engine.version(workers[0])]

    def update() -> None:
        versions.append(str(900 + len(versions)))
        answer = call(f"{router}/update_weight_version", {"new_version": versions[-1]})
        assert answer.status == 200, answer.content
        assert [one["status"] for one in answer.json()["workers"]] == [200, 200]

    with ThreadPoolExecutor() as pool:
        partial = aborted(pool, update, engine, workers, router, text, LONG, rid="partial")
    before, now = versions[-2:]
    assert call(f"{router}/radix_tree/stats").json()["weight_version"] == now
    # With something behind it: what the engine does not show of its end is left out where a text ends just there.
    more = text + partial["text"] + "\n"
    rest = generate(router, more, {"max_new_tokens": 20, "ignore_eos": True})
    chain = partial["prompt_token_ids"] + partial["output_ids"]
    assert rest["prompt_token_ids"][: len(chain)] == chain
    found = check(router, more, rest)
    assert {span["version"] for span in found["weight_versions"]} == {before, now}
    stale = retrieve(router, more, max_staleness=0)["stale_tokens"]
    spans = partial["meta_info"]["weight_versions"]
    assert stale == sum(span["end"] - span["start"] for span in spans if span["version"] != now)
    assert stale > 0


def test_a_pause_costs_nothing(router: str, engine: Engine, workers: list[EngineServer]) -> None:
    texts = [f"Pause {number}" for number in range(16)]
    params = {"max_new_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(16) as pool:
        replies = [in_background(pool, router, text, params) for text in texts[1:]]
        first, _ = caught(pool, engine, workers, router, texts[0], params, rid="paused")
        assert call(f"{router}/pause_generation", {"mode": "in_place"}).status == 200
        late = in_background(pool, router, "Sent while paused", params)
        time.sleep(1.0)  # the pause itself
        assert not late.done()
        assert call(f"{router}/continue_generation", {}).status == 200
        assert len(check(router, texts[0], first.result(), request_id="paused")["tokens"]) > 400
        for text, reply in zip(texts[1:], replies, strict=True):
            assert len(check(router, text, reply.result())["tokens"]) > 400
        late.result()


def test_an_update_that_was_refused_may_have_loaded_the_weights(
    router: str, engine: Engine, workers: list[EngineServer]
) -> None:
    """SGLang cannot flush its cache under a frozen request. Replies say what they were sampled from; again, and all agree."""
    update = {"model_path": str(engine.kit.model), "weight_version": "5000"}
    text, params = "Frozen", {"max_new_tokens": 300, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        running, frozen = caught(pool, engine, workers, router, text, params, rid="frozen")
        assert call(f"{router}/pause_generation", {"mode": "in_place"}).status == 200
        answer = call(f"{router}/update_weights_from_disk", update)
        assert call(f"{router}/continue_generation", {}).status == 200
        reply = running.result()
    assert (answer.status, {one["url"]: one["status"] for one in answer.json()["workers"]}[frozen.url]) == (207, 400)
    assert f"{frozen.url} (status 400: Weights were updated, but the cache was not flushed" in answer.json()["message"]
    assert call(f"{frozen.url}/model_info").json()["weight_version"] != "5000"
    assert check(router, text, reply)["weight_versions"][-1]["version"] == "5000"
    assert call(f"{router}/update_weights_from_disk", update).status == 200
    assert call(f"{frozen.url}/model_info").json()["weight_version"] == "5000"


@pytest.mark.parametrize("first", [1, 5])
def test_a_client_that_leaves_frees_its_worker_at_once(
    router: str, engine: Engine, workers: list[EngineServer], first: int
) -> None:
    """And what it had seen by then is remembered.

    A busy machine may sample all of a reply before the client leaves or the abort arrives: the client asks and leaves
    once more.
    """
    for attempt in range(5):
        text, seen = f"I leave after {first}, {attempt}", ""
        sampled = sum(engine.progress(worker)[1] for worker in workers)
        events = stream(f"{router}/generate", {"text": text, "stream": True, "sampling_params": LONG, **WANTED})
        ids: list[int] = []
        for _ in range(first):
            event = next(events)
            delta = len(event["output_ids"]) < event["meta_info"]["completion_tokens"]
            ids = ids + event["output_ids"] if delta else event["output_ids"]
            seen = seen + event["text"] if delta else event["text"]
        heard = aborts_heard(engine, workers)
        events.close()  # type: ignore[attr-defined]
        idle = sum(until_idle(engine, worker) for worker in workers)
        sampled = sum(engine.progress(worker)[1] for worker in workers) - sampled
        if sampled < LONG["max_new_tokens"] and idle < 5.0:
            break
    else:
        raise AssertionError("each time it went on after the client had left")
    until_heard(engine, workers, heard + 1)
    found = retrieve(router, text + seen)
    kept = found["tokens"][len(found["tokens"]) - found["response_length"] :][: len(ids)]
    assert kept == ids[: len(kept)]
    assert len(kept) > len(ids) - 4, "all but the bytes of a character that was not whole yet"


def test_clients_that_leave_before_the_first_token_free_their_workers(
    router: str, engine: Engine, workers: list[EngineServer]
) -> None:
    heard = aborts_heard(engine, workers)
    for number in range(4):
        with pytest.raises(TimeoutError):
            call(f"{router}/generate", {"text": f"Gone {number}", "sampling_params": LONG}, timeout=0.5)
    until_heard(engine, workers, heard + 4)
    assert sum(until_idle(engine, worker) for worker in workers) < 5.0


def test_in_a_small_storm_nothing_is_lost(router: str, engine: Engine, workers: list[EngineServer]) -> None:
    """Conversations of three turns, while everything is aborted, paused, updated, and left, here and at the workers."""
    before = outcomes(router)
    params = {"max_new_tokens": 60, "ignore_eos": True}
    whole: list[tuple[str, Json]] = []
    calm = threading.Event()

    def converse(number: int) -> int:
        text, sent = f"Storm {number}: ", 0
        for _ in range(3):
            reply = generate(router, text, params)
            sent += 1
            whole.append((text, reply))
            text += reply["text"] + f"\nTool: {number}\n"
        return sent

    def leave(number: int) -> int:
        body = {"text": f"Left {number}", "stream": True, "sampling_params": LONG, **WANTED}
        events = stream(f"{router}/generate", body)
        next(events)
        events.close()  # type: ignore[attr-defined]
        return 1

    def trouble() -> None:
        version = 1_000
        while not calm.is_set():
            version += 1
            for path, body, worker in (
                ("/abort_request", {"abort_all": True}, workers[0]),
                ("/update_weight_version", {"new_version": str(version), "abort_all_requests": False}, None),
                ("/pause_generation", {"mode": "in_place"}, None),
                ("/continue_generation", {}, workers[1]),
            ):
                assert call(router + path, body).status == 200
                calm.wait(0.2)  # the time in which something is sampled between two troubles
                if worker is not None:
                    engine.abort(worker)
                calm.wait(0.2)  # the time in which something is sampled between two troubles

    with ThreadPoolExecutor(32) as pool:
        troubled = pool.submit(trouble)
        try:
            talks = [pool.submit(converse, number) for number in range(16)]
            talks += [pool.submit(leave, number) for number in range(8)]
            sent = sum(talk.result() for talk in talks)
        finally:
            calm.set()
        troubled.result()
    for worker in workers:
        until_idle(engine, worker)
    assert outcomes(router) - before == sent, "one outcome for each generation"
    kinds = {reply["meta_info"]["finish_reason"]["type"] for _, reply in whole}
    assert "length" in kinds
    assert kinds <= {"abort", "length"}
    for text, reply in whole:
        if reply["output_ids"]:
            check(router, text, reply, request_id=reply["meta_info"]["id"])


def outcomes(router: str) -> int:
    lines = call(f"{router}/metrics").content.decode().splitlines()
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith("tito_radix_replies_total{"))


@pytest.mark.parametrize("number", [0, 1], ids=["cumulative", "deltas"])
def test_what_is_aborted_after_a_pause_retracted_it_is_kept(
    router_for: RouterFor, engine: Engine, workers: list[EngineServer], number: int
) -> None:
    """A stream of deltas then ends with all of it once more, and is not taken for a longer one."""
    url, name = router_for(number), uuid.uuid4().hex
    body = {"text": "Retract me", "sampling_params": LONG, "stream": True, "rid": name}
    with ThreadPoolExecutor() as pool:
        running = pool.submit(lambda: [event for event in stream(f"{url}/generate", body) if event is not None])
        busy(engine, [workers[number]])
        assert call(f"{url}/pause_generation", {"mode": "retract"}).status == 200
        assert call(f"{url}/abort_request", {"rid": name}).status == 200
        events = running.result(60)
    assert call(f"{url}/continue_generation", {}).status == 200
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    text = events[-1]["text"]
    if number == 1:
        text = said_once("".join(event["text"] for event in events[:-1]), text)
    found = retrieve(url, "Retract me" + text, request_id=name)
    assert found["exact"]
    assert found["response_length"] == events[-1]["meta_info"]["completion_tokens"]
