"""Where the next turn's text meets the tokens of the sampled one: rule 6 of exactness, for a text that a template wrote.

    chain  ... sampled: [The][ answer][ is][ 4][<|im_end|>]
    tail                                        <|im_end|>\\n<|im_start|>user\\n ...     its first token is there already
    tail                                        <|observation|> ...                    of GLM: the model stopped with <|user|>

The tail is what the template writes behind the text of the turn. Where it opens with the very token that the model stopped
with, that token is used, once. Where it opens with another special token, the template has no place for the sampled one: it is
left out, or the model would see two ends. A stop *string* that the client never saw goes, too, unless the tail spells it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from middleware_hub.prefix_match import spell_tail
from middleware_hub.sessions.message_trie import Checkpoint
from middleware_hub.spans import ID_BYTES, unpack_ids


class Seam(NamedTuple):
    """So many tokens of the sampled turn stay, and this is the text to be encoded behind them."""

    take: int
    text: str
    recut: bool = False
    """The text begins with the visible part of a token that was half hidden (`cut_in_token`)."""
    left_out: bool = False
    """The token that the model stopped with is not kept."""


def seam(checkpoint: Checkpoint, tail: str, encode: Callable[[str], Sequence[int]], special: frozenset[int]) -> Seam:
    """How `tail` goes on behind a sampled turn.

    Args:
        checkpoint: the turn.
        tail: what the template writes behind it, not empty.
        encode: encodes a continuation; asked for no more than the beginning of `tail`.
        special: the ids of special tokens.
    """
    span, hidden = checkpoint.span, checkpoint.tail
    taken, position = spell_tail(hidden, tail, 0)
    if hidden and hidden[0].shown and not taken:
        return Seam(span.visible, checkpoint.shown + tail, recut=True, left_out=True)
    take = span.visible + taken
    left_out = take < len(span)
    if taken and not position and hidden[-1].special and take == len(span):
        stopped = unpack_ids(span.ids[-ID_BYTES:])[0]
        opens = encode(tail[:_OPENING])
        if opens and opens[0] in special and opens[0] != stopped:
            return Seam(take - 1, tail, left_out=True)
    return Seam(take, tail[position:], left_out=left_out)


def cut(checkpoint: Checkpoint) -> Seam:
    """Where a turn that was cut off is gone on with, by itself: behind what the client saw of it."""
    span, hidden = checkpoint.span, checkpoint.tail
    return Seam(span.visible, checkpoint.shown, bool(checkpoint.shown), len(hidden) > 0)


_OPENING = 64
"""Characters; no special token is longer."""
