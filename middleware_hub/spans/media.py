"""Images in token sequences: a picture's mark in a text, and its *media span* in a chain.

A vision-language model reads a picture as a run of one placeholder id, as long as the picture is large. Three forms of one
prompt follow from that, and one text:

    compact ids     [<|vision_start|>][pad][<|vision_end|>][Look]                       a worker is sent these, and the picture
    expanded ids    [<|vision_start|>][pad][pad][pad][pad][<|vision_end|>][Look]        the engine computes with these
    keyed text      <|vision_start|>MARK<|vision_end|>Look                              a chain is found by this

- **A chain holds expanded ids**, because the engine consumed these. How long the run of a picture is, the engine tells with
  its reply; no image processor is needed. Until then the length is unknown, and the run has one id.
- **Compact ids are made by collapsing media spans**, never equal neighbours: a placeholder that the model sampled is a token
  like any other.
- **A mark stands for the picture in every text that is a key**: U+FDD0, the digest of the file, U+FDD1. Two texts with
  different pictures are two texts, wherever texts are compared. A client's text has neither of these noncharacters.
- All ids of a run end at the end of the mark. So no cut of a text falls inside the run: it is reused whole or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from middleware_hub.spans.chain import ID_BYTES, SpanFlag, TokenSpan, links

UNKNOWN = 1
"""The length of a picture that no engine has told yet. Every family's least length is greater."""
OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode, for private use inside of a program (Unicode 16, section 23.7)."""
_MARK = re.compile(f"{OPEN}(sha256:[0-9a-f]{{64}}){CLOSE}")
MARK_LENGTH = len(OPEN) + len("sha256:") + 64 + len(CLOSE)


class MediaSpan(NamedTuple):
    """The run of ids of one picture: `length` ids from `start` on. `digest`: `sha256:` and that of the encoded file."""

    start: int
    length: int
    digest: str


def mark(digest: str) -> str:
    """Return what stands for a picture in a keyed text."""
    return f"{OPEN}{digest}{CLOSE}"


def is_reserved(text: str) -> bool:
    """Return whether a text holds a character of marks. A client's text must not: it would become a picture."""
    return OPEN in text or CLOSE in text


def digests_in(keyed: str) -> list[str]:
    """Return the digests of the pictures of a keyed text, in order."""
    return _MARK.findall(keyed) if OPEN in keyed else []


def keyed_text(text: str, placeholder: str, digests: Sequence[str]) -> str:
    """Return a text with the k-th placeholder replaced by the mark of the k-th picture. There are as many of both."""
    parts = text.split(placeholder)
    assert len(parts) == len(digests) + 1
    return parts[0] + "".join([mark(digest) + part for digest, part in zip(digests, parts[1:], strict=True)])


def plain_text(keyed: str, placeholder: str) -> str:
    """Return a keyed text with a placeholder in place of each mark: the text that a tokenizer encodes, and a client reads."""
    return _MARK.sub(placeholder, keyed) if OPEN in keyed else keyed


def plain_length(keyed: str, placeholder: str, end: int) -> int:
    """Return the length in plain text of the first `end` characters of a keyed text, without half of a mark."""
    return end if OPEN not in keyed else len(plain_text(keyed[: outside_mark(keyed, end)], placeholder))


def outside_mark(keyed: str, end: int) -> int:
    """Return `end`, or the beginning of the mark that it stands in."""
    begin = keyed.rfind(OPEN, 0, end)
    return begin if begin >= 0 and keyed.find(CLOSE, begin, end) < 0 else end


def media_of(span: TokenSpan) -> list[MediaSpan]:
    """Return the media spans of one span. Their starts count from its beginning."""
    return [MediaSpan(*one) for one in span.media]


def settle(span: TokenSpan, lengths: Mapping[str, int]) -> None:
    """Give the pictures of a context the lengths that an engine has told, before anything builds on it.

    This is the only change that the tokens of a span ever see: until then nobody knows how many they are.
    """
    media, more = list[tuple[int, int, str]](), 0
    counts = np.ones(span.count, dtype=np.int64)
    for start, length, digest in span.media:
        wider = lengths.get(digest, length) - length if length == UNKNOWN else 0
        counts[start] += wider
        media.append((start + more, length + wider, digest))
        more += wider
    if more:
        span.ids = np.repeat(np.frombuffer(span.ids, dtype=np.int32), counts).tobytes()
        span.count = span.visible = len(span.ids) // ID_BYTES
        span.media = tuple(media)


