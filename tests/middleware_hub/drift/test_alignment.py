"""Two encodings of one text, laid over each other: against a search for tokens that stand in the same place."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.drift.alignment import differences

Encoding = list[tuple[int, int]]
"""Tokens, each with its id and the characters that it is wide."""


@st.composite
def encodings(draw: st.DrawFn) -> tuple[Encoding, Encoding]:
    """Two ways to cut one text; where both cut alike, they mostly have the same id."""
    size = draw(st.integers(0, 30))

    def cut() -> Encoding:
        found, at = [], 0
        while at < size:
            width = min(draw(st.integers(1, 4)), size - at)
            at += width
            found.append((draw(st.sampled_from([width, width, width, 9])), width))
        return found

    return cut(), cut()


def placed(encoding: Encoding) -> set[tuple[int, int, int]]:
    found, at = set(), 0
    for number, width in encoding:
        found.add((at, at + width, number))
        at += width
    return found


@given(encodings())
def test_what_differs_is_what_has_no_equal_in_its_place(pair: tuple[Encoding, Encoding]) -> None:
    one, other = pair
    ids, others = (np.array([number for number, _ in each], np.int32) for each in pair)
    ends, other_ends = (np.cumsum([width for _, width in each] or [0], dtype=np.int32)[: len(each)] for each in pair)
    found = differences(ids, ends, others, other_ends)
    for mine, theirs, places in (
        (one, other, [(part.start, part.end) for part in found]),
        (other, one, [(part.other_start, part.other_end) for part in found]),
    ):
        differing = {at for low, high in places for at in range(low, high)}
        known = placed(theirs)
        at = 0
        for number, (token, width) in enumerate(mine):
            assert (number in differing) is ((at, at + width, token) not in known)
            at += width
    for part in found:
        begin = int(ends[part.start - 1]) if part.start else 0
        assert begin == (int(other_ends[part.other_start - 1]) if part.other_start else 0), "both begin in one place"
        assert ends[part.end - 1] == other_ends[part.other_end - 1], "and end in one"


def test_tokens_of_one_character_go_together() -> None:
    """Two tokens are half a character each, so they share an end: the other encoding has it in one."""
    ids, ends = np.array([1, 2, 3], np.int32), np.array([1, 1, 2], np.int32)
    other, other_ends = np.array([7, 3], np.int32), np.array([1, 2], np.int32)
    assert differences(ids, ends, other, other_ends) == [(0, 2, 0, 1)]


def test_a_bos_that_only_one_has_is_a_difference_of_its_own() -> None:
    ids, ends = np.array([0, 5, 6], np.int32), np.array([0, 2, 3], np.int32)
    other, other_ends = np.array([5, 6], np.int32), np.array([2, 3], np.int32)
    assert differences(ids, ends, other, other_ends) == [(0, 1, 0, 0)]
    assert differences(other, other_ends, ids, ends) == [(0, 0, 0, 1)]


def test_nothing_differs_from_nothing() -> None:
    empty = np.zeros(0, np.int32)
    assert differences(empty, empty, empty, empty) == []
