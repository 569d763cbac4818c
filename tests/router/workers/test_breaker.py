"""The circuit breaker of one worker, against the plainest account of what it should do."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from router.config import BreakerConfig
from router.workers.breaker import Breaker, BreakerState
from tests.conftest import examples

CONFIG = BreakerConfig(failure_threshold=3, success_threshold=2, timeout=10.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened() -> tuple[Breaker, Clock]:
    clock = Clock()
    breaker = Breaker(CONFIG, clock)
    for _ in range(3):
        breaker.failed()
    return breaker, clock


def test_failures_in_a_row_open_it_and_a_success_in_between_does_not() -> None:
    breaker = Breaker(CONFIG, Clock())
    for one in "ffsff":
        breaker.failed() if one == "f" else breaker.succeeded()
        assert breaker.allows
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows


def test_one_trial_at_a_time_and_enough_good_ones_close_it() -> None:
    breaker, clock = opened()
    clock.now = 9.9
    assert not breaker.allows
    clock.now = 10.0
    for left in (1, 0):
        assert breaker.allows
        assert breaker.begin()
        assert not breaker.allows, "a trial is under way"
        breaker.succeeded()
        breaker.trial_over()
        assert (breaker.state is BreakerState.CLOSED) == (left == 0)


def test_a_failed_trial_opens_it_again_for_the_whole_time() -> None:
    breaker, clock = opened()
    clock.now = 12.0
    breaker.begin()
    breaker.trial_over()
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    assert breaker.seconds_left == 10.0


def test_a_trial_that_tells_nothing_makes_way_for_the_next() -> None:
    breaker, clock = opened()
    clock.now = 10.0
    breaker.begin()
    breaker.trial_over()
    assert breaker.allows
    assert breaker.state is BreakerState.HALF_OPEN


def test_one_that_is_turned_off_never_opens() -> None:
    breaker = Breaker(BreakerConfig(failure_threshold=1, enabled=False), Clock())
    breaker.failed()
    assert breaker.allows


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from(["begin", "over", "good", "bad", "wait"]), max_size=60))
def test_whatever_happens_it_does_what_its_history_says(steps: list[str]) -> None:
    """The oracle keeps all that happened, and reads the state off that."""
    clock = Clock()
    told: list[BreakerState] = []
    breaker = Breaker(CONFIG, clock, told.append)
    state, run, opened_at, trial = "closed", 0, 0.0, False
    for step in steps:
        allowed = state == "closed" or (not trial and (state == "half_open" or clock.now >= opened_at + 10))
        assert breaker.allows == allowed
        assert breaker.state.value == state
        if step == "wait":
            clock.now += 4.0
        elif step == "begin" and allowed:
            assert breaker.begin() == (state != "closed")
            if state == "open":
                state, run = "half_open", 0
            trial = trial or state == "half_open"
        elif step == "over" and trial:
            breaker.trial_over()
            trial = False
        elif step == "good":
            breaker.succeeded()
            run = 0 if state == "closed" else run + (state == "half_open")
            if state == "half_open" and run >= 2:
                state, run = "closed", 0
        elif step == "bad":
            breaker.failed()
            run = run + 1 if state == "closed" else run
            if state == "half_open" or (state == "closed" and run >= 3):
                state, run, opened_at = "open", 0, clock.now
    assert all(before is not after for before, after in itertools.pairwise(told))
