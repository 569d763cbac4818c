"""A chain as the inspector reads it: windows of its tokens, found by their offsets.

Spans never change, so a chain stays as it was when it was taken, whatever is evicted meanwhile. It holds only pointers; the
cost of a window depends on its size, not on its place.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from middleware_hub.spans.chain import ID_BYTES, SpanFlag, TokenSpan, reasons_of, unpack_logprobs
from middleware_hub.spans.media import MediaSpan
from middleware_hub.spans.trajectory import SampledTurn, version_runs
from middleware_hub.tokenizer.vocabulary import Vocabulary

LOOK_BACK = 64
"""Tokens before a window that are read to know whether the window begins inside a character."""


class SpanSlice(NamedTuple):
    """The tokens of one span in a chain: `start` to `end`, half-open."""

    span: TokenSpan
    start: int
    end: int


class CompactIds(NamedTuple):
    """The ids of a chain with one id for each picture, as its text spells them.

    `places`: where each of them begins in the chain, and the chain's length behind them; None if it is where it stands here.
    """

    ids: NDArray[np.int32]
    places: NDArray[np.intp] | None

    def place(self, at: int) -> int:
        """Return where an id of these begins in the chain."""
        return at if self.places is None else int(self.places[at])

    def at(self, place: int) -> int:
        """Return the first id of these that begins at a place of the chain, or behind it."""
        return place if self.places is None else int(np.searchsorted(self.places, place))


class Chain:
    """One token sequence, from its first prompt to its end.

    Args:
        links: its spans, first one first, each with the number of its tokens in the chain.
        roles: of the contexts, if the messages are known.
        remarks: reasons of single spans, beside those of their flags.
    """

    def __init__(
        self,
        links: Sequence[tuple[TokenSpan, int]],
        roles: Mapping[TokenSpan, str] | None = None,
        remarks: Mapping[TokenSpan, Sequence[str]] | None = None,
    ) -> None:
        self.parts = [SpanSlice(span, span.offset, span.offset + take) for span, take in links if take]
        self.total = self.parts[-1].end if self.parts else 0
        self._starts = [part.start for part in self.parts]
        self._roles = roles or {}
        self._remarks = remarks or {}
        self._flags = 0
        for span, _ in links:
            self._flags |= span.flags & ~SpanFlag.DOUBTFUL
        self._doubtful = [span for span, _ in links if span.flags & SpanFlag.DOUBTFUL]

    def __len__(self) -> int:
        return self.total

    def between(self, start: int, end: int) -> Iterator[SpanSlice]:
        """Yield the parts that hold tokens of a window."""
        for number in range(max(0, bisect_right(self._starts, start) - 1), bisect_left(self._starts, end)):
            yield self.parts[number]

    def ids(self, start: int = 0, end: int | None = None) -> NDArray[np.int32]:
        """Return the token ids of a window."""
        end = self.total if end is None else end
        packed = [
            part.span.ids[
                ID_BYTES * (max(start, part.start) - part.start) : ID_BYTES * (min(end, part.end) - part.start)
            ]
            for part in self.between(start, end)
        ]
        return np.frombuffer(b"".join(packed), np.int32)

    @cached_property
    def media(self) -> list[MediaSpan]:
        """Its pictures, in order. Their starts count from its beginning."""
        return [
            MediaSpan(part.start + start, length, digest)
            for part in self.parts
            for start, length, digest in part.span.media
            if start + length <= part.end - part.start
        ]

    def compact(self) -> CompactIds:
        """Return its ids with one id for each picture."""
        ids = self.ids()
        if not self.media:
            return CompactIds(ids, None)
        kept = np.ones(len(ids) + 1, np.bool_)
        for start, length, _ in self.media:
            kept[start + 1 : start + length] = False
        return CompactIds(ids[kept[:-1]], np.flatnonzero(kept))

    def mask(self, start: int = 0, end: int | None = None) -> NDArray[np.bool_]:
        """Return which tokens of a window were sampled."""
        end = self.total if end is None else end
        found = np.zeros(max(0, end - start), np.bool_)
        for part in self.between(start, end):
            if part.span.sampled:
                found[max(part.start, start) - start : min(part.end, end) - start] = True
        return found

    @cached_property
    def sampled(self) -> int:
        """The number of sampled tokens."""
        return sum(part.end - part.start for part in self.parts if part.span.sampled)

    @cached_property
    def versions(self) -> list[str]:
        """The weight versions of its sampled tokens, in the order of their first appearance."""
        return list(dict.fromkeys(name for part in self.parts for name, _, _ in versions_in(part)))

    @property
    def reasons(self) -> list[str]:
        """Why it is not exact, or not in every way, as in a retrieval of its whole text."""
        unasked = any(one.flags & SpanFlag.UNASKED for one in self._doubtful)
        found = reasons_of(self._flags | (SpanFlag.UNASKED if unasked else SpanFlag.NONE))
        if self._lacks_logprobs:
            found.append("no_logprobs")
        return found

    def reasons_between(self, start: int, end: int) -> list[str]:
        """Return those of the reasons that the spans of a window have."""
        found: dict[str, None] = {}
        for span, _, _ in self.between(start, end):
            found.update(dict.fromkeys((*reasons_of(span.flags), *self._remarks.get(span, ()))))
            if span.sampled and span.logprobs is None:
                found["no_logprobs"] = None
        return list(found)

    @cached_property
    def _lacks_logprobs(self) -> bool:
        return any(part.span.sampled and part.span.logprobs is None for part in self.parts)

    @cached_property
    def replies(self) -> list[SampledTurn]:
        """The sampled replies in it, in order."""
        return [SampledTurn(*part) for part in self.parts if part.span.sampled]

    @cached_property
    def turns(self) -> list[dict[str, Any]]:
        """The sampled replies and the contexts between them, in order: together they are the whole chain."""
        found: list[dict[str, Any]] = []
        for part in self.parts:
            if part.span.sampled:
                found.append({**SampledTurn(*part).described(), "role": "assistant", "sampled": True})
                continue
            role = self._roles.get(part.span, "context" if found else "prompt")
            if found and not found[-1]["sampled"] and found[-1]["role"] in (role, "prompt"):
                found[-1]["end"] = part.end
                continue
            named = {"request_id": None, "start": part.start, "end": part.end, "version": None, "finish": None}
            found.append({**named, "role": role, "sampled": False})
        return found

    @cached_property
    def logprobs(self) -> NDArray[np.float64]:
        """The logprobs of the sampled tokens that have one, in order."""
        found = [_logprobs(part.span)[: part.end - part.start] for part in self.parts if part.span.logprobs is not None]
        return np.concatenate(found) if found else np.zeros(0)

    def mean_logprob(self, start: int) -> float | None:
        """Return the mean logprob of the reply that begins at a token; None if it has no logprobs."""
        part = self.parts[bisect_left(self._starts, start)]
        if part.span.logprobs is None:
            return None
        return float(_logprobs(part.span)[: part.end - part.start].astype(np.float64).mean())

    def window(self, start: int, end: int, vocabulary: Vocabulary) -> dict[str, Any]:
        """Return the columns of a window: each has one entry for each token."""
        size = end - start
        logprobs: list[float | None] = [None] * size
        versions, turns = [-1] * size, [-1] * size
        known = {name: number for number, name in enumerate(self.versions)}
        for part in self.between(start, end):
            low, high = max(part.start, start), min(part.end, end)
            if part.span.logprobs is not None:
                numbers = _logprobs(part.span)[low - part.start : high - part.start]
                logprobs[low - start : high - start] = numbers.tolist()
            for name, begin, stop in versions_in(part):
                first, last = max(begin, start), min(stop, end)
                if first < last:
                    versions[first - start : last - start] = [known[name]] * (last - first)
        begins = self._turn_starts
        for number in range(max(0, bisect_right(begins, start) - 1), bisect_left(begins, end)):
            first, last = max(start, begins[number]), min(end, self.turns[number]["end"])
            turns[first - start : last - start] = [number] * (last - first)
        ids = self.ids(start, end)
        texts, broken = self._texts(start, end, vocabulary)
        return {
            "start": start,
            "end": end,
            "total": self.total,
            "ids": ids.tolist(),
            "texts": texts,
            "bytes": broken,
            "special": [start + at for at, one in enumerate(ids.tolist()) if one in vocabulary.special_ids],
            "mask": self.mask(start, end).astype(np.uint8).tolist(),
            "logprobs": logprobs,
            "versions": versions,
            "turns": turns,
        }

    @cached_property
    def _turn_starts(self) -> list[int]:
        return [turn["start"] for turn in self.turns]

    def _texts(self, start: int, end: int, vocabulary: Vocabulary) -> tuple[list[str], dict[str, str]]:
        """Return what each token adds to the text, and the bytes of tokens that are not whole characters, by offset."""
        before = max(0, start - LOOK_BACK)
        pieces = vocabulary.pieces(self.ids(before, end))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        lead = start - before
        for piece in pieces[_resume(pieces, lead) : lead]:
            decoder.decode(piece)
        texts: list[str] = []
        broken: dict[str, str] = {}
        for at, piece in enumerate(pieces[lead:], start):
            whole = not decoder.getstate()[0]
            texts.append(decoder.decode(piece))
            if piece and not (whole and _is_text(piece)):
                broken[str(at)] = piece.hex()
        return texts, broken


def _resume(pieces: Sequence[bytes], lead: int) -> int:
    """Return where to start decoding so that the state at `lead` is known: no character has more than four bytes."""
    size, at = 0, lead
    while at and size < 4:
        at -= 1
        size += len(pieces[at])
    return at


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _logprobs(span: TokenSpan) -> NDArray[np.floating[Any]]:
    assert span.logprobs is not None
    return unpack_logprobs(span.logprobs, span.count)


def versions_in(part: SpanSlice) -> Iterator[tuple[str, int, int]]:
    """Yield `(version, start, end)` over the sampled tokens of a part, in the chain's offsets."""
    if part.span.versions is not None:
        for version, start, end in version_runs(part.span.versions, part.end - part.start):
            yield version, part.start + start, part.start + end


