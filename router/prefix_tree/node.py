"""Nodes of a prefix tree, and the holdings of its tenants.

A node stands for one key: all edges from the root, joined. A *tenant* holds a node if one of its keys runs through it, so it
also holds every node above. Each node keeps the last access of each tenant:

                      "You are" {a: 7, b: 9, c: 8}
                      /                          \\
        " a poet" {a: 7, b: 4}          " a judge" {b: 9, c: 8}
             |
        ". Hi" {b: 4}

An access stamps the whole path, so no node was used before the nodes below it. If nodes of the same access are ordered deepest
first, the least recently used node of a tenant is therefore always one of its leaves. No children need counting per tenant, and
a split changes nothing for any tenant.
"""

from __future__ import annotations

import heapq
from typing import AnyStr, Generic

import msgspec

_FEW = 64


class PrefixNode(msgspec.Struct, Generic[AnyStr], gc=False, eq=False):
    """A node; see the top of this file. The garbage collector does not track nodes: `detach` cuts the reference cycles.

    Attributes:
        edge: the part of the node's key after its parent's key; empty at the root only.
        parent: None at the root, and for a node that has left the tree.
        end: the length of the node's key. It never changes: a split puts a new node above.
        tenants: tenant -> tick of its last access, in this order; empty at the root only.
        children: the child nodes, by the first page of their edges.
        ends: how many conversations stand here: their last prompt, or what is known of its reply, ends with this node, and no
            later turn has come.
    """

    edge: AnyStr
    parent: PrefixNode[AnyStr] | None
    end: int
    tenants: dict[str, int]
    children: dict[AnyStr, PrefixNode[AnyStr]]
    ends: int = 0

    def __repr__(self) -> str:
        edge = self.edge if len(self.edge) <= 20 else self.edge[:20]
        return f"<PrefixNode {edge!r} to {self.end}, {len(self.tenants)} tenants, {len(self.children)} children>"

    def detach(self, page: int) -> None:
        assert self.parent is not None, "the root stays"
        del self.parent.children[self.edge[:page]]
        self.parent = None

    def split(self, cut: int, page: int) -> PrefixNode[AnyStr]:
        """Insert and return a parent node that takes the first `cut` of the edge and has the same tenants."""
        assert self.parent is not None, "the root has nothing to split"
        edge = self.edge
        self.edge = edge[cut:]
        end = self.end - len(self.edge)
        above = PrefixNode(edge[:cut], self.parent, end, self.tenants.copy(), {self.edge[:page]: self})
        self.parent.children[edge[:page]] = above
        self.parent = above
        return above

    def last_tenant(self) -> str:
        return next(reversed(self.tenants))


def common_length(key: AnyStr, start: int, edge: AnyStr, page: int) -> int:
    """Return how much of `edge` stands in `key` at `start`, in whole pages.

    It bisects and compares slices: character by character, a long prompt would take milliseconds.
    """
    same, end = 0, min(len(edge), len(key) - start) // page
    while same < end:
        middle = (same + end + 1) // 2
        low, high = same * page, middle * page
        if key[start + low : start + high] == edge[low:high]:
            same = middle
        else:
            end = middle - 1
    return same * page


class Holding(Generic[AnyStr]):
    """The nodes that one tenant holds: their total size, and the least recently used leaf.

    The heap has an entry for every leaf of the tenant. An entry that is outdated, because the node was used again or is no
    longer held, is recognised when it comes up; all outdated entries are dropped whenever the heap has doubled. Entries of
    inner nodes do no harm, because the nodes below come first.

    Attributes:
        tenant: the tenant's name.
        size: the length of all its edges, as they are kept.
    """

    __slots__ = ("_heap", "_kept", "_newest", "_newest_tick", "_pushes", "size", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.size = 0
        self._heap: list[tuple[int, int, int, PrefixNode[AnyStr]]] = []
        self._kept = 0
        self._pushes = 0
        self._newest: PrefixNode[AnyStr] | None = None
        self._newest_tick = 0

    def __repr__(self) -> str:
        return f"<Holding {self.tenant}: {self.size}>"

    def __len__(self) -> int:
        """Return the number of heap entries, including outdated ones."""
        return len(self._heap)

    def offer(self, node: PrefixNode[AnyStr]) -> None:
        """Push a node of the tenant that was just used or may have become a leaf."""
        tick = node.tenants[self.tenant]
        if node is self._newest and tick == self._newest_tick:
            return  # it has lost one of many leaves
        self._newest, self._newest_tick = node, tick
        self._pushes += 1
        heapq.heappush(self._heap, (tick, -node.end, self._pushes, node))
        if len(self._heap) > 2 * self._kept + _FEW:
            self._heap = self.current()
            heapq.heapify(self._heap)
            self._kept = len(self._heap)

    def first(self) -> tuple[int, PrefixNode[AnyStr]]:
        """Return the least recently used leaf and its tick. The tenant must hold something."""
        heap, tenant = self._heap, self.tenant
        while heap[0][3].tenants.get(tenant) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0], heap[0][3]

    def current(self) -> list[tuple[int, int, int, PrefixNode[AnyStr]]]:
        """Return the entries that are not outdated."""
        return [entry for entry in self._heap if entry[3].tenants.get(self.tenant) == entry[0]]
