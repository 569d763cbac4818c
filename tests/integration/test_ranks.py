"""Workers with data-parallel ranks, seen from outside: which rank answers, and what is told about it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from router.app import create_app
from router.config import (
    RADIX_TREE_MIDDLEWARE,
    SESSIONS_MIDDLEWARE,
    HealthConfig,
    QueueConfig,
    RadixConfig,
    RetryConfig,
    RouterConfig,
    WorkersConfig,
)
from tests.support.asking import Asking, until
from tests.support.client import Answer, call
from tests.support.serving import serve
from worker.options import Interface, Role
from worker.worker import EmbeddedWorker

BOTH = pytest.mark.parametrize("interface", ["sglang", "vllm"])
RANKS = 4


@contextlib.contextmanager
def ranked(
    interface: Interface = "sglang",
    sizes: tuple[int, ...] = (RANKS, RANKS),
    middlewares: tuple[str, ...] = (),
    **options: Any,
) -> Iterator[tuple[str, list[EmbeddedWorker]]]:
    """A router in front of workers with so many ranks, and the workers."""
    with contextlib.ExitStack() as entered:
        workers = [
            entered.enter_context(EmbeddedWorker(interface=interface, dp_size=size, seed=number))
            for number, size in enumerate(sizes)
        ]
        config = RouterConfig(
            workers=WorkersConfig(urls=tuple(worker.url for worker in workers), **options),
            radix=RadixConfig(tokenizer_path=workers[0].tokenizer_path),
            middlewares=middlewares,
        )
        yield entered.enter_context(serve(create_app(config))), workers


def generate(url: str, text: Any = "Hello.", *, headers: dict[str, str] | None = None, **more: Any) -> Answer:
    return call(f"{url}/generate", {"text": text, "sampling_params": {"max_new_tokens": 4}, **more}, headers=headers)


def described(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call(f"{url}/workers").json()["workers"]
    return found


@BOTH
def test_each_rank_of_each_worker_gets_its_share(interface: Interface) -> None:
    """One that has a single rank is one place, and is told no rank."""
    with ranked(interface, (RANKS, 1, 2)) as (url, workers):
        assert [len(worker["targets"]) for worker in described(url)] == [RANKS, 1, 2]
        answers = [generate(url) for _ in range(14)]
        assert [answer.status for answer in answers] == [200] * 14
        for worker, ranks in zip(workers, (RANKS, 1, 2), strict=True):
            assert Counter(record.rank for record in worker.log) == dict.fromkeys(range(ranks), 2)
        assert all("routed_dp_rank" not in record.body for record in workers[1].log)
        assert all("x-data-parallel-rank" not in record.headers for record in workers[1].log)
        assert [worker["rank_mismatches"] for worker in described(url)] == [0, 0, 0]


@BOTH
@pytest.mark.parametrize("field", ["routed_dp_rank", "data_parallel_rank", "x-data-parallel-rank"])
def test_a_client_that_names_a_rank_gets_it(interface: Interface, field: str) -> None:
    """At the workers that have it. A batch, and samples, are at one rank; and nothing else of the request changes."""
    with ranked(interface, (1, RANKS)) as (url, (small, large)):

        def ask(rank: Any, text: Any = "Hello.", **more: Any) -> Answer:
            if field.startswith("x-"):
                return generate(url, text, headers={field: str(rank)}, **more)
            return generate(url, text, **{field: rank}, **more)

        for _ in range(3):
            assert ask(3).status == 200
        assert ask(2, ["Hello.", "Bye.", "Again."]).status == 200
        assert ask(1, sampling_params={"max_new_tokens": 4, "n": 3}).status == 200
        assert ask(3, stream=True).status == 200
        assert [record.rank for record in large.log] == [3] * 3 + [2] * 3 + [1] * 3 + [3]
        told = [record.headers.get("x-data-parallel-rank") for record in large.log]
        assert set(told) == ({None} if interface == "sglang" else {"1", "2", "3"}), "an engine's own way, and no other"
        assert not small.log
        for rank in (0, 0):
            assert ask(rank).status == 200
        assert len(small.log) == 1, "both have a rank 0"


@BOTH
def test_a_rank_that_no_worker_has_is_a_bad_request(interface: Interface) -> None:
    with ranked(interface, (1, 2)) as (url, workers):
        answer = generate(url, routed_dp_rank=2)
        assert answer.status == 400
        assert "no worker has the data-parallel rank 2: the ranks are 0 to 1" in answer.content.decode()
        for wrong in (-1, "1", 1.5, [0, 1], True):
            assert generate(url, routed_dp_rank=wrong).status == 400, wrong
        for header in ("-1", "one", "", "1.0", "9" * 40):
            assert generate(url, headers={"x-data-parallel-rank": header}).status == 400, header
        assert generate(url, routed_dp_rank=None).status == 200
        assert sum(len(worker.log) for worker in workers) == 1


@BOTH
def test_turns_find_their_cache(interface: Interface) -> None:
    """Every rank has a cache of its own; the first turns are spread over all of them."""
    middlewares = (RADIX_TREE_MIDDLEWARE,)
    with ranked(interface, middlewares=middlewares, policy="cache_aware") as (url, workers):
        texts = [f"Conversation {number * 7919}: " + "You are careful. " * 40 for number in range(16)]
        for _ in range(4):
            for number, text in enumerate(texts):
                texts[number] = text + generate(url, text).json()["text"] + f" And {number}? "
        places: dict[str, set[tuple[str, int]]] = {}
        for worker in workers:
            for record in worker.log:
                said = worker.vocabulary.decode(record.input_ids, skip_special_tokens=False)
                number = said.partition("Conversation ")[2].partition(":")[0]
                places.setdefault(number, set()).add((worker.url, record.rank))
        assert len(places) == 16
        assert all(len(found) == 1 for found in places.values()), places
        assert len(set.union(*places.values())) == 2 * RANKS


def test_a_session_and_a_chat_can_name_a_rank() -> None:
    with ranked(middlewares=(SESSIONS_MIDDLEWARE, RADIX_TREE_MIDDLEWARE)) as (url, workers):
        body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4, "model": "any", "routed_dp_rank": 3}
        assert call(f"{url}/v1/chat/completions", body).status == 200
        session = call(f"{url}/sessions", {}).json()["session_id"]
        assert call(f"{url}/sessions/{session}/v1/chat/completions", body).status == 200
        body = {"prompt": "Hi.", "max_tokens": 4, "model": "any", "routed_dp_rank": 3}
        assert call(f"{url}/v1/completions", body).status == 200
        body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4, "model": "any"}
        assert call(f"{url}/v1/chat/completions", body, headers={"x-data-parallel-rank": "3"}).status == 200
        assert [record.rank for worker in workers for record in worker.log] == [3] * 4


def test_a_reply_of_another_rank_is_counted_and_told() -> None:
    """An engine that puts requests elsewhere: the loads are wrong then."""
    with ranked(sizes=(2,)) as (url, (worker,)):
        worker.script(extra_meta={"dp_rank": 1}, times=2)
        assert generate(url, routed_dp_rank=0).status == 200
        assert generate(url, routed_dp_rank=0, stream=True).status == 200
        assert generate(url, 'A text with "dp_rank": 1 in it.', routed_dp_rank=0).status == 200
        worker.script(extra_meta={"dp_rank": 0}, times=2)
        assert generate(url, ["One.", "Two."], routed_dp_rank=1).status == 200
        (told,) = described(url)
        assert told["rank_mismatches"] == 4
        metrics = call(f"{url}/metrics").content.decode()
        assert f'tito_router_rank_mismatch_total{{worker="{worker.url}"}} 4.0' in metrics


def test_loads_and_limits_are_those_of_each_rank() -> None:
    with ranked(sizes=(2,), queue=QueueConfig(max_inflight_per_worker=1)) as (url, (worker,)):
        worker.hold()
        asks = [Asking(url, {"text": "Hi.", "sampling_params": {"max_new_tokens": 2}}) for _ in range(3)]
        worker.wait_for_arrivals(2)
        (told,) = described(url)
        assert told["targets"] == [{"rank": 0, "load": 1}, {"rank": 1, "load": 1}]
        assert told["load"] == 2
        metrics = call(f"{url}/metrics").content.decode()
        assert f'tito_router_rank_inflight{{rank="1",worker="{worker.url}"}} 1.0' in metrics
        assert sorted(
            (load["dp_rank"], load["num_total_reqs"]) for load in call(f"{worker.url}/v1/loads").json()["loads"]
        ) == [
            (0, 1),
            (1, 1),
        ]
        worker.release()
        assert [ask.answer().status for ask in asks] == [200] * 3
        assert described(url)[0]["targets"] == [{"rank": 0, "load": 0}, {"rank": 1, "load": 0}]


@BOTH
def test_the_flag_makes_a_worker_one_place(interface: Interface) -> None:
    """A client's rank passes then, as any field does."""
    with ranked(interface, (2,), dp_ranks="off") as (url, (worker,)):
        assert described(url)[0]["targets"] == [{"rank": 0, "load": 0}]
        assert generate(url).status == 200
        assert "routed_dp_rank" not in worker.log[0].body
        assert "x-data-parallel-rank" not in worker.log[0].headers
        if interface == "sglang":
            assert generate(url, routed_dp_rank=1).json()["meta_info"]["dp_rank"] == 1
            assert generate(url, routed_dp_rank=2).status == 400


