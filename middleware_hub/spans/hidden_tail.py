"""The hidden tail of a reply: the sampled tokens at its end whose text the reader did not see (rule 6 of exactness)."""

from __future__ import annotations

from typing import NamedTuple


class HiddenToken(NamedTuple):
    """A token, or the tokens of one character, at the end of a reply whose text the reader did not see."""

    tokens: int
    text: str
    """How the later text has to go on to spell it."""
    special: bool
    """It stays in the chain whether it is spelled or not."""
    shown: int
    """Its characters that the reader did see: a stop string began inside a token."""


def spell_tail(tail: tuple[HiddenToken, ...], text: str, position: int) -> tuple[int, int]:
    """Return how many hidden tokens stay when the text goes on at `position`, and the position after their spelling."""
    taken, index = 0, 0
    while index < len(tail):
        if tail[index].special:
            end = index
            while end < len(tail) and tail[end].special:
                end += 1
            position = _spell_special([token.text for token in tail[index:end]], text, position)
            taken += sum(token.tokens for token in tail[index:end])
            index = end
        elif text.startswith(tail[index].text, position):
            position += len(tail[index].text)
            taken += tail[index].tokens
            index += 1
        else:
            break
    return taken, position


def _spell_special(literals: list[str], text: str, position: int) -> int:
    """Special tokens stay in any case. The text may spell all of them, the last ones, the first ones, or none."""
    for first in range(len(literals)):
        joined = "".join(literals[first:])
        if text.startswith(joined, position):
            return position + len(joined)
    for literal in literals:
        if not text.startswith(literal, position):
            break
        position += len(literal)
    return position
