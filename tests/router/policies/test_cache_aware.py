"""Where cache_aware sends what, and why."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import pytest

from benchmarks.routing_skew import PlainCacheAware, Simulation
from router.config import CacheAwareConfig
from router.policies import cache_aware
from router.policies.base import RouteQuery
from router.policies.cache_aware import CacheAware
from router.policies.kv_index import KvIndex
from router.policies.prefix_snapshot import SnapshotError
from router.sglang.kv_events import AllBlocksCleared, BlockStored, KvEvent
from router.workers.worker import Worker

SYSTEM = "You are a careful assistant. " * 40


def fleet(*inflight: int) -> tuple[Worker, ...]:
    made = []
    for number, count in enumerate(inflight):
        made.append(Worker(f"http://w{number}:1"))
        made[-1].inflight = count
    return tuple(made)


def query(text: str, kind: str = "text") -> RouteQuery:
    if kind == "text":
        return RouteQuery(text=text)
    ids = [ord(character) for character in text]
    return RouteQuery(text="of no use", token_ids=ids if kind == "list" else memoryview(array("i", ids)))


KINDS = pytest.mark.parametrize("kind", ["text", "list", "view"])


@KINDS
def test_the_next_turn_stays_where_its_reply_was_made(kind: str) -> None:
    """However little of it the tree has seen: the reply is longer than all the rest, and the tree has not seen it."""
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    prompt = "Please write a long story.      "
    worker, reason = policy.select(workers, query(prompt, kind))
    assert reason == "least_loaded"
    worker.inflight = 3  # others of its conversations
    for _ in range(5):
        prompt += "and then " * 50 + "What comes next?"
        assert policy.select(workers, query(prompt, kind)) == (worker, "continued")


@KINDS
def test_a_prompt_of_which_enough_is_cached_goes_there(kind: str) -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    worker = policy.select(workers, query("a" * 400 + "b" * 200, kind)).worker
    worker.inflight = 1
    assert policy.select(workers, query("a" * 400 + "c" * 900, kind)) == (worker, "cached")
    assert policy.select(workers, query("a" * 400 + "d" * 1000, kind)).reason == "least_loaded"


@pytest.mark.parametrize(("matched", "reason"), [(50, "least_loaded"), (51, "cached")])
def test_the_threshold_is_a_parameter(matched: int, reason: str) -> None:
    policy, workers = CacheAware(CacheAwareConfig(threshold=0.5)), fleet(0, 0)
    policy.select(workers, query("a" * 60 + "b" * 40))
    assert policy.select(workers, query("a" * matched + "c" * (100 - matched))).reason == reason


def test_what_more_than_half_of_the_fleet_has_is_everybodys() -> None:
    """Though one of them has a few characters more of it, by chance."""
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    for worker in workers[:3]:
        policy.select((worker,), query(SYSTEM + f"{worker.id} asks something"))
    for worker in workers[:3]:
        worker.inflight = 1
    chance = workers[0].id[:-2]
    assert policy.select(workers, query(SYSTEM + f"{chance} something else")) == (workers[3], "least_loaded")


def test_of_two_who_have_it_the_less_loaded() -> None:
    policy, workers = CacheAware(), fleet(2, 1, 0, 0)
    for worker in workers[:2]:
        policy.select((worker,), query(SYSTEM))
    assert policy.select(workers, query(SYSTEM)) == (workers[1], "cached")


@pytest.mark.parametrize(
    ("inflight", "reason"),
    [((70, 5), "imbalance"), ((69, 5), "cached"), ((200, 140), "cached"), ((211, 140), "imbalance")],
)
def test_out_of_balance_is_more_by_number_and_by_share(inflight: tuple[int, int], reason: str) -> None:
    policy, workers = CacheAware(), fleet(*inflight)
    policy.select((workers[0],), query(SYSTEM))
    for number in range(200):  # so that none was given too much lately
        policy.select((workers[1],), query(f"{number} other words " * 60))
    assert policy.select(workers, query(SYSTEM)).reason == reason


def test_who_was_given_too_much_gets_no_more_for_the_caches_sake() -> None:
    """A cold fleet and one system prompt: whoever was first does not keep it to himself."""
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    for number in range(64):
        policy.select(workers, query(SYSTEM + f"{number} {number * 7919} is my number")).worker.inflight += 1
    loads = sorted(worker.inflight for worker in workers)
    assert loads[-1] <= 1.25 * 16, loads


def test_a_request_of_nothing_but_the_system_prompt_is_not_continued_by_all() -> None:
    """Such as one that warms up the fleet; and nothing is ever in flight, so that only what was routed tells."""
    policy, workers, served = CacheAware(), fleet(0, 0, 0, 0), Counter[str]()
    policy.select(workers, query(SYSTEM))
    for number in range(80):
        served[policy.select(workers, query(SYSTEM + f"{number} {number * 7919} is my number")).worker.url] += 1
    assert max(served.values()) <= 1.25 * 20, served


def test_forks_of_a_conversation_go_where_it_was() -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    prompt = "Think of something, and tell me what it is. " * 10
    first = policy.select(workers, query(prompt)).worker
    told = [policy.select(workers, query(prompt + f"{number}!" * 50)) for number in range(2)]
    assert [decision.worker for decision in told] == [first] * 2
    assert [decision.reason for decision in told] == ["continued", "cached"]


def test_a_lone_conversation_never_spills() -> None:
    """It is all that was routed lately, and nobody is in anybody's way."""
    policy, workers, prompt = CacheAware(), fleet(0, 0, 0, 0), SYSTEM
    first = policy.select(workers, query(prompt)).worker
    for _ in range(100):
        prompt += "more " * 20
        assert policy.select(workers, query(prompt)) == (first, "continued")


