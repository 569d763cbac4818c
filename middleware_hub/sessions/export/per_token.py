"""Arrays of the worker with a row for each token: those of all turns of a branch, joined to one along its chain.

SGLang (0.5.23, `state_capturer`) writes `routed_experts` and `indexer_topk` as base64 of int32, `[rows, layers, top_k]`, and
says none of these three numbers. Row `i` is what was decided when token `i` was read, so the last sampled token has none.
A value covers prompt and reply, with what came out of the prefix cache, or (`routed_experts_start_len`) only its last rows:

    token     0    1    2    3    4    5    6    7    8    9
              [    prompt   ][ sampled][ context][  sampled  ]
    turn 1    r0   r1   r2   r3
    turn 2    s0   s1   s2   s3   s4   s5   s6   s7   s8
    joined    r0   r1   r2   r3   s4   s5   s6   s7   s8

**A row is taken from the first turn that told it.** What token `i + 1` was sampled from, and the logprob that is exported with
it, came out of reading token `i` in the turn that sampled it. That turn is the first that read the token, and so the first with
this row: whoever replays it has the policy that the logprob belongs to. A later turn that tells it again has either the
same from its cache, or has read the prompt anew, on another worker or with other weights: decisions that had no part in the
sample. (Of context, later turns may have attended to their own reading; one array can hold one of them.)

**Rows that nobody told are -1**, and `parts` names who told the others. Nothing is computed, moved or repeated to fill a gap.
If the turn that sampled told nothing, a later turn's row stands there, under that turn's name.

**The width is found, not known.** No value has more rows than its turn has tokens less one, and all rows are equally wide: the
width is at least the largest of `numbers / (tokens - 1)`, and is exactly that if some turn told all of its rows, which is the
default of every request. Where this is no whole number, or does not divide another turn's numbers, the values are not joined.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

ROW_FIELDS = ("routed_experts", "indexer_topk")
"""Fields of `meta_info` that are such arrays; of no other is the shape known."""

UNTOLD = -1
"""In place of each number of a row that nobody told."""

_NUMBER = np.dtype("<i4")
_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_PIECE = 48 * 1024  # bytes: 64 KiB of base64, a fraction of a millisecond


@dataclass(frozen=True, slots=True)
class TurnRows:
    """What a worker told of one turn.

    Attributes:
        generation_id: of the turn.
        tokens: of its prompt and all that it sampled.
        kept: how many of these the branch goes through: fewer where it left a stop token out.
        value: the field, as it came.
    """

    generation_id: str
    tokens: int
    kept: int
    value: Raw


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `start` to `end` of an array, as one turn told them; `begin` is the row with which its base64 begins."""

    generation_id: str
    start: int
    end: int
    begin: int
    base64: memoryview


@dataclass(frozen=True, slots=True)
class PerTokenArray:
    """Row `i` belongs to token `i` of `prompt_ids + response_ids`; the last token has none.

    Attributes:
        rows: tokens less one.
        width: int32 numbers a row, `layers * top_k`.
        parts: in order, not overlapping. Rows in none of them are `UNTOLD`.
    """

    rows: int
    width: int
    parts: tuple[Part, ...]

    def described(self) -> dict[str, Any]:
        """All but the numbers, ready to be printed as JSON."""
        told = [{"generation_id": one.generation_id, "start": one.start, "end": one.end} for one in self.parts]
        return {"dtype": "int32", "shape": [self.rows, self.width], "told": told}

    def array(self) -> NDArray[np.int32]:
        """The numbers, `[rows, width]`."""
        return np.frombuffer(b"".join(self._pieces()), _NUMBER).reshape(self.rows, self.width)

    def as_base64(self) -> Iterator[bytes]:
        """The numbers as the worker writes them, in pieces that are quickly made."""
        held = b""
        for piece in self._pieces():
            held += piece
            whole = len(held) // 3 * 3  # padding may only be at the very end
            yield binascii.b2a_base64(held[:whole], newline=False)
            held = held[whole:]
        yield binascii.b2a_base64(held, newline=False)

    def _pieces(self) -> Iterator[bytes]:
        size, at = self.width * _NUMBER.itemsize, 0
        for part in self.parts:
            yield from _untold((part.start - at) * size)
            yield from _decoded(part.base64, (part.start - part.begin) * size, (part.end - part.begin) * size)
            at = part.end
        yield from _untold((self.rows - at) * size)


