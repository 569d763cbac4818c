"""Nodes of the radix tree, and the generations that end at them.

A node stands for one text: all edges from the root, joined. It owns characters only, and points at the tokens:

    ends      generations whose prompt + reply is exactly this text, oldest first
    contexts  context spans of prompts that are exactly this text
    replied   whether this text may end inside a reply, or at its end; else all that runs through it is context here
    through   for each generation R that is continued on this path (None: a fresh start), the newest generation
              after R whose text runs through this node: the chain to cut when a text leaves the tree here

Others hold the node object, so a split puts a *new* node above and the old one keeps its end, its pointers and its identity;
a merge keeps the lower node for the same reason. Most nodes have one child, one pass and at most one end, so these are kept
bare and become containers only for a second one (a dict costs 184 bytes, and a whole turn about 1,000).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Reversible
from heapq import nlargest
from math import inf
from typing import TypeVar

import msgspec

from middleware_hub.spans.chain import TokenSpan
from middleware_hub.spans.hidden_tail import HiddenToken
from middleware_hub.spans.versions import Stamp

T = TypeVar("T")


class Generation(msgspec.Struct, gc=False, eq=False):
    """One recorded reply: the end of a chain, indexed by the text that the chain spells.

    Attributes:
        span: what was sampled; its parents are the prompt.
        node: the node where its text ends in the tree.
        continues: the complete reply that its prompt continued.
        tail: the hidden tail, for the texts that may spell it.
        serial: its place in the order of recording; with a store, of everything in the store.
        tick: when it, or something below it, was hit last.
        stamp: the weight version at that time.
        retrieved: whether its tokens were ever retrieved.
        namespace, fingerprints: kept by `IdsIndex`.
    """

    span: TokenSpan
    node: RadixNode
    continues: Generation | None
    tail: tuple[HiddenToken, ...]
    serial: int
    stamp: Stamp
    tick: int
    retrieved: bool = False
    namespace: tuple[str, ...] = ()
    fingerprints: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<Generation {self.request_ids[0] if self.request_ids else self.serial}: {self.span!r}>"

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Return the client's `rid` and SGLang's `meta_info.id`."""
        return self.span.request_ids

    @property
    def leaf(self) -> bool:
        """Return whether nothing else builds on this generation, so that removing it frees tokens."""
        return self.span.users == 1


class StoredSpan(msgspec.Struct, frozen=True):
    """A span that a store has: the end of a prompt, or a reply.

    Attributes:
        span: its parent is in the tree.
        record: the id of its record.
        namespace: where it was recorded.
        base: the span after whose whole text `text` begins; None at the start of a chain.
        line: the complete reply that its prompt continued.
        tail, serial, retrieved: those of the `Generation`.
        version: the weight version of its last hit.
    """

    span: TokenSpan
    record: bytes
    namespace: tuple[str, ...]
    text: str
    base: TokenSpan | None
    line: TokenSpan | None
    tail: tuple[HiddenToken, ...]
    serial: int
    version: str
    retrieved: bool


