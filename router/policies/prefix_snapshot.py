"""The bytes of a prefix tree's snapshot.

    4  "PFXT"
    2  version, little-endian
    8  of blake3 of the rest
       msgpack: [kind, ticks, [tenant, ...], [[edge, [tenant, tick, tenant, tick, ...], children], ...]]

The nodes stand parents first, each followed by its children in the order of their keys; `children` counts them. Edges are bytes
(texts as UTF-8, half a surrogate pair like a character), a tenant of a node is its place in the list. Everything has one order,
so equal trees have equal bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import AnyStr, Generic, NamedTuple

import blake3
import msgspec

VERSION = 1

_MAGIC = b"PFXT"
_HEADER = struct.Struct("<4sH8s")


class SnapshotError(ValueError):
    """These bytes are no snapshot that can be read here; the message says why."""


class Node(NamedTuple, Generic[AnyStr]):
    """One node of a snapshot."""

    edge: AnyStr
    tenants: dict[str, int]
    children: int


class _Record(msgspec.Struct, array_like=True, gc=False):
    edge: bytes
    accesses: list[int]
    children: int


class _Payload(msgspec.Struct, array_like=True):
    kind: str
    ticks: int
    tenants: list[str]
    nodes: list[_Record]


_decoder = msgspec.msgpack.Decoder(_Payload)


def by_access(item: tuple[str, int]) -> tuple[int, str]:
    """The order of tenants in a node. Only those that came from different replicas can have the same tick."""
    return item[1], item[0]


def encode(kind: str, ticks: int, nodes: Iterable[Node[AnyStr]]) -> bytes:
    """A snapshot of these nodes, which come parents first."""
    numbers: dict[str, int] = {}
    records = []
    for edge, tenants, children in nodes:
        accesses: list[int] = []
        for tenant, tick in sorted(tenants.items(), key=by_access):
            accesses += (numbers.setdefault(tenant, len(numbers)), tick)
        packed = edge if isinstance(edge, bytes) else edge.encode("utf-8", "surrogatepass")
        records.append(_Record(packed, accesses, children))
    payload = msgspec.msgpack.encode(_Payload(kind, ticks, list(numbers), records))
    return _HEADER.pack(_MAGIC, VERSION, _digest(payload)) + payload


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
        yield Node(edge, tenants, record.children)


def _check_shape(nodes: list[Node[AnyStr]], ticks: int, page: int) -> None:
    """Children under their parents, told apart by their first page, held by who holds the parent, and used no later."""
    above: list[tuple[Mapping[str, int] | None, set[AnyStr], int]] = [(None, set(), -1)]
    for edge, tenants, children in nodes:
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
        if children < 0:
            raise SnapshotError("the snapshot has a node with fewer than no children")
        above.append((tenants, set(), children))
    if any(left > 0 for _, _, left in above):
        raise SnapshotError("the snapshot ends early")


def _digest(payload: bytes) -> bytes:
    return blake3.blake3(payload).digest(8)
