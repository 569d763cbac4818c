"""How ids lie over the text they were encoded from, or that an engine sent with them.

For a context the first that fits: the ids spell the text; they do but for a leading BOS; but for the dummy space behind
it; the tokenizer's own offsets (a normalizer changed characters); else nothing is known, and the span is cut only at its ends.

For a reply the ids have to explain the text, or the reply is not what it claims to be (a wrong `--tokenizer-path`):

    ids spell   "The answer is 4.<|im_end|>"         text "The answer is 4."      hidden tail: <|im_end|>
    ids spell   "Action: look\nObservation: I"       text "Action: look"          hidden tail: a stop string, and more
    ids spell   "caf" + half an é                    text "caf�" or "caf"         exact as a whole, never cut inside
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from middleware_hub.radix.node import HiddenToken
from middleware_hub.spans.chain import SpanFlag
from middleware_hub.tokenizer.vocabulary import REPLACEMENT, Vocabulary

Offsets = Callable[[], Sequence[tuple[int, int]] | None]
"""The tokenizer's own `(begin, end)` characters of every id, or None if it has none for these ids."""


class Alignment(msgspec.Struct, frozen=True):
    """See `spans.TokenSpan` for the fields; `tail` is the hidden tail of a reply."""

    flags: int
    ends: bytes | None = None
    visible: int | None = None
    tail: tuple[HiddenToken, ...] = ()


def align_context(
    vocabulary: Vocabulary, ids: Sequence[int], text: str, *, bos: Sequence[int], offsets: Offsets
) -> Alignment:
    """Align what was encoded from `text`, or given by a client whose ids spell it."""
    spelled = vocabulary.spell(ids)
    led = len(bos) == 1 and list(ids[:1]) == list(bos)
    bare = spelled[len(vocabulary.literal(bos[0])) :] if led else spelled
    for flag, candidate in (
        (SpanFlag.NONE, spelled),
        (SpanFlag.BOS, bare),
        (SpanFlag.DUMMY, spelled[1:] if spelled[:1] == " " else ""),
        (SpanFlag.BOS | SpanFlag.DUMMY, bare[1:] if led and bare[:1] == " " else ""),
    ):
        if candidate == text and (candidate or not text):
            if REPLACEMENT not in text:
                return Alignment(flag)
            ends = vocabulary.counted(ids)
            lead = (len(spelled) - len(bare) if flag & SpanFlag.BOS else 0) + bool(flag & SpanFlag.DUMMY)
            return Alignment(flag, np.maximum(ends - lead, 0).astype(np.int32).tobytes())
    own = offsets()
    if own is None or len(own) != len(ids):
        return Alignment(SpanFlag.WHOLE)
    return Alignment(SpanFlag.BOS if led else SpanFlag.NONE, _monotonic(own, len(text)).tobytes())


def _monotonic(offsets: Sequence[tuple[int, int]], length: int) -> NDArray[np.int32]:
    """Ends that never fall, leave no character between two tokens to nobody, and reach the end of the text."""
    if not offsets:
        return np.zeros(0, dtype=np.int32)
    begins = np.array([begin for begin, _ in offsets], dtype=np.int32)
    ends = np.array([end for _, end in offsets], dtype=np.int32)
    ends[:-1] = np.maximum(ends[:-1], begins[1:])
    ends[-1] = length
    ends = np.minimum(np.maximum.accumulate(ends), length)
    result: NDArray[np.int32] = ends.astype(np.int32)
    return result


def align_reply(
    vocabulary: Vocabulary, ids: Sequence[int], text: str, *, skips_special: bool, matched: int | str | None
) -> Alignment:
    """Align what a worker sampled with the text it sent.

    Args:
        vocabulary: what ids spell.
        ids: `output_ids`.
        text: the reply's text.
        skips_special: the request's `skip_special_tokens`.
        matched: `finish_reason.matched`: the stop token or stop string that ended it, if one did.

    Returns:
        An alignment with `MISMATCH` among its flags if the ids do not explain the text.
    """
    layout = SpanFlag.SKIPS_SPECIAL if skips_special else SpanFlag.NONE
    trimmed = ids[:-1] if ids and ids[-1] == matched else ids
    spelled = vocabulary.spell(ids, skip_special=skips_special)
    bare = spelled if trimmed is ids else vocabulary.spell(trimmed, skip_special=skips_special)
    # A decoder that is not shown what stands before the reply takes its first space for the dummy one, and takes it away.
    for lead in (0, 1) if vocabulary.strips_lead and spelled.startswith(" ") else (0,):
        found = _laid_over(vocabulary, ids, trimmed, spelled[lead:], bare[lead:], text, skips_special, matched, lead)
        if found is not None:
            return found
    for shown in (trimmed, ids):
        if _split_at_edges(vocabulary, shown, text, skips_special):
            visible = _without_textless(vocabulary, ids, len(shown), skips_special)
            flags = layout | SpanFlag.WHOLE | SpanFlag.SPLIT
            return Alignment(flags, None, visible, _spelled_alone(vocabulary, ids[visible:]))
    return Alignment(SpanFlag.WHOLE | SpanFlag.MISMATCH, None, len(ids))


