"""What is remembered of the prompts that were routed: who has them, and where conversations stand.

A node at which a prompt ended is marked, and so is one at which what is known of a reply ended: a conversation stands there (in
the picture `*`), and its next turn will begin with all of that, or with nearly all of it:

    the prompt        |== system prompt ==|= first question =|-gen-|
    the tree          |== held by most ===|== held by w2 =========*|== the reply ==*
    the next turn     |== system prompt ==|= first question ==|== the reply ==|- next question -|
                                                              ^ history drops the generation prompt: just before a mark

So a prompt continues a conversation if it runs through a mark, or leaves the tree a little before one. What most of the fleet
holds tells nobody apart, however long it is: all is measured from there on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Any, AnyStr, Generic, NamedTuple

from router.prefix_tree.node import PrefixNode
from router.prefix_tree.tree import Key, PrefixTree, Walk

COMMON = 16
"""A sixteenth of a prompt tells nobody apart."""

_LOOK_BACK = 32
"""Nodes above the end of a match among which a mark is looked for: some ten turns."""

_MANY = 64
"""Conversations that may stand at one node: a group of samples, but not a whole run under one system prompt."""


class Known(NamedTuple):
    """Of a prompt. Lengths are in units of the tree.

    Attributes:
        holders: who has what tells workers apart; none if nothing does.
        matched: how much of the prompt is known.
        shared: how much of it most of the fleet has.
        marks: nodes where the conversation stood that it continues.
        left: the node that it has left just before the mark there.
        similar: whether it has left one that looks like it, but may be another conversation's.
    """

    holders: Collection[str] = ()
    matched: int = 0
    shared: int = 0
    marks: Sequence[PrefixNode[Any]] = ()
    left: PrefixNode[Any] | None = None
    similar: bool = False

    @property
    def continued(self) -> bool:
        """Whether the prompt continues a conversation."""
        return bool(self.marks) or self.left is not None or self.similar


class RememberedPrompts(Generic[Key, AnyStr]):
    """Prompts of one kind. `slip`: how many units of a prompt's end its history may drop."""

    def __init__(self, tree: PrefixTree[Key, AnyStr], slip: int) -> None:
        self.tree: PrefixTree[Key, AnyStr] = tree
        self._slip = slip * tree.width

    def known(self, walk: Walk[AnyStr], base: int, fleet: int) -> Known:
        """What is known of a prompt, good until something is learnt.

        Args:
            walk: of the prompt, behind `base` units that all prompts of its tenant begin with.
            base: they are not counted.
            fleet: how many workers there are.
        """
        path, width = walk.path, self.tree.width
        start = base * width
        if walk.matched <= start:
            return Known()
        fleet = max(fleet, len(self.tree.holdings))
        # Who holds a node holds all above it, so those that few hold are the last ones.
        first = bisect_left(path, True, key=lambda node: 2 * len(node.tenants) <= fleet or fleet == 1)
        matched = walk.matched // width - base
        if first == len(path):
            return Known((), matched, matched)
        shared = max(start, path[first - 1].end if first else 0)
        marks, left, similar = self._marks(walk, first), None, False
        if self._slips(walk):
            if walk.key.endswith(path[-1].edge[walk.cut :]):
                left = path[-1]
            else:
                similar = self._is_little(walk, first)
        if marks or left is not None or similar:
            return Known(path[-1].tenants.keys(), matched, shared // width - base, marks, left, similar)
        sure = max(shared + 1, walk.matched - (len(walk.key) - shared) // COMMON)
        holders = next(node.tenants.keys() for node in path[first:] if node.end >= sure)
        return Known(holders, matched, shared // width - base)

    def learn(self, walk: Walk[AnyStr], worker: str, known: Known) -> None:
        """A worker gets this prompt, of which so much was known. The conversation stands here now, and nowhere else.

        What else begins with its marks is a fork, or has no more than a system prompt in common with a request that was nothing
        else.
        """
        for node in known.marks:
            node.ends -= 1
        left = known.left
        if left is not None:
            left.ends -= 1
        self._stand(self.tree.follow(walk, worker))
        if left is not None and left.ends and left.parent is not None and left.parent.end == walk.matched:
            # Other samples of its group will drop the same: they stand where it has left the tree.
            left.parent.ends, left.ends = min(_MANY, left.parent.ends + left.ends), 0

    def replied(self, key: Key, worker: str) -> None:
        """A worker has a prompt, and what is known of its reply: the conversation stands there, too."""
        self._stand(self.tree.follow(self.tree.walk(key), worker))

    @staticmethod
    def _stand(node: PrefixNode[AnyStr] | None) -> None:
        if node is not None:
            node.ends = min(_MANY, node.ends + 1)

    @staticmethod
    def _marks(walk: Walk[AnyStr], first: int) -> list[PrefixNode[AnyStr]]:
        """Those that the prompt runs through, and beyond."""
        end = min(walk.matched, len(walk.key) - 1)
        return [node for node in walk.path[max(first, len(walk.path) - _LOOK_BACK) :] if node.ends and node.end <= end]

    def _slips(self, walk: Walk[AnyStr]) -> bool:
        """Whether the prompt leaves the tree just before a mark. If it ends itself with what it lacks there, that is a
        generation prompt, which history drops."""
        if not walk.cut or walk.matched == len(walk.key):
            return False
        node = walk.path[-1]
        return node.ends > 0 and node.end - walk.matched <= self._slip

    @staticmethod
    def _is_little(walk: Walk[AnyStr], first: int) -> bool:
        """Whether what it lacks up to the mark is little beside what it has behind the last branch, twice as much or more.

        A few characters that any two questions have in common are no conversation.
        """
        path, at, has = walk.path, len(walk.path) - 1, walk.cut
        lacks = path[at].end - walk.matched
        while has < 2 * lacks and at > first and len(path[at - 1].children) == 1:
            at -= 1
            has += len(path[at].edge)
        return has >= 2 * lacks