def matches(
    chain: Chain, vocabulary: Vocabulary, needle: str | Sequence[int], first: int, most: int
) -> tuple[list[dict[str, int]], bool]:
    """Return where a text, or a sequence of ids, occurs in a chain from token `first` on, and whether there is more.

    At most `most` places are returned. In a text a picture is one placeholder, as clients write it.
    """
    find = (
        _text_finder(chain, vocabulary, needle, first) if isinstance(needle, str) else _ids_finder(chain, needle, first)
    )
    found: list[dict[str, int]] = []
    for start, end in find():
        if len(found) == most:
            return found, True
        found.append({"start": start, "end": end})
    return found, False


Finder = Callable[[], Iterator[tuple[int, int]]]


def _ids_finder(chain: Chain, needle: Sequence[int], first: int) -> Finder:
    def find() -> Iterator[tuple[int, int]]:
        wanted = np.array(needle, np.int32).tobytes()
        packed = chain.ids(first).tobytes()
        at = packed.find(wanted)
        while at >= 0:
            if at % ID_BYTES == 0:
                begin = first + at // ID_BYTES
                yield begin, begin + len(needle)
            at = packed.find(wanted, at + 1)

    return find


def _text_finder(chain: Chain, vocabulary: Vocabulary, needle: str, first: int) -> Finder:
    def find() -> Iterator[tuple[int, int]]:
        compact = chain.compact()
        skipped = compact.at(first)
        pieces = vocabulary.pieces(compact.ids[skipped:])
        ends = np.cumsum([len(piece) for piece in pieces])
        text, wanted = b"".join(pieces), needle.encode("utf-8", "surrogatepass")
        at = text.find(wanted)
        while at >= 0:
            begin = int(np.searchsorted(ends, at, "right"))
            end = int(np.searchsorted(ends, at + len(wanted), "left")) + 1
            yield compact.place(skipped + begin), compact.place(skipped + end)
            at = text.find(wanted, at + len(wanted))

    return find