def joined(turns: Sequence[TurnRows], tokens: int) -> PerTokenArray | None:
    """One array of what the turns of a branch told, first turn first; None if their shape cannot be told.

    Args:
        turns: those whose tokens this branch's chain consists of, as far as they told anything.
        tokens: of the whole chain.
    """
    texts = [_base64(turn.value) for turn in turns]
    counts = [0 if text is None else _numbers(text) for text in texts]
    width = _width(counts, [turn.tokens - 1 for turn in turns])
    if width is None:
        return None
    parts: list[Part] = []
    gaps = [(0, tokens - 1)]
    for turn, text, count in zip(turns, texts, counts, strict=True):
        if text is None:
            return None
        end = turn.tokens - 1
        begin = end - count // width
        new, gaps = _claimed(gaps, begin, min(end, turn.kept))
        for low, high in new:
            size = width * _NUMBER.itemsize
            if not _is_base64(text, (low - begin) * size, (high - begin) * size):
                return None
            parts.append(Part(turn.generation_id, low, high, begin, text))
    parts.sort(key=lambda part: part.start)
    return PerTokenArray(tokens - 1, width, tuple(parts))


def _width(counts: Sequence[int], most_rows: Sequence[int]) -> int | None:
    """Numbers a row, of values with so many numbers in at most so many rows."""
    told = [(count, rows) for count, rows in zip(counts, most_rows, strict=True) if count]
    if not told or min(rows for _, rows in told) < 1:
        return None
    width = max(-(-count // rows) for count, rows in told)
    whole = any(count == width * rows for count, rows in told)
    return width if whole and all(count % width == 0 for count, _ in told) else None


def _claimed(
    gaps: Sequence[tuple[int, int]], low: int, high: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What `low` to `high` fills of the gaps, and what is left of them."""
    new, left = [], []
    for start, end in gaps:
        first, last = max(start, low), min(end, high)
        if first >= last:
            left.append((start, end))
            continue
        new.append((first, last))
        left += [gap for gap in ((start, first), (last, end)) if gap[0] < gap[1]]
    return new, left


# Base64 ----------------------------------------------------------------------------------------------------------------


def _base64(value: Raw) -> memoryview | None:
    """The inside of a JSON string whose length is that of base64 of whole numbers; None if it is something else."""
    text = memoryview(value)
    if len(text) < 2 or text[0] != ord('"'):
        return None
    text = text[1:-1]
    return None if len(text) % 4 or _bytes(text) % _NUMBER.itemsize else text


def _bytes(text: memoryview) -> int:
    return len(text) // 4 * 3 - bytes(text[-2:]).count(b"=")


def _numbers(text: memoryview) -> int:
    return _bytes(text) // _NUMBER.itemsize


def _group(begin: int, end: int) -> slice:
    """Where bytes stand in base64: four letters have three of them."""
    return slice(begin // 3 * 4, -(-end // 3) * 4)


def _is_base64(text: memoryview, begin: int, end: int) -> bool:
    """Whether what these bytes are written in has no other letters. Only what is used is looked at: a value may be 100 MB."""
    group = _group(begin, end)
    padding = _bytes(text) // 3 * 4  # where the group begins that may have any
    letters, rest = bytes(text[group.start : min(group.stop, padding)]), bytes(text[padding : group.stop])
    return not letters.translate(None, _LETTERS) and not rest.rstrip(b"=").translate(None, _LETTERS)


def _decoded(text: memoryview, begin: int, end: int) -> Iterator[bytes]:
    for low in range(begin, end, _PIECE):
        high = min(low + _PIECE, end)
        skipped = low % 3
        yield binascii.a2b_base64(text[_group(low, high)])[skipped : skipped + high - low]


def _untold(size: int) -> Iterator[bytes]:
    filler = np.full(_PIECE // _NUMBER.itemsize, UNTOLD, _NUMBER).tobytes()
    for low in range(0, size, _PIECE):
        yield filler[: min(_PIECE, size - low)]
