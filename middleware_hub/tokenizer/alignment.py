"""How ids lie over the text they were encoded from, or that an engine sent with them.

For a context, the first case that fits: the ids spell the text; they spell it after a leading BOS; also after the dummy space
that follows the BOS; the tokenizer's own offsets (a normalizer changed characters); else the ends are unknown, and the span is
cut only at its edges.

For a reply the ids have to explain the text; if they do not, `--tokenizer-path` may be wrong:

    ids spell   "The answer is 4.<|im_end|>"         text "The answer is 4."      hidden tail: <|im_end|>
    ids spell   "Action: look\nObservation: I"       text "Action: look"          hidden tail: a stop string, and more
    ids spell   "caf" + half an é                    text "caf�" or "caf"         exact as a whole, never cut inside
    ids spell   "caf" + "é and half a 你"            text "caf"                   hidden tail: what a decoder held back
    ids spell   "caf", with an unknown one            text "c!af"                  exact: SGLang shows token 0 for it

The text of a stream that broke off, or that its client left, may end anywhere before that: an engine holds back what may
become a stop string, or a character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from middleware_hub.spans.chain import SpanFlag
from middleware_hub.spans.hidden_tail import HiddenToken
from middleware_hub.tokenizer.vocabulary import REPLACEMENT, Vocabulary

_MOST_HELD = 8
"""Tokens that a decoder may hold back. Each of them ends inside a character, so there are few."""

Offsets = Callable[[], Sequence[tuple[int, int]] | None]
"""The tokenizer's own `(begin, end)` characters of every id, or None if it has none for these ids."""


class Alignment(msgspec.Struct, frozen=True):
    """How ids lie over a text: see `TokenSpan` for the fields; `tail` is the hidden tail of a reply."""

    flags: int
    ends: bytes | None = None
    visible: int | None = None
    tail: tuple[HiddenToken, ...] = ()


def align_context(
    vocabulary: Vocabulary, ids: Sequence[int], text: str, *, bos: Sequence[int], offsets: Offsets
) -> Alignment:
    """Align ids with the `text` from which they were encoded, or which they spell."""
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
    """Return ends that never fall, leave no character between two tokens unowned, and reach the end of the text."""
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
    vocabulary: Vocabulary,
    ids: Sequence[int],
    text: str,
    *,
    skips_special: bool,
    matched: int | str | None,
    unfinished: bool = False,
) -> Alignment:
    """Align the ids that a worker sampled with the text that it sent.

    Args:
        vocabulary: spells ids.
        ids: `output_ids`.
        text: the reply's text.
        skips_special: the request's `skip_special_tokens`.
        matched: `finish_reason.matched`: the stop token or stop string that ended the reply, if any.
        unfinished: whether the text may be the beginning of what the ids spell, because the end of the reply never came.

    Returns:
        An alignment with `MISMATCH` among its flags if the ids do not explain the text.
    """
    said = (skips_special, matched, unfinished)
    found = _ReplyLayout(vocabulary, ids, text, *said).align()
    if not found.flags & SpanFlag.MISMATCH or max(ids, default=0) < vocabulary.known:
        return found
    # Models pad their vocabulary. For an id beyond its tokenizer SGLang shows token 0 (`_clamp_decode_ids` of 0.5.23).
    clamped = [token_id if token_id < vocabulary.known else 0 for token_id in ids]
    matched = clamped[-1] if ids[-1] == matched else matched
    return _ReplyLayout(vocabulary, clamped, text, skips_special, matched, unfinished).align_with_ends()


