"""The structure of a prefix tree, under keys as they are kept: `str`, or `bytes` in pages.

`PrefixTree` is what others use. Here is what keeps it true: where a key runs, how its way is made and stamped, how a leaf goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import AnyStr, ClassVar, Generic

from router.prefix_tree.node import Holding, PrefixNode, common_length
from router.prefix_tree.snapshot import by_access


class PrefixCore(Generic[AnyStr]):
    """Nodes, and what each tenant holds of them.

    Attributes:
        page: how long the least piece of a key is.
        root: has no tenants.
        holdings: of the tenants that hold anything.
        nodes: how many there are, without the root.
        ticks: the logical clock: how many keys were inserted, here or in what was merged.
    """

    page: ClassVar[int]

    def __init__(self) -> None:
        self.root: PrefixNode[AnyStr] = PrefixNode(self._nothing(), None, 0, {}, {})
        self.holdings: dict[str, Holding[AnyStr]] = {}
        self.nodes = 0
        self.ticks = 0
        self._size = 0  # as edges are long, of all holdings
        self._changes = 0  # of nodes or tenants, so that who walked before can tell

    @classmethod
    def _nothing(cls) -> AnyStr:
        """A key of no length."""
        raise NotImplementedError

    def _descend(self, node: PrefixNode[AnyStr], key: AnyStr) -> tuple[list[PrefixNode[AnyStr]], int, int]:
        """The nodes below `node` that `key` runs through, how much of it they match, and how much of the last one's edge
        that is if it is not all of it, else 0."""
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
        """Stamp the way of a key, which is made where it is missing. Returns its last node; None for an empty key."""
        if not key:
            return None
        path = self._reach(self.root, key, path, matched, cut)
        self.ticks += 1
        ticks, gained = self.ticks, 0
        for node in path:
            tenants = node.tenants
            if tenants.pop(tenant, None) is None:
                gained += len(node.edge)
            tenants[tenant] = ticks  # behind all others
        holding = self.holdings.get(tenant)
        if holding is None:
            holding = self.holdings[tenant] = Holding(tenant)
        holding.size += gained
        self._size += gained
        holding.offer(path[-1])
        return path[-1]

    def _reach(
        self, above: PrefixNode[AnyStr], key: AnyStr, path: list[PrefixNode[AnyStr]], matched: int, cut: int
    ) -> list[PrefixNode[AnyStr]]:
        """The whole way of `key` below `above`, with a node at its end: what `_descend` found, split and continued.

        A node that is new here has no tenants yet.
        """
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
        """Others know of these accesses."""
        for tenant, ticks in tenants.items():
            known = node.tenants.get(tenant)
            if known is not None and known >= ticks:
                continue
            node.tenants[tenant] = ticks
            holding = self.holdings.get(tenant)
            if holding is None:
                holding = self.holdings[tenant] = Holding(tenant)
            if known is None:
                holding.size += len(node.edge)
                self._size += len(node.edge)
            holding.offer(node)
        node.tenants = dict(sorted(node.tenants.items(), key=by_access))

    def _release(self, holding: Holding[AnyStr], node: PrefixNode[AnyStr]) -> None:
        """A leaf of a tenant goes; the node goes with its last tenant."""
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

    def _walk(self) -> Iterator[tuple[PrefixNode[AnyStr], int]]:
        """All nodes but the root with their depth from 1 on, parents first, in order of their keys."""
        stack = [iter(sorted(self.root.children.items()))]
        while stack:
            item = next(stack[-1], None)
            if item is None:
                stack.pop()
                continue
            yield item[1], len(stack)
            stack.append(iter(sorted(item[1].children.items())))
