"""The table at the end: what was played, and what a tokenizer would have made of the same texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest

from tokenizers import Tokenizer

from router.demo.conversations import Conversation

HEAD = ("", "turns", "tokens", "sampled", "wrong if encoded again", "retrieved", "not encoded again")


@dataclass(frozen=True)
class Respelling:
    """A place where encoding the text again gives other tokens: as they were sampled, and as they would be encoded."""

    sampled: list[str]
    encoded: list[str]


class Speller:
    """Compares ids with what encoding their text gives. For byte-level tokenizers, as the shipped one is.

    Args:
        tokenizer: what the text is encoded with.
        spells_special: whether the text spells special tokens that were sampled; the text of `/generate` does not.
    """

    def __init__(self, tokenizer: Tokenizer, *, spells_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._spells_special = spells_special
        added = tokenizer.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        self._special = {number for number, token in added.items() if token.special}

    def encode(self, text: str) -> list[int]:
        """What somebody who only has the text would train on."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def wrong(self, trajectory: dict[str, object], text: str) -> tuple[int, Respelling | None]:
        """How many sampled tokens are none of the text's encoding, and the first place where that can be shown.

        A token is there again if it has the same id at the same bytes.
        """
        tokens, mask = trajectory["tokens"], trajectory["loss_mask"]
        assert isinstance(tokens, list)
        assert isinstance(mask, list)
        encoded = self.encode(text)
        there = dict(zip(self._spans(encoded), encoded, strict=True))
        spans = self._spans(tokens, mask)
        lost = [
            index
            for index, (span, token) in enumerate(zip(spans, tokens, strict=True))
            if mask[index] and span[0] < span[1] and there.get(span) != token
        ]
        places = (self._place(index, spans, tokens, list(there), encoded) for index in lost)
        return len(lost), next((place for place in places if place is not None), None)

    def _place(
        self,
        index: int,
        spans: list[tuple[int, int]],
        tokens: list[int],
        encoded_spans: list[tuple[int, int]],
        encoded: list[int],
    ) -> Respelling | None:
        """From where both begin a token to where both end one; None if a token without text is among them."""
        begins = {begin for begin, _ in encoded_spans}
        ends = {end for _, end in encoded_spans}
        first = last = index
        while first and spans[first][0] not in begins:
            first -= 1
        while last + 1 < len(spans) and spans[last][1] not in ends:
            last += 1
        begin, end = spans[first][0], spans[last][1]
        if not self._special.isdisjoint(tokens[first : last + 1]):
            return None
        inside = [i for (b, e), i in zip(encoded_spans, encoded, strict=True) if begin <= b and e <= end]
        return Respelling([self._said(i) for i in tokens[first : last + 1]], [self._said(i) for i in inside])

    def _spans(self, ids: Sequence[int], mask: Sequence[int] = ()) -> list[tuple[int, int]]:
        """The bytes of each id in the text that they spell together; of a sampled special token that it leaves out, none."""
        hidden = () if self._spells_special else self._special
        unseen = [bool(sampled) and i in hidden for i, sampled in zip_longest(ids, mask, fillvalue=0)]
        ends = [0, *accumulate(0 if silent else self._width(i) for i, silent in zip(ids, unseen, strict=True))]
        return list(pairwise(ends))

    def _width(self, token_id: int) -> int:
        content = self._added.get(token_id)
        # In the alphabet of byte-level BPE a character stands for a byte.
        return len(content.encode()) if content is not None else len(self._tokenizer.id_to_token(token_id) or "")

    def _said(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))


def table(talks: Sequence[Conversation], speller: Speller) -> str:
    """All conversations, a line each, and their sum."""
    rows = [_row(f"{number + 1}", [talk], speller) for number, talk in enumerate(talks)]
    rows.append(_row("all", talks, speller))
    widths = [max(len(cell) for cell in column) for column in zip(HEAD, *rows, strict=True)]
    line = "  ".join("─" * width for width in widths)
    shown = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (HEAD, *rows)]
    return "\n".join([shown[0], line, *shown[1:-1], line, shown[-1]])


def _row(name: str, talks: Sequence[Conversation], speller: Speller) -> tuple[str, ...]:
    sampled = sum(sum(talk.trajectory["loss_mask"]) for talk in talks)
    wrong = sum(speller.wrong(talk.trajectory, talk.text)[0] for talk in talks)
    exact = sum(talk.exact for talk in talks)
    prompt, reused = sum(talk.prompt_tokens for talk in talks), sum(talk.reused_tokens for talk in talks)
    return (
        name,
        str(sum(len(talk.sampled) for talk in talks)),
        str(sum(talk.trajectory["token_length"] for talk in talks)),
        str(sampled),
        f"{wrong} ({wrong / sampled:.0%})" if sampled else "-",
        ("exact" if exact else "NOT EXACT") if len(talks) == 1 else f"{exact} of {len(talks)} exact",
        f"{reused} of {prompt}",
    )


def example(talks: Sequence[Conversation], speller: Speller) -> str | None:
    """One place where the text alone would have misled, in words; None if there is none."""
    for talk in talks:
        _, found = speller.wrong(talk.trajectory, talk.text)
        if found is not None:
            return f"sampled {shown(found.sampled)}; its text encodes to {shown(found.encoded)}"
    return None


def shown(pieces: Sequence[str]) -> str:
    """Tokens, each in brackets."""
    return "".join(f"[{piece}]" for piece in pieces).replace("\n", "\\n")