def chain_media(span: TokenSpan | None, take: int) -> list[MediaSpan]:
    """Return the media spans of a chain, in order. Their starts count from the beginning of the chain."""
    found: list[MediaSpan] = []
    for part, count in links(span, take):
        if part.media:
            found += [
                MediaSpan(part.offset + start, length, digest)
                for start, length, digest in reversed(part.media)
                if start + length <= count
            ]
    found.reverse()
    return found


def spelled_keyed(spell: Callable[[Sequence[int]], str], packed: bytes, media: Sequence[MediaSpan]) -> str:
    """Return the keyed text that expanded ids spell. `spell` returns the text of ids."""
    ids = memoryview(packed).cast("i")
    if not media:
        return spell(ids.tolist())
    parts, done = list[str](), 0
    for start, length, digest in media:
        parts += (spell(ids[done:start].tolist()), mark(digest))
        done = start + length
    return "".join((*parts, spell(ids[done:].tolist())))


def collapsed(packed: bytes, media: Iterable[MediaSpan]) -> bytes:
    """Return expanded ids with one id for each media span: the compact ids."""
    parts, done = [], 0
    for start, length, _ in media:
        parts.append(packed[ID_BYTES * done : ID_BYTES * (start + 1)])
        done = start + length
    return b"".join((*parts, packed[ID_BYTES * done :]))


def without_runs(
    ids: Sequence[int], placeholder: int, digests: Sequence[str], lengths: Mapping[str, int]
) -> tuple[list[int], list[int]]:
    """Return the compact ids of ids with runs, and how many placeholders each picture had. Callers compare the numbers.

    A run belongs to the next picture, or to the next ones if their known lengths add up to it; the last of these may be of an
    unknown length. A run of one placeholder is a picture that is compact already.

    Args:
        ids: those of a prompt; each run of `placeholder` is as long as its pictures.
        placeholder: the id.
        digests: of the pictures, in order.
        lengths: by digest, as far as they are known.
    """
    pads = np.flatnonzero(np.fromiter(ids, dtype=np.int64, count=len(ids)) == placeholder)
    found, counts, done = list[int](), list[int](), 0
    for run in np.split(pads, np.flatnonzero(np.diff(pads) > 1) + 1) if len(pads) else ():
        found += ids[done : run[0]]
        shares = _shares(len(run), digests, len(counts), lengths)
        counts += shares
        found += [placeholder] * len(shares)
        done = int(run[-1]) + 1
    return [*found, *ids[done:]], counts


def _shares(run: int, digests: Sequence[str], first: int, lengths: Mapping[str, int]) -> list[int]:
    """Return how a run divides between the pictures from `first` on."""
    shares, left = list[int](), run
    for number in range(first, len(digests)):
        shares.append(lengths.get(digests[number], left))
        left -= shares[-1]
        if left <= 0:
            break
    return [run] if left else shares


class Pictures(NamedTuple):
    """The pictures of a prompt.

    Attributes:
        placeholder: the text that stands for one, where an engine encodes it.
        digests: of each, in order.
        lengths: by digest, how many ids an engine makes of it, as far as that is known.
    """

    placeholder: str
    digests: Sequence[str]
    lengths: Mapping[str, int]


