"""Ids and the characters they spell, by table.

A table id -> bytes fits both families of tokenizers that engines serve: byte-level BPE (every id is a run of bytes, in an
alphabet of printable stand-ins) and SentencePiece (pieces with `▁` for a space, and `<0xXX>` for single bytes). Bytes
determine where every token ends: the token that holds a character's first byte *begins* the character, and

    ends[i] = characters begun by tokens 0..i

so the tokens of one character share an end and go together, and `searchsorted(ends, cut, "right")` is the whole rule for a
cut, once a token is raised to the end of the token that finishes its last character (a token may finish one character and
go on with whole ones: `EC 9E`, `88 EC 8A B5`). That is one vectorised sum if the bytes are valid UTF-8. If not, decoders write
`�`, and the slow path counts like them: a lossy decoder one per maximal broken part, SentencePiece one per byte of a broken
run.
"""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from middleware_hub.spans.chain import SpanFlag, TokenSpan

REPLACEMENT = "\ufffd"

_AT_ONCE = 32_768
"""Ids that are spelled in one call: a call holds up all other threads, whichever thread makes it."""


class Vocabulary:
    """The spelling of every id. Implements `spans.Measure`.

    Args:
        pieces: id -> bytes, complete for ids the tokenizer knows.
        special: ids that `skip_special_tokens` leaves out of a text.
        boundaries: ids of added tokens after which encoding is provably compositional.
        added: ids that an encoder matches in a text before any other step, whatever surrounds them.
        byte_ids: SentencePiece's byte tokens, empty for byte-level vocabularies.
        strips_lead: whether its decoder removes a leading space.
    """

    def __init__(
        self,
        pieces: Mapping[int, bytes],
        *,
        special: Iterable[int],
        boundaries: Iterable[int] = (),
        added: Iterable[int] = (),
        byte_ids: Collection[int] = (),
        strips_lead: bool = False,
    ) -> None:
        self.strips_lead = strips_lead
        self.known = len(pieces)
        """The number of ids that the tokenizer knows."""
        size = max(pieces) + 1
        self._pieces = [pieces.get(i, b"") for i in range(size)]
        ends = np.cumsum([len(piece) for piece in self._pieces])
        begins = np.frombuffer(b"".join(self._pieces), dtype=np.uint8) & 0xC0 != 0x80
        # One more entry than there are ids, for ids beyond the table, which decoders skip too.
        self._begun = np.zeros(size + 1, dtype=np.int32)
        self._begun[:size] = np.diff(np.concatenate(([0], np.cumsum(begins)))[ends], prepend=0)
        # SentencePiece's byte tokens are one byte long: none finishes one character and begins another.
        joins = [] if byte_ids else [i for i, piece in enumerate(self._pieces) if piece and piece[0] & 0xC0 == 0x80]
        self._joins = _mask(joins, size)
        self._special = _mask(special, size)
        self._spelled = np.array([*self._pieces, b""], dtype=object)
        self._spelled_if_skipping = np.where(self._special, b"", self._spelled)
        self._boundary = _mask(boundaries, size)
        self._bytes = frozenset(byte_ids)
        literals = sorted({self.literal(i) for i in added} - {""}, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, literals)) or r"(?!)")
        self._reach = max(map(len, literals), default=1) - 1
        self.special_ids = frozenset(int(i) for i in np.flatnonzero(self._special))
        self.open_ends = frozenset([*_open_ends(self._pieces), *self.special_ids, *self._bytes])
        """Ids behind which a text may end with U+FFFD: inside of a character, or as the tokens before them do."""

        self.size = size
        """The number of the model's ids, if known; models pad their vocabulary."""
        self.certain = False
        """Whether `size` is the model's. If not, an id beyond it may be one that a worker sampled."""

    def __len__(self) -> int:
        return len(self._pieces)

    def learn(self, ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Accept ids that a worker sampled as valid, whatever the tokenizer's folder says."""
        if len(ids):
            largest = np.maximum.reduce(ids if isinstance(ids, np.ndarray) else _as_array(ids))
            self.size = max(self.size, int(largest) + 1)

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of one id; empty for an unknown one."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def pieces(self, ids: NDArray[np.int32]) -> list[bytes]:
        """Return the bytes of each id; empty for unknown ones."""
        # As unsigned numbers, negative ids too are beyond the table, and get its last entry.
        found: list[bytes] = self._spelled.take(ids.view(np.uint32), mode="clip").tolist()
        return found

    def literal(self, token_id: int) -> str:
        """Return the text of one id on its own."""
        return self.piece(token_id).decode("utf-8", "replace")

    def spell(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of ids in their context; no dummy space is removed, no space is inserted."""
        joined = self._joined(ids, skip_special)
        if not self._bytes:
            return joined.decode("utf-8", "replace")
        try:
            return joined.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(self._spell_runs(ids, skip_special))

    def lossy(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of ids with one `�` per broken character, whatever the decoder does."""
        return self._joined(ids, skip_special).decode("utf-8", "replace")

    def spells(self, ids: Sequence[int], text: str, *, skip_special: bool = False) -> bool:
        """Return whether the bytes of ids are exactly this text."""
        return self._joined(ids, skip_special) == text.encode()

    def without_leading_bytes(self, ids: Sequence[int]) -> Sequence[int]:
        """Return ids without the byte tokens that they begin with."""
        return ids[next((at for at, i in enumerate(ids) if i not in self._bytes), len(ids)) :]

    def _joined(self, ids: Sequence[int], skip_special: bool) -> bytes:
        table = self._spelled_if_skipping if skip_special else self._spelled
        # As unsigned numbers, negative ids too are beyond the table, and get its last entry.
        numbers = _as_array(ids).view(np.uint32)
        if len(numbers) <= _AT_ONCE:
            return b"".join(table.take(numbers, mode="clip").tolist())
        begins = range(0, len(numbers), _AT_ONCE)
        return b"".join([b"".join(table.take(numbers[at : at + _AT_ONCE], mode="clip").tolist()) for at in begins])

    def _spell_runs(self, ids: Sequence[int], skip_special: bool) -> Iterable[str]:
        for run, broken in self._runs(ids, skip_special):
            yield REPLACEMENT * len(run) if broken else self._joined(run, False).decode("utf-8", "replace")

    def _runs(self, ids: Sequence[int], skip_special: bool) -> Iterable[tuple[list[int], bool]]:
        """Yield ids cut where byte tokens begin and end, and whether a run of byte tokens is not valid UTF-8 as a whole."""
        run: list[int] = []
        for i in ids:
            if skip_special and i in self.special_ids:
                continue  # the decoder never sees it, so a run goes on
            if run and (i in self._bytes) != (run[-1] in self._bytes):
                yield run, self._broken(run)
                run = []
            run.append(i)
        if run:
            yield run, self._broken(run)

    def _broken(self, run: list[int]) -> bool:
        if run[0] not in self._bytes:
            return False
        try:
            self._joined(run, False).decode("utf-8")
        except UnicodeDecodeError:
            return True
        return False

    # Where tokens end ----------------------------------------------------------------------------------------------------

    def ends(self, span: TokenSpan) -> NDArray[np.int32]:
        """Return the character ends of a span's tokens, relative to its start, and keep them with the span."""
        if span.ends is not None:
            return np.frombuffer(span.ends, dtype=np.int32)
        if span.flags & SpanFlag.WHOLE:
            return np.full(span.count, span.width, dtype=np.int32)
        table = self._within(np.frombuffer(span.ids, dtype=np.int32))
        widths = self._begun[table]
        if span.flags & SpanFlag.SKIPS_SPECIAL:
            widths[: span.visible][self._special[table[: span.visible]]] = 0
        if span.flags & SpanFlag.BOS:
            widths[0] = 0
        ends = self._raised(np.cumsum(widths, dtype=np.int32), self._joins[table])
        if span.flags & SpanFlag.DUMMY:
            ends = np.maximum(ends - 1, 0, dtype=np.int32)
        span.ends = ends.tobytes()
        return ends

    def begun(self, ids: Sequence[int], *, skip_special: bool = False) -> NDArray[np.int32]:
        """Return the ends of ids that spell valid UTF-8: a running sum over a table."""
        table = self._within(_as_array(ids))
        widths = self._begun[table]
        if skip_special:
            widths[self._special[table]] = 0
        return self._raised(np.cumsum(widths, dtype=np.int32), self._joins[table])

    @staticmethod
    def _raised(ends: NDArray[np.int32], continues: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Raise the ends of tokens that share a character to the last end. `continues`: which continue an open character."""
        if not continues.any():
            return ends
        has_text = continues | (np.diff(ends, prepend=np.int32(0)) > 0)
        shares = False
        for index in range(len(ends) - 1, -1, -1):
            if shares:
                ends[index] = ends[index + 1]
            if has_text[index]:
                shares = bool(continues[index])
        return ends

    def counted(self, ids: Sequence[int], *, skip_special: bool = False) -> NDArray[np.int32]:
        """Return the ends of any ids: decoded token by token, counting like the decoder where bytes are not UTF-8."""
        ends: list[int] = []
        if not self._bytes:
            decoder, characters = _Decoder(), 0
            continues: list[bool] = []
            for i in ids:
                piece = b"" if skip_special and i in self.special_ids else self.piece(i)
                continues.append(bool(decoder.open and piece) and _goes_on(decoder.open, piece[:1]))
                characters += len(decoder.decode(piece))
                ends.append(characters + bool(decoder.open))
            return self._raised(np.array(ends, dtype=np.int32), np.array(continues, dtype=np.bool_))
        kept = [i for i in ids if not (skip_special and i in self.special_ids)]
        widths: list[int] = []
        for run, broken in self._runs(kept, False):
            widths += [1] * len(run) if broken else [int(self._begun[self._index(i)]) for i in run]
        upcoming, characters = iter(widths), 0
        for i in ids:
            if not (skip_special and i in self.special_ids):
                characters += next(upcoming)
            ends.append(characters)
        return np.array(ends, dtype=np.int32)

    def textless(self, span: TokenSpan, index: int) -> bool:
        """Return whether a token has no text: a special token that vanished, or an id that spells nothing."""
        token_id = int.from_bytes(span.ids[4 * index : 4 * index + 4], "little", signed=True)
        if span.flags & SpanFlag.SKIPS_SPECIAL and token_id in self.special_ids:
            return True
        if self.piece(token_id):
            return False
        # SGLang shows a text for an id that its tokenizer does not know: see `align_reply`.
        ends = span.ends and memoryview(span.ends).cast("i")
        return not ends or ends[index] == (ends[index - 1] if index else 0)

    def last_boundary(self, span: TokenSpan, count: int) -> int:
        if span.flags & SpanFlag.WHOLE:
            return 0
        found = self._boundaries(np.frombuffer(span.ids, dtype=np.int32)[:count])
        # A BOS that the text does not spell is no boundary of the text.
        unspelled = len(found) and found[-1] == 0 and span.flags & SpanFlag.BOS
        return int(found[-1]) + 1 if len(found) and not unspelled else 0

    def boundaries(self, ids: NDArray[np.int32]) -> NDArray[np.intp]:
        """Return the number of ids before each place at which a text may be cut without changing its encoding.

        These places follow added tokens that the text spells (see `Measure.last_boundary`).
        """
        return self._boundaries(ids) + 1

    def _boundaries(self, ids: NDArray[np.int32]) -> NDArray[np.intp]:
        """Return the places of added tokens after which encoding is compositional."""
        return self._boundary.take(ids.view(np.uint32), mode="clip").nonzero()[0]  # see `pieces`

    def straddled(self, text: str, position: int) -> int | None:
        window = max(0, position - self._reach)
        for found in self._added.finditer(text, window, position + self._reach):
            if found.start() >= position:
                break
            if found.end() > position:
                return found.start()
        return None

    def _within(self, ids: NDArray[np.integer]) -> NDArray[np.integer]:
        if len(ids) and ids.min() >= 0 and ids.max() < len(self._pieces):
            return ids
        return np.where((ids >= 0) & (ids < len(self._pieces)), ids, len(self._pieces))

    def _index(self, token_id: int) -> int:
        return token_id if 0 <= token_id < len(self._pieces) else len(self._pieces)


def _as_array(ids: Sequence[int]) -> NDArray[np.int32]:
    try:
        return np.frombuffer(ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids), dtype=np.int32)
    except OverflowError:
        return np.array([i if abs(i) < 2**31 else -1 for i in ids], dtype=np.int32)


class _Decoder:
    """Decodes UTF-8 piece by piece, and replaces each broken part as soon as it is certain.

    Python's own decoder keeps the first two bytes of a surrogate (ED A0 to ED BF) until a third one comes, for callers that let
    surrogates pass. Here they are no character, whatever follows, and so they are two broken parts.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def open(self) -> bytes:
        """Return the bytes that may yet become a character."""
        return self._decoder.getstate()[0]

    def decode(self, piece: bytes) -> str:
        """Return the characters that are certain now."""
        text, left = self._decoder.decode(piece), self.open
        if len(left) == 2 and left[0] == 0xED and left[1] >= 0xA0:
            self._decoder.reset()
            text += 2 * REPLACEMENT
        return text


def _goes_on(open_bytes: bytes, byte: bytes) -> bool:
    """Return whether a byte continues the open character instead of breaking it."""
    return REPLACEMENT not in _Decoder().decode(open_bytes + byte)


def _open_ends(pieces: Sequence[bytes]) -> Iterable[int]:
    """Return the ids whose bytes may end inside of a character, or end with U+FFFD, and the ids without bytes."""
    last = np.frombuffer(b"".join(piece[-3:].rjust(3, b"\xff") for piece in pieces), dtype=np.uint8).reshape(-1, 3)
    third, second, first = last.T
    # A character of two bytes begins with C0 or more, of three with E0, of four with F0. FF is in front of a short piece.
    is_open = (first >= 0xC0) | ((first >= 0x80) & ((second >= 0xE0) | ((second & 0xC0 == 0x80) & (third >= 0xF0))))
    found: list[int] = np.flatnonzero(is_open | np.all(last == list(REPLACEMENT.encode()), axis=1)).tolist()
    return found


def _mask(ids: Iterable[int], size: int) -> NDArray[np.bool_]:
    mask = np.zeros(size + 1, dtype=np.bool_)
    mask[[i for i in ids if 0 <= i < size]] = True
    return mask
