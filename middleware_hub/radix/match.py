"""Which recorded chain a text continues: rule 3 of exactness. Only reads.

The match walks a text down the tree. It continues the longest complete reply on the path, or the reply that the request names.
After that reply, it also reuses whole tokens of a chain that the text leaves midway (see `cut`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import compress, islice
from typing import Any, NamedTuple

import msgspec

from middleware_hub.radix.cut import (
    FRESH,
    MOST_CANDIDATES,
    Cut,
    end_of,
    ends_by,
    leaves,
    resolve_complete,
    resolve_partial,
    same_encoding,
    samples_nothing,
    says_lost,
    shows_half_a_token,
    whole_literals,
)
from middleware_hub.radix.indexes import FAR, Landmarks
from middleware_hub.radix.node import Generation, RadixNode, common_length
from middleware_hub.spans.chain import Measure, SpanFlag, TokenSpan, links

_REASONS = (
    *("cut_in_token", "tail_left_out", "ambiguous_parent", "unknown_parent", "edited_turn"),
    *("engine_mismatch", "store_unreachable"),
)


class Path(NamedTuple):
    """How far a text goes down the tree."""

    text: str
    at: RadixNode
    """The node in whose edge, or at whose end, the text leaves the tree."""
    end: int
    """Characters from the root to the end of that node."""
    limit: int
    """Characters of the text that agree."""
    ids: bytes = b""
    """The ids that a client sent with it, packed."""

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
        seen, visits = set[Generation](), MOST_CANDIDATES
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
                span = generation.span
                if not span.flags & SpanFlag.MISMATCH and (request_id is None or span.named(request_id)):
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
            if samples_nothing(generation, limit):
                continue
            its_rank = (generation.span.start < limit, limit, generation.serial)
            preferred = best is not None and its_rank > rank
            if best is not None and not preferred and ends_by(generation.span, limit, best.start, measure):
                continue
            found = whole_literals(self.text, generation, limit, line, measure, boundaries=False, ids=self.ids)
            if found is not None and found.start + preferred > (best or cut).start:
                best, rank = found, its_rank
        if best is None and boundaries and newest is not None:
            found = whole_literals(self.text, *newest, line, measure, boundaries=True, ids=self.ids)
            if found is not None and found.start > cut.start and not says_lost(found.span, cut.span):
                return found
        return best

    def is_ambiguous(self, continues: Generation, start: int, measure: Measure) -> bool:
        """Return whether a chain that does not continue this reply has whole sampled tokens of the text after `start`."""
        if self.limit <= start or not any(node.replied for node, _ in self.upward(start)):
            return False  # and there may be hundreds of lines: equal samples, followed by one observation
        lines = {other.continues: None for node, _ in self.upward(start) for other in node.lines()}
        lines.pop(continues, None)
        for line in islice(lines, MOST_CANDIDATES):
            for other, limit in self.candidates(line, start):
                if not samples_nothing(other, limit):
                    cut = resolve_partial(other, limit, line, measure, boundaries=False)
                    if cut is not None and cut.start > start:
                        return True
        return False

    def passes_mismatch(self, line: Generation | None) -> bool:
        """Return whether a reply whose ids do not spell its text ends on the path after `line`."""
        if line is not None and self.at is line.node and self.limit == self.end:
            return False
        for node, _ in self.stops():
            if line is not None and node is line.node:
                break
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

    def noted(self, cut: Cut) -> Cut:
        """Return a cut of this text, with the note that what comes after it is the visible part of a token, if it is."""
        half = self.limit > cut.start and shows_half_a_token(self.text, self.stops(), cut.start)
        return cut._replace(recut=True) if half else cut

    def ends_on_node(self) -> bool:
        """Return whether the whole text is in the tree and ends where a node does."""
        return self.limit == len(self.text) == self.end


class PrefixMatch(msgspec.Struct, frozen=True):
    """The result of `RadixTree.match`. `tree.pin(match)` keeps it from being collected while a request uses it.

    Attributes:
        namespace, text: what was looked up.
        cut: the chain to continue, and the character of `text` from which to encode.
        continues: the complete generation that is continued, if any.
        known: a remembered context that holds exactly the encoding of the rest; then nothing needs encoding.
        ambiguous: another chain matches whole sampled tokens further on (`ambiguous_parent`).
        unknown_parent: the request named a parent whose tokens are not in the prompt.
        edited: the prompt keeps only a part of the parent that the request named: the text leaves the reply in its middle.
        path: how far the text goes down the tree, from where `RadixTree.record` goes on.
        mismatched: the text holds a reply whose ids do not spell it (`engine_mismatch`), encoded as the client saw it.
        unasked: the store, which may know more of this text, could not be asked (`store_unreachable`).
        unheard: it is a chat with replies that nobody knew while the store could not be asked.
        hidden_parent: the parent that the request named has only hidden tokens, and the prompt has none of them.
        foreign: the chain was recorded under another text than this one (the ids of both are the same).
        hashed: the hashes of the text that the store behind the tree has computed.
    """

    namespace: tuple[str, ...]
    text: str
    cut: Cut = FRESH
    continues: Generation | None = None
    known: TokenSpan | None = None
    ambiguous: bool = False
    unknown_parent: bool = False
    hidden_parent: bool = False
    foreign: bool = False
    edited: bool = False
    mismatched: bool = False
    path: Path | None = None
    unasked: bool = False
    unheard: bool = False
    hashed: Any = None

    @property
    def flags(self) -> int:
        """Return the flags of the first span after this match."""
        return (
            (SpanFlag.PARENT_LOST if self.unknown_parent else 0)
            | (SpanFlag.AFTER_MISMATCH if self.mismatched else 0)
            | (SpanFlag.FOREIGN if self.foreign or self.cut.foreign else 0)
            | (SpanFlag.UNASKED if self.unasked or self.unheard else 0)
            | (SpanFlag.UNHEARD if self.unheard else 0)
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the reasons that describe how the prompt was made, as answers and counters name them."""
        line, (span, take, _, recut, _) = self.continues, self.cut
        if span is not None and span.versions is None:
            span, take, _, recut = self.cut.sampled_base
        left_out = self.hidden_parent or (line is not None and span is line.span and take < line.span.count)
        holds = (recut, left_out and not recut, self.ambiguous, self.unknown_parent, self.edited)
        return tuple(compress(_REASONS, (*holds, self.mismatched, self.unasked)))


