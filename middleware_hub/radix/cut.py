"""Where a text may cut a recorded chain: rules 5 and 6 of exactness, as pure functions on spans.

text:      |  prompt  |   reply   |<|im_end|>|   next context   | half of a rep
chain:     [ context  ][  sampled  (EOS)    ][     context      ][ sampled ... ]
                                   ^ resolve_complete: the whole reply, its hidden tail consumed where spelled
                                                                         ^ resolve_partial: whole sampled tokens
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from middleware_hub.radix.node import Generation, RadixNode
from middleware_hub.spans.chain import ID_BYTES, Measure, SpanFlag, TokenSpan, links
from middleware_hub.spans.hidden_tail import spell_tail

_UNCUT = SpanFlag.GIVEN | SpanFlag.RECUT
"""Flags of contexts that are reused whole or not at all: what they say would not be true of each part."""
MOST_CANDIDATES = 16
"""How many of the chains that a text could cut are tried: nodes, and replies of one text."""


class Cut(NamedTuple):
    """A chain, and the character of the text from which the rest has to be encoded."""

    span: TokenSpan | None
    take: int
    start: int
    recut: bool = False
    """The rest has the visible part of a sampled token that was not kept (`cut_in_token`)."""
    foreign: bool = False
    """The chain was recorded under another text than the one that is cut (`SpanFlag.FOREIGN`)."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the chain."""
        return 0 if self.span is None else self.span.offset + self.take

    @property
    def sampled_base(self) -> tuple[TokenSpan | None, int, int, bool]:
        """Return the cut without the last contexts, and whether it, or one of them, is `recut`.

        After equal chains a text has equal encodings.
        """
        span, take, start, recut = self[:4]
        while span is not None and not span.sampled:
            take, start, recut = span.take, span.start, recut or bool(span.flags & SpanFlag.RECUT)
            span = span.parent
        return span, take, start, recut


FRESH = Cut(None, 0, 0)
"""Nothing is reused: the text is a start."""


def end_of(span: TokenSpan) -> Cut:
    """Return the cut that keeps a whole chain."""
    return Cut(span, span.count, span.text_end)


def resolve_complete(generation: Generation, text: str, position: int) -> Cut | None:
    """Continue a complete reply that ends at `position` of `text`; None if the text must not continue it."""
    span, tail = generation.span, generation.tail
    shown = tail[0].shown if tail else 0
    taken, spelled = spell_tail(tail, text, position) if tail and position < len(text) else (0, position)
    if span.visible + taken == 0 or (span.width == 0 and spelled == position):
        # Nothing of the reply is left: it is empty and its tail is not spelled, or only half a token is left, which is encoded
        # again.
        return None
    if shown and not taken:
        return Cut(span, span.visible, position - shown, recut=True)
    return Cut(span, span.visible + taken, spelled)


def shows_half_a_token(text: str, stops: Iterable[tuple[RadixNode, int]], start: int) -> bool:
    """Return whether the text after `start` has a reply of which it can keep nothing: the visible part of its only token.

    Args:
        stops: the nodes of the text at which generations end, with the characters down to there, last one first.
    """
    for node, position in stops:
        if position <= start:
            break
        for reply in islice(reversed(node.generations()), MOST_CANDIDATES):
            span = reply.span
            half = not span.visible and start <= span.start < position and not span.flags & SpanFlag.MISMATCH
            if half and resolve_complete(reply, text, position) is None:
                return True
    return False


def has_context_at(cut: Cut, position: int) -> bool:
    """Return whether the character at `position` of a text is encoded, or is context of the chain before."""
    parts = (part for part, _ in links(cut.span, cut.take))
    return position >= cut.start or not next(part for part in parts if part.start <= position).sampled


