"""The table of conversations that processes share, against a dict, and what a policy makes of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies import homes
from router.policies.cache_aware import CacheAware
from router.policies.homes import ConversationHomes, number_of
from router.workers.policy import RouteQuery
from router.workers.worker import Target, Worker

NUMBERS = st.integers(1, 2**64 - 1)


@pytest.fixture(scope="module")
def descriptor() -> Iterator[int]:
    found = ConversationHomes.create()
    yield found
    os.close(found)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=20), NUMBERS)
def test_each_process_finds_the_last_worker_of_a_conversation(
    descriptor: int, put: list[tuple[int, int]], unknown: int
) -> None:
    ours, theirs = ConversationHomes(descriptor), ConversationHomes(descriptor)
    expected = {}
    for key, worker in put:
        expected[key % homes._SLOTS] = key, worker
        ours.put(key, worker)
    for key, worker in expected.values():
        assert theirs.get(key) == worker
        assert theirs.get(key + homes._SLOTS if key < 2**63 else key - homes._SLOTS) is None
    if unknown % homes._SLOTS in expected and expected[unknown % homes._SLOTS][0] != unknown:
        assert theirs.get(unknown) is None


def test_a_table_is_empty_at_first_and_an_entry_of_two_writers_is_none() -> None:
    descriptor = ConversationHomes.create()
    table = ConversationHomes(descriptor)
    assert [table.get(key) for key in (0, 1, homes._SLOTS)] == [None, None, None]
    key = number_of(b"", b"a conversation")
    table.put(key, number_of(b"http://w1:1"))
    mixed = bytes(table._halves[2 * (key % homes._SLOTS)].to_bytes(8, "little"))
    table.put(key, number_of(b"http://w2:1"))
    table._halves[2 * (key % homes._SLOTS)] = int.from_bytes(mixed, "little")
    assert table.get(key) is None
    os.close(descriptor)


def fleet() -> tuple[Target, ...]:
    return tuple(Target(Worker(f"http://w{number}:1")) for number in range(4))


def of(text: str, word: str = "a word", *, continues: bool = True, tenant: str = "") -> RouteQuery:
    return RouteQuery(text=text, tenant=tenant, conversation=word.encode, continues=continues)


def processes(descriptor: int) -> tuple[CacheAware, CacheAware]:
    found = CacheAware(), CacheAware()
    for policy in found:
        policy.homes = ConversationHomes(descriptor)
    return found


def test_a_turn_stays_on_its_worker_whichever_process_routes_it(descriptor: int) -> None:
    policies = processes(descriptor)
    for number in range(40):
        text = f"{number * 7919} begins this conversation. "
        workers, at = fleet(), None
        for turn in range(6):
            target, reason = policies[(number + turn) % 2].select(workers, of(text, str(number), continues=turn > 0))
            assert at is None or (target.name, reason) == (at, "continued")
            at = target.name
            text += "A reply. And what follows it? " * 4


def test_a_prompt_without_a_reply_of_this_conversation_goes_where_it_would_without_the_table(descriptor: int) -> None:
    """All samples of a prompt have one word, and are spread by the rules for groups."""
    ours, theirs = processes(descriptor)
    workers = fleet()
    at = ours.select(workers, of("A question. ", "group", continues=False)).target
    at.inflight = 3
    target, reason = theirs.select(workers, of("A question. ", "group", continues=False))
    assert (target is at, reason) == (False, "least_loaded")


def test_another_tenants_conversation_of_the_same_word_is_another(descriptor: int) -> None:
    ours, theirs = processes(descriptor)
    workers = fleet()
    at = ours.select(workers, of("A question. ", "shared", tenant="a")).target
    at.inflight = 3
    assert theirs.select(workers, of("A question. And more. ", "shared", tenant="b")).reason == "least_loaded"
    assert theirs.select(workers, of("A question. And more. ", "shared", tenant="a")) == (at, "continued")


def test_a_conversation_whose_worker_left_goes_to_another_and_stays_there(descriptor: int) -> None:
    ours, theirs = processes(descriptor)
    workers = fleet()
    at = ours.select(workers, of("A question. ", "moved")).target
    rest = tuple(target for target in workers if target is not at)
    moved, reason = theirs.select(rest, of("A question. And more. ", "moved"))
    assert reason == "least_loaded"
    moved.inflight = 2
    assert ours.select(rest, of("A question. And more. And more. ", "moved")) == (moved, "continued")


def test_a_worker_that_has_too_much_gets_no_turns_of_other_processes_either(descriptor: int) -> None:
    ours, theirs = processes(descriptor)
    workers = fleet()
    at = ours.select(workers, of("A question. ", "busy")).target
    at.inflight = 200
    assert theirs.select(workers, of("A question. And more. ", "busy")).reason == "imbalance"