def test_a_matched_worker_that_is_not_there_is_replaced_and_the_replacement_learnt() -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0)
    prompt = "To be continued. " * 10
    first = policy.select(workers, query(prompt)).worker
    others = tuple(worker for worker in workers if worker is not first)
    second, reason = policy.select(others, query(prompt + "a"))
    assert reason == "least_loaded"
    assert policy.select(others, query(prompt + "a, b")) == (second, "continued")
    policy.forget(second)
    assert policy.select(workers, query(prompt + "a, b, c")) == (first, "cached")


def test_a_worker_with_much_is_forgotten_in_pieces_and_has_nothing_if_it_comes_back() -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0)
    prompts = [f"{number} " * 400 for number in range(100)]
    for prompt in prompts:
        policy.select(workers[:1], query(prompt))
    policy.forget(workers[0])
    left = policy.texts.tenant_size(workers[0].url)
    assert left > 100_000
    assert policy.select(workers, query(prompts[-1])).reason == "least_loaded", "what is left does not count"
    for number in range(3):
        policy.select(workers[1:], query(f"another {number}"))
    assert 0 < policy.texts.tenant_size(workers[0].url) < left
    policy.select(workers[:1], query("it is back"))
    assert policy.texts.tenant_size(workers[0].url) == len("it is back")
    policy.texts.check()


def test_without_a_prompt_the_least_loaded_in_turn() -> None:
    policy, workers = CacheAware(), fleet(0, 1, 0)
    chosen = [policy.select(workers, RouteQuery()) for _ in range(4)]
    assert {decision.reason for decision in chosen} == {"no_prompt"}
    assert workers[1] not in {decision.worker for decision in chosen}


def test_equals_are_told_apart_by_what_they_were_given_lately() -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0)
    lengths = [300, 20, 100, 30, 25, 120]
    given = dict.fromkeys(workers, 0)
    for number, length in enumerate(lengths):
        text = str(number) * length
        worker = policy.select(workers, query(text)).worker
        assert given[worker] == min(given.values())
        given[worker] += length


# -- snapshots ---------------------------------------------------------------------------------------------------------


@KINDS
def test_a_snapshot_survives_a_restart(kind: str) -> None:
    before, workers = CacheAware(), fleet(0, 0, 0, 0)
    prompt = "Remember this, whatever happens. "
    worker = before.select(workers, query(prompt, kind)).worker
    after = CacheAware()
    after.load(before.dump())
    assert after.dump() == before.dump()
    worker.inflight = 2
    assert after.select(workers, query(prompt + "Now?", kind)).worker is worker


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: b"", lambda data: data[:60] + b"?" + data[61:]])
def test_a_damaged_snapshot_is_refused_and_nothing_is_half_loaded(spoil: Any) -> None:
    before = CacheAware()
    before.select(fleet(0, 0), query("a prompt " * 20))
    before.select(fleet(0, 0), query("a prompt " * 20, "list"))
    after = CacheAware()
    with pytest.raises(SnapshotError):
        after.load(spoil(before.dump()))
    assert after.dump() == CacheAware().dump()


# -- what workers say themselves ---------------------------------------------------------------------------------------


def stored(text: str, start: int = 1) -> list[KvEvent]:
    """A worker's event for a prompt, in blocks of 16."""
    ids = [ord(character) for character in text]
    hashes = [start + number for number in range(len(ids) // 16)]
    return [BlockStored(hashes, None, ids[: 16 * len(hashes)], 16, None)]


def test_a_workers_own_word_counts_more_than_the_tree() -> None:
    index = KvIndex()
    policy, workers = CacheAware(index=index), fleet(0, 0, 0)
    for worker in workers:
        index.reset(worker.url, complete=True)
    prompt = "How was that again? " * 20
    first = policy.select(workers, query(prompt, "view")).worker
    other = next(worker for worker in workers if worker is not first)
    index.apply(other.url, stored(prompt))
    other.inflight = 2
    assert policy.select(workers, query(prompt + "And now, tell me more?", "view")).worker is other
    index.apply(other.url, [AllBlocksCleared()])
    assert policy.select(workers, query(prompt + "And now, tell me more?", "view")).reason == "least_loaded"


def test_workers_that_tell_nothing_are_known_by_the_tree() -> None:
    index = KvIndex()
    policy, workers = CacheAware(index=index), fleet(0, 0, 0)
    index.reset(workers[0].url, complete=True)
    prompt = "How was that again? " * 20
    policy.select(workers[1:2], query(prompt, "view"))
    workers[1].inflight = 2
    assert policy.select(workers, query(prompt + "And now, tell me more?", "view")) == (workers[1], "continued")
    index.apply(workers[0].url, stored(prompt[:48]))
    prompt += "And now, tell me more?"
    assert policy.select(workers, query(prompt + " That is enough, I think.", "view")) == (workers[1], "continued")
    policy.forget(workers[0])
    assert not index.tracked(workers[0].url)


# -- the run as a whole ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inflight", [16, 64, 128])
def test_a_run_under_one_system_prompt_neither_collapses_nor_wanders(inflight: int) -> None:
    outcome = Simulation(CacheAware(), inflight).run(3000)
    assert outcome.busiest <= 1.25
    assert outcome.kept >= 0.9


def test_the_simulation_can_tell() -> None:
    """The rule of the longest prefix, taken literally, collapses in it."""
    assert Simulation(PlainCacheAware(), 64).run(3000).busiest > 1.5


def test_the_bound_of_a_run_leaves_room_for_long_requests() -> None:
    assert cache_aware._BOUND < 1.25
