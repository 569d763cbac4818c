"""Where the same messages were sampled under other tools or options.

Each setting has a root of its own in a trie of messages, so equal conversations under two settings are two paths:

    root(tools, thinking)      system -- user -- assistant *1       path 71f3...
    root(tools, no thinking)   system -- user -- assistant *2       path 71f3..., the newer one
    root(other tools)          system -- user -- assistant *3       path 71f3..., with tools that no other path has

Each node keeps the hash of the keys along its path. The index finds nodes with samples by their path, and by their path and
tools. A look-up tries path and tools first, because a turn is continued under other options more often than under other tools.
It costs the same however many settings there are, and no client's requests push out another's.
"""

from __future__ import annotations

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
        for place in _places(node):
            known = self._found.get(place)
            if known is None or known is node:
                self._found[place] = node
                continue
            nodes = self._found[place] = known if isinstance(known, dict) else {known: None}
            nodes.pop(node, None)
            nodes[node] = None

    def gone(self, node: MessageNode) -> None:
        for place in _places(node):
            known = self._found.get(place)
            if isinstance(known, dict):
                known.pop(node, None)
                if len(known) == 1:
                    (self._found[place],) = known
            elif known is node:
                del self._found[place]

    def other(self, node: MessageNode) -> MessageNode | None:
        """Return the node with samples for the same messages under another setting: the same tools first, then the newest."""
        for place in reversed(_places(node)):
            known = self._found.get(place)
            for found in () if known is None else reversed(known) if isinstance(known, dict) else (known,):
                if found is not node:
                    # The hashes of two paths may collide. Then there is no need to look further.
                    if same_path(found, node):
                        return found
                    break
        return None

    def clear(self) -> None:
        self._found.clear()


def _places(node: MessageNode) -> tuple[int, int]:
    return node.path_hash, hash((node.path_hash, tools_of(node.setting)))


def same_path(one: MessageNode, other: MessageNode) -> bool:
    """Whether both nodes end the same messages, for the same adapter."""
    while one.depth and other.depth:
        if one is other:
            return True
        if one.key != other.key or one.parent is None or other.parent is None:
            return False
        one, other = one.parent, other.parent
    return one.depth == other.depth and one.path_hash == other.path_hash
