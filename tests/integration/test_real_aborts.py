"""Aborts, pauses, weight updates and clients that leave, on real SGLang workers.

What is long here has `ignore_eos`: nothing ends it but what a test does to it.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.conftest import RouterFor
from tests.support.asking import said_once
from tests.support.client import call, stream
from tests.support.sglang_server import SGLangServer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

Json = dict[str, Any]
LONG = {"max_new_tokens": 3_000, "ignore_eos": True}
WANTED = {"return_logprob": True, "return_prompt_token_ids": True}


@pytest.fixture(scope="module")
def router(router_for: RouterFor) -> str:
    return router_for(0, 1, flags=("--abort-retry-wait", "0.05", "--abort-retries", "20"))


@pytest.fixture(autouse=True)
def idle_before_and_after(sglang_workers: list[SGLangServer], router: str) -> Iterator[None]:
    yield
    for worker in sglang_workers:
        until_idle(worker)
    assert [one["load"] for one in call(f"{router}/workers").json()["workers"]] == [0, 0]


def until_idle(worker: SGLangServer, seconds: float = 30.0) -> float:
    """How long it takes until nothing runs there: the cache cannot be flushed before."""
    begun = time.monotonic()
    while call(f"{worker.url}/flush_cache", {}).status != 200:
        assert time.monotonic() - begun < seconds, "it never became idle"
        time.sleep(0.05)  # a poll of another process: there is nothing to wait on
    return time.monotonic() - begun


def aborts_heard(workers: list[SGLangServer]) -> int:
    """How often workers were told to abort, by their own access logs."""
    return sum(worker.log_path.read_text(errors="replace").count('"POST /abort_request') for worker in workers)


def until_heard(workers: list[SGLangServer], count: int) -> None:
    deadline = time.monotonic() + 10
    while aborts_heard(workers) < count:
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


def busy(workers: list[SGLangServer]) -> SGLangServer:
    """The worker that samples something: waits until one does.

    To run is not enough: what is aborted between its arrival and its first token has no token to be kept.
    """
    deadline = time.monotonic() + 20
    before = [(0, 0)] * len(workers)
    while time.monotonic() < deadline:
        for number, worker in enumerate(workers):
            load = call(f"{worker.url}/v1/loads?include=core").json()["loads"][0]
            running, tokens = load["num_running_reqs"], load["num_used_tokens"]
            if running and running == before[number][0] and tokens > before[number][1]:
                return worker  # the same ones as before, and longer
            before[number] = running, tokens
        time.sleep(0.01)  # a poll of another process: there is nothing to wait on
    raise AssertionError("nothing is sampled")


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


def test_an_abort_that_was_asked_for_is_returned(router: str, sglang_workers: list[SGLangServer]) -> None:
    with ThreadPoolExecutor() as pool:
        reply = in_background(pool, router, "Abort me", LONG, rid="abort-me")
        busy(sglang_workers)
        answer = call(f"{router}/abort_request", {"rid": "abort-me"})
        assert answer.status == 200
        assert len(answer.json()["workers"]) == 1
        partial = reply.result()
    assert partial["meta_info"]["finish_reason"]["type"] == "abort"
    assert partial["meta_info"]["id"] == "abort-me"
    assert 0 < len(partial["output_ids"]) < 3_000
    check(router, "Abort me", partial, request_id="abort-me")


def test_an_abort_that_nobody_asked_for_here_is_not_seen(router: str, sglang_workers: list[SGLangServer]) -> None:
    """Somebody else ended it, at the worker itself: it is sent again, and the client's id goes on to name it."""
    params = {"max_new_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        reply = in_background(pool, router, "Again", params, rid="once-more")
        worker = busy(sglang_workers)
        assert call(f"{worker.url}/abort_request", {"abort_all": True}).status == 200
        whole = reply.result()
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 400}
    assert whole["meta_info"]["id"] == "once-more"
    assert 'tito_router_abort_retries_total{outcome="retried"}' in call(f"{router}/metrics").content.decode()
    check(router, "Again", whole, request_id="once-more")


