"""Places deep in the tree at which the walk of a long text may begin.

A conversation of 5,000 turns is a path of 10,000 nodes, and each of its requests would walk down all of them. A landmark is a
node on such a path, kept under a hash of the text around it:

    text      |-- block --|-- block --|-- block --|-- block --| go on
    hashes                h1          h2          h3          h4        each is the hash of all blocks up to there
    landmark                               node, under (root, 3, h3): every text with these three blocks runs through it

A walk that has passed `FAR` nodes looks for its last landmark, and goes on from there; a walk that passes `FAR` more nodes
leaves a landmark. So a short conversation neither makes landmarks nor hashes anything. Landmarks change no answer.

The hash of a string is keyed, and has 64 bits; the node's own edge is compared besides. An entry is outdated when its node was
removed or merged into the one below, which cuts it from its parent. It is recognised when it comes up, or dropped as the least
recently used entry.
"""

from __future__ import annotations

from collections import OrderedDict

from middleware_hub.radix.node import RadixNode

FAR = 64
"""A walk of this many nodes takes longer than looking for a landmark."""
BLOCK = 4_096
"""Characters between two places where landmarks may be."""
MOST_LANDMARKS = 4_096
"""How many are kept, of all conversations: one or two megabytes, and the edges of nodes that were removed meanwhile."""

_Key = tuple[RadixNode, int, int]


class Landmarks:
    """See the top of this file."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[_Key, tuple[RadixNode, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def deepest(self, root: RadixNode, text: str, node: RadixNode, position: int) -> tuple[RadixNode, int]:
        """Return the last landmark on the path of a text, and the characters down to its end; if none, what was given.

        The walk of the text has reached `node`, `position` characters down.
        """
        if not self._nodes:
            return node, position
        hashes = _hashes(text, len(text))
        for blocks in range(len(hashes), position // BLOCK, -1):
            key = root, blocks, hashes[blocks - 1]
            found = self._nodes.get(key)
            if found is None:
                continue
            landmark, end = found
            if landmark.parent is None:
                del self._nodes[key]
            elif end > position and text.startswith(landmark.edge, end - len(landmark.edge)):
                self._nodes.move_to_end(key)
                return found
        return node, position

    def place(self, root: RadixNode, text: str, node: RadixNode, position: int) -> None:
        """Make a landmark of the last node that ends within whole blocks of a text whose walk has reached `node`."""
        hashes = _hashes(text, position)
        above: RadixNode | None = node
        while above is not None and position > len(hashes) * BLOCK:
            position -= len(above.edge)
            above = above.parent
        if above is None or above is root:
            return
        self._nodes[root, len(hashes), hashes[-1]] = above, position
        if len(self._nodes) > MOST_LANDMARKS:
            self._nodes.popitem(last=False)


def _hashes(text: str, size: int) -> list[int]:
    """Return the hash of the first block of a text, of the first two, and so on, within its first `size` characters."""
    found: list[int] = []
    before = 0
    for end in range(BLOCK, size + 1, BLOCK):
        before = hash((before, text[end - BLOCK : end]))
        found.append(before)
    return found