class Encoded(NamedTuple):
    """The ids of a text with pictures, before their lengths are known: compact, packed.

    Attributes:
        ids: one placeholder id for each picture.
        ends: int32 ends in the keyed text, one for each id; None if they are unknown.
        flags: see `SpanFlag`.
        pictures: the place of each picture among `ids`, with its digest.
    """

    ids: bytes
    ends: NDArray[np.int32] | None
    flags: int
    pictures: tuple[tuple[int, str], ...]

    def after(self, count: int, start: int) -> Encoded:
        """Return the ids behind the first `count`, whose text begins at the character `start`."""
        pictures = tuple((place - count, digest) for place, digest in self.pictures if place >= count)
        ends = None if self.ends is None else np.maximum(self.ends[count:] - start, 0)
        flags = self.flags & ~(SpanFlag.BOS | SpanFlag.DUMMY) if count else self.flags
        return Encoded(self.ids[ID_BYTES * count :], ends, flags, pictures)

    def expanded(self, lengths: Mapping[str, int]) -> tuple[bytes, bytes | None, tuple[MediaSpan, ...]]:
        """Return ids, ends and media spans with these lengths of pictures. A picture without one keeps its one id."""
        counts = np.ones(len(self.ids) // ID_BYTES, dtype=np.int64)
        media, more = list[MediaSpan](), 0
        for place, digest in self.pictures:
            length = lengths.get(digest, 1)
            counts[place] = length
            media.append(MediaSpan(place + more, length, digest))
            more += length - 1
        ids = np.repeat(np.frombuffer(self.ids, dtype=np.int32), counts).tobytes()
        return ids, None if self.ends is None else np.repeat(self.ends, counts).tobytes(), tuple(media)


def keyed_ends(ends: NDArray[np.int32], keyed: str, placeholder: str) -> NDArray[np.int32]:
    """Return ends in a keyed text for ends in its plain text."""
    closes = [found.end() for found in _MARK.finditer(keyed)]
    wider = MARK_LENGTH - len(placeholder)
    plain = np.array([close - wider * number for number, close in enumerate(closes, 1)], dtype=np.int32)
    moved: NDArray[np.int32] = ends + (wider * np.searchsorted(plain, ends, side="right")).astype(np.int32)
    return moved


class UnlikePromptError(Exception):
    """The ids that an engine consumed are not those that it was sent, with a run for each picture."""


def learned(
    sent: bytes,
    media: Sequence[MediaSpan],
    unknown: Iterable[str],
    returned: bytes,
    least: int,
    places: Sequence[tuple[int, int]] | None = None,
) -> dict[str, int]:
    """Return the lengths of pictures that an engine's ids tell.

    Args:
        sent: packed ids; the picture of an unknown length has one id, every other its whole run.
        media: the media spans in `sent`.
        unknown: the digests of the pictures without a known length.
        returned: the packed ids that the engine computed with.
        least: the fewest ids that a picture can have.
        places: offset and length of each picture in `returned`, if the engine tells them.

    Raises:
        UnlikePromptError: the two do not fit together, or do not tell where one picture ends and the next begins. The same
            picture twice has equal runs; for two others, the rule of a family would be a guess.
    """
    ours, theirs = np.frombuffer(sent, dtype=np.int32), np.frombuffer(returned, dtype=np.int32)
    pads = {one.start: one for one in media}
    asked, found = set(unknown), dict[str, int]()
    at = done = 0
    for start, _, digest in media:
        if digest not in asked:
            continue
        length = found.get(digest)
        between = start - done
        if not np.array_equal(ours[done:start], theirs[at : at + between]):
            raise UnlikePromptError(f"the ids before the picture at {start} are others")
        at, done = at + between, start + 1
        if length is None:
            placeholder, behind, same = ours[start], done, 1
            while behind < len(ours) and ours[behind] == placeholder:
                if behind in pads and pads[behind].digest in asked and pads[behind].digest not in found:
                    if pads[behind].digest != digest:
                        raise UnlikePromptError("two pictures of unknown length stand side by side")
                    same += 1
                behind += 1
            run = at
            while run < len(theirs) and theirs[run] == placeholder:
                run += 1
            # If it is no multiple, ids are left over behind the last picture.
            length = found[digest] = (run - at - (behind - done - (same - 1))) // same
        if length < least:
            raise UnlikePromptError(
                f"a picture has {length} ids, fewer than the {least} of the smallest: it was left out"
            )
        if not (theirs[at : at + length] == ours[start]).all() or at + length > len(theirs):
            raise UnlikePromptError(f"the picture at {start} has not the {length} ids of the same picture before")
        at += length
    if not np.array_equal(ours[done:], theirs[at:]):
        raise UnlikePromptError("the ids behind the last picture are others" if media else "the ids are others")
    if places is not None and list(places) != _places(media, asked, found):
        raise UnlikePromptError("the engine says that its pictures are elsewhere")
    return found


def _places(media: Sequence[MediaSpan], unknown: Container[str], lengths: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return offset and length of each picture after the lengths of unknown ones have been learned."""
    places, more = list[tuple[int, int]](), 0
    for start, length, digest in media:
        wide = lengths[digest] if digest in unknown else length
        places.append((start + more, wide))
        more += wide - length
    return places
