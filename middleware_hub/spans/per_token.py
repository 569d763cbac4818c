"""Arrays of a worker with a row for each token: the arrays of a branch's turns, joined to one along its chain.

SGLang (0.5.23, `state_capturer`) writes `routed_experts` and `indexer_topk` as base64 of int32, `[rows, layers, top_k]`, and
does not give these three numbers. Row `i` is what was decided when token `i` was read, so the last sampled token has none. A
value covers prompt and reply, including what came out of the prefix cache, or (`routed_experts_start_len`) only its last rows:

    token     0    1    2    3    4    5    6    7    8    9
              [    prompt   ][ sampled][ context][  sampled  ]
    turn 1    r0   r1   r2   r3
    turn 2    s0   s1   s2   s3   s4   s5   s6   s7   s8
    joined    r0   r1   r2   r3   s4   s5   s6   s7   s8

**A row is taken from the first turn that reported it.** Token `i + 1`, with the logprob that is exported, was sampled after
token `i` was read in the same turn. That turn was the first to read the token, and so the first with this row: a trainer that
replays the row has the policy to which the logprob belongs. A later turn that reports the row again either has it from its
cache, or has read the prompt again, on another worker or with other weights: those decisions did not affect the sample. (Later
turns may have attended to their own reading of the context; one array can hold only one of them.)

**Rows that no turn reported are -1**, and `parts` names the turns that reported the others. Nothing is computed, moved or
repeated to fill a gap. If the turn that sampled reported nothing, a later turn's row takes its place, under the later turn's
name.

**The width is computed.** No value has more rows than its turn has tokens less one, and all rows are equally wide: the width
is at least the largest of `numbers / (tokens - 1)`, and exactly that if some turn reported all of its rows, which is the
default of every request. If this is not a whole number, or does not divide another turn's numbers, the values are not joined.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

ROW_FIELDS = ("routed_experts", "indexer_topk")
"""The fields of `meta_info` that are such arrays; the shape of others is unknown."""
TOP_P: Final = "top_p"
"""The field of an answer with the tokens that top-p kept; it is not an array per token."""

MISSING = -1
"""Each number of a row that no turn reported."""

_NUMBER = np.dtype("<i4")
_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_PIECE = 48 * 1024  # bytes: 64 KiB of base64, a fraction of a millisecond


@dataclass(frozen=True, slots=True)
class TurnRows:
    """The array that a worker reported for one turn.

    Attributes:
        generation_id: of the turn.
        tokens: the number of tokens of its prompt and its reply.
        kept: how many of these the branch contains: fewer if it leaves out a stop token.
        value: the raw field.
    """

    generation_id: str
    tokens: int
    kept: int
    value: Raw


@dataclass(frozen=True, slots=True)
class ReportedRows:
    """Rows `start` to `end` of an array, as one turn reported them; `begin` is the first row in its base64."""

    generation_id: str
    start: int
    end: int
    begin: int
    base64: memoryview


@dataclass(frozen=True, slots=True)
class PerTokenArray:
    """Row `i` belongs to token `i` of `prompt_ids + response_ids`; the last token has none.

    Attributes:
        rows: the number of tokens less one.
        width: int32 numbers in a row, `layers * top_k`.
        parts: in order, without overlaps. Rows in none of them are `MISSING`.
    """

    rows: int
    width: int
    parts: tuple[ReportedRows, ...]

    def described(self, name: str = "generation_id") -> dict[str, Any]:
        """Return everything but the numbers, ready to be encoded as JSON. `name` is the key of a turn's id."""
        reported = [{name: one.generation_id, "start": one.start, "end": one.end} for one in self.parts]
        return {"dtype": "int32", "shape": [self.rows, self.width], "told": reported}

    def array(self) -> NDArray[np.int32]:
        return np.frombuffer(b"".join(self._pieces()), _NUMBER).reshape(self.rows, self.width)

    def as_base64(self) -> Iterator[bytes]:
        """Yield the numbers as the worker writes them, in pieces that take little time."""
        held = b""
        for piece in self._pieces():
            held += piece
            whole = len(held) // 3 * 3  # padding may only be at the end
            yield binascii.b2a_base64(held[:whole], newline=False)
            held = held[whole:]
        yield binascii.b2a_base64(held, newline=False)

    def _pieces(self) -> Iterator[bytes]:
        size, at = self.width * _NUMBER.itemsize, 0
        for part in self.parts:
            yield from _missing((part.start - at) * size)
            yield from _decoded(part.base64, (part.start - part.begin) * size, (part.end - part.begin) * size)
            at = part.end
        yield from _missing((self.rows - at) * size)


