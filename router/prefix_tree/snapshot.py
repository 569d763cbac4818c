"""The bytes of a prefix tree's snapshot.

    4  "PFXT"
    2  version, little-endian
    8  of blake3 of the rest
       msgpack: [kind, ticks, [tenant, ...], [[edge, [tenant, tick, tenant, tick, ...], children, ends], ...]]

Parents come first, each followed by its children in the order of their keys; `children` counts them, and `ends` counts the
conversations that stand at the node. Edges are bytes (texts as UTF-8, with lone surrogates encoded like characters), and a node
names a tenant by its place in the list. The order of everything is fixed, so equal trees have equal bytes.
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
    """Bytes are not a snapshot that this version can read; the message says why."""


class SnapshotNode(NamedTuple, Generic[AnyStr]):
    """A decoded node of a snapshot."""

    edge: AnyStr
    tenants: dict[str, int]
    children: int
    ends: int


class _EncodedNode(msgspec.Struct, array_like=True, gc=False):
    edge: bytes
    accesses: list[int]
    children: int
    ends: int


class _Payload(msgspec.Struct, array_like=True):
    kind: str
    ticks: int
    tenants: list[str]
    nodes: list[_EncodedNode]


_decoder = msgspec.msgpack.Decoder(_Payload)


def by_access(item: tuple[str, int]) -> tuple[int, str]:
    """Return the sort key of tenants in a node. Only tenants from different replicas can have the same tick."""
    return item[1], item[0]


class TreeCopy(Generic[AnyStr]):
    """A copy of a tree for a snapshot, taken a few nodes at a time while the tree keeps changing.

    Keys that are inserted or forgotten meanwhile may or may not be in the copy. The copy is consistent all the same: a node
    that was split after its parent was copied is copied from its upper part on, and no tenant has a node without the nodes
    above.
    """

    def __init__(self, root: PrefixNode[AnyStr]) -> None:
        self._numbers: dict[str, int] = {}
        self._records: list[_EncodedNode] = []
        # For each copied node whose children are not all copied: the node, its tenants, its record's number, the children left.
        self._stack: list[tuple[PrefixNode[AnyStr], Mapping[str, int] | None, int, Iterator[PrefixNode[AnyStr]]]] = [
            (root, None, -1, _children(root))
        ]

    def step(self, most: int) -> bool:
        """Copy at most this many nodes. Return whether there are more."""
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
            records.append(_EncodedNode(packed, accesses, 0, node.ends))
        return bool(stack)

    def encode(self, kind: str, ticks: int) -> bytes:
        """Return the snapshot. It does not touch the tree, so another thread may run it."""
        pack = msgspec.msgpack.Encoder().encode
        pieces = [b"\x94", pack(kind), pack(ticks), pack(list(self._numbers)), _array_head(len(self._records))]
        pieces += [pack(record) for record in self._records]
        payload = b"".join(pieces)
        return b"".join((_HEADER.pack(_MAGIC, VERSION, _digest(payload)), payload))


def _children(node: PrefixNode[AnyStr]) -> Iterator[PrefixNode[AnyStr]]:
    """Iterate over the present children, in the order of their keys."""
    return iter([child for _, child in sorted(node.children.items())])


def _within(tenants: Mapping[str, int], holders: Mapping[str, int]) -> Mapping[str, int]:
    """Return the tenants that also hold the parent, with ticks no later than there."""
    return {tenant: min(tick, holders[tenant]) for tenant, tick in tenants.items() if tenant in holders}


def _array_head(count: int) -> bytes:
    """Return the start of a msgpack array."""
    if count < 16:
        return bytes((0x90 | count,))
    return struct.pack(">BH", 0xDC, count) if count < 1 << 16 else struct.pack(">BI", 0xDD, count)


def decode(data: bytes, kind: str, empty: AnyStr, page: int) -> tuple[int, list[SnapshotNode[AnyStr]]]:
    """Return the ticks and the nodes of a snapshot.

    Args:
        data: the snapshot.
        kind: the kind of tree that it must be of.
        empty: an empty edge of that kind of tree.
        page: the length that every edge is a multiple of.

    Raises:
        SnapshotError: it is not such a snapshot, or not as `encode` wrote it.
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
        raise SnapshotError("the snapshot is damaged: its checksum does not match")
    try:
        found = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SnapshotError(f"the snapshot is malformed: {error}") from None
    if found.kind != kind:
        raise SnapshotError(f"a snapshot of a tree of {found.kind}, not of {kind}")
    nodes = list(_nodes(found, empty, page))
    _check_shape(nodes, found.ticks, page)
    return found.ticks, nodes


def _nodes(found: _Payload, empty: AnyStr, page: int) -> Iterator[SnapshotNode[AnyStr]]:
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
        yield SnapshotNode(edge, tenants, record.children, record.ends)


def _check_shape(nodes: list[SnapshotNode[AnyStr]], ticks: int, page: int) -> None:
    """Raise SnapshotError unless siblings differ in their first page and a child's tenants hold its parent, no earlier."""
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