def test_a_worker_that_comes_back_with_other_ranks_has_these() -> None:
    with contextlib.ExitStack() as of_router, contextlib.ExitStack() as of_worker:
        first = of_worker.enter_context(EmbeddedWorker(dp_size=4))
        workers = WorkersConfig(urls=(first.url,), health=HealthConfig(interval=0.1))
        url = of_router.enter_context(serve(create_app(RouterConfig(workers=workers, middlewares=()))))
        assert len(described(url)[0]["targets"]) == 4
        of_worker.close()
        until(lambda: described(url)[0]["complaint"] is not None)
        second = of_worker.enter_context(EmbeddedWorker(dp_size=2, port=first.port))
        until(lambda: len(described(url)[0]["targets"]) == 2)
        assert generate(url, routed_dp_rank=1).status == 200
        assert generate(url, routed_dp_rank=3).status == 400
        assert [record.rank for record in second.log] == [1]


@pytest.mark.parametrize(("interface", "role"), [("sglang", "null"), ("vllm", "null"), ("sglang", "prefill")])
def test_an_added_worker_has_its_ranks_at_once(interface: Interface, role: Role) -> None:
    """Also one that was removed. No probe is due in this test."""
    with EmbeddedWorker(interface=interface, dp_size=2, disaggregation_mode=role) as worker:
        config = RouterConfig(workers=WorkersConfig(health=HealthConfig(interval=60)), middlewares=())
        with serve(create_app(config)) as url:
            for _ in range(2):
                assert call(f"{url}/add_worker?url={worker.url}", {}).status == 200
                assert [target["rank"] for target in described(url)[0]["targets"]] == [0, 1]
                if role == "null":
                    assert generate(url, routed_dp_rank=1).status == 200
                    assert worker.log[-1].rank == 1
                assert call(f"{url}/remove_worker?url={worker.url}", {}).status == 200
                assert described(url) == []


