"""Compares two encodings of one text: where their tokens differ. Linear in the number of tokens.

Both know where their tokens end in the text, so no search is needed. Where ids or ends differ, a difference goes on
up to the next character at which a token ends in both:

    sampled   [ four][ty][-two][ is]
    encoded   [ forty   ][-two][ is]          one difference: 2 tokens instead of 1
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_CHUNK = 4_096


class TokenDifference(NamedTuple):
    """Tokens `start` to `end` of one encoding, and tokens `other_start` to `other_end` of the other, spell the same text."""

    start: int
    end: int
    other_start: int
    other_end: int


def differences(
    ids: NDArray[np.int32], ends: NDArray[np.int32], other: NDArray[np.int32], other_ends: NDArray[np.int32]
) -> list[TokenDifference]:
    """Return where two encodings of one text differ, in order.

    Args:
        ids, other: the tokens of each.
        ends, other_ends: the characters at which they end, never falling; tokens of one character have one end.
    """
    found: list[TokenDifference] = []
    i = j = 0
    while True:
        same = _same(ids[i:], ends[i:], other[j:], other_ends[j:])
        i, j = i + same, j + same
        if i == len(ids) and j == len(other):
            return found
        before = max(int(ends[i - 1]) if i else 0, int(other_ends[j - 1]) if j else 0)
        stop, other_stop = _next_common(ends, other_ends, i, j, before)
        found.append(TokenDifference(i, stop, j, other_stop))
        i, j = stop, other_stop


def _same(
    ids: NDArray[np.int32], ends: NDArray[np.int32], other: NDArray[np.int32], other_ends: NDArray[np.int32]
) -> int:
    """Return how many tokens at the beginning are the same."""
    size, at = min(len(ids), len(other)), 0
    while at < size:
        stop = min(at + _CHUNK, size)
        differ = (ids[at:stop] != other[at:stop]) | (ends[at:stop] != other_ends[at:stop])
        if differ.any():
            return at + int(differ.argmax())
        at = stop
    return size


def _next_common(
    ends: NDArray[np.int32], other_ends: NDArray[np.int32], i: int, j: int, before: int
) -> tuple[int, int]:
    """Return how many tokens of each end at the next character where tokens of both end."""
    reached = other_reached = before
    size, other_size = len(ends), len(other_ends)
    # Tokens without any text, such as a BOS, are a separate difference.
    moved = bool((i < size and ends[i] == before) or (j < other_size and other_ends[j] == before))
    while not (moved and reached == other_reached):
        if i < size and (reached <= other_reached or j == other_size):
            reached = int(ends[i])
            i += 1
        elif j < other_size:
            other_reached = int(other_ends[j])
            j += 1
        else:
            break
        moved = True
    # The other tokens of a character that several share.
    while i < size and ends[i] == reached:
        i += 1
    while j < other_size and other_ends[j] == reached:
        j += 1
    return i, j