def resolve_partial(
    generation: Generation, limit: int, line: Generation | None, measure: Measure, *, boundaries: bool = True
) -> Cut | None:
    """Reuse the tokens of a chain whose text agrees with ours in `limit` characters but not to its end.

    Only tokens after `line`, the complete generation that is continued anyway, count; None if there are none. Sampled
    tokens are reused up to the last one that lies wholly inside. Context after that is reused only up to a compositional
    boundary, and not at all with `boundaries=False`.
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
            # The recorded chain continues after this reply as our text does: keep the part of the reply that it kept.
            return Cut(span, take, end, foreign=bool(child.flags & SpanFlag.FOREIGN))
        if child.flags & SpanFlag.FOREIGN:
            return None
        inside = _cut_inside(span, take, min(limit, end), measure, boundaries)
        child = span
    return inside


def same_encoding(node: RadixNode, cut: Cut) -> TokenSpan | None:
    """Return a remembered context that ends at `node` and was encoded after the same sampled tokens."""
    base = cut.sampled_base
    for span in reversed(node.known_contexts()):
        if not span.flags & (SpanFlag.GIVEN | SpanFlag.LOST) and end_of(span).sampled_base == base:
            return span
    return None


def recorded_context(node: RadixNode, cut: Cut, *, any_chain: bool) -> Cut | None:
    """Return a prompt that was sent with exactly the text of `node`: of the chain of `cut` if there is one."""
    contexts, base = node.known_contexts(), cut.sampled_base[:3]
    for span in reversed(contexts):
        if end_of(span).sampled_base[:3] == base:
            return end_of(span)
    return end_of(contexts[-1]) if contexts and any_chain else None


def ends_by(span: TokenSpan, limit: int, start: int, measure: Measure) -> bool:
    """Return whether no token of a reply ends after `start` and within `limit`, and its prompt ends at `start` or before."""
    if span.start > start:
        return False
    ends = _ends(span, measure)
    inside = bisect_right(ends, limit - span.start)
    return not inside or span.start + ends[inside - 1] <= start


def _ends(span: TokenSpan, measure: Measure) -> memoryview[int]:
    """Return what `Measure.ends` does: of one number, a search in the packed ends is faster than one in an array."""
    packed = measure.ends(span).tobytes() if span.ends is None else span.ends
    return memoryview(packed).cast("i")


def _cut_inside(span: TokenSpan, take: int, limit: int, measure: Measure, boundaries: bool) -> Cut | None:
    """Cut the first `take` tokens of one span for a text that agrees up to character `limit`."""
    if span.start >= limit or span.flags & SpanFlag.MISMATCH:
        return None
    if not span.sampled and (not boundaries or span.flags & _UNCUT or not measure.last_boundary(span, take)):
        return None  # without a look at where its tokens end, which a span would keep
    ends = _ends(span, measure)
    count = bisect_right(ends, limit - span.start, 0, take)
    if span.sampled:
        while count and measure.textless(span, count - 1):
            count -= 1
    else:
        count = measure.last_boundary(span, count)
    return Cut(span, count, span.start + ends[count - 1]) if count else None


def whole_literals(
    text: str,
    generation: Generation,
    limit: int,
    line: Generation | None,
    measure: Measure,
    *,
    boundaries: bool,
    ids: bytes = b"",
) -> Cut | None:
    """Cut by `resolve_partial`, but never inside an added token that the text spells, and where `ids` go on otherwise.

    A sampled `<` and the text `<|im_end|>` have a character in common. If that token were kept, the rest would be encoded as
    `|im_end|>`, which ends nothing. `ids`: those that a client sent with the text, packed; a chain is kept as far as they are
    its own.
    """
    while True:
        cut = resolve_partial(generation, limit, line, measure, boundaries=boundaries)
        begin = None if cut is None else measure.straddled(text, cut.start)
        if begin is None and cut is not None and ids:
            begin = _parting(ids, cut, measure)
        if begin is None:
            return cut
        limit = begin


def _parting(ids: bytes, cut: Cut, measure: Measure) -> int | None:
    """Return the character up to which packed ids are those of a chain, less than its end; None if all of them are."""
    found = None
    for part, take in links(cut.span, cut.take):
        low = ID_BYTES * part.offset
        if ids[low : low + ID_BYTES * take] != part.ids[: ID_BYTES * take]:
            theirs = ids[low : low + ID_BYTES * take]
            pairs = zip(memoryview(theirs).cast("i"), memoryview(part.ids).cast("i"), strict=False)
            same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(theirs) // ID_BYTES)
            found = part.start + (_ends(part, measure)[same - 1] if same else 0)
    return None if found is None else min(found, cut.start - 1)


def says_lost(context: TokenSpan | None, above: TokenSpan | None) -> bool:
    """Return whether a context has a flag, true only for its own request, that something before it may be missing."""
    while context is not None and context is not above and not context.flags & SpanFlag.LOST:
        context = context.parent
    return context is not None and context is not above


def samples_nothing(generation: Generation, limit: int) -> bool:
    """Return whether only the reply itself was sampled after its line, and it begins at `limit` or later."""
    span, line = generation.span, generation.continues
    if span.start < limit:
        return False
    before, stop = span.parent, None if line is None else line.span
    return before is stop or (before is not None and before.parent is stop and not before.sampled)


def leaves(cut: Cut, reply: TokenSpan) -> bool:
    """Return whether a chain has sampled tokens that begin within the prompt of a reply, or at its end, and are not in it."""
    prompt = {part for part, _ in links(reply.parent, reply.take)}
    found = links(cut.span, cut.take)
    return any(take and part.sampled and part.start <= reply.start and part not in prompt for part, take in found)