def joined(turns: Sequence[TurnRows], tokens: int, width: int | None = None) -> PerTokenArray | None:
    """Join the arrays of a branch's turns; None if their shape cannot be found.

    Args:
        turns: the turns of the branch's chain that reported an array, first turn first.
        tokens: the number of tokens of the whole chain.
        width: the numbers in a row of each of them, where it is known.
    """
    texts = [_base64(turn.value) for turn in turns]
    counts = [0 if text is None else _numbers(text) for text in texts]
    width = width or _width(counts, [turn.tokens - 1 for turn in turns])
    if width is None:
        return None
    parts: list[ReportedRows] = []
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
            parts.append(ReportedRows(turn.generation_id, low, high, begin, text))
    parts.sort(key=lambda part: part.start)
    return PerTokenArray(tokens - 1, width, tuple(parts))


def _width(counts: Sequence[int], most_rows: Sequence[int]) -> int | None:
    """Return the numbers in a row, for values of `counts` numbers in at most `most_rows` rows."""
    reported = [(count, rows) for count, rows in zip(counts, most_rows, strict=True) if count]
    if not reported or min(rows for _, rows in reported) < 1:
        return None
    width = max(-(-count // rows) for count, rows in reported)
    whole = any(count == width * rows for count, rows in reported)
    return width if whole and all(count % width == 0 for count, _ in reported) else None


def _claimed(
    gaps: Sequence[tuple[int, int]], low: int, high: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the parts of the gaps that `low` to `high` fills, and the gaps that are left."""
    new, left = [], []
    for start, end in gaps:
        first, last = max(start, low), min(end, high)
        if first >= last:
            left.append((start, end))
            continue
        new.append((first, last))
        left += [gap for gap in ((start, first), (last, end)) if gap[0] < gap[1]]
    return new, left


def count_in(value: Raw) -> int | None:
    """Return the number of int32 numbers in a JSON string of base64, by its length; None for anything else."""
    text = _base64(value)
    return None if text is None else _numbers(text)


def numbers_from(value: Raw, first: int) -> bytes | None:
    """Return the little-endian int32 numbers of a JSON string of base64, from number `first` on; None for anything else.

    What precedes them is not decoded or checked.
    """
    text = _base64(value)
    if text is None:
        return None
    begin, end = first * _NUMBER.itemsize, _bytes(text)
    return b"".join(_decoded(text, begin, end)) if _is_base64(text, begin, end) else None


def numbers_in(name: str, value: Raw) -> bytes | None:
    """Return the little-endian int32 numbers of a field that is such an array; None for any other, or if `written` differs."""
    text = _base64(value) if name in ROW_FIELDS else None
    if text is None:
        return None
    try:
        numbers = binascii.a2b_base64(text)
    except binascii.Error:
        return None
    return numbers if written(numbers) == bytes(value) else None


def written(numbers: bytes) -> bytes:
    """Return numbers as the worker writes them: a JSON string of base64."""
    return b'"%b"' % binascii.b2a_base64(numbers, newline=False)


# Base64 ----------------------------------------------------------------------------------------------------------------


def _base64(value: Raw) -> memoryview | None:
    """Return the inside of a JSON string with the length of base64 of whole numbers; None for anything else."""
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
    """Return the place of bytes in base64: four letters hold three bytes."""
    return slice(begin // 3 * 4, -(-end // 3) * 4)


def _is_base64(text: memoryview, begin: int, end: int) -> bool:
    """Whether only letters of base64 write these bytes. The rest is not read: a value may have 100 MB."""
    group = _group(begin, end)
    padding = _bytes(text) // 3 * 4  # only the group that begins here may be padded
    letters, rest = bytes(text[group.start : min(group.stop, padding)]), bytes(text[padding : group.stop])
    return not letters.translate(None, _LETTERS) and not rest.rstrip(b"=").translate(None, _LETTERS)


def _decoded(text: memoryview, begin: int, end: int) -> Iterator[bytes]:
    for low in range(begin, end, _PIECE):
        high = min(low + _PIECE, end)
        skipped = low % 3
        yield binascii.a2b_base64(text[_group(low, high)])[skipped : skipped + high - low]


def _missing(size: int) -> Iterator[bytes]:
    filler = np.full(_PIECE // _NUMBER.itemsize, MISSING, _NUMBER).tobytes()
    for low in range(0, size, _PIECE):
        yield filler[: min(_PIECE, size - low)]
