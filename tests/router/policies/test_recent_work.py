"""Fading sums, compared with sums that are recomputed."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from router.policies.cache_aware import RecentWork

NAMES = st.sampled_from("abcd")


@given(
    st.lists(st.one_of(st.tuples(NAMES, st.integers(0, 10_000)), st.tuples(NAMES, st.none())), max_size=200),
    st.sampled_from([0.25, 1.0, 7.0, 1000.0]),
)
def test_sums_follow_their_definition(steps: list[tuple[str, int | None]], half_life: float) -> None:
    recent, naive = RecentWork(half_life), dict[str, float]()
    for name, units in steps:
        if units is None:
            recent.forget(name)
            naive.pop(name, None)
            continue
        naive = {known: work * 0.5 ** (1 / half_life) for known, work in naive.items()}
        naive[name] = naive.get(name, 0.0) + units
        recent.add(name, units)
    total = sum(naive.values())
    assert math.isclose(recent.total, total, rel_tol=1e-6, abs_tol=1e-6)
    for name in "abcd":
        assert math.isclose(recent.given(name), naive.get(name, 0.0), rel_tol=1e-6, abs_tol=1e-6)
    assert len(recent) == len(naive)


def test_weights_never_overflow() -> None:
    """Without rescaling, the weight would be infinite after a thousand half-lives."""
    recent = RecentWork(1.0)
    for _ in range(5000):
        recent.add("a", 1)
        recent.add("b", 2)
    assert math.isclose(recent.given("b") / recent.total, 0.8)
    assert math.isclose(recent.mean, recent.total / (1 / (1 - 0.5)))


def test_the_mean_of_a_request_is_that_of_the_workers_that_are_left() -> None:
    """As far as it is known: a worker takes its share of the work, and so much of the requests, with it."""
    recent = RecentWork(1e9)
    for name in "aabb":
        recent.add(name, 10)
    recent.forget("a")
    assert math.isclose(recent.mean, 10.0, rel_tol=1e-6)
    recent.forget("b")
    assert recent.mean == 0.0
