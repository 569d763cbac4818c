"""Compares the tokens that a tokenizer makes of a sampled text with the sampled ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import Any

from tokenizers import Tokenizer

Span = tuple[int, int]  # the first byte of a token in the text, and the byte after its last one


@dataclass(frozen=True)
class Respelling:
    """A place of a text, as the model spelled it and as the tokenizer encodes it."""

    sampled: list[str]
    encoded: list[str]

    def __str__(self) -> str:
        sampled, encoded = ("".join(f"[{piece}]" for piece in pieces) for pieces in (self.sampled, self.encoded))
        return f"sampled {sampled}; its text encodes to {encoded}".replace("\n", "\\n")


class Speller:
    """Compares ids with the encoding of their text. For byte-level tokenizers, as the shipped one is.

    Args:
        tokenizer: encodes the text.
        spells_special: whether the text spells sampled special tokens; the text of `/generate` does not.
    """

    def __init__(self, tokenizer: Tokenizer, *, spells_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._spells_special = spells_special
        added = tokenizer.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        self._special = {number for number, token in added.items() if token.special}

    def wrong(self, trajectory: Mapping[str, Any], text: str) -> tuple[int, Respelling | None]:
        """Count the sampled tokens that the encoding of `text` lacks, and return the first place that shows one.

        The encoding has a token if it has the same id at the same bytes.

        Args:
            trajectory: with `tokens` and `loss_mask`.
            text: the text that the tokens spell.
        """
        tokens, mask = trajectory["tokens"], trajectory["loss_mask"]
        encoded: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        by_span = dict(zip(self._spans(encoded), encoded, strict=True))
        spans = self._spans(tokens, mask)
        lost = [
            index
            for index, (span, token) in enumerate(zip(spans, tokens, strict=True))
            if mask[index] and span[0] < span[1] and by_span.get(span) != token
        ]
        places = (self._place(index, spans, tokens, by_span) for index in lost)
        return len(lost), next((place for place in places if place is not None), None)

    def _place(
        self, index: int, spans: Sequence[Span], tokens: Sequence[int], encoded: Mapping[Span, int]
    ) -> Respelling | None:
        """Return the tokens around `index`, from where both spellings begin a token to where both end one.

        None if a token without text is among them.
        """
        begins, ends = ({span[side] for span in encoded} for side in (0, 1))
        first = last = index
        while first and spans[first][0] not in begins:
            first -= 1
        while last + 1 < len(spans) and spans[last][1] not in ends:
            last += 1
        sampled = tokens[first : last + 1]
        if not self._special.isdisjoint(sampled):
            return None
        begin, end = spans[first][0], spans[last][1]
        inside = [token for (low, high), token in encoded.items() if begin <= low and high <= end]
        return Respelling([self._text(token) for token in sampled], [self._text(token) for token in inside])

    def _spans(self, ids: Sequence[int], mask: Sequence[int] = ()) -> list[Span]:
        """Return the bytes of each id in the text of all; none for a sampled special token that the text leaves out."""
        hidden = () if self._spells_special else self._special
        widths = (
            0 if sampled and token in hidden else self._width(token)
            for token, sampled in zip_longest(ids, mask, fillvalue=0)
        )
        return list(pairwise([0, *accumulate(widths)]))

    def _width(self, token: int) -> int:
        content = self._added.get(token)
        # In the alphabet of byte-level BPE a character stands for a byte.
        return len(content.encode()) if content is not None else len(self._tokenizer.id_to_token(token) or "")

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))
