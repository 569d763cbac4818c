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

from middleware_hub.radix.cut import spell_tail
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.spans.chain import ID_BYTES, unpack_ids


class Seam(NamedTuple):
    """So many tokens of the sampled turn stay, and this is the text to be encoded behind them."""

    take: int
    text: str
    recut: bool = False
    """The text begins with the visible part of a token that was half hidden (`cut_in_token`)."""
    left_out: bool = False
    """The token that the model stopped with is not kept."""


class Codec(NamedTuple):
    """What encodes and spells: a start, a continuation, special tokens spelled too."""

    encode_start: Callable[[str], Sequence[int]]
    encode_tail: Callable[[str], Sequence[int]]
    spell: Callable[[Sequence[int]], str]
    special_ids: frozenset[int]
    stop_ids: frozenset[int]
    """Special tokens that a model ends its turns with; others may vanish from a text, too, and end nothing."""
    plain_starts: bool
    """Whether what a start spells is encoded as that start. A dummy space, or a doubled BOS, would be gained a second time."""


def seam(checkpoint: Checkpoint, tail: str, codec: Codec) -> Seam:
    """How `tail` goes on behind a sampled turn.

    Args:
        checkpoint: the turn.
        tail: what the template writes behind it, not empty.
        codec: of the model; it encodes no more than the beginning of `tail`.
    """
    span, hidden = checkpoint.span, checkpoint.tail
    taken, position = spell_tail(hidden, tail, 0)
    if hidden and hidden[0].shown and not taken:
        return Seam(span.visible, checkpoint.shown + tail, recut=True, left_out=True)
    take = span.visible + taken
    left_out = take < len(span)
    if taken and not position and hidden[-1].special and take == len(span) and _ended(checkpoint, codec):
        stopped = unpack_ids(span.ids[-ID_BYTES:])[0]
        opens = codec.encode_tail(tail[:OPENING])
        if opens and opens[0] in codec.special_ids and opens[0] != stopped:
            return Seam(take - 1, tail, left_out=True)
    return Seam(take, tail[position:], left_out=left_out)


def cut(checkpoint: Checkpoint, codec: Codec) -> Seam:
    """Where a turn that was cut off is gone on with, by itself: behind what the client saw of it.

    Special tokens that it did not see are there as well, unless the last of them is what the model stopped with.
    """
    span, hidden = checkpoint.span, checkpoint.tail
    kept = 0
    if not checkpoint.shown and all(token.special for token in hidden):
        kept = len(hidden) - _ended(checkpoint, codec) if hidden else 0
    return Seam(span.visible + kept, checkpoint.shown, bool(checkpoint.shown), kept < len(hidden))


def _ended(checkpoint: Checkpoint, codec: Codec) -> bool:
    """Whether its last token is one that it stopped with. At a limit that happens by chance."""
    if checkpoint.finish in ("stop", "tool_calls"):
        return True
    return unpack_ids(checkpoint.span.ids[-ID_BYTES:])[0] in codec.stop_ids


OPENING = 64
"""Characters; no special token is longer."""
