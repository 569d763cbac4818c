"""Compares two sequences of tokens, even long ones: which runs they have in common.

The common beginning and end are removed first, so the first difference is exact. Between them, stretches of
tokens that occur once in both are anchors, and the longest series of anchors that rises in both is kept. What lies between two
anchors is compared token by token if it is short. All of it takes O(n log n), however little they have in common.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ANCHOR = 6
"""Tokens of an anchor."""
SHORT = 400
"""Longer parts between anchors are not compared token by token."""
MOST_WORK = 2_000_000
"""Pairs of tokens that are compared one by one, in one whole comparison."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
Ids = NDArray[np.int32]


class Run(NamedTuple):
    """Tokens `start` to `end` of one sequence, and `other_start` to `other_end` of the other.

    They are the same (`equal`), replace each other (`replace`), or only the other sequence (`insert`) or this one (`delete`)
    has tokens.
    """

    op: str
    start: int
    end: int
    other_start: int
    other_end: int


def first_difference(one: Ids, other: Ids) -> int | None:
    """Return where two sequences differ first; None if they are the same."""
    size = min(len(one), len(other))
    differing = np.flatnonzero(one[:size] != other[:size])
    if len(differing):
        return int(differing[0])
    return None if len(one) == len(other) else size


def compare(one: Ids, other: Ids, *, most: int) -> tuple[list[Run], bool]:
    """Return the runs of two sequences, and whether those after the first `most` were left out."""
    runs: list[Run] = []
    for run in _joined(_runs(one, other)):
        if len(runs) == most:
            return runs, True
        runs.append(run)
    return runs, False


def _runs(one: Ids, other: Ids) -> Iterator[Run]:
    head = first_difference(one, other)
    if head is None:
        yield from _run(0, len(one), 0, len(other), equal=True)
        return
    tail = first_difference(one[head:][::-1], other[head:][::-1])
    size = min(len(one), len(other)) - head if tail is None else tail
    stop, other_stop = len(one) - size, len(other) - size
    yield from _run(0, head, 0, head, equal=True)
    at, other_at, work = head, head, MOST_WORK
    for begin, other_begin, count in _anchors(one[head:stop], other[head:other_stop]):
        begin, other_begin = begin + head, other_begin + head
        work -= (begin - at) * (other_begin - other_at)
        yield from _between(one, other, at, begin, other_at, other_begin, slow=work >= 0)
        at, other_at = begin + count, other_begin + count
        yield from _run(begin, at, other_begin, other_at, equal=True)
    work -= (stop - at) * (other_stop - other_at)
    yield from _between(one, other, at, stop, other_at, other_stop, slow=work >= 0)
    yield from _run(stop, len(one), other_stop, len(other), equal=True)


def _anchors(one: Ids, other: Ids) -> Iterator[tuple[int, int, int]]:
    """Yield `(start, other_start, count)` of the common runs, in order and without overlaps."""
    hashes, other_hashes = _hashes(one), _hashes(other)
    places, other_places = _once(hashes), _once(other_hashes)
    _, mine, theirs = np.intersect1d(
        hashes[places], other_hashes[other_places], assume_unique=True, return_indices=True
    )
    starts, other_starts = places[mine], other_places[theirs]
    order = np.argsort(starts)
    starts, other_starts = starts[order], other_starts[order]
    if not len(starts):
        return
    # Anchors side by side are one stretch.
    breaks = np.flatnonzero((np.diff(starts) != 1) | (np.diff(other_starts) != 1)) + 1
    firsts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((firsts, [len(starts)]))) + ANCHOR - 1
    at = other_at = 0
    for number in _rising(other_starts[firsts].tolist()):
        begin, other_begin = int(starts[firsts[number]]), int(other_starts[firsts[number]])
        count = int(counts[number])
        skip = max(at - begin, other_at - other_begin, 0)
        begin, other_begin, count = begin + skip, other_begin + skip, count - skip
        # Two different stretches may have one hash.
        same = (
            0 if count <= 0 else first_difference(one[begin : begin + count], other[other_begin : other_begin + count])
        )
        count = count if same is None else same
        if count > 0:
            yield begin, other_begin, count
            at, other_at = begin + count, other_begin + count


def _hashes(ids: Ids) -> NDArray[np.uint64]:
    """Return a number for each stretch of `ANCHOR` tokens."""
    size = len(ids) - ANCHOR + 1
    if size <= 0:
        return np.zeros(0, np.uint64)
    values = ids.astype(np.uint64)
    found = np.zeros(size, np.uint64)
    for offset in range(ANCHOR):
        found = (found ^ (values[offset : offset + size] + np.uint64(1))) * _FACTOR
        found ^= found >> np.uint64(29)
    return found


def _once(hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Return the places of numbers that occur once."""
    _, places, counts = np.unique(hashes, return_index=True, return_counts=True)
    found: NDArray[np.intp] = places[counts == 1]
    return found


def _rising(numbers: list[int]) -> list[int]:
    """Return the places of the longest rising series of numbers."""
    ends: list[int] = []
    places: list[int] = []
    before: list[int] = []
    for place, number in enumerate(numbers):
        at = bisect_left(ends, number)
        before.append(places[at - 1] if at else -1)
        if at == len(ends):
            ends.append(number)
            places.append(place)
        else:
            ends[at], places[at] = number, place
    found: list[int] = []
    place = places[-1] if places else -1
    while place >= 0:
        found.append(place)
        place = before[place]
    return found[::-1]


def _between(
    one: Ids, other: Ids, start: int, end: int, other_start: int, other_end: int, *, slow: bool
) -> Iterator[Run]:
    """Yield the runs between two anchors."""
    if not slow or max(end - start, other_end - other_start) > SHORT or start == end or other_start == other_end:
        yield from _run(start, end, other_start, other_end, equal=False)
        return
    matcher = SequenceMatcher(None, one[start:end].tolist(), other[other_start:other_end].tolist(), autojunk=False)
    for kind, low, high, other_low, other_high in matcher.get_opcodes():
        ends = (start + low, start + high, other_start + other_low, other_start + other_high)
        yield from _run(*ends, equal=kind == "equal")


def _run(start: int, end: int, other_start: int, other_end: int, *, equal: bool) -> Iterator[Run]:
    if end == start and other_end == other_start:
        return
    op = "equal" if equal else "insert" if end == start else "delete" if other_end == other_start else "replace"
    yield Run(op, start, end, other_start, other_end)


def _joined(runs: Iterator[Run]) -> Iterator[Run]:
    """Join neighbours of one kind."""
    held: Run | None = None
    for run in runs:
        if held is None:
            held = run
        elif (held.op == "equal") is (run.op == "equal"):
            (held,) = _run(held.start, run.end, held.other_start, run.other_end, equal=held.op == "equal")
        else:
            yield held
            held = run
    if held is not None:
        yield held