class RadixNode(msgspec.Struct, gc=False, eq=False):
    """A node, see the top of this file. Like spans, nodes are not garbage collected: `detach` cuts the cycles."""

    edge: str
    parent: RadixNode | None
    children: RadixNode | dict[str, RadixNode] | None = None
    ends: Generation | list[Generation] | None = None
    contexts: TokenSpan | list[TokenSpan] | None = None
    _through: Generation | dict[Generation | None, Generation] | None = None
    replied: bool = False

    def __repr__(self) -> str:
        edge = self.edge if len(self.edge) <= 20 else self.edge[:17] + "..."
        return f"<RadixNode {edge!r}, {sum(1 for _ in self.each_child())} children, {len(self.generations())} ends>"

    @property
    def text(self) -> str:
        """Return the text that it stands for."""
        edges: list[str] = []
        node: RadixNode | None = self
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return "".join(reversed(edges))

    def each_child(self) -> Reversible[RadixNode]:
        """Return the children, in the order in which they were made."""
        children = self.children
        if children is None:
            return ()
        return children.values() if isinstance(children, dict) else (children,)

    def child(self, character: str) -> RadixNode | None:
        """Return the child whose edge begins with `character`."""
        children = self.children
        if isinstance(children, dict):
            return children.get(character)
        return children if children is not None and children.edge[0] == character else None

    def walk(self, text: str, position: int, most: int) -> tuple[RadixNode, int, int]:
        """Follow a text from this node, `position` characters down, along at most so many whole edges.

        Return the last node, the characters down to its end, and how many edges there were.
        """
        node, steps, size = self, 0, len(text)
        while position < size and steps < most:
            children = node.children
            child = children.get(text[position]) if isinstance(children, dict) else children
            if child is None or not text.startswith(child.edge, position):
                break
            node = child
            position += len(child.edge)
            steps += 1
        return node, position, steps

    def attach(self, child: RadixNode) -> None:
        """Put `child` below this node, replacing one with the same first character."""
        child.parent = self
        children = self.children
        if isinstance(children, dict):
            children[child.edge[0]] = child
        elif children is None or children.edge[0] == child.edge[0]:
            self.children = child
        else:
            self.children = {children.edge[0]: children, child.edge[0]: child}

    def detach(self, child: RadixNode) -> None:
        child.parent = None
        if isinstance(self.children, dict):
            del self.children[child.edge[0]]
            if len(self.children) == 1:
                (self.children,) = self.children.values()
        else:
            self.children = None

    def generations(self) -> tuple[Generation, ...] | list[Generation]:
        """Return the generations that end here, oldest first."""
        ends = self.ends
        return () if ends is None else ends if isinstance(ends, list) else (ends,)

    def add_end(self, generation: Generation) -> None:
        self.ends = generation if self.ends is None else added(self.ends, generation, _recorded)

    def remove_end(self, generation: Generation) -> None:
        self.ends = removed(self.ends, generation)

    def known_contexts(self) -> tuple[TokenSpan, ...] | list[TokenSpan]:
        """Return the contexts that end here, oldest first."""
        contexts = self.contexts
        return () if contexts is None else contexts if isinstance(contexts, list) else (contexts,)

    def add_context(self, span: TokenSpan) -> None:
        self.contexts = span if self.contexts is None else added(self.contexts, span, _encoded)

    def remove_context(self, span: TokenSpan) -> None:
        self.contexts = removed(self.contexts, span)

    def newest_first(self, line: Generation | None, most: int) -> list[RadixNode]:
        """Return the children through which generations after `line` run, the child with the newest of them first."""
        children = [child for child in self.each_child() if child.through(line) is not None]
        if len(children) < 2:
            return children
        return nlargest(most, children, key=lambda child: child.through(line).serial)  # type: ignore[union-attr]

    def through(self, line: Generation | None) -> Generation | None:
        """Return the newest generation after `line` whose text runs through this node, or ends here."""
        passes = self._through
        if isinstance(passes, dict):
            return passes.get(line)
        return passes if passes is not None and passes.continues is line else None

    def lines(self) -> Iterator[Generation]:
        """Yield one generation for each line that runs through this node, the newest line first."""
        passes = self._through
        if isinstance(passes, dict):
            yield from reversed(passes.values())
        elif passes is not None:
            yield passes

    def note_pass(self, generation: Generation) -> None:
        """Note that `generation` runs through this node, if it is the newest of its line."""
        passes = self._through
        if passes is None:
            self._through = generation
            return
        newest = self.through(generation.continues)
        if newest is None or newest.serial <= generation.serial:
            self._set_pass(generation)

    def _set_pass(self, generation: Generation) -> None:
        passes = self._through
        if isinstance(passes, dict):
            passes[generation.continues] = generation
        elif passes is None or passes.continues is generation.continues:
            self._through = generation
        else:
            self._through = {passes.continues: passes, generation.continues: generation}

    def forget_pass(self, generation: Generation) -> bool:
        """Replace a removed generation by the newest one left of its line. Return False if it was not noted here.

        This reads the node's ends and its children's passes, which have to be right already: go bottom-up.
        """
        line = generation.continues
        if self.through(line) is not generation:
            return False
        newest: Generation | None = None
        for child in self.each_child():
            other = child.through(line)
            if other is not None and (newest is None or other.serial > newest.serial):
                newest = other
        for other in self.generations():
            if other.continues is line and (newest is None or other.serial > newest.serial):
                newest = other
        if newest is not None:
            self._set_pass(newest)
        elif isinstance(self._through, dict):
            del self._through[line]
            if len(self._through) == 1:
                (self._through,) = self._through.values()
        else:
            self._through = None
        return True

    def split(self, at: int) -> RadixNode:
        """Cut the edge after `at` characters and return the new upper node.

        parent --"abcdef"--> self      becomes      parent --"abc"--> upper --"def"--> self
        """
        assert self.parent is not None
        assert 0 < at < len(self.edge)
        upper = RadixNode(self.edge[:at], self.parent)
        upper.replied = self.replied
        upper._through = dict(self._through) if isinstance(self._through, dict) else self._through
        self.parent.attach(upper)
        self.edge = self.edge[at:]
        upper.attach(self)
        return upper

    def first_characters(self, skip: int, count: int) -> str:
        """Return how the newest generation through this node goes on, after the first `skip` characters of its edge."""
        node = self
        characters = node.edge[skip : skip + count]
        while len(characters) < count:
            children = list(node.each_child())
            if not children:
                break
            node = children[-1]
            characters += node.edge[: count - len(characters)]
        return characters

    @property
    def removable(self) -> bool:
        """Return whether nothing ends at or below this node."""
        return self.ends is None and self.contexts is None and self.children is None

    def merge_down(self) -> None:
        """Merge this node, at which nothing ends, into its only child: the opposite of `split`."""
        child = self.children
        assert self.parent is not None
        assert isinstance(child, RadixNode)
        child.edge = self.edge + child.edge
        self.parent.attach(child)
        self.parent = self.children = self._through = None


def common_length(edge: str, text: str, pos: int) -> int:
    """Return how many characters of `edge` match `text` from `pos` on. Bisection leaves the comparing to C."""
    low, high = 0, min(len(edge), len(text) - pos)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(edge[low:middle], pos + low):
            low = middle
        else:
            high = middle - 1
    return low


def added(held: T | list[T] | None, item: T, order: Callable[[T], float]) -> T | list[T]:
    """Add to what is held: nothing, one item, or a list of several, in their order."""
    if held is None:
        return item
    if not isinstance(held, list):
        held = [held]
    insort(held, item, key=order)
    return held


def _recorded(generation: Generation) -> int:
    return generation.serial


def _encoded(context: TokenSpan) -> float:
    """Return the order of a context that a store has; a new context comes last."""
    return inf if context.stored is None else context.stored.serial


def removed(held: T | list[T] | None, item: T) -> T | list[T] | None:
    """Remove from what is held: the opposite of `added`."""
    if not isinstance(held, list):
        return None
    held.remove(item)
    return held[0] if len(held) == 1 else held


def every_node(roots: Iterable[RadixNode]) -> Iterator[tuple[RadixNode, int]]:
    """Yield all nodes with the number of characters down to their end."""
    stack = [(root, 0) for root in roots]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        stack.extend((child, depth + len(child.edge)) for child in node.each_child())
