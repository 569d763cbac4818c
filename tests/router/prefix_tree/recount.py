"""Recounts everything that a prefix tree keeps, as an oracle for its tests."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any, AnyStr

from router.prefix_tree.node import PrefixNode
from router.prefix_tree.tree import PrefixTree


def unpack_ids(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def check(tree: PrefixTree[Any, AnyStr]) -> None:
    """Raise AssertionError if a recount differs from what the tree keeps. Costs the whole tree."""
    root = tree.root
    assert (root.parent, len(root.edge), root.end, root.tenants) == (None, 0, 0, {}), f"{root} is no root"
    sizes: Counter[str] = Counter()
    leaves: set[tuple[str, int]] = set()
    nodes = 0
    stack: list[PrefixNode[AnyStr]] = [root]
    while stack:
        node = stack.pop()
        leaves.update((tenant, id(node)) for tenant in node.tenants)
        for first, child in node.children.items():
            _check_child(node, first, child, tree)
            nodes += 1
            sizes.update(dict.fromkeys(child.tenants, len(child.edge)))
            leaves.difference_update((tenant, id(node)) for tenant in child.tenants)
            stack.append(child)
    assert nodes == tree.nodes, f"{tree.nodes} nodes are counted, {nodes} are there"
    held = {tenant: holding.size for tenant, holding in tree.holdings.items()}
    assert held == dict(sizes), f"{held} are counted, {dict(sizes)} are there"
    assert tree.size * tree.width == sum(sizes.values()), f"{tree.size} units are counted, {sizes.total()} are there"
    offered = {(name, id(entry[3])) for name, holding in tree.holdings.items() for entry in holding.current()}
    assert leaves <= offered, "a leaf would never be evicted"


def _check_child(
    node: PrefixNode[AnyStr], first: AnyStr, child: PrefixNode[AnyStr], tree: PrefixTree[Any, AnyStr]
) -> None:
    assert child.parent is node, f"{child} has another parent"
    assert first == child.edge[: tree.page], f"{child} stands under {first!r}"
    assert len(child.edge) % tree.page == 0 < len(child.edge), f"{child} is not made of pages"
    assert child.end == node.end + len(child.edge), f"{child} does not end at {child.end}"
    assert child.ends >= 0, f"fewer than no conversations stand at {child}"
    assert child.tenants, f"nobody holds {child}"
    ticks = list(child.tenants.values())
    assert ticks == sorted(ticks), f"{child} does not have its tenants in order of their accesses"
    assert 0 < ticks[0] <= ticks[-1] <= tree.ticks, f"{child} was used at another time than this tree has had"
    if node is not tree.root:
        for tenant, tick in child.tenants.items():
            assert node.tenants.get(tenant, 0) >= tick, f"{tenant} has {child} without what is above"


def entries(tree: PrefixTree[Any, Any]) -> Iterator[tuple[Any, dict[str, int]]]:
    """Yield each node's whole key with its tenants' last ticks, in the order of the keys."""
    pieces: list[Any] = []
    stack = [iter(sorted(tree.root.children.items()))]
    while stack:
        item = next(stack[-1], None)
        if item is None:
            stack.pop()
            continue
        node = item[1]
        pieces[len(stack) - 1 :] = [node.edge]
        key = tree.root.edge.join(pieces)
        yield key if isinstance(key, str) else unpack_ids(key), dict(node.tenants)
        stack.append(iter(sorted(node.children.items())))
