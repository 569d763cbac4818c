"""Which recorded chain a text continues: rule 3 of exactness. Only reads.

A text is first walked down the tree. The longest complete reply on its path is continued, or the reply that the request names.
After it, whole tokens of a chain that the text leaves midway are reused too (see `cut`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any

import msgspec

from middleware_hub.radix.cut import FRESH, Cut, Path, resolve_complete, same_encoding
from middleware_hub.radix.landmarks import FAR, Landmarks
from middleware_hub.radix.node import Generation, RadixNode, common_length
from middleware_hub.spans.chain import Measure, SpanFlag, TokenSpan, links

_REASONS = (
    "cut_in_token",
    "tail_left_out",
    "ambiguous_parent",
    "unknown_parent",
    "edited_turn",
    "engine_mismatch",
    "store_unreachable",
)


class PrefixMatch(msgspec.Struct, frozen=True):
    """The result of `RadixTree.match`. `tree.pin(match)` keeps it from being collected while a request uses it.

    Attributes:
        namespace: that of the look-up.
        text: the text that was looked up.
        cut: the chain to continue, and the character of `text` from which to encode.
        continues: the complete generation that is continued, if any.
        known: a remembered context that holds exactly the encoding of the rest; then nothing needs encoding.
        ambiguous: another chain matches whole sampled tokens further on (`ambiguous_parent`).
        unknown_parent: the request named a parent whose tokens are not in the prompt.
        edited: the prompt keeps only a part of the parent that the request named: the text leaves the reply in its middle.
        path: how far the text goes down the tree, from where `RadixTree.record` goes on.
        mismatched: the text holds a reply whose ids do not spell it (`engine_mismatch`), encoded as the client saw it.
        unasked: the store, which may know more of this text, could not be asked (`store_unreachable`).
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
    hashed: Any = None

    @property
    def tail_left_out(self) -> bool:
        """Return whether the prompt lacks tokens at the end of the reply that it follows (`tail_left_out`)."""
        line, cut = self.continues, self.cut
        return self.hidden_parent or (line is not None and cut.span is line.span and cut.take < line.span.count)

    @property
    def flags(self) -> int:
        """Return the flags of the first span after this match."""
        return (
            (SpanFlag.PARENT_LOST if self.unknown_parent else 0)
            | (SpanFlag.AFTER_MISMATCH if self.mismatched else 0)
            | (SpanFlag.FOREIGN if self.foreign else 0)
            | (SpanFlag.UNASKED if self.unasked else 0)
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the reasons that describe how the prompt was made, as answers and counters name them."""
        holds = (
            self.cut.recut,
            self.tail_left_out and not self.cut.recut,
            self.ambiguous,
            self.unknown_parent,
            self.edited,
            self.mismatched,
            self.unasked,
        )
        return tuple(compress(_REASONS, holds))


def walk_down(root: RadixNode, text: str, marks: Landmarks | None = None) -> Path:
    """Follow a text as far as the tree goes, through the landmarks of a deep conversation if there are any."""
    node, position, size, steps = root, 0, len(text), 0
    while position < size:
        child = node.child(text[position])
        if child is None:
            break
        edge = child.edge
        if not text.startswith(edge, position):
            limit = position + common_length(edge, text, position)
            return Path(text, child, position + len(edge), limit)
        position += len(edge)
        node = child
        steps += 1
        if steps == FAR and marks is not None:
            node, position = marks.deepest(root, text, node, position)
    if steps >= 2 * FAR and marks is not None:
        marks.place(root, text, node, position)
    return Path(text, node, position, position)


def match_text(namespace: tuple[str, ...], path: Path, parent: str | None, measure: Measure) -> PrefixMatch:
    """Find the chain that the text of a path continues; `parent` names the reply to prefer."""
    text = path.text
    cut, continues, unknown = FRESH, None, False
    if parent is not None:
        cut, continues = path.longest_complete(parent)
        unknown = continues is None
    if continues is None:
        cut, continues = path.longest_complete(None)
        begin = None if continues is None else measure.straddled(text, continues.span.start + continues.span.width)
        if begin is not None:
            # The reply ends inside an added token that the text spells: a shorter reply continues with that token.
            shorter = path.longest_complete(None, begin)
            cut, continues = (cut, continues) if shorter[1] is None else shorter
    at_prompt = path.at.contexts is not None and path.ends_on_node()
    further = path.further(continues, cut, measure, boundaries=not at_prompt)
    known = None
    if at_prompt:
        known = same_encoding(path.at, further or cut)
        if known is None:
            further = path.further(continues, cut, measure)
    cut = further or cut if known is None else Cut(known, known.count, len(text))
    ambiguous = continues is not None and path.is_ambiguous(continues, cut.start, measure)
    mismatched = path.passes_mismatch(continues)
    return PrefixMatch(namespace, text, cut, continues, known, ambiguous, unknown, mismatched=mismatched, path=path)


def match_parent(match: PrefixMatch, parent: Generation, measure: Measure) -> PrefixMatch | None:
    """Return a match for the reply that a request names as its parent, where a match has no token of it; None for no other.

    Replies to one prompt begin alike. If the text keeps only a part of the parent, others may have that part as well, and be
    newer or complete. If the parent has only hidden tokens, what the workflow says after it may be how another reply begins.
    """
    path, line = match.path, parent.continues
    if path is None or path.shared(parent) < parent.span.start:
        return None
    cut = path.kept_of(parent, measure)
    if cut is None and not parent.span.visible and _leaves(match.cut, parent.span):
        cut = path.whole_literals(parent, parent.span.start, line, measure, boundaries=False)
        if cut is None:
            cut = FRESH if line is None else resolve_complete(line, path.text, line.span.text_end)
    if cut is None:
        return None
    known = same_encoding(path.at, cut) if path.at.contexts is not None and path.ends_on_node() else None
    cut = cut if known is None else Cut(known, known.count, len(path.text))
    return PrefixMatch(match.namespace, path.text, cut, line, known, mismatched=path.passes_mismatch(line), path=path)


def _leaves(cut: Cut, reply: TokenSpan) -> bool:
    """Return whether a chain has sampled tokens that begin within the prompt of a reply, or at its end, and are not in it."""
    prompt = {part for part, _ in links(reply.parent, reply.take)}
    found = links(cut.span, cut.take)
    return any(take and part.sampled and part.start <= reply.start and part not in prompt for part, take in found)


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