def test_of_a_batch_only_what_was_aborted_is_sent_again(router: str, sglang_workers: list[SGLangServer]) -> None:
    texts = [f"Item {number}" for number in range(4)]
    rids = [f"batch-{number}" for number in "abcd"]
    params = {"max_new_tokens": 600, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        replies = in_background(pool, router, texts, params, rid=rids)
        worker = busy(sglang_workers)
        assert call(f"{worker.url}/abort_request", {"rid": "batch-c"}).status == 200
        found = replies.result()
    assert [reply["meta_info"]["id"] for reply in found] == rids
    assert [len(reply["output_ids"]) for reply in found] == [600] * 4
    for text, rid, reply in zip(texts, rids, found, strict=True):
        check(router, text, reply, request_id=rid)


def test_a_partial_rollout_goes_on_under_new_weights(router: str, sglang_workers: list[SGLangServer]) -> None:
    """The update aborts, as it does by default; the text so far continues from exactly the ids that were sampled."""
    before = call(f"{sglang_workers[0].url}/model_info").json()["weight_version"]
    text = "A story:"
    with ThreadPoolExecutor() as pool:
        reply = in_background(pool, router, text, LONG)
        busy(sglang_workers)
        answer = call(f"{router}/update_weight_version", {"new_version": "900"})
        assert answer.status == 200, answer.content
        assert [one["status"] for one in answer.json()["workers"]] == [200, 200]
        partial = reply.result()
    assert call(f"{router}/radix_tree/stats").json()["weight_version"] == "900"
    assert partial["meta_info"]["finish_reason"]["type"] == "abort"
    rest = generate(router, text + partial["text"], {"max_new_tokens": 20, "ignore_eos": True})
    chain = partial["prompt_token_ids"] + partial["output_ids"]
    if not partial["text"].endswith("\ufffd"):
        assert rest["prompt_token_ids"] == chain
    found = check(router, text + partial["text"], rest)
    assert {span["version"] for span in found["weight_versions"]} == {before, "900"}
    stale = retrieve(router, text + partial["text"], max_staleness=0)["stale_tokens"]
    spans = partial["meta_info"]["weight_versions"]
    assert stale == sum(span["end"] - span["start"] for span in spans if span["version"] != "900")
    assert stale > 0


def test_a_pause_costs_nothing(router: str, sglang_workers: list[SGLangServer]) -> None:
    texts = [f"Pause {number}" for number in range(16)]
    params = {"max_new_tokens": 100, "ignore_eos": True}
    with ThreadPoolExecutor(16) as pool:
        replies = [in_background(pool, router, text, params) for text in texts]
        busy(sglang_workers)
        assert call(f"{router}/pause_generation", {"mode": "in_place"}).status == 200
        late = in_background(pool, router, "Sent while paused", params)
        time.sleep(1.0)  # the pause itself
        assert not late.done()
        assert call(f"{router}/continue_generation", {}).status == 200
        for text, reply in zip(texts, replies, strict=True):
            assert len(check(router, text, reply.result())["tokens"]) > 100
        late.result()


@pytest.mark.parametrize("first", [1, 5])
def test_a_client_that_leaves_frees_its_worker_at_once(
    router: str, sglang_workers: list[SGLangServer], first: int
) -> None:
    """And what it had seen by then is remembered."""
    text, seen = f"I leave after {first}", ""
    events = stream(f"{router}/generate", {"text": text, "stream": True, "sampling_params": LONG, **WANTED})
    ids: list[int] = []
    for _ in range(first):
        event = next(events)
        delta = len(event["output_ids"]) < event["meta_info"]["completion_tokens"]
        ids = ids + event["output_ids"] if delta else event["output_ids"]
        seen = seen + event["text"] if delta else event["text"]
    worker = busy(sglang_workers)
    heard = aborts_heard(sglang_workers)
    events.close()  # type: ignore[attr-defined]
    until_heard(sglang_workers, heard + 1)
    assert until_idle(worker) < 5.0, "it went on to the end of 3,000 tokens"
    found = retrieve(router, text + seen)
    assert found["tokens"][: len(found["tokens"]) - found["response_length"] + len(ids)][-len(ids) :] == ids


def test_clients_that_leave_before_the_first_token_free_their_workers(
    router: str, sglang_workers: list[SGLangServer]
) -> None:
    heard = aborts_heard(sglang_workers)
    for number in range(4):
        with pytest.raises(TimeoutError):
            call(f"{router}/generate", {"text": f"Gone {number}", "sampling_params": LONG}, timeout=0.5)
    until_heard(sglang_workers, heard + 4)
    assert sum(until_idle(worker) for worker in sglang_workers) < 5.0


def test_in_a_small_storm_nothing_is_lost(router: str, sglang_workers: list[SGLangServer]) -> None:
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
            for url, path, body in (
                (router, "/abort_request", {"abort_all": True}),
                (router, "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}),
                (sglang_workers[0].url, "/abort_request", {"abort_all": True}),
                (router, "/pause_generation", {"mode": "in_place"}),
                (router, "/continue_generation", {}),
                (sglang_workers[1].url, "/abort_request", {"abort_all": True}),
            ):
                assert call(url + path, body).status == 200
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
    for worker in sglang_workers:
        until_idle(worker)
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
    router_for: RouterFor, sglang_workers: list[SGLangServer], number: int
) -> None:
    """A stream of deltas then ends with all of it once more, and is not taken for a longer one."""
    url, name = router_for(number), uuid.uuid4().hex
    body = {"text": "Retract me", "sampling_params": LONG, "stream": True, "rid": name}
    with ThreadPoolExecutor() as pool:
        running = pool.submit(lambda: [event for event in stream(f"{url}/generate", body) if event is not None])
        busy([sglang_workers[number]])
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