def walk_down(root: RadixNode, text: str, marks: Landmarks | None = None) -> Path:
    """Follow a text as far as the tree goes, through the landmarks of a deep conversation if there are any."""
    node, position, steps = root.walk(text, 0, FAR)
    if steps == FAR:
        if marks is not None:
            node, position = marks.deepest(root, text, node, position)
        node, position, further = node.walk(text, position, len(text))
        if further >= FAR and marks is not None:
            marks.place(root, text, node, position)
    child = node.child(text[position]) if position < len(text) else None
    if child is None:
        return Path(text, node, position, position)
    edge = child.edge
    return Path(text, child, position + len(edge), position + common_length(edge, text, position))


def match_text(
    namespace: tuple[str, ...], path: Path, parent: str | None, measure: Measure, *, boundaries: bool = True
) -> PrefixMatch:
    """Find the chain that the text of a path continues; `parent` names the reply to prefer, `boundaries` is for `further`."""
    text = path.text
    cut, continues, unknown = FRESH, None, False
    if parent is not None:
        cut, continues = path.longest_complete(parent)
        unknown = continues is None
    if continues is None:
        cut, continues = path.longest_complete(None)
        begin = None if continues is None else measure.straddled(text, cut.start)
        if begin is not None:
            # The reply ends inside an added token that the text spells: a shorter reply continues with that token. (Where the
            # reply itself sampled that token, and shows a part of it, the cut lies behind it.)
            shorter = path.longest_complete(None, begin)
            cut, continues = (cut, continues) if shorter[1] is None else shorter
    at_prompt = path.at.contexts is not None and path.ends_on_node()
    further = path.further(continues, cut, measure, boundaries=boundaries and not at_prompt)
    known = same_encoding(path.at, path.noted(further or cut)) if at_prompt else None
    if boundaries and at_prompt and known is None:
        further = path.further(continues, cut, measure)
    cut = path.noted(further or cut) if known is None else end_of(known)
    start = cut.start if cut.span is None or cut.span.versions is not None else cut.sampled_base[2]
    ambiguous = continues is not None and path.is_ambiguous(continues, start, measure)
    mismatched = path.passes_mismatch(continues)
    return PrefixMatch(namespace, text, cut, continues, known, ambiguous, unknown, mismatched=mismatched, path=path)


def match_parent(match: PrefixMatch, parent: Generation, measure: Measure) -> PrefixMatch | None:
    """Return a match for the reply that a request names as its parent, where a match has no token of it; None for no other.

    Replies to one prompt begin alike: others may have the part of the parent that the text keeps, and be newer or complete. If
    the parent has only hidden tokens, what the workflow says after it may be how another reply begins.
    """
    path, line, begin = match.path, parent.continues, parent.span.start
    if path is None or (shared := path.shared(parent)) < begin:
        return None
    kept = whole_literals(path.text, parent, shared, line, measure, boundaries=False)
    cut: Cut | None = kept if kept is not None and kept.span is parent.span else None
    if cut is None and not parent.span.visible and leaves(match.cut, parent.span):
        before = FRESH if line is None else resolve_complete(line, path.text, line.span.text_end)
        cut = whole_literals(path.text, parent, begin, line, measure, boundaries=False) or before
    if cut is None:
        return None
    cut = path.noted(cut)
    known = same_encoding(path.at, cut) if path.at.contexts is not None and path.ends_on_node() else None
    cut = end_of(known) if known else cut
    return PrefixMatch(match.namespace, path.text, cut, line, known, mismatched=path.passes_mismatch(line), path=path)


def match_chain(
    namespace: tuple[str, ...], path: Path, generation: Generation, take: int, width: Callable[[int], int]
) -> PrefixMatch:
    """Match ids that begin with the chain of a reply: on the path of their own text, or recorded under another one.

    If the chain was recorded under another text, the longest of its replies that is still on the path is continued.
    """
    span, text = generation.span, path.text
    for node, position in path.stops():
        if node is generation.node:
            cut = resolve_complete(generation, text, position)
            if cut is None or (cut.span, cut.take) != (span, take):
                cut = Cut(span, take, position)
            return PrefixMatch(namespace, text, cut, generation, path=path)
    owners = {part.owner for part, _ in links(span.parent, span.take) if part.sampled}
    line = next((g for node, _ in path.stops() for g in node.generations() if g in owners), None)
    return PrefixMatch(namespace, text, Cut(span, take, width(span.offset + take)), line, foreign=True, path=path)
