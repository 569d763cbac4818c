"""The long lists of numbers in a reply, read without a Python object for each number.

SGLang always prints them in the same form, and prints nothing between the numbers that is not needed:

    "output_ids":[13,7]      "output_token_logprobs":[[-3.25,13,null],[-0.5,7,null]]

Other forms are left to the caller: these functions return None for them, and never guess.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import simdjson
from numpy.typing import NDArray

_SEPARATOR = b",null],["
_BLANK = b",       "
_WORD = np.dtype("S8")
"""Both are one word, so one array operation compares them, and one replaces them."""

_OPENING = ord("[")
_NOT_NUMBERS = (ValueError, TypeError, RuntimeError)
"""What simdjson raises for what is no list of numbers, and numpy for an odd number of them."""

_parser = simdjson.Parser()  # it holds the GIL, and refuses to parse while a result of its own is in use


class Numbers(array):  # type: ignore[type-arg] # it takes a parameter since Python 3.12
    """An array that can stand for a list: it equals every sequence of the same numbers."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, array):
            return super().__eq__(other)
        return isinstance(other, Sequence) and self.tolist() == list(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def read_numbers(ids: bytes, entries: memoryview) -> tuple[Numbers, Numbers] | None:
    """Read the ids of a list, and the logprobs of `[[logprob, id, null], ...]`; None if their ids differ, or are no int32."""
    flat = _flattened(entries)
    if flat is None:
        return None
    try:
        own = np.frombuffer(_parser.parse(ids).as_buffer(of_type="i"), dtype=np.int64).astype(np.int32)
        pairs = np.frombuffer(_parser.parse(flat).as_buffer(of_type="d")).reshape(-1, 2)
    except _NOT_NUMBERS:
        return None
    # An id beyond int32 has become another one, and differs.
    if len(pairs) != len(own) or not (pairs[:, 1] == own).all():
        return None
    return Numbers("i", own.tobytes()), Numbers("d", pairs[:, 0].tobytes())


def _flattened(entries: memoryview) -> bytearray | None:
    """Return the numbers of `entries` as one list; None if anything else stands between them.

        [[-3.25,13,null],[-0.5,7,null]]
         [-3.25,13,       -0.5,7]
    """
    flat = bytearray(entries[1:-6])
    flat[-1] = ord("]")
    begins = np.flatnonzero(np.frombuffer(flat, dtype=np.uint8) == _OPENING)[1:] - (len(_SEPARATOR) - 1)
    words: NDArray[Any] = np.ndarray((max(0, len(flat) - 7),), _WORD, flat, strides=(1,))
    if len(begins):
        if begins[0] < 0 or (words[begins] != _SEPARATOR).any():
            return None
        words[begins] = _BLANK
    return flat
