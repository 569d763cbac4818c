"""Which tokens of a recorded chain a text may reuse: rules 3, 5 and 6 of exactness, as pure functions on spans.

text:      |  prompt  |   reply   |<|im_end|>|   next context   | half of a rep
chain:     [ context  ][  sampled  (EOS)    ][     context      ][ sampled ... ]
                                   ^ resolve_complete: the whole reply, its hidden tail consumed where spelled
                                                                         ^ resolve_partial: whole sampled tokens
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from middleware_hub.radix.node import Generation, HiddenToken
from middleware_hub.spans.chain import Measure, SpanFlag, TokenSpan


class Cut(NamedTuple):
    """A chain, and the character of the text from which on the rest has to be encoded."""

    span: TokenSpan | None
    take: int
    start: int
    recut: bool = False
    """The rest begins inside a sampled token whose other half the reader never saw (`cut_in_token`)."""

    @property
    def tokens(self) -> int:
        """Tokens of the chain."""
        return 0 if self.span is None else self.span.offset + self.take


FRESH = Cut(None, 0, 0)
"""Nothing reused: the text is a start."""


class PrefixMatch(msgspec.Struct, frozen=True):
    """What `RadixTree.match` found. `tree.pin(match)` keeps it from being collected while a request uses it.

    Attributes:
        namespace: where it was looked up.
        text: what was looked up.
        cut: the chain to continue, and from which character of `text` on to encode.
        continues: the complete generation that is continued, if any.
        known: a remembered context that holds exactly the encoding of the rest; nothing needs encoding then.
        ambiguous: another chain matched further by whole sampled tokens (`ambiguous_parent`).
        unknown_parent: the request named a parent whose tokens are not in the prompt.
        edited: of the parent that the request named, the prompt keeps a part only: the text leaves the reply in its middle.
        mismatched: the text holds a reply whose ids do not spell it (`engine_mismatch`), encoded as the client saw it.
        foreign: the chain was recorded under another text than this one (the ids of both are the same).
    """

    namespace: tuple[str, ...]
    text: str
    cut: Cut = FRESH
    continues: Generation | None = None
    known: TokenSpan | None = None
    ambiguous: bool = False
    unknown_parent: bool = False
    foreign: bool = False
    edited: bool = False
    mismatched: bool = False

    @property
    def tail_left_out(self) -> bool:
        """Whether sampled tokens at the end of the continued reply were left out (`tail_left_out`)."""
        span = self.cut.span
        return self.continues is not None and span is self.continues.span and self.cut.take < len(span)

    @property
    def lost(self) -> int:
        """Flags of what is known to be missing from the prompt."""
        return (SpanFlag.PARENT_LOST if self.unknown_parent else 0) | (
            SpanFlag.AFTER_MISMATCH if self.mismatched else 0
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """What is to be known about how the prompt was made, one word each."""
        found = (
            ("cut_in_token", self.cut.recut),
            ("tail_left_out", self.tail_left_out and not self.cut.recut),
            ("ambiguous_parent", self.ambiguous),
            ("unknown_parent", self.unknown_parent),
            ("edited_turn", self.edited),
            ("engine_mismatch", self.mismatched),
        )
        return tuple(name for name, holds in found if holds)


def resolve_complete(generation: Generation, text: str, position: int) -> Cut | None:
    """Continue a complete reply whose text ends at `position` of `text`; None if it must not be continued by this text."""
    span = generation.span
    visible = span.visible
    tail = generation.tail
    shown = tail[0].shown if tail else 0
    taken, spelled = (0, position) if position == len(text) else spell_tail(tail, text, position)
    if visible + taken == 0 or (span.width == 0 and spelled == position):
        # Nothing of it is left: an empty reply whose tail is not spelled, or only half a token, which is encoded again.
        return None
    if shown and not taken:
        return Cut(span, visible, position - shown, recut=True)
    return Cut(span, visible + taken, spelled)


def spell_tail(tail: tuple[HiddenToken, ...], text: str, position: int) -> tuple[int, int]:
    """How many hidden tokens stay when the text goes on at `position`, and where it is when it has spelled what it spells."""
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


def resolve_partial(
    generation: Generation, limit: int, line: Generation | None, measure: Measure, *, boundaries: bool = True
) -> Cut | None:
    """Reuse the tokens of a chain whose text agrees with ours in `limit` characters but not to its end.

    Only what lies behind `line` is looked at, the complete generation that is continued anyway; None if nothing does.
    Sampled tokens are reused up to the last one that lies wholly inside; context behind that only up to a compositional
    boundary (`boundaries=False`: not even that).
    """
    stop = None if line is None else line.span
    child = generation.span
    if child is stop:
        return None
    inside = _cut_inside(child, child.visible, limit, measure, boundaries)
    while inside is None:
        span, take, end = child.parent, child.take, child.start
        if span is None or span is stop:
            return None
        if span.sampled and take and end <= limit and not span.flags & SpanFlag.MISMATCH:
            # The recorded chain goes on behind this reply as our text does: what it kept of the reply, we keep.
            return Cut(span, take, end)
        if child.flags & SpanFlag.FOREIGN:
            return None
        inside = _cut_inside(span, take, min(limit, end), measure, boundaries)
        child = span
    return inside


def _cut_inside(span: TokenSpan, take: int, limit: int, measure: Measure, boundaries: bool) -> Cut | None:
    """How many of the first `take` tokens of one span may be reused by a text that agrees up to character `limit`."""
    if span.start >= limit or span.flags & SpanFlag.MISMATCH:
        return None
    if not span.sampled and (not boundaries or span.flags & SpanFlag.GIVEN):
        return None
    ends = measure.ends(span)
    count = int(np.searchsorted(ends[:take], limit - span.start, side="right"))
    if span.sampled:
        while count and measure.textless(span, count - 1):
            count -= 1
    else:
        count = measure.last_boundary(span, count)
    return Cut(span, count, span.start + int(ends[count - 1])) if count else None


def sampled_base(span: TokenSpan | None, take: int, start: int) -> tuple[TokenSpan | None, int, int]:
    """Where a chain was before its last contexts were added: the same base gives a text the same encoding."""
    while span is not None and not span.sampled:
        take, start = span.take, span.start
        span = span.parent
    return span, take, start
