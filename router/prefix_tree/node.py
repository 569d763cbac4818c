"""Nodes of a prefix tree, and who holds them.

A node stands for one key: all edges from the root, joined. A *tenant* holds a node if a key of its own runs through it, so
whoever holds a node holds all that are above it. Each tenant's last access is kept per node:

                      "You are" {a: 7, b: 9, c: 8}
                      /                          \\
        " a poet" {a: 7, b: 4}          " a judge" {b: 9, c: 8}
             |
        ". Hi" {b: 4}

An access stamps the whole path, so no tenant used a node before it used what is below it. That is why the least recently used
node of a tenant is always a leaf of it, once nodes of the same access come in the order of their depth, deepest first: no
counting of children per tenant, and a split has nothing to tell anybody.
"""

from __future__ import annotations

import heapq
from typing import AnyStr, Generic

import msgspec

_FEW = 64


class PrefixNode(msgspec.Struct, Generic[AnyStr], gc=False, eq=False):
    """See the top of this file. Nodes are not tracked by the garbage collector: `detach` cuts the cycles.

    Attributes:
        edge: what the key of this node has behind that of its parent; empty at the root only.
        parent: None at the root, and for what is no part of a tree any more.
        end: how long its key is. Never changes: a split puts a new node above.
        tenants: tenant -> tick of its last access, in order of these; never empty but at the root.
        children: by the first page of their edges.
        ends: how many conversations stand here: their last prompt, or what is known of the reply to it, ends with this
            node, and no later turn of them has come.
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
        """Leave the tree."""
        assert self.parent is not None, "the root stays"
        del self.parent.children[self.edge[:page]]
        self.parent = None

    def split(self, cut: int, page: int) -> PrefixNode[AnyStr]:
        """Put a node above that takes the first `cut` of the edge, and is held by the same tenants. Gives it back."""
        assert self.parent is not None, "the root has nothing to split"
        edge = self.edge
        self.edge = edge[cut:]
        end = self.end - len(self.edge)
        above = PrefixNode(edge[:cut], self.parent, end, self.tenants.copy(), {self.edge[:page]: self})
        self.parent.children[edge[:page]] = above
        self.parent = above
        return above

    def last_tenant(self) -> str:
        """Who used it last."""
        return next(reversed(self.tenants))


def common_length(key: AnyStr, start: int, edge: AnyStr, page: int) -> int:
    """How much of `edge` stands in `key` at `start`, in whole pages.

    By bisection, each half compared at once: characters one by one would take milliseconds for a long prompt.
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
    """What one tenant holds: how much, and which of it was used least recently.

    The heap has an entry for every leaf of the tenant. An entry is not removed when it gets out of date, because the node was
    used again or is not held any more, but recognised when it comes up; and all are looked through whenever they are twice as
    many as after the last time. Entries of nodes that are no leaves do no harm: those below come first.

    Attributes:
        tenant: whose it is.
        size: the edges of all its nodes, together.
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
        """How many entries the heap has, those that are out of date included."""
        return len(self._heap)

    def offer(self, node: PrefixNode[AnyStr]) -> None:
        """A node that the tenant holds was used, or may have become a leaf of it."""
        tick = node.tenants[self.tenant]
        if node is self._newest and tick == self._newest_tick:
            return  # it has lost another one of many leaves
        self._newest, self._newest_tick = node, tick
        self._pushes += 1
        heapq.heappush(self._heap, (tick, -node.end, self._pushes, node))
        if len(self._heap) > 2 * self._kept + _FEW:
            self._heap = self.current()
            heapq.heapify(self._heap)
            self._kept = len(self._heap)

    def first(self) -> tuple[int, PrefixNode[AnyStr]]:
        """The least recently used leaf, and when that was. Only for a tenant that holds anything."""
        heap, tenant = self._heap, self.tenant
        while heap[0][3].tenants.get(tenant) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0], heap[0][3]

    def current(self) -> list[tuple[int, int, int, PrefixNode[AnyStr]]]:
        """The entries that are not out of date."""
        return [entry for entry in self._heap if entry[3].tenants.get(self.tenant) == entry[0]]
