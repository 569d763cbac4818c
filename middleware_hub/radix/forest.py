"""The radix trees of all namespaces: how nodes and spans are added and removed, and the running counts of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from middleware_hub.radix.indexes import IdsIndex, Landmarks, Leaves, ReplyNames
from middleware_hub.radix.node import Generation, RadixNode, StoredSpan, common_length
from middleware_hub.spans.chain import SpanFlag, TokenSpan
from middleware_hub.spans.extras import Extras
from middleware_hub.spans.versions import Stamp


@dataclass(slots=True)
class TreeStats:
    """Running counts of a tree."""

    nodes: int = 0
    generations: int = 0
    spans: int = 0
    tokens: int = 0
    characters: int = 0
    payload: int = 0
    """Bytes of ids and logprobs."""
    hits: int = 0
    """Recorded requests that continued a chain."""
    misses: int = 0
    evicted: Counter[str] = field(default_factory=Counter)
    evicted_tokens: int = 0

    def forget(self) -> None:
        """Reset the counts to an empty tree; evictions stay counted."""
        self.nodes = self.generations = self.spans = self.tokens = self.characters = self.payload = 0
        self.hits = self.misses = 0


class Forest:
    """One radix tree per namespace, the indexes over all of them, and their counts.

    Attributes:
        stored: the spans that a store has too, by the ids of their records.
        extras: further per-token data of engines for these replies.
        watcher: called with each reply that is added or removed; None while the inspector is not in use.
    """

    def __init__(self, *, stored: bool = False) -> None:
        """`stored`: whether a store has everything that is here."""
        self.stats = TreeStats()
        self.leaves = Leaves(stored=stored)
        self.marks = Landmarks()
        self.by_ids = IdsIndex()
        self.names = ReplyNames()
        self.roots: dict[tuple[str, ...], RadixNode] = {}
        self.stored: dict[bytes, TokenSpan] = {}
        self.extras = Extras(stored=stored)
        self.watcher: Callable[[Generation], None] | None = None

    @property
    def estimated_bytes(self) -> int:
        """Return the bytes held: the counted payload, and the average cost of CPython's objects (measured in benchmarks/)."""
        stats = self.stats
        objects = 200 * stats.spans + 190 * stats.nodes + 420 * stats.generations
        return stats.payload + self.extras.bytes + stats.characters + objects

    def root(self, namespace: tuple[str, ...]) -> RadixNode:
        found = self.roots.get(namespace)
        if found is None:
            found = self.roots[namespace] = RadixNode("", None)
        return found

    def descend(self, node: RadixNode, text: str, position: int) -> RadixNode:
        """Descend along `text[position:]`, making and splitting nodes, so that a node ends exactly where the text does."""
        while position < len(text):
            child = node.child(text[position])
            if child is None:
                child = RadixNode(text[position:], node)
                node.attach(child)
                self.stats.nodes += 1
                self.stats.characters += len(child.edge)
            elif not text.startswith(child.edge, position):
                child = child.split(common_length(child.edge, text, position))
                self.stats.nodes += 1
            position += len(child.edge)
            node = child
        return node

    def insert(self, namespace: tuple[str, ...], generation: Generation) -> None:
        """Put a reply at its node and into all indexes, whether it is new or comes from a store."""
        span, node = generation.span, generation.node
        span.owner = generation
        span.users = 1
        self.add_span(span)
        node.add_end(generation)
        before = span.parent
        own = before is not None and bool(before.flags & SpanFlag.FOREIGN) and not before.sampled
        self.note_passes(generation, foreign=own or bool(span.flags & SpanFlag.FOREIGN))
        self.stats.generations += 1
        self.by_ids.add(namespace, generation)
        self.names.add(generation)
        self.leaves.offer(generation)
        if self.watcher is not None:
            self.watcher(generation)

    def insert_context(self, span: TokenSpan, node: RadixNode) -> None:
        """Put the context of prompts at the node of their text."""
        span.owner = node
        node.add_context(span)
        self.add_span(span)

    def restore(self, found: StoredSpan, stamp: Stamp, tick: int) -> None:
        """Put in what a store has. What it builds on is in the tree. `stamp` and `tick` are those of its last hit."""
        span, base = found.span, found.base
        if base is None:
            above = self.root(found.namespace)
        else:
            above = base.owner.node if isinstance(base.owner, Generation) else base.owner
        node = self.descend(above, found.text, 0)
        if span.sampled:
            line = None if found.line is None else found.line.owner
            self.insert(
                found.namespace, Generation(span, node, line, found.tail, found.serial, stamp, tick, found.retrieved)
            )
        else:
            self.insert_context(span, node)
        self.stored[found.record] = span

    def remove(self, generation: Generation) -> None:
        """Remove a reply on which nothing builds."""
        node, line, span = generation.node, generation.continues, generation.span
        self.by_ids.remove(generation)
        self.names.remove(generation)
        node.remove_end(generation)
        self.stats.generations -= 1
        top = None if line is None else line.node
        passed: RadixNode | None = node
        while passed is not None and passed is not top and passed.forget_pass(generation):
            passed = passed.parent
        parent = _nearest_generation(span)
        if parent is not None and generation.tick > parent.tick:
            # A hit below counts as a hit here; it had no effect while there was something below.
            parent.tick, parent.stamp = generation.tick, generation.stamp
        self.prune(node)
        self.release(span)
        span.owner = None
        if self.watcher is not None:
            self.watcher(generation)

    def note_passes(self, generation: Generation, *, foreign: bool) -> None:
        """Note a new reply in the nodes between it and the reply that it continues.

        The tokens of a `foreign` chain are not where its text has them, so its context counts as a reply.
        """
        line, span = generation.continues, generation.span
        top = None if line is None else line.node
        node, end = generation.node, span.start + span.width
        while node is not top and node.parent is not None:
            node.note_pass(generation)
            if foreign or end > span.start:
                node.replied = True
            end -= len(node.edge)
            node = node.parent

    def add_span(self, span: TokenSpan) -> None:
        if span.parent is not None:
            span.parent.users += 1
        self.stats.spans += 1
        self.stats.tokens += span.count
        self.stats.payload += len(span.ids) if span.logprobs is None else len(span.ids) + len(span.logprobs)

    def release(self, span: TokenSpan | None) -> None:
        """Count one user fewer of a span. A span without users is removed, and so on upward."""
        while span is not None:
            span.users -= 1
            assert span.users >= 0
            owner = span.owner
            if span.users:
                if isinstance(owner, Generation):
                    self.leaves.offer(owner)
                return
            self.stats.spans -= 1
            self.stats.tokens -= span.count
            self.stats.payload -= len(span.ids) if span.logprobs is None else len(span.ids) + len(span.logprobs)
            self.extras.forget(span)
            if span.stored is not None:
                self.stored.pop(span.stored.id, None)
            if isinstance(owner, RadixNode):
                span.owner = None
                owner.remove_context(span)
                self.prune(owner)
            span = span.parent

    def prune(self, node: RadixNode) -> None:
        """Remove nodes at or below which nothing ends any more, and merge what is left."""
        while node.parent is not None and node.removable:
            above = node.parent
            above.detach(node)
            self.stats.nodes -= 1
            self.stats.characters -= len(node.edge)
            node = above
        if node.parent is None:
            if node.removable:
                for namespace in [name for name, root in self.roots.items() if root is node]:
                    del self.roots[namespace]
        elif node.ends is None and node.contexts is None and isinstance(node.children, RadixNode):
            node.merge_down()
            self.stats.nodes -= 1

    def each_generation(self) -> Iterator[Generation | None]:
        """Yield all replies, and None for each node without one. While the forest changes, new replies may be left out."""
        for node, _ in every_node(list(self.roots.values())):
            yield from tuple(node.generations()) or (None,)

    def clear(self) -> None:
        """Forget everything, link by link: freeing a chain of 100,000 spans by its end alone would overflow the C stack."""
        for node, _ in list(every_node(self.roots.values())):
            for generation in node.generations():
                span: TokenSpan | None = generation.span
                while span is not None:
                    above = span.parent
                    span.parent = span.owner = None
                    span = above
            node.parent = node.children = node.ends = node.contexts = node._through = None
        self.roots.clear()
        self.stored.clear()
        self.extras.clear()
        self.leaves = Leaves(stored=self.leaves.stored)
        self.marks = Landmarks()
        self.by_ids = IdsIndex()
        self.names = ReplyNames()
        self.stats.forget()


def every_node(roots: Iterable[RadixNode]) -> Iterator[tuple[RadixNode, int]]:
    """Yield all nodes with the number of characters down to their end."""
    stack = [(root, 0) for root in roots]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        stack.extend((child, depth + len(child.edge)) for child in node.each_child())


def _nearest_generation(span: TokenSpan) -> Generation | None:
    above = span.parent
    while above is not None and not isinstance(above.owner, Generation):
        above = above.parent
    return None if above is None else above.owner
