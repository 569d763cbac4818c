"""How the text of the next turn joins the tokens of the sampled one: rule 6 of exactness, for text that a template writes.

    chain  ... sampled: [The][ answer][ is][ 4][<|im_end|>]
    tail                                        <|im_end|>\\n<|im_start|>user\\n ...     its first token is there already
    tail                                        <|observation|> ...                    GLM: the model stopped with <|user|>

The tail is what the template writes after the text of the turn. If it opens with the token that the model stopped with, that
token is used once. White space before it (`\\n<|end|>\\n`) belongs to the turn, which has ended. If the tail opens with another
special token, or with white space and another token that ends turns, the template has no place for the sampled one, which is
left out: otherwise the model would see two ends. The same holds for the last of several tokens (`<|im_end|><|endoftext|>`, of
which the tail spells only the first). A stop *string* that the client never saw is left out too, unless the tail
spells it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.spans.chain import ID_BYTES, unpack_ids
from middleware_hub.spans.hidden_tail import spell_tail

OPENING = 64
"""Characters; no special token is longer."""


class Join(NamedTuple):
    """Where a chain is continued.

    Attributes:
        take: how many tokens of the sampled turn stay.
        text: the text to encode after them.
        recut: whether the text begins with the visible part of a token that was half hidden (`cut_in_token`).
        left_out: whether the token that the model stopped with is not kept.
    """

    take: int
    text: str
    recut: bool = False
    left_out: bool = False


class Codec(NamedTuple):
    """Encodes and spells.

    Attributes:
        encode_start: encodes the start of a prompt.
        encode_tail: encodes a text that follows other tokens.
        spell: spells ids, special tokens included.
        special_ids: of all special tokens.
        stop_ids: of the special tokens that a model ends its turns with; others may be hidden too, and end nothing.
        plain_starts: whether the spelling of a start encodes to that start again, without a second dummy space or BOS.
    """

    encode_start: Callable[[str], Sequence[int]]
    encode_tail: Callable[[str], Sequence[int]]
    spell: Callable[[Sequence[int]], str]
    special_ids: frozenset[int]
    stop_ids: frozenset[int]
    plain_starts: bool


def join(checkpoint: Checkpoint, tail: str, codec: Codec) -> Join:
    """Return how `tail` continues a sampled turn.

    Args:
        tail: the text that the template writes after the turn, not empty.
        codec: of the model; it encodes only the beginning of `tail`.
    """
    span, hidden = checkpoint.span, checkpoint.tail
    taken, position = spell_tail(hidden, tail, 0)
    if hidden and hidden[0].shown and not taken:
        return Join(span.visible, checkpoint.shown + tail, recut=True, left_out=True)
    take = span.visible + taken
    left_out = take < span.count
    spelled = position and tail.endswith(hidden[-1].text, 0, position)
    plain = position and not all(token.special for token in hidden)  # the tail spells a stop string
    if taken and not (spelled or plain or left_out) and hidden[-1].special and _ended(checkpoint, codec):
        return _end_once(checkpoint, take, tail, position, codec)
    return Join(take, tail[position:], left_out=left_out)


def _end_once(checkpoint: Checkpoint, take: int, tail: str, position: int, codec: Codec) -> Join:
    """Return how a tail joins the special token that the model stopped with, if it does not spell it at `position`."""
    hidden, rest = checkpoint.tail, tail[position:]
    opens = codec.encode_tail(rest[:OPENING])
    if opens and opens[0] in codec.special_ids and opens[0] != _last_id(checkpoint):
        return Join(take - 1, rest, left_out=True)
    blank = len(rest) - len(rest.lstrip())
    _, spelled = spell_tail(hidden, rest, blank)
    if spelled > blank:
        return Join(take, rest[spelled:])
    if position:  # the tail has spelled another token before: the turn has ended with that
        return Join(take - 1, rest, left_out=True)
    if blank:
        opens = codec.encode_tail(rest[blank : blank + OPENING])
        if opens and opens[0] in codec.stop_ids:
            return Join(take - 1, rest, left_out=True)
    return Join(take, rest)


def join_in_place(checkpoint: Checkpoint, codec: Codec) -> Join:
    """Return where a turn that was cut off is continued: after the last character that the client saw.

    Hidden special tokens stay as well, unless the model stopped with the last of them.
    """
    hidden = checkpoint.tail
    kept = 0
    if hidden and not checkpoint.shown and all(token.special for token in hidden):
        kept = len(hidden) - _ended(checkpoint, codec)
    return Join(checkpoint.span.visible + kept, checkpoint.shown, bool(checkpoint.shown), kept < len(hidden))


def _ended(checkpoint: Checkpoint, codec: Codec) -> bool:
    """Whether a turn stopped with its last token. At a limit the last token may look like that by chance."""
    return checkpoint.finish in ("stop", "tool_calls") or _last_id(checkpoint) in codec.stop_ids


def _last_id(checkpoint: Checkpoint) -> int:
    return unpack_ids(checkpoint.span.ids[-ID_BYTES:])[0]
