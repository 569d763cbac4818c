"""Sequences of tokens, compared: the runs are true, whatever they are, and long ones take no long time."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.drift.sequences import compare, first_difference

Tokens = list[int]


@st.composite
def edited(draw: st.DrawFn) -> tuple[Tokens, Tokens]:
    """A sequence, and the same with some parts replaced."""
    ids = st.integers(0, draw(st.sampled_from([1, 4, 1_000])))
    one = draw(st.lists(ids, max_size=120))
    other = list(one)
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(other)))
        other[at : at + draw(st.integers(0, 5))] = draw(st.lists(ids, max_size=8))
    return one, other


@given(edited())
def test_runs_are_the_whole_of_both_and_true(pair: tuple[Tokens, Tokens]) -> None:
    one, other = pair
    runs, truncated = compare(np.array(one, np.int32), np.array(other, np.int32), most=1_000)
    assert not truncated
    at = other_at = 0
    for number, run in enumerate(runs):
        assert (run.start, run.other_start) == (at, other_at)
        at, other_at = run.end, run.other_end
        mine, theirs = one[run.start : run.end], other[run.other_start : run.other_end]
        assert (mine == theirs) is (run.op == "equal")
        assert bool(mine) is (run.op != "insert")
        assert bool(theirs) is (run.op != "delete")
        assert not number or (runs[number - 1].op == "equal") is not (run.op == "equal"), "neighbours are joined"
    assert (at, other_at) == (len(one), len(other))


@given(edited())
def test_the_first_difference_is_exact(pair: tuple[Tokens, Tokens]) -> None:
    one, other = pair
    size = min(len(one), len(other))
    expected = next((at for at in range(size) if one[at] != other[at]), None if len(one) == len(other) else size)
    assert first_difference(np.array(one, np.int32), np.array(other, np.int32)) == expected


def test_what_is_the_same_is_found_between_what_is_not() -> None:
    rng = np.random.default_rng(0)
    one = rng.integers(0, 50_000, 20_000).astype(np.int32)
    other = np.delete(one, [100, 5_000, 5_001, 15_000])
    other[12_000] = -1
    runs, _ = compare(one, other, most=100)
    assert sum(run.end - run.start for run in runs if run.op == "equal") == len(one) - 5
    assert [run.op for run in runs if run.op != "equal"] == ["delete", "delete", "replace", "delete"]


def test_no_more_runs_than_wanted() -> None:
    one, other = np.arange(1_000, dtype=np.int32), np.arange(1_000, dtype=np.int32)
    other[::10] = -1
    runs, truncated = compare(one, other, most=7)
    assert (len(runs), truncated) == (7, True)


@pytest.mark.parametrize("words", [1, 2, 50_000])
def test_long_sequences_without_much_in_common_take_no_long_time(words: int) -> None:
    """A quadratic comparison would take minutes."""
    one, other = (np.random.default_rng(seed).integers(0, words, 200_000).astype(np.int32) for seed in (1, 2))
    other[0] = -1
    begun = time.process_time()
    compare(one, other, most=2_000)
    assert time.process_time() - begun < 10
