"""Routed prompts in a tree: which workers have them, and where conversations stand.

A node at which a prompt ended is marked, and so is the node at which the known part of its reply ended. A conversation stands
at a mark (`*` in the picture), and its next turn will begin with all of that, or with nearly all of it:

    the prompt        |== system prompt ==|= first question =|-gen-|
    the tree          |== held by most ===|== held by w2 =========*|== the reply ==*
    the next turn     |== system prompt ==|= first question ==|== the reply ==|- next question -|
                                                              ^ history drops the generation prompt: just before a mark

So a prompt continues a conversation if it runs through a mark, or leaves the tree a little before one. What most of the fleet
holds tells no workers apart, however long it is: everything is measured from its end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Any, AnyStr, Generic, NamedTuple

from router.prefix_tree.node import PrefixNode
from router.prefix_tree.tree import Descent, Key, PrefixTree

NEGLIGIBLE = 16
"""One part in this many of a prompt tells no workers apart."""

_LOOK_BACK = 32
"""Nodes above the end of a match that are searched for marks: about ten turns."""

_MANY = 64
"""Conversations counted at one node: a group of samples, but not a whole run under one system prompt."""


class Known(NamedTuple):
    """The known part of a prompt. Lengths are in units of the tree.

    Attributes:
        holders: the workers that have the part which tells workers apart; empty if no part does.
        matched: the length of the known prefix.
        shared: the length of the prefix that most of the fleet has.
        marks: the marked nodes of the conversation that the prompt continues.
        left: the marked node of that conversation whose edge the prompt leaves just before its end.
        similar: whether the prompt leaves a marked edge just before its end, but perhaps another conversation's.
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
    """Prompts of one kind. `slip` is how many units of a prompt's end the next turn may drop."""

    def __init__(self, tree: PrefixTree[Key, AnyStr], slip: int) -> None:
        self.tree: PrefixTree[Key, AnyStr] = tree
        self._slip = slip * tree.width

    def known(self, descent: Descent[AnyStr], base: int, fleet: int) -> Known:
        """Return the known part of a prompt. The answer is valid until something is learnt.

        Args:
            descent: the prompt's.
            base: the length of the salt in front of the prompt, in units; it does not count.
            fleet: the number of workers.
        """
        path, width = descent.path, self.tree.width
        start = base * width
        if descent.matched <= start:
            return Known()
        fleet = max(fleet, len(self.tree.holdings))
        # A tenant of a node holds all nodes above it, so the nodes with few tenants are the last ones.
        first = bisect_left(path, True, key=lambda node: 2 * len(node.tenants) <= fleet or fleet == 1)
        matched = descent.matched // width - base
        if first == len(path):
            return Known((), matched, matched)
        shared = max(start, path[first - 1].end if first else 0)
        marks, left, similar = self._marks(descent, first), None, False
        if self._slips(descent):
            if descent.key.endswith(path[-1].edge[descent.cut :]):
                left = path[-1]
            else:
                similar = self._lacks_little(descent, first)
        if marks or left is not None or similar:
            return Known(path[-1].tenants.keys(), matched, shared // width - base, marks, left, similar)
        sure = max(shared + 1, descent.matched - (len(descent.key) - shared) // NEGLIGIBLE)
        holders = next(node.tenants.keys() for node in path[first:] if node.end >= sure)
        return Known(holders, matched, shared // width - base)

    def learn(self, descent: Descent[AnyStr], worker: str, known: Known) -> None:
        """Remember that a worker gets this prompt. Its conversation stands here now, and nowhere else.

        Another prompt that runs through its marks is a fork, or shares only a system prompt with a request that was nothing
        else.
        """
        for node in known.marks:
            node.ends -= 1
        left = known.left
        if left is not None:
            left.ends -= 1
        self._stand(self.tree.follow(descent, worker))
        if left is not None and left.ends and left.parent is not None and left.parent.end == descent.matched:
            # The other samples of the group will drop the same end: they stand where this prompt has left the tree.
            left.parent.ends, left.ends = min(_MANY, left.parent.ends + left.ends), 0

    def replied(self, key: Key, worker: str) -> None:
        """Remember a prompt with the known start of its reply: the conversation stands there, too."""
        self._stand(self.tree.follow(self.tree.descend(key), worker))

    @staticmethod
    def _stand(node: PrefixNode[AnyStr] | None) -> None:
        if node is not None:
            node.ends = min(_MANY, node.ends + 1)

    @staticmethod
    def _marks(descent: Descent[AnyStr], first: int) -> list[PrefixNode[AnyStr]]:
        """Return the marked nodes that the prompt runs through and goes beyond."""
        path, end = descent.path, min(descent.matched, len(descent.key) - 1)
        return [node for node in path[max(first, len(path) - _LOOK_BACK) :] if node.ends and node.end <= end]

    def _slips(self, descent: Descent[AnyStr]) -> bool:
        """Return whether the prompt leaves the tree just before a mark.

        If the prompt itself ends with what it lacks there, that is a generation prompt, which history drops.
        """
        if not descent.cut or descent.matched == len(descent.key):
            return False
        node = descent.path[-1]
        return node.ends > 0 and node.end - descent.matched <= self._slip

    @staticmethod
    def _lacks_little(descent: Descent[AnyStr], first: int) -> bool:
        """Return whether the prompt has, after the last branch, at least twice as much as it lacks up to the mark.

        A few characters that any two questions share make no conversation.
        """
        path, at, has = descent.path, len(descent.path) - 1, descent.cut
        lacks = path[at].end - descent.matched
        while has < 2 * lacks and at > first and len(path[at - 1].children) == 1:
            at -= 1
            has += len(path[at].edge)
        return has >= 2 * lacks
