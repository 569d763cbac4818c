"""Where the same messages were sampled under other tools or options: found by what was said, whoever said it.

Each setting has a root of its own in a trie of messages, so equal conversations under two settings are two paths:

    root(tools, thinking)      system -- user -- assistant *1       path 71f3...
    root(tools, no thinking)   system -- user -- assistant *2       path 71f3..., the newer one
    root(other tools)          system -- user -- assistant *3       path 71f3..., and the same tools as nobody else

A path is a hash of the keys along it, kept in each node. Here are the nodes with samples, by their path, and by their path and
tools: these are looked up first, for turns are more often found again under other options than under other tools. A look-up
costs the same however many settings there are, and what others ask pushes nothing out.
"""

from __future__ import annotations

from collections.abc import Iterable

from middleware_hub.chat.keys import tools_of
from middleware_hub.sessions.trie.nodes import MessageNode

Nodes = dict[MessageNode, None]
"""In the order of their newest samples."""


class PathIndex:
    """See the top of this file."""

    def __init__(self) -> None:
        self._found: dict[int, MessageNode | Nodes] = {}

    def __len__(self) -> int:
        return len(self._found)

    def sampled(self, node: MessageNode) -> None:
        """A node has a new sample."""
        for place in _places(node):
            known = self._found.get(place)
            if known is None or known is node:
                self._found[place] = node
                continue
            nodes = self._found[place] = known if isinstance(known, dict) else {known: None}
            nodes.pop(node, None)
            nodes[node] = None

    def gone(self, node: MessageNode) -> None:
        """A node has no samples any more."""
        for place in _places(node):
            known = self._found.get(place)
            if isinstance(known, dict):
                known.pop(node, None)
                if len(known) == 1:
                    (self._found[place],) = known
            elif known is node:
                del self._found[place]

    def other(self, node: MessageNode) -> MessageNode | None:
        """A node with samples for the same messages under another setting: the same tools first, then the newest."""
        for place in reversed(_places(node)):
            known = self._found.get(place)
            for found in () if known is None else reversed(known) if isinstance(known, dict) else (known,):
                if found is not node:
                    # A hash may be another path's, too; that is no reason to look further.
                    if _same_path(found, node):
                        return found
                    break
        return None

    def check(self, sampled: Iterable[MessageNode]) -> None:
        """AssertionError if it does not hold exactly these nodes. Slow, for tests."""
        expected: dict[int, set[MessageNode]] = {}
        for node in sampled:
            for place in _places(node):
                expected.setdefault(place, set()).add(node)
        found = {place: {*known} if isinstance(known, dict) else {known} for place, known in self._found.items()}
        assert found == expected
        assert all(len(known) > 1 for known in self._found.values() if isinstance(known, dict))

    def clear(self) -> None:
        """Forget all of them."""
        self._found.clear()


def _places(node: MessageNode) -> tuple[int, int]:
    return node.path_hash, hash((node.path_hash, tools_of(node.setting)))


def _same_path(one: MessageNode, other: MessageNode) -> bool:
    """Whether both are at the end of the same messages, for the same adapter."""
    while one.depth and other.depth:
        if one is other:
            return True
        if one.key != other.key or one.parent is None or other.parent is None:
            return False
        one, other = one.parent, other.parent
    return one.depth == other.depth and one.path_hash == other.path_hash
