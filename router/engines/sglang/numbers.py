"""The long lists of numbers in a reply, read without a Python object for each number.

SGLang always prints them in the same form, and prints nothing between the numbers that is not needed:

    "output_ids":[13,7]      "output_token_logprobs":[[-3.25,13,null],[-0.5,7,null]]

Other forms are left to the caller: these functions return None for them, and never guess.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
import simdjson
from numpy.typing import NDArray

_SEPARATOR = b",null],["
_BLANK = b",       "
_SIZE = len(_SEPARATOR)

_OPENING = ord("[")
_NOT_NUMBERS = (ValueError, TypeError, RuntimeError)
"""What simdjson raises for what is no list of numbers."""

_parser = simdjson.Parser()  # it holds the GIL, and refuses to parse while a result of its own is in use


class Numbers(array):  # type: ignore[type-arg] # it takes a parameter since Python 3.12
    """Token ids, none of them negative, or finite floats: an array that equals every sequence of the same numbers."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, array):
            return super().__eq__(other)
        return isinstance(other, Sequence) and self.tolist() == list(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def packed_ids(ids: Sequence[int]) -> Sequence[int]:
    """Return token ids as `Numbers`; unchanged if one of them is negative, or beyond int32."""
    if isinstance(ids, Numbers) or min(ids, default=0) < 0:
        return ids
    try:
        return Numbers("i", ids)
    except OverflowError:
        return ids


def packed_logprobs(logprobs: Sequence[float | None]) -> Sequence[float | None]:
    """Return logprobs as `Numbers`; unchanged if one of them is no finite number."""
    if isinstance(logprobs, Numbers) or not _all_finite(logprobs):
        return logprobs
    return Numbers("d", logprobs)


def are_ids(ids: Sequence[int]) -> bool:
    """Return whether no id is negative."""
    return isinstance(ids, Numbers) or min(ids, default=0) >= 0


def are_finite(logprobs: Sequence[float | None]) -> bool:
    """Return whether every logprob is a finite number."""
    return isinstance(logprobs, Numbers) or _all_finite(logprobs)


def _all_finite(values: Sequence[float | None]) -> bool:
    try:
        return math.isfinite(math.fsum(values))  # type: ignore[arg-type] # None is what the TypeError is for
    except (TypeError, ValueError, OverflowError):
        return all(value is not None and math.isfinite(value) for value in values)


def read_numbers(ids: bytes, entries: memoryview) -> tuple[Numbers, Numbers] | None:
    """Read token ids, and the logprobs of the same tokens. Return None if the ids differ, or are no int32.

    Args:
        ids: from one bracket to the next.
        entries: from `[[` to `,null]]`: `[[logprob, id, null], ...]`.
    """
    flat = _flattened(entries)
    if flat is None:
        return None
    try:
        own = np.frombuffer(_numbers(ids).as_buffer(of_type="i"), dtype=np.int64)
        pairs = np.frombuffer(_numbers(flat).as_buffer(of_type="d"))
    except _NOT_NUMBERS:
        return None
    if len(pairs) != 2 * len(own) or not (pairs[1::2] == own).all() or own.view(np.uint64).max() >= 2**31:
        return None
    return Numbers("i", own.astype(np.int32).tobytes()), Numbers("d", pairs[0::2].copy().tobytes())


def _numbers(raw: bytes | bytearray) -> simdjson.Array:
    found = _parser.parse(raw)
    if not isinstance(found, simdjson.Array):
        raise ValueError("not a list")
    return found


def _flattened(entries: memoryview) -> bytearray | None:
    """Return the numbers of `entries` as one list; None if anything else stands between them.

    [[-3.25,13,null],[-0.5,7,null]]
     [-3.25,13,       -0.5,7]
    """
    flat = bytearray(entries[1:-6])
    flat[-1] = ord("]")
    begins = (np.frombuffer(flat, dtype=np.uint8) == _OPENING).nonzero()[0][1:]
    begins -= _SIZE - 1
    if len(begins):
        # One item for each place of the text: what stands there in the length of a separator.
        places: NDArray[np.bytes_] = np.ndarray((len(flat) - _SIZE + 1,), f"S{_SIZE}", flat, strides=(1,))
        if begins[0] < 0 or places[begins].tobytes() != _SEPARATOR * len(begins):
            return None
        places[begins] = _BLANK
    return flat