class _ReplyLayout:
    """The ids of one reply over its text; `trimmed`: the ids without a matched stop token."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        ids: Sequence[int],
        text: str,
        skips_special: bool,
        matched: int | str | None,
        unfinished: bool,
    ) -> None:
        self.vocabulary = vocabulary
        self.ids = ids
        self.text = text
        self.skips_special = skips_special
        self.matched = matched
        self.unfinished = unfinished
        self.trimmed = ids[:-1] if ids and ids[-1] == matched else ids
        self.flags = SpanFlag.SKIPS_SPECIAL if skips_special else SpanFlag.NONE

    def align(self) -> Alignment:
        vocabulary, ids, trimmed = self.vocabulary, self.ids, self.trimmed
        if REPLACEMENT not in self.text and vocabulary.spells(trimmed, self.text, skip_special=self.skips_special):
            visible = self._without_textless(len(trimmed))
            return Alignment(self.flags, None, visible, self._literals(visible))
        spelled = vocabulary.spell(ids, skip_special=self.skips_special)
        bare = spelled if trimmed is ids else vocabulary.spell(trimmed, skip_special=self.skips_special)
        # A decoder that does not see what precedes the reply takes the first space of the reply for the dummy one, and removes
        # it.
        for lead in (0, 1) if vocabulary.strips_lead and spelled.startswith(" ") else (0,):
            found = self._laid_over(spelled[lead:], bare[lead:], lead)
            if found is not None:
                return found
        for shown in (trimmed, ids):
            if self._split_at_edges(shown):
                visible = self._without_textless(len(shown))
                return Alignment(self.flags | SpanFlag.WHOLE | SpanFlag.SPLIT, None, visible, self._literals(visible))
        return Alignment(SpanFlag.WHOLE | SpanFlag.MISMATCH, None, len(ids))

    def align_with_ends(self) -> Alignment:
        """Align, and return the ends of the tokens as well, for a reader that has other ids than these."""
        found = self.align()
        if found.ends is not None or found.visible is None or found.flags & SpanFlag.WHOLE:
            return found
        ends = self._ends(self.vocabulary.begun, self.ids, lead=bool(found.flags & SpanFlag.DUMMY))
        return msgspec.structs.replace(found, ends=self._hidden_ends(found.visible, ends))

    def _laid_over(self, spelled: str, bare: str, lead: int) -> Alignment | None:
        """Align ids that spell `spelled`, or `bare` without a matched stop token, if they explain the text.

        The first `lead` characters of what the ids spell were removed.
        """
        flags = self.flags | (SpanFlag.DUMMY if lead else SpanFlag.NONE)
        text, ids = self.text, self.ids
        for shown, said in ((ids, spelled), (self.trimmed, bare)):
            if said == text:
                visible = self._without_textless(len(shown))
                tail = self._literals(visible)
                if REPLACEMENT not in text:
                    return Alignment(flags, None, visible, tail)
                ends = self._ends(self.vocabulary.counted, shown, lead)
                return Alignment(flags, self._hidden_ends(visible, ends), visible, tail)
        if spelled.startswith(text) and (self.unfinished or self._explained(spelled) or self._held_back(lead)):
            count = self.vocabulary.begun if REPLACEMENT not in spelled else self.vocabulary.counted
            ends = self._ends(count, ids, lead)
            visible = self._without_textless(int(np.searchsorted(ends, len(text), side="right")))
            tail = self._tail(visible, ends, spelled)
            return Alignment(flags, self._hidden_ends(visible, ends), visible, tail)
        return None

    def _ends(self, count: Callable[..., NDArray[np.int32]], ids: Sequence[int], lead: int) -> NDArray[np.int32]:
        ends: NDArray[np.int32] = np.maximum(count(ids, skip_special=self.skips_special) - np.int32(lead), 0)
        return ends

    def _split_at_edges(self, ids: Sequence[int]) -> bool:
        """Return whether ids and text differ only by half characters at one of the ends.

        How many `�` stand for such a half depends on what a decoder sees at once, and a streaming engine decodes in pieces.
        """
        bare = self.text.strip(REPLACEMENT)
        if any(
            bare == spell(ids, skip_special=self.skips_special).strip(REPLACEMENT)
            for spell in (self.vocabulary.spell, self.vocabulary.lossy)
        ):
            return True
        # An engine decodes a reply together with the last few tokens of its prompt. If these begin inside a character, the byte
        # tokens there and those that the reply begins with are one broken run, and each of them becomes a `�`.
        rest = self.vocabulary.without_leading_bytes(ids)
        return (
            len(rest) < len(ids)
            and self.text.startswith(REPLACEMENT)
            and bare == self.vocabulary.spell(rest, skip_special=self.skips_special).strip(REPLACEMENT)
        )

    def _explained(self, spelled: str) -> bool:
        """Return whether a stop, or a character cut in half, explains that the ids spell more than the text."""
        text, matched = self.text, self.matched
        if isinstance(matched, str):
            # Usually the text ends where the stop string begins (or, untrimmed, where it ends). But SGLang may pass on its
            # beginning if an interim text was made in its middle (sglang PR #35157).
            begin = spelled.find(matched, max(0, len(text) - len(matched)))
            return 0 <= begin <= len(text)
        return not spelled[len(text) :].strip(REPLACEMENT)

    def _held_back(self, lead: int) -> bool:
        """Return whether the text lacks just the last tokens, which end inside a character.

        A decoder that shows text in pieces (vLLM's) holds back the whole token until the rest of the character comes.
        """
        shown, skips = self.trimmed[: self._without_textless(len(self.trimmed))], self.skips_special
        spell = self.vocabulary.spell
        for count in range(1, min(len(shown), _MOST_HELD) + 1):
            if spell(shown[:-count], skip_special=skips)[lead:] == self.text:
                held = shown[-count:]
                return all(spell(held[: end + 1], skip_special=skips).endswith(REPLACEMENT) for end in range(count))
        return False

    def _without_textless(self, count: int) -> int:
        ids, vocabulary = self.ids, self.vocabulary
        while count and (
            (self.skips_special and ids[count - 1] in vocabulary.special_ids) or not vocabulary.piece(ids[count - 1])
        ):
            count -= 1
        return count

    def _literals(self, visible: int) -> tuple[HiddenToken, ...]:
        vocabulary = self.vocabulary
        if visible == len(self.ids):
            return ()
        return tuple(HiddenToken(1, vocabulary.literal(i), i in vocabulary.special_ids, 0) for i in self.ids[visible:])

    def _tail(self, visible: int, ends: NDArray[np.int32], spelled: str) -> tuple[HiddenToken, ...]:
        """Return the hidden tail.

        It has an entry for each token, for tokens that share a character, and for a half-shown token with the textless
        tokens before it.
        """
        ids, vocabulary, seen = self.ids, self.vocabulary, len(self.text)
        tail: list[HiddenToken] = []
        begin = int(ends[visible - 1]) if visible else 0
        index = visible
        while index < len(ids):
            token_id = ids[index]
            if token_id in vocabulary.special_ids and (self.skips_special or begin >= seen):
                if not self.skips_special:
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
                # The tokens before it have no text and lie inside what the reader saw: they are kept or dropped with it.
                first = visible
                tail.clear()
            text = spelled[max(begin, seen) : end]
            # No text spells half a character. So its token stays, unless a stop string hides it.
            stays = not isinstance(self.matched, str) and not shown and text.endswith(REPLACEMENT)
            tail.append(HiddenToken(index - first, text, stays, shown))
            begin = end
        return tuple(tail)

    def _hidden_ends(self, visible: int, counted: NDArray[np.int32]) -> bytes:
        """Return ends in which hidden special tokens, and tokens not counted, are as wide as their literals.

        A later text may spell them.
        """
        ids, vocabulary = self.ids, self.vocabulary
        widths = np.zeros(len(ids), dtype=np.int32)
        widths[: len(counted)] = np.diff(counted, prepend=np.int32(0))
        for index in range(visible, len(ids)):
            if index >= len(counted) or ids[index] in vocabulary.special_ids:
                widths[index] = len(vocabulary.literal(ids[index]))
        return np.cumsum(widths, dtype=np.int32).tobytes()
