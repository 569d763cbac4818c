"""Routing, seen from outside: which worker answers, and why, over HTTP and in front of embedded engines."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.app import RouterApp, create_app
from router.config import (
    RADIX_TREE_MIDDLEWARE,
    RadixConfig,
    RouterConfig,
    ServerConfig,
    WorkersConfig,
)
from router.policies.cache_aware import CacheAwareParameters
from tests.support.asking import Asking
from tests.support.client import Answer, call
from tests.support.serving import serve
from tests.support.usual import usual
from tests.support.vocabularies import vocabulary
from worker.worker import EmbeddedWorker

SYSTEM = "You are a careful assistant who answers in one word. " * 30
WITH_IDS = (RADIX_TREE_MIDDLEWARE,)
BOTH = pytest.mark.parametrize("middlewares", [WITH_IDS, ()], ids=["ids", "text"])
ONE_OF_BOTH = pytest.mark.parametrize(
    "middlewares", [WITH_IDS, pytest.param((), marks=pytest.mark.slow)], ids=["ids", "text"]
)


@dataclass
class Routed:
    """A router in front of four workers."""

    app: RouterApp
    url: str

    def generate(self, text: str, **headers: str) -> Answer:
        body = {"text": text, "sampling_params": {"max_new_tokens": 8}}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = call(f"{self.url}/generate", body, headers=named)
        assert answer.status == 200, answer.content
        return answer

    def ask(self, asks: list[Asking], text: str, **headers: str) -> None:
        """Without waiting for the reply, but until it is counted."""
        count = len(asks)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        asks.append(Asking(self.url, {"text": text, "sampling_params": {"max_new_tokens": 8}}, headers=named))
        deadline = time.monotonic() + 20
        while sum(self.inflight()) <= count:
            assert time.monotonic() < deadline, "it never arrived"
            time.sleep(0.001)  # the pool stands in another thread, and tells nobody

    def inflight(self) -> list[int]:
        return [worker.inflight for worker in self.app.pool.list()]

    def decisions(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for line in call(f"{self.url}/metrics").content.decode().splitlines():
            if line.startswith("tito_router_decisions_total{"):
                label, value = line.rsplit(" ", 1)
                found[label.split('reason="')[1].split('"')[0]] += int(float(value))
        return found


Start = Callable[..., contextlib.AbstractContextManager[Routed]]


@pytest.fixture(scope="module")
def workers() -> Iterator[list[EmbeddedWorker]]:
    with contextlib.ExitStack() as entered:
        yield [entered.enter_context(EmbeddedWorker(vocabulary("qwen"), seed=number)) for number in range(4)]


@pytest.fixture
def start(workers: list[EmbeddedWorker]) -> Start:
    @contextlib.contextmanager
    def started(policy: str, middlewares: tuple[str, ...] = (), **options: Any) -> Iterator[Routed]:
        config = RouterConfig(
            workers=WorkersConfig(
                urls=tuple(worker.url for worker in workers), policy=policy, parameters=CacheAwareParameters(**options)
            ),
            radix=RadixConfig(tokenizer_path=str(vocabulary("qwen"))),
            middlewares=middlewares,
        )
        app = create_app(config)
        with serve(app) as url:
            yield Routed(app, url)

    return started


@BOTH
def test_the_next_turns_of_a_conversation_stay_on_their_worker(start: Start, middlewares: tuple[str, ...]) -> None:
    """Sixteen conversations under one system prompt, in turns; and none of them all on one worker."""
    with start("cache_aware", middlewares) as routed:
        texts = [SYSTEM + f"Conversation {number} is about {number * 7919}. " for number in range(16)]
        at: dict[int, str] = {}
        for turn in range(3):
            for number, text in enumerate(texts):
                answer = routed.generate(text)
                worker, reason = answer.headers["x-router-worker"], answer.headers["x-router-reason"]
                assert at.setdefault(number, worker) == worker
                assert turn == 0 or reason == "continued"
                texts[number] = text + answer.json()["text"] + f" And then, for the {turn}th time?"
        assert len(set(at.values())) == 4, Counter(at.values())
        assert routed.decisions()["continued"] in (32, 33), "the second question looks like one more of the first"


@BOTH
@pytest.mark.parametrize("listed", [False, True])
def test_a_conversation_under_another_adapter_is_a_new_one(
    start: Start, middlewares: tuple[str, ...], listed: bool
) -> None:
    """No worker has computed any of it with that adapter; in a batch, that of the first prompt."""
    with start("cache_aware", middlewares) as routed:

        def reason(*adapters: str | None) -> str:
            lora = {"lora_path": [*adapters]} if listed else {"lora_path": adapters[0]} if adapters[0] else {}
            body = {
                "text": [text] * len(adapters) if listed else text,
                "sampling_params": {"max_new_tokens": 4},
                **lora,
            }
            answer = call(f"{routed.url}/generate", body)
            assert answer.status == 200, answer.content
            return answer.headers["x-router-reason"]

        text = SYSTEM + "A conversation that goes on. " * 8
        for adapters in ((None, "x"), ("x", None), ("y", "x")):
            assert reason(*adapters) == "least_loaded"
        text += "And then?"
        assert {reason(*adapters) for adapters in ((None, "x"), ("x", None), ("y", "x"))} == {"continued"}
        assert reason("z", "x") == "least_loaded"


@BOTH
def test_a_burst_under_one_system_prompt_is_spread(
    start: Start, workers: list[EmbeddedWorker], middlewares: tuple[str, ...], asks: list[Asking]
) -> None:
    with start("cache_aware", middlewares) as routed:
        for worker in workers:
            worker.hold()
        try:
            for number in range(40):
                routed.ask(asks, SYSTEM + f"{number * 7919} is my number")
            assert max(routed.inflight()) <= 1.25 * 10
        finally:
            for worker in workers:
                worker.release()
        assert all(asking.answer().status == 200 for asking in asks)


def test_a_conversation_whose_worker_is_removed_goes_on_elsewhere_and_stays_there(start: Start) -> None:
    with start("cache_aware") as routed:
        text = SYSTEM
        first = routed.generate(text).headers["x-router-worker"]
        assert call(f"{routed.url}/remove_worker?url={first}", {}).status == 200
        second = routed.generate(text + "a").headers
        assert second["x-router-worker"] != first
        assert second["x-router-reason"] == "least_loaded"
        third = routed.generate(text + "a b").headers
        assert (third["x-router-worker"], third["x-router-reason"]) == (second["x-router-worker"], "continued")


GENERATION = " Answer:"


@ONE_OF_BOTH
def test_later_turns_stay_though_history_drops_the_end_of_the_prompt(
    start: Start, middlewares: tuple[str, ...]
) -> None:
    """And strips the reply, under a system prompt of which all that is said is a small part."""
    system = " ".join(f"Rule {number}: be number {number * 7919}." for number in range(500))
    assert len(system) > 14_000
    with start("cache_aware", middlewares) as routed:
        texts = [f"{system} Question {number}: what is {number * 7919}?" for number in range(16)]
        at: dict[int, str] = {}
        for _ in range(3):
            for number, text in enumerate(texts):
                answer = routed.generate(text + GENERATION)
                worker = answer.headers["x-router-worker"]
                assert at.setdefault(number, worker) == worker
                texts[number] = f"{text} {answer.json()['text'].strip()} And what is {number}?"
        assert max(Counter(at.values()).values()) <= 5, Counter(at.values())


@ONE_OF_BOTH
@pytest.mark.parametrize("way", usual(["plain", "stream", "samples"], "samples"))
def test_samples_of_one_prompt_are_told_apart_by_their_replies(
    start: Start, middlewares: tuple[str, ...], way: str, workers: list[EmbeddedWorker]
) -> None:
    """Though each worker has some of the group, so that the first prompt tells nothing."""
    prompt = SYSTEM + "How many are there? Say it in some words."
    with start("cache_aware", middlewares) as routed:
        at: list[tuple[str, str]] = []
        for number in range(8):
            others = [worker.url for worker in workers if worker is not workers[number % 4]]
            body: dict[str, Any] = {
                "text": prompt,
                "sampling_params": {"max_new_tokens": 24},
                "stream": way == "stream",
            }
            body["sampling_params"]["n"] = 2 if way == "samples" else 1
            for url in others:
                routed.app.pool.get(url).targets[0].inflight += 100  # so that it is the turn of one of them
            answer = call(f"{routed.url}/generate", body)
            for url in others:
                routed.app.pool.get(url).targets[0].inflight -= 100
            assert answer.status == 200, answer.content
            at += [(text, answer.headers["x-router-worker"]) for text in texts_of(answer, way)]
        assert {worker for _, worker in at} == {worker.url for worker in workers}
        told = [routed.generate(prompt + text + " Are you sure?").headers for text, _ in at]
        assert [headers["x-router-worker"] for headers in told] == [worker for _, worker in at]


def texts_of(answer: Answer, way: str) -> list[str]:
    """What was said in a reply of one of three forms."""
    if way == "samples":
        return [one["text"] for one in answer.json()]
    if way == "plain":
        return [answer.json()["text"]]
    events = [line for line in answer.content.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(events[-1].removeprefix("data: "))["text"]]


@BOTH
def test_the_reason_does_not_tell_a_tenant_what_another_one_has_sent(
    workers: list[EmbeddedWorker], middlewares: tuple[str, ...]
) -> None:
    config = RouterConfig(
        server=ServerConfig(api_keys=("one:key-of-one-tenant-1", "two:key-of-two-tenant-2")),
        workers=WorkersConfig(urls=tuple(worker.url for worker in workers), policy="cache_aware"),
        radix=RadixConfig(tokenizer_path=str(vocabulary("qwen"))),
        middlewares=middlewares,
    )
    app = create_app(config)
    with serve(app) as url:
        routed = Routed(app, url)
        reasons = {
            key: [routed.generate(SYSTEM, authorization=f"Bearer {key}").headers["x-router-reason"] for _ in range(2)]
            for key in ("key-of-one-tenant-1", "key-of-two-tenant-2")
        }
    assert set(map(tuple, reasons.values())) == {("least_loaded", "cached")}


def test_a_router_with_keys_sends_nothing_to_a_worker_that_asks_for_one(workers: list[EmbeddedWorker]) -> None:
    """It passes none on, so every request would fail there: at once, and the least loaded worker would get all of them."""
    keys, headers = ("key-of-one-tenant-1",), {"authorization": "Bearer key-of-one-tenant-1"}

    def asking(*urls: str) -> RouterApp:
        return create_app(
            RouterConfig(
                server=ServerConfig(api_keys=keys),
                workers=WorkersConfig(urls=urls, policy="least_inflight"),
                radix=RadixConfig(tokenizer_path=str(vocabulary("qwen"))),
            )
        )

    app = asking(workers[0].url)
    with serve(app) as locked, serve(asking(locked, workers[0].url)) as url:
        told = {one["url"]: one for one in call(f"{url}/workers", headers=headers).json()["workers"]}
        assert (told[locked]["state"], told[workers[0].url]["state"]) == ("starting", "healthy")
        assert "asks for a key" in told[locked]["complaint"]
        body = {"text": SYSTEM, "sampling_params": {"max_new_tokens": 1}}
        answers = [call(f"{url}/generate", body, headers=headers) for _ in range(4)]
        assert [one.status for one in answers] == [200] * 4


def test_a_key_stays_with_its_first_worker_whatever_the_load(
    start: Start, workers: list[EmbeddedWorker], asks: list[Asking]
) -> None:
    """`X-SMG-Routing-Key`, then `X-Session-Id`; and elsewhere once that worker is gone."""
    with start("manual") as routed:
        for worker in workers:
            worker.hold()
        try:
            for _ in range(12):
                routed.ask(asks, "A:", x_smg_routing_key="k", x_session_id="s")
            assert sorted(routed.inflight()) == [0, 0, 0, 12]
        finally:
            for worker in workers:
                worker.release()
        told = [asking.answer().headers for asking in asks]
        assert [headers["x-router-reason"] for headers in told] == ["new_key"] + ["key"] * 11
        first = told[0]["x-router-worker"]
        assert routed.generate("B:", x_session_id="k").headers["x-router-worker"] == first
        assert routed.generate("B:", x_session_id="s").headers["x-router-reason"] == "new_key"
        assert call(f"{routed.url}/remove_worker?url={first}", {}).status == 200
        moved = routed.generate("C:", x_smg_routing_key="k").headers
        assert (moved["x-router-reason"], moved["x-router-worker"] == first) == ("moved", False)
        again = routed.generate("D:", x_smg_routing_key="k").headers
        assert (again["x-router-reason"], again["x-router-worker"]) == ("key", moved["x-router-worker"])


@ONE_OF_BOTH
def test_what_is_remembered_survives_a_restart(start: Start, middlewares: tuple[str, ...], tmp_path: Path) -> None:
    snapshot, texts = tmp_path / "policy", [f"{number} bottles on the wall. " * 20 for number in range(6)]
    with start("cache_aware", middlewares, snapshot=snapshot) as routed:
        before = [routed.generate(text).headers["x-router-worker"] for text in texts]
    assert len(set(before)) == 4
    with start("cache_aware", middlewares, snapshot=snapshot) as routed:
        after = [routed.generate(text + "How many?").headers for text in texts]
    assert [headers["x-router-worker"] for headers in after] == before
    assert {headers["x-router-reason"] for headers in after} == {"continued"}


def test_a_damaged_snapshot_is_told_of_and_left_aside(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = tmp_path / "policy"
    snapshot.write_bytes(b"half of something")
    with start("cache_aware", snapshot=snapshot) as routed:
        assert routed.generate(SYSTEM).headers["x-router-reason"] == "least_loaded"
    assert str(snapshot) in caplog.text
    assert snapshot.read_bytes() != b"half of something", "the end of the run has written a good one"


def test_a_session_and_a_key_stay_on_their_worker_and_the_key_comes_first(start: Start) -> None:
    with start("consistent_hashing") as routed:
        at = {key: routed.generate("A:", x_session_id=key).headers["x-router-worker"] for key in map(str, range(16))}
        assert len(set(at.values())) > 1
        for key, worker in at.items():
            found = routed.generate("B:", x_session_id="another", x_smg_routing_key=key).headers
            assert (found["x-router-worker"], found["x-router-reason"]) == (worker, "key")
        assert routed.generate("C:").headers["x-router-reason"] == "no_key"


def test_the_client_may_name_its_worker(start: Start, workers: list[EmbeddedWorker]) -> None:
    with start("consistent_hashing") as routed:
        for worker in workers:
            found = routed.generate("A:", x_smg_target_worker=worker.url, x_smg_routing_key="k").headers
            assert (found["x-router-worker"], found["x-router-reason"]) == (worker.url, "target")
        found = routed.generate("A:", x_smg_target_worker="http://nobody:1", x_smg_routing_key="k").headers
        assert found["x-router-reason"] == "key"


def test_a_key_that_asks_for_too_much_spills(start: Start, workers: list[EmbeddedWorker], asks: list[Asking]) -> None:
    """At 1.25 x the mean of what is in flight, the new request included."""
    with start("consistent_hashing") as routed:
        for worker in workers:
            worker.hold()
        try:
            for _ in range(24):
                routed.ask(asks, "A:", x_smg_routing_key="k")
            assert max(routed.inflight()) == 8  # the last one found 7, which is less than 1.25 x 24 / 4
        finally:
            for worker in workers:
                worker.release()
        told = [asking.answer().headers for asking in asks]
    own = told[0]["x-router-worker"]
    assert {headers["x-router-reason"] for headers in told if headers["x-router-worker"] == own} == {"key"}
    assert {headers["x-router-reason"] for headers in told if headers["x-router-worker"] != own} == {"spilled"}
