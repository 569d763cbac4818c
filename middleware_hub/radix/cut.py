"""Where a text may cut a recorded chain: rules 5 and 6 of exactness, as pure functions on spans, and for the path of a text.

text:      |  prompt  |   reply   |<|im_end|>|   next context   | half of a rep
chain:     [ context  ][  sampled  (EOS)    ][     context      ][ sampled ... ]
                                   ^ resolve_complete: the whole reply, its hidden tail consumed where spelled
                                                                         ^ resolve_partial: whole sampled tokens
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from middleware_hub.radix.node import Generation, RadixNode
from middleware_hub.spans.chain import Measure, SpanFlag, TokenSpan
from middleware_hub.spans.hidden_tail import spell_tail

MOST_CANDIDATES = 16
"""How many of the chains that a text could cut are tried: nodes, and replies of one text."""


class Cut(NamedTuple):
    """A chain, and the character of the text from which the rest has to be encoded."""

    span: TokenSpan | None
    take: int
    start: int
    recut: bool = False
    """The rest begins inside a sampled token of which the reader saw only a part (`cut_in_token`)."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the chain."""
        return 0 if self.span is None else self.span.offset + self.take

    @property
    def sampled_base(self) -> tuple[TokenSpan | None, int, int]:
        """Return the chain and start without the last contexts: on equal bases a text has equal encodings."""
        span, take, start, _ = self
        while span is not None and not span.sampled:
            take, start = span.take, span.start
            span = span.parent
        return span, take, start


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
            return Cut(span, take, end)
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
    contexts, base = node.known_contexts(), cut.sampled_base
    for span in reversed(contexts):
        if end_of(span).sampled_base == base:
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
    if not span.sampled and (not boundaries or span.flags & SpanFlag.GIVEN or not measure.last_boundary(span, take)):
        return None  # without a look at where its tokens end, which a span would keep
    ends = _ends(span, measure)
    count = bisect_right(ends, limit - span.start, 0, take)
    if span.sampled:
        while count and measure.textless(span, count - 1):
            count -= 1
    else:
        count = measure.last_boundary(span, count)
    return Cut(span, count, span.start + ends[count - 1]) if count else None