def _laid_over(
    vocabulary: Vocabulary,
    ids: Sequence[int],
    trimmed: Sequence[int],
    spelled: str,
    bare: str,
    text: str,
    skips_special: bool,
    matched: int | str | None,
    lead: int,
) -> Alignment | None:
    """The alignment of ids that spell `spelled` (less a matched stop token: `bare`), if they explain the text.

    The first `lead` characters of what they spell were taken off.
    """
    layout = (SpanFlag.SKIPS_SPECIAL if skips_special else SpanFlag.NONE) | (SpanFlag.DUMMY if lead else SpanFlag.NONE)
    for shown, said in ((ids, spelled), (trimmed, bare)):
        if said == text:
            visible = _without_textless(vocabulary, ids, len(shown), skips_special)
            tail = _spelled_alone(vocabulary, ids[visible:])
            if REPLACEMENT not in text:
                return Alignment(layout, None, visible, tail)
            counted = np.maximum(vocabulary.counted(shown, skip_special=skips_special) - np.int32(lead), 0)
            return Alignment(layout, _hidden_ends(vocabulary, ids, visible, counted), visible, tail)
    if spelled.startswith(text) and _explained(spelled, text, matched):
        count = vocabulary.begun if REPLACEMENT not in spelled else vocabulary.counted
        counted = np.maximum(count(ids, skip_special=skips_special) - np.int32(lead), 0)
        visible = int(np.searchsorted(counted, len(text), side="right"))
        visible = _without_textless(vocabulary, ids, visible, skips_special)
        tail = _tail(vocabulary, ids, visible, counted, spelled, len(text), skips_special)
        return Alignment(layout, _hidden_ends(vocabulary, ids, visible, counted), visible, tail)
    return None


def _split_at_edges(vocabulary: Vocabulary, ids: Sequence[int], text: str, skips_special: bool) -> bool:
    """Whether ids and text differ in halves of characters only, at one of the ends.

    How many `�` stand for such a half depends on what a decoder sees at once, and an engine that streams decodes in pieces.
    """
    bare = text.strip(REPLACEMENT)
    return any(
        bare == spelled.strip(REPLACEMENT)
        for spelled in (
            vocabulary.spell(ids, skip_special=skips_special),
            vocabulary.lossy(ids, skip_special=skips_special),
        )
    )


def _explained(spelled: str, text: str, matched: int | str | None) -> bool:
    """Whether a stop, or a character that was cut in half, explains that the ids spell more than the text."""
    if isinstance(matched, str):
        # Usually the text ends where the stop string begins (or, untrimmed, where it ends). SGLang may let its beginning
        # through, though, when an interim text was made in the middle of it (sglang PR #35157).
        begin = spelled.find(matched, max(0, len(text) - len(matched)))
        return 0 <= begin <= len(text)
    remainder = spelled[len(text) :]
    return not remainder.strip(REPLACEMENT)


def _without_textless(vocabulary: Vocabulary, ids: Sequence[int], count: int, skips_special: bool) -> int:
    while count and (
        (skips_special and ids[count - 1] in vocabulary.special_ids) or not vocabulary.piece(ids[count - 1])
    ):
        count -= 1
    return count


def _spelled_alone(vocabulary: Vocabulary, ids: Sequence[int]) -> tuple[HiddenToken, ...]:
    return tuple(HiddenToken(1, vocabulary.literal(i), i in vocabulary.special_ids, 0) for i in ids)


def _tail(
    vocabulary: Vocabulary,
    ids: Sequence[int],
    visible: int,
    ends: NDArray[np.int32],
    spelled: str,
    seen: int,
    skips_special: bool,
) -> tuple[HiddenToken, ...]:
    """The hidden tail: an entry for each token, for tokens that share a character, for a half-shown one and the textless
    tokens before it."""
    tail: list[HiddenToken] = []
    begin = int(ends[visible - 1]) if visible else 0
    index = visible
    while index < len(ids):
        token_id = ids[index]
        if token_id in vocabulary.special_ids and (skips_special or begin >= seen):
            if not skips_special:
                begin = int(ends[index])
            tail.append(HiddenToken(1, vocabulary.literal(token_id), True, 0))
            index += 1
            continue
        first, end = index, int(ends[index])
        index += 1
        while index < len(ids) and ends[index] == end and vocabulary.piece(ids[index]):
            if ids[index] in vocabulary.special_ids:
                break
            index += 1
        shown = max(0, min(seen, end) - begin) if begin < seen else 0
        if shown:
            # What stands before it has no text, inside of what the reader saw: it stays or goes with it.
            first = visible
            tail.clear()
        tail.append(HiddenToken(index - first, spelled[max(begin, seen) : end], False, shown))
        begin = end
    return tuple(tail)


def _hidden_ends(
    vocabulary: Vocabulary,
    ids: Sequence[int],
    visible: int,
    counted: NDArray[np.int32],
) -> bytes:
    """Ends with the special tokens of the hidden tail, and what was not counted, as wide as their literals: a later text may
    spell them."""
    widths = np.zeros(len(ids), dtype=np.int32)
    widths[: len(counted)] = np.diff(counted, prepend=np.int32(0))
    for index in range(visible, len(ids)):
        if index >= len(counted) or ids[index] in vocabulary.special_ids:
            widths[index] = len(vocabulary.literal(ids[index]))
    return np.cumsum(widths, dtype=np.int32).tobytes()
