"""The choices of the simple policies."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router.errors import BadRequestError
from router.policies import POLICIES, create_policy
from router.policies.least_inflight import LeastInflight
from router.policies.power_of_two import PowerOfTwo
from router.policies.random_choice import RandomChoice
from router.policies.round_robin import RoundRobin
from router.workers.policy import RouteQuery
from router.workers.worker import Target, Worker

QUERY = RouteQuery()


def workers(*inflight: int) -> list[Target]:
    made = []
    for number, count in enumerate(inflight):
        made.append(Target(Worker(f"http://w{number}:1")))
        made[-1].inflight = count
    return made


def test_least_inflight_takes_the_idlest() -> None:
    fleet = workers(3, 1, 2)
    policy = LeastInflight()
    assert [policy.select(fleet, QUERY) for _ in range(3)] == [fleet[1]] * 3


def test_least_inflight_takes_equals_in_turn() -> None:
    fleet = workers(0, 5, 0, 0)
    policy = LeastInflight()
    chosen = [policy.select(fleet, QUERY) for _ in range(6)]
    assert chosen == [fleet[0], fleet[2], fleet[3]] * 2


def test_least_inflight_survives_a_shrinking_fleet() -> None:
    fleet = workers(0, 0, 0)
    policy = LeastInflight()
    for _ in range(3):
        policy.select(fleet, QUERY)
    assert policy.select(fleet[:1], QUERY) is fleet[0]


def test_round_robin_ignores_load() -> None:
    fleet = workers(9, 0, 5)
    policy = RoundRobin()
    assert [policy.select(fleet, QUERY) for _ in range(6)] == fleet * 2
    assert policy.select(fleet[:1], QUERY) is fleet[0]


def test_random_is_even() -> None:
    fleet = workers(9, 0, 5)
    policy = RandomChoice(random.Random(1))
    counts = Counter(policy.select(fleet, QUERY).name for _ in range(3000))
    assert all(900 < count < 1100 for count in counts.values())


def test_power_of_two_never_takes_the_busiest() -> None:
    fleet = workers(1, 2, 9)
    policy = PowerOfTwo(random.Random(1))
    counts = Counter(policy.select(fleet, QUERY).name for _ in range(3000))
    assert fleet[2].name not in counts
    assert counts[fleet[0].name] > counts[fleet[1].name] > 0
    assert policy.select(fleet[:1], QUERY) is fleet[0]


def test_each_name_makes_a_policy() -> None:
    for name in POLICIES:
        assert create_policy(name).select(workers(0), QUERY)


def test_unknown_name_lists_the_names() -> None:
    with pytest.raises(BadRequestError, match="least_inflight, round_robin, random, power_of_two"):
        create_policy("best")