@BOTH
@pytest.mark.parametrize("sizes", [(3,), (3, 3)])
def test_a_rank_that_hangs_costs_its_requests_a_wait_and_nothing_else(
    interface: Interface, sizes: tuple[int, ...]
) -> None:
    """They are answered once, by other workers or, without any, by other ranks; and every lease is given back."""
    with ranked(interface, sizes, request_timeout=0.5) as (url, workers):
        workers[0].hold(rank=1)
        texts = [f"Question {number}?" for number in range(6 * sum(sizes))]
        asks = [Asking(url, {"text": text, "sampling_params": {"max_new_tokens": 3}}) for text in texts]
        answers = [ask.answer() for ask in asks]
        assert [answer.status for answer in answers] == [200] * len(texts)
        assert any(record.rank == 1 for record in workers[0].log), "some were there"
        workers[0].release()
        for worker in workers:
            worker.wait_until_idle()
        records = [record for worker in workers for record in worker.log]
        served = Counter(tuple(record.input_ids) for record in records if record.finish_reason["type"] != "abort")
        assert set(served.values()) == {1}, "none twice"
        assert len(served) == len(texts), "none lost"
        until(lambda: not any(target["load"] for worker in described(url) for target in worker["targets"]))
        assert [worker["state"] for worker in described(url)] == ["healthy"] * len(sizes)


@pytest.mark.parametrize("middlewares", [(), (RADIX_TREE_MIDDLEWARE,)])
def test_a_retry_keeps_the_rank_of_its_client(middlewares: tuple[str, ...]) -> None:
    """Also an attempt after an abort, and one at the same worker, which is the only one with that rank."""
    with ranked(sizes=(4, 2), middlewares=middlewares, retry=RetryConfig(first_wait=0.01)) as (url, (large, small)):
        large.fault("http_503", times=2)
        assert generate(url, routed_dp_rank=3).status == 200
        assert [record.rank for record in large.log] == [3] * 3
        assert not small.log
        small.fault("dies")
        large.fault("dies")
        assert generate(url, routed_dp_rank=1).status == 502
        assert [record.rank for record in (*small.log, *large.log[3:])] == [1, 1]