class Path(NamedTuple):
    """How far a text goes down the tree."""

    text: str
    at: RadixNode
    """The node in whose edge, or at whose end, the text leaves the tree."""
    end: int
    """Characters from the root to the end of that node."""
    limit: int
    """Characters of the text that agree."""

    def upward(self, floor: int = 0) -> Iterator[tuple[RadixNode, int]]:
        """Yield the nodes of the path, last one first, with the characters agreed there, while these exceed `floor`.

        A chain that runs through one of them and not through the one below agrees with the text exactly to its end.
        """
        node: RadixNode | None = self.at
        limit, end = self.limit, self.end
        while node is not None and limit > floor:
            yield node, limit
            limit = end = end - len(node.edge)
            node = node.parent

    def stops(self) -> Iterator[tuple[RadixNode, int]]:
        """Yield the nodes of the path at which generations end, last one first, with the characters down to there."""
        node: RadixNode | None = self.at
        end = self.end
        while node is not None and end:
            if node.ends is not None and end <= self.limit:
                yield node, end
            end -= len(node.edge)
            node = node.parent

    def candidates(self, line: Generation | None, floor: int) -> Iterator[tuple[Generation, int]]:
        """Yield generations after `line` that leave the path above `floor`, with the characters agreed, furthest first.

        Of those that leave it in the same place the newest come first. There may be 100,000 siblings, so this ends after
        `MOST_CANDIDATES`: few chains differ in their tokens before they differ in their text. Where no reply runs, they do not
        differ at all, and the newest is enough: what it reuses of another reply is in that reply itself, further up.
        """
        seen: set[Generation] = set()
        visits = MOST_CANDIDATES
        walked: RadixNode | None = None
        for top, limit in self.upward(floor):
            below = [top]
            while below and visits:
                node = below.pop()
                newest = None if node is walked else node.through(line)
                if newest is None:
                    continue
                if newest not in seen:
                    seen.add(newest)
                    yield newest, limit
                elif not top.replied:
                    continue
                visits -= 1
                if not top.replied:
                    continue
                if node.ends is not None and node.ends is not newest:
                    for generation in islice(reversed(node.generations()), MOST_CANDIDATES):
                        if generation.continues is line and generation not in seen:
                            seen.add(generation)
                            yield generation, limit
                if node.children is not None:
                    below += reversed(node.newest_first(line, visits))
            if not visits:
                return
            walked = top

    def longest_complete(self, request_id: str | None, limit: int | None = None) -> tuple[Cut, Generation | None]:
        """Return the longest complete reply that this text may continue, the newest of equal texts.

        If they are given, it has the name `request_id` and ends within `limit` characters. A reply whose ids do not
        spell its text is not continued: the text that the client saw is encoded instead.
        """
        for node, position in self.stops():
            if limit is not None and position > limit:
                continue
            for generation in reversed(node.generations()):
                if generation.span.flags & SpanFlag.MISMATCH:
                    continue
                if request_id is None or generation.span.named(request_id):
                    cut = resolve_complete(generation, self.text, position)
                    if cut is not None:
                        return cut, generation
        return FRESH, None

    def further(self, line: Generation | None, cut: Cut, measure: Measure, *, boundaries: bool = True) -> Cut | None:
        """Return tokens after `cut` of a chain that continues `line` and that the text leaves midway: furthest, then newest.

        Context, whose encoding would be the same anyway, counts only where there are no sampled tokens. Of equal tokens, those
        of a reply that the text leaves in its middle come first, then those of the chain that agrees furthest, then the newest.
        """
        if self.limit <= cut.start:
            return None
        best, rank, newest = None, (False, 0, 0), None
        for generation, limit in self.candidates(line, cut.start):
            if best is not None and limit < best.start:
                break
            newest = newest or (generation, limit)
            if _samples_nothing(generation, limit):
                continue
            its_rank = (generation.span.start < limit, limit, generation.serial)
            preferred = best is not None and its_rank > rank
            if best is not None and not preferred and ends_by(generation.span, limit, best.start, measure):
                continue
            found = self.whole_literals(generation, limit, line, measure, boundaries=False)
            if found is not None and found.start + preferred > (best or cut).start:
                best, rank = found, its_rank
        if best is None and boundaries and newest is not None:
            found = self.whole_literals(*newest, line, measure, boundaries=True)
            if found is not None and found.start > cut.start and not _says_lost(found.span, cut.span):
                return found
        return best

    def whole_literals(
        self, generation: Generation, limit: int, line: Generation | None, measure: Measure, *, boundaries: bool
    ) -> Cut | None:
        """Cut by `resolve_partial`, but never inside an added token that the text spells.

        A sampled `<` and the text `<|im_end|>` have a character in common. If that token were kept, the rest would be
        encoded as `|im_end|>`, which ends nothing.
        """
        while True:
            cut = resolve_partial(generation, limit, line, measure, boundaries=boundaries)
            begin = None if cut is None else measure.straddled(self.text, cut.start)
            if begin is None:
                return cut
            limit = begin

    def is_ambiguous(self, continues: Generation, start: int, measure: Measure) -> bool:
        """Return whether a chain that does not continue this reply has whole sampled tokens of the text after `start`."""
        if self.limit <= start or not any(node.replied for node, _ in self.upward(start)):
            return False  # and there may be hundreds of lines: equal samples, followed by one observation
        for node, limit in self.upward(start):
            for other in node.lines():
                if other.continues is not continues and not _samples_nothing(other, limit):
                    cut = resolve_partial(other, limit, other.continues, measure, boundaries=False)
                    if cut is not None and cut.start > start:
                        return True
        return False

    def passes_mismatch(self, line: Generation | None) -> bool:
        """Return whether a reply whose ids do not spell its text ends on the path after `line`."""
        if line is not None and self.at is line.node and self.limit == self.end:
            return False
        for node, _ in self.stops():
            if line is not None and node is line.node:
                return False
            if any(generation.span.flags & SpanFlag.MISMATCH for generation in node.generations()):
                return True
        return False

    def resume(self) -> tuple[RadixNode, int] | None:
        """Return the last node of the path, and the characters down to its end; None if it is gone, or only the root is left.

        Splits and merges change neither the text nor the end of a node that stays.
        """
        node, end = self.at, self.end
        while node.parent is not None and end > self.limit:
            end -= len(node.edge)
            node = node.parent
        return None if node.parent is None else (node, end)

    def shared(self, reply: Generation) -> int:
        """Return how many characters the text has in common with that of a reply."""
        above, node = set[RadixNode](), reply.node
        while node.parent is not None:
            above.add(node)
            node = node.parent
        return next((limit for node, limit in self.upward() if node in above), 0)

    def kept_of(self, reply: Generation, measure: Measure) -> Cut | None:
        """Return the whole tokens of a reply that the text leaves in its middle; None if the text has none of them."""
        cut = self.whole_literals(reply, self.shared(reply), reply.continues, measure, boundaries=False)
        return cut if cut is not None and cut.span is reply.span else None

    def ends_on_node(self) -> bool:
        """Return whether the whole text is in the tree and ends where a node does."""
        return self.limit == len(self.text) == self.end


def _says_lost(context: TokenSpan | None, above: TokenSpan | None) -> bool:
    """Return whether a context has a flag, true only for its own request, that something before it may be missing."""
    while context is not None and context is not above and not context.flags & SpanFlag.LOST:
        context = context.parent
    return context is not None and context is not above


def _samples_nothing(generation: Generation, limit: int) -> bool:
    """Return whether only the reply itself was sampled after its line, and it begins at `limit` or later."""
    span, line = generation.span, generation.continues
    if span.start < limit:
        return False
    before, stop = span.parent, None if line is None else line.span
    return before is stop or (before is not None and before.parent is stop and not before.sampled)
