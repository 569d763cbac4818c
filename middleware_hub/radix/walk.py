"""How far a text goes down the tree, and what is found on its way. Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from middleware_hub.radix.match import FRESH, Cut, resolve_complete, sampled_base
from middleware_hub.radix.node import Generation, RadixNode, common_length
from middleware_hub.spans.chain import SpanFlag, TokenSpan

BESIDE = 16
"""How many chains that a text could be cut out of are looked at: nodes, and replies of one text."""


class Walk(NamedTuple):
    """How far a text goes down the tree."""

    stops: list[tuple[RadixNode, int]]
    """The nodes on the way at which generations end, with the characters matched up to there."""
    at: RadixNode
    """The node in whose edge, or at whose end, the text leaves the tree."""
    inside: int
    """Characters of that edge that agree."""
    limit: int
    """Characters of the text that agree."""

    def upward(self, floor: int) -> Iterator[tuple[RadixNode, int]]:
        """The nodes on the way from the last one up, with the characters agreed there, as long as these are over `floor`.

        A chain that runs through one of them and not through the one below agrees with the text exactly to its end.
        """
        node: RadixNode | None = self.at
        limit, inside = self.limit, self.inside
        while node is not None and limit > floor:
            yield node, limit
            limit -= inside
            node = node.parent
            inside = 0 if node is None else len(node.edge)

    def beside(self, line: Generation | None, floor: int) -> Iterator[tuple[Generation, int]]:
        """Generations behind `line` that leave the way over `floor`, with the characters agreed; the furthest first.

        Of those that leave it in the same place the newest come first. All of them could be 100,000 siblings, so it ends
        after `BESIDE`: those that differ in their tokens before they differ in their text are few.
        """
        seen: set[Generation] = set()
        visits = BESIDE
        walked: RadixNode | None = None
        for top, limit in self.upward(floor):
            below = [top]
            while below and visits:
                node = below.pop()
                newest = node.through(line)
                if newest is None or node is walked:
                    continue
                visits -= 1
                for generation in (newest, *islice(reversed(node.generations()), BESIDE)):
                    if generation.continues is line and generation not in seen:
                        seen.add(generation)
                        yield generation, limit
                below += reversed([*islice(reversed(node.each_child()), visits)])
            walked = top

    def passes_mismatch(self, line: Generation | None) -> bool:
        """Whether the way passes the end of a reply behind `line` whose ids do not spell its text."""
        for node, _ in reversed(self.stops):
            ended = node.generations()
            if line in ended:
                return False
            if any(generation.span.flags & SpanFlag.MISMATCH for generation in ended):
                return True
        return False

    def ends_on_node(self, text: str) -> bool:
        """Whether the whole text is in the tree and ends where a node does."""
        return self.limit == len(text) and self.inside == len(self.at.edge)


def walk_down(root: RadixNode, text: str) -> Walk:
    """Follow a text as far as the tree goes."""
    stops: list[tuple[RadixNode, int]] = []
    node, position, size = root, 0, len(text)
    while position < size:
        child = node.child(text[position])
        if child is None:
            break
        edge = child.edge
        if not text.startswith(edge, position):
            inside = common_length(edge, text, position)
            return Walk(stops, child, inside, position + inside)
        position += len(edge)
        node = child
        if node.ends is not None:
            stops.append((node, position))
    return Walk(stops, node, len(node.edge), position)


def first_characters(node: RadixNode, skip: int, count: int) -> str:
    """What the newest generation through a node goes on with, behind the first `skip` characters of its edge."""
    characters = node.edge[skip : skip + count]
    while len(characters) < count:
        children = list(node.each_child())
        if not children:
            break
        node = children[-1]
        characters += node.edge[: count - len(characters)]
    return characters


def longest_complete(
    stops: list[tuple[RadixNode, int]], text: str, request_id: str | None
) -> tuple[Cut, Generation | None]:
    """The longest complete reply that this text may continue, the newest of equal texts; or the one that is named.

    A reply whose ids do not spell its text is not continued: the text that the client saw is encoded instead.
    """
    for node, position in reversed(stops):
        for generation in reversed(node.generations()):
            if generation.span.flags & SpanFlag.MISMATCH:
                continue
            if request_id is None or generation.span.named(request_id):
                cut = resolve_complete(generation, text, position)
                if cut is not None:
                    return cut, generation
    return FRESH, None


def same_encoding(node: RadixNode, cut: Cut) -> TokenSpan | None:
    """A remembered context that ends at `node` and was encoded behind the same sampled tokens."""
    base = sampled_base(cut.span, cut.take, cut.start)
    for span in reversed(node.known_contexts()):
        if not span.flags & (SpanFlag.GIVEN | SpanFlag.LOST) and sampled_base(span, len(span), span.text_end) == base:
            return span
    return None
