"""The bytes of a prefix tree's snapshot.

    4  "PFXT"
    2  version, little-endian
    8  of blake3 of the rest
       msgpack: [kind, ticks, [tenant, ...], [[edge, [tenant, tick, tenant, tick, ...], children, ends], ...]]

The nodes stand parents first, each followed by its children in the order of their keys; `children` counts them, and `ends` the
conversations that stand there. Edges are bytes
(texts as UTF-8, half a surrogate pair like a character), a tenant of a node is its place in the list. Everything has one order,
so equal trees have equal bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import AnyStr, Generic, NamedTuple

import blake3
import msgspec

from router.prefix_tree.node import PrefixNode

VERSION = 2

_MAGIC = b"PFXT"
_HEADER = struct.Struct("<4sH8s")


class SnapshotError(ValueError):
    """These bytes are no snapshot that can be read here; the message says why."""


class Node(NamedTuple, Generic[AnyStr]):
    """One node of a snapshot."""

    edge: AnyStr
    tenants: dict[str, int]
    children: int
    ends: int


class _Record(msgspec.Struct, array_like=True, gc=False):
    edge: bytes
    accesses: list[int]
    children: int
    ends: int


class _Payload(msgspec.Struct, array_like=True):
    kind: str
    ticks: int
    tenants: list[str]
    nodes: list[_Record]


_decoder = msgspec.msgpack.Decoder(_Payload)


def by_access(item: tuple[str, int]) -> tuple[int, str]:
    """The order of tenants in a node. Only those that came from different replicas can have the same tick."""
    return item[1], item[0]


class TreeCopy(Generic[AnyStr]):
    """A copy of a tree for a snapshot, taken a few nodes at a time, while the tree goes on changing in between.

    What is inserted or forgotten meanwhile may be in the copy or not. What is there holds together: a node that was split
    since its parent was copied is copied from its upper part on, and nobody has a node without what is above it.
    """

    def __init__(self, root: PrefixNode[AnyStr]) -> None:
        self._numbers: dict[str, int] = {}
        self._records: list[_Record] = []
        # A node that was copied, who has it, the number of its record, and its children that are left.
        self._stack: list[tuple[PrefixNode[AnyStr], Mapping[str, int] | None, int, Iterator[PrefixNode[AnyStr]]]] = [
            (root, None, -1, _children(root))
        ]

    def step(self, most: int) -> bool:
        """Copy so many nodes. Whether there are more."""
        stack, records = self._stack, self._records
        while stack and most > 0:
            above, holders, number, children = stack[-1]
            node = next(children, None)
            if node is None:
                stack.pop()
                continue
            most -= 1
            while node.parent is not None and node.parent is not above:
                node = node.parent
            tenants = node.tenants if holders is None else _within(node.tenants, holders)
            if node.parent is None or not tenants:
                continue
            accesses: list[int] = []
            for tenant, tick in sorted(tenants.items(), key=by_access):
                accesses += (self._numbers.setdefault(tenant, len(self._numbers)), tick)
            edge = node.edge
            packed = edge if isinstance(edge, bytes) else edge.encode("utf-8", "surrogatepass")
            if number >= 0:
                records[number].children += 1
            stack.append((node, dict(tenants), len(records), _children(node)))
            records.append(_Record(packed, accesses, 0, node.ends))
        return bool(stack)

    def encode(self, kind: str, ticks: int) -> bytes:
        """The snapshot. It touches no tree, and may run in another thread, which it leaves room for others."""
        pack = msgspec.msgpack.Encoder().encode
        pieces = [b"\x94", pack(kind), pack(ticks), pack(list(self._numbers)), _array_head(len(self._records))]
        pieces += [pack(record) for record in self._records]
        payload = b"".join(pieces)
        return b"".join((_HEADER.pack(_MAGIC, VERSION, _digest(payload)), payload))


def _children(node: PrefixNode[AnyStr]) -> Iterator[PrefixNode[AnyStr]]:
    """Those that it has now, in the order of their keys."""
    return iter([child for _, child in sorted(node.children.items())])


def _within(tenants: Mapping[str, int], holders: Mapping[str, int]) -> Mapping[str, int]:
    """Those who have what is above, and used this no later."""
    return {tenant: min(tick, holders[tenant]) for tenant, tick in tenants.items() if tenant in holders}


def _array_head(count: int) -> bytes:
    """How msgpack begins an array."""
    if count < 16:
        return bytes((0x90 | count,))
    return struct.pack(">BH", 0xDC, count) if count < 1 << 16 else struct.pack(">BI", 0xDD, count)


def decode(data: bytes, kind: str, empty: AnyStr, page: int) -> tuple[int, list[Node[AnyStr]]]:
    """Its ticks and its nodes.

    Args:
        data: the snapshot.
        kind: which tree it is for.
        empty: an edge of that kind of tree, of no length.
        page: what the length of an edge is a multiple of.

    Raises:
        SnapshotError: it is no such snapshot, or not as `encode` wrote it.
    """
    if len(data) < _HEADER.size:
        raise SnapshotError(f"{len(data)} bytes are no snapshot of a prefix tree")
    magic, version, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise SnapshotError("this is no snapshot of a prefix tree")
    if version != VERSION:
        raise SnapshotError(f"a snapshot of version {version}: this router reads version {VERSION}")
    payload = data[_HEADER.size :]
    if digest != _digest(payload):
        raise SnapshotError("the snapshot is damaged: its checksum is another one")
    try:
        found = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SnapshotError(f"the snapshot is malformed: {error}") from None
    if found.kind != kind:
        raise SnapshotError(f"a snapshot of a tree of {found.kind}, not of {kind}")
    nodes = list(_nodes(found, empty, page))
    _check_shape(nodes, found.ticks, page)
    return found.ticks, nodes


def _nodes(found: _Payload, empty: AnyStr, page: int) -> Iterator[Node[AnyStr]]:
    names = dict(enumerate(found.tenants))
    if len(set(found.tenants)) != len(found.tenants):
        raise SnapshotError("the snapshot has a tenant twice")
    for record in found.nodes:
        try:
            edge = record.edge if isinstance(empty, bytes) else record.edge.decode("utf-8", "surrogatepass")
            tenants = {names[n]: tick for n, tick in zip(record.accesses[::2], record.accesses[1::2], strict=True)}
        except (UnicodeDecodeError, KeyError, ValueError) as error:
            raise SnapshotError(f"the snapshot has a node that cannot be read: {error}") from None
        if not edge or len(edge) % page:
            raise SnapshotError(f"the snapshot has an edge of {len(edge)}")
        if 2 * len(tenants) != len(record.accesses) or not tenants:
            raise SnapshotError("the snapshot has a node with a tenant twice, or without any")
        yield Node(edge, tenants, record.children, record.ends)


def _check_shape(nodes: list[Node[AnyStr]], ticks: int, page: int) -> None:
    """Children under their parents, told apart by their first page, held by who holds the parent, and used no later."""
    above: list[tuple[Mapping[str, int] | None, set[AnyStr], int]] = [(None, set(), -1)]
    for edge, tenants, children, ends in nodes:
        while not above[-1][2]:
            above.pop()
        holders, siblings, left = above[-1]
        above[-1] = holders, siblings, left - 1
        first = edge[:page]
        if first in siblings:
            raise SnapshotError("the snapshot has two nodes with the same key")
        siblings.add(first)
        for tenant, tick in tenants.items():
            if not 0 < tick <= (ticks if holders is None else holders.get(tenant, 0)):
                raise SnapshotError(f"the snapshot has an access of {tenant} that cannot be")
        if children < 0 or ends < 0:
            raise SnapshotError("the snapshot has a node with fewer than no children, or conversations")
        above.append((tenants, set(), children))
    if any(left > 0 for _, _, left in above):
        raise SnapshotError("the snapshot ends early")


def _digest(payload: bytes) -> bytes:
    return blake3.blake3(payload).digest(8)
