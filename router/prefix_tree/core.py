"""The structure of a prefix tree, over keys as the tree keeps them: `str`, or `bytes` in pages.

`PrefixTree` is the public class. This base class maintains the invariants: it finds where a key runs, creates and stamps the
path of a key, and removes leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import AnyStr, ClassVar, Generic

from router.prefix_tree.node import Holding, PrefixNode, common_length
from router.prefix_tree.snapshot import by_access


class PrefixCore(Generic[AnyStr]):
    """The nodes of a tree, and what each tenant holds of them.

    Attributes:
        page: the length that every edge is a multiple of.
        empty: a key of no length.
        root: the root node; it has no tenants.
        holdings: the holding of each tenant that holds anything.
        nodes: the number of nodes without the root.
        ticks: the logical clock: the number of keys inserted, here or in a merged tree.
    """

    page: ClassVar[int]
    empty: AnyStr

    def __init__(self) -> None:
        self.root: PrefixNode[AnyStr] = PrefixNode(self.empty, None, 0, {}, {})
        self.holdings: dict[str, Holding[AnyStr]] = {}
        self.nodes = 0
        self.ticks = 0
        self._size = 0  # the edges of all holdings, as they are kept
        self._changes = 0  # of nodes or tenants: tells whether an earlier descent is still valid

    def _find(self, node: PrefixNode[AnyStr], key: AnyStr) -> tuple[list[PrefixNode[AnyStr]], int, int]:
        """Follow `key` down from `node`.

        Returns the nodes on its way, the length of the key that they match, and how much of the last node's edge matches if
        that is not all of it, else 0.
        """
        path: list[PrefixNode[AnyStr]] = []
        at, end, page = 0, len(key), self.page
        while at < end:
            below = node.children.get(key[at : at + page])
            if below is None:
                break
            path.append(below)
            if not key.startswith(below.edge, at):
                cut = common_length(key, at, below.edge, page)
                return path, at + cut, cut
            at += len(below.edge)
            node = below
        return path, at, 0

    def _hold(
        self, key: AnyStr, tenant: str, path: list[PrefixNode[AnyStr]], matched: int, cut: int
    ) -> PrefixNode[AnyStr] | None:
        """Complete the path of a key and stamp it for a tenant. Return its last node; None for an empty key."""
        if not key:
            return None
        path = self._complete(self.root, key, path, matched, cut)
        self.ticks += 1
        ticks, gained = self.ticks, 0
        for node in path:
            tenants = node.tenants
            if tenants.pop(tenant, None) is None:
                gained += len(node.edge)
            tenants[tenant] = ticks  # after all other tenants
        self._gain(tenant, gained).offer(path[-1])
        return path[-1]

    def _gain(self, tenant: str, length: int) -> Holding[AnyStr]:
        holding = self.holdings.get(tenant)
        if holding is None:
            holding = self.holdings[tenant] = Holding(tenant)
        holding.size += length
        self._size += length
        return holding

    def _complete(
        self, above: PrefixNode[AnyStr], key: AnyStr, path: list[PrefixNode[AnyStr]], matched: int, cut: int
    ) -> list[PrefixNode[AnyStr]]:
        """Extend what `_find` returned to the whole path of `key`, with a node at its end. New nodes have no tenants yet."""
        self._changes += 1
        if cut:
            path[-1] = path[-1].split(cut, self.page)
            self.nodes += 1
        if matched < len(key):
            last = path[-1] if path else above
            edge = key[matched:]
            path.append(PrefixNode(edge, last, last.end + len(edge), {}, {}))
            last.children[edge[: self.page]] = path[-1]
            self.nodes += 1
        return path

    def _learn(self, node: PrefixNode[AnyStr], tenants: Mapping[str, int]) -> None:
        """Merge another tree's accesses into a node."""
        for tenant, ticks in tenants.items():
            known = node.tenants.get(tenant)
            if known is None or known < ticks:
                node.tenants[tenant] = ticks
                self._gain(tenant, len(node.edge) if known is None else 0).offer(node)
        node.tenants = dict(sorted(node.tenants.items(), key=by_access))

    def _release(self, holding: Holding[AnyStr], node: PrefixNode[AnyStr]) -> None:
        """Take a leaf away from a tenant. The node goes with its last tenant."""
        self._changes += 1
        del node.tenants[holding.tenant]
        holding.size -= len(node.edge)
        self._size -= len(node.edge)
        above = node.parent
        assert above is not None, "nobody holds the root"
        if not node.tenants:
            node.detach(self.page)
            self.nodes -= 1
        if above is not self.root:
            holding.offer(above)
        elif not holding.size:
            del self.holdings[holding.tenant]
