"""Prefix trees: which worker was sent which prefixes.

One structure serves two kinds of keys: `StringTree` over the characters (code points) of texts, `TokenTree` over pages of 16
token ids, as in an SGLang worker's own radix cache. Both are radix trees whose nodes are held by several *tenants*, the workers
(`node.py` has a picture). The trees are pure: no await, no clock but a counter of insertions, no randomness.

Three rules:

* **Matching reads, inserting writes.** A lookup does not make a prompt look used; sending it to a worker does.
* **State that concerns a tenant is kept per tenant.** A match costs the length of its path, whether five or five
  hundred workers hold it; only a split copies the tenants of one node.
* **Slices are compared, not characters.** One `startswith` matches a whole edge, and bisection finds where a key leaves one.
"""

from __future__ import annotations

import array
import heapq
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import AnyStr, ClassVar, Generic, NamedTuple, Self, TypeVar

from router.prefix_tree.node import Holding, PrefixNode, common_length
from router.prefix_tree.snapshot import SnapshotNode, TreeCopy, by_access, decode

Key = TypeVar("Key")
"""The keys of callers; a tree keeps them as `AnyStr`."""

PAGE = 16
"""Token ids in a page."""

_WORDS = "iIlL"
"""Formats of arrays and memoryviews that are copied as they are if their items have four bytes."""


class Match(NamedTuple):
    """The longest known prefix of a key. Lengths are in units: characters, or token ids.

    Attributes:
        tenant: the last tenant that used it; None if nothing matches.
        matched: its length, in whole pages.
        input: the length of the key, including an incomplete page.
    """

    tenant: str | None
    matched: int
    input: int


class Descent(NamedTuple, Generic[AnyStr]):
    """How far a key runs through a tree. Valid until the tree changes. Lengths are of the key as the tree keeps it.

    Attributes:
        key: the key as the tree keeps it, in whole pages.
        path: the nodes on its way, without the root.
        matched: the length of the key that these nodes have.
        cut: how much of the last node's edge matches, if not all of it, else 0.
        changes: the tree's counter of changes at that time.
    """

    key: AnyStr
    path: list[PrefixNode[AnyStr]]
    matched: int
    cut: int
    changes: int


class PrefixTree(Generic[Key, AnyStr]):
    """The base class of the kinds below; see the top of this file.

    An empty key, or ids that do not fill a page, match nothing, and inserting them does nothing.

    Attributes:
        kind: the name of the kind of keys in a snapshot.
        width: the length of a unit as it is kept.
        page: the length that every edge is a multiple of.
        empty: a key of no length.
        root: the root node; it has no tenants.
        holdings: the holding of each tenant that holds anything.
        nodes: the number of nodes without the root.
        ticks: the logical clock: the number of keys inserted, here or in a merged tree.
    """

    kind: ClassVar[str]
    width: ClassVar[int]
    page: ClassVar[int]
    empty: AnyStr

    def __init__(self) -> None:
        self.root: PrefixNode[AnyStr] = PrefixNode(self.empty, None, 0, {}, {})
        self.holdings: dict[str, Holding[AnyStr]] = {}
        self.nodes = 0
        self.ticks = 0
        self._size = 0  # the edges of all holdings, as they are kept
        self._changes = 0  # of nodes or tenants: tells whether an earlier descent is still valid

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.size} units of {len(self.holdings)} tenants in {self.nodes} nodes>"

    @property
    def size(self) -> int:
        """The units that all tenants hold together: a unit that several hold counts for each."""
        return self._size // self.width

    def match(self, key: Key) -> Match:
        packed, given = self._pack(key)
        path, matched, _ = self._find(self.root, packed)
        return Match(path[-1].last_tenant() if path else None, matched // self.width, given)

    def descend(self, key: Key) -> Descent[AnyStr]:
        """Return how far a key runs through the tree, for `follow`."""
        packed, _ = self._pack(key)
        return Descent(packed, *self._find(self.root, packed), self._changes)

    def tenant_size(self, tenant: str) -> int:
        """Return the units that a tenant holds."""
        holding = self.holdings.get(tenant)
        return 0 if holding is None else holding.size // self.width

    def tenant_sizes(self) -> dict[str, int]:
        """Return the units of each tenant that holds any."""
        return {tenant: holding.size // self.width for tenant, holding in self.holdings.items()}

    def insert(self, key: Key, tenant: str) -> None:
        """Note that a tenant has all of this key and uses it now."""
        self.follow(self.descend(key), tenant)

    def follow(self, descent: Descent[AnyStr], tenant: str) -> PrefixNode[AnyStr] | None:
        """Insert the key of a descent without another descent. Return the node at its end; None for an empty key."""
        if descent.changes != self._changes:
            return self._hold(descent.key, tenant, *self._find(self.root, descent.key))
        return self._hold(descent.key, tenant, descent.path, descent.matched, descent.cut)

    def evict(self, tenant: str, max_units: int) -> int:
        """Shrink a tenant to at most this many units, least recently used leaves first. Return the units it lost."""
        holding = self.holdings.get(tenant)
        if holding is None:
            return 0
        before, limit = self._size, max(0, max_units * self.width)
        while holding.size > limit:
            self._release(holding, holding.first()[1])
        return (before - self._size) // self.width

    def evict_all(self, max_units: int) -> int:
        """Shrink all tenants together to at most this many units, least recently used leaves first. Return the units lost."""
        before, limit = self._size, max(0, max_units * self.width)
        if before <= limit:
            return 0
        turns = [(holding.first()[0], number, holding) for number, holding in enumerate(self.holdings.values())]
        heapq.heapify(turns)
        while self._size > limit:
            _, number, holding = turns[0]
            self._release(holding, holding.first()[1])
            if holding.size:
                heapq.heapreplace(turns, (holding.first()[0], number, holding))
            else:
                heapq.heappop(turns)
        return (before - self._size) // self.width

    def remove_tenant(self, tenant: str) -> int:
        """Forget a tenant, at a cost proportional to its leaves. Return the units it held."""
        return self.evict(tenant, 0)

    def dump(self) -> bytes:
        """Return a snapshot, for a restart or for another replica. Equal trees give equal bytes."""
        copy = self.copy()
        copy.step(self.nodes + 1)
        return copy.encode(self.kind, self.ticks)

    def copy(self) -> TreeCopy[AnyStr]:
        """Start a snapshot that is taken in steps."""
        return TreeCopy(self.root)

    @classmethod
    def load(cls, snapshot: bytes) -> Self:
        """Return the tree of a snapshot. Raise SnapshotError as `decode` does."""
        tree = cls()
        tree.merge(snapshot)
        return tree

    def decode(self, snapshot: bytes) -> tuple[int, list[SnapshotNode[AnyStr]]]:
        """Return the ticks and nodes of a snapshot, for `merge_decoded`.

        Raises:
            SnapshotError: the snapshot is damaged, of another version, or of another kind of tree.
        """
        return decode(snapshot, self.kind, self.empty, self.page)

    def merge(self, snapshot: bytes) -> None:
        """Add another tree. A node that a tenant holds in both gets the later of its two ticks.

        Raises:
            SnapshotError: as in `decode`. The tree is not changed then.
        """
        self.merge_decoded(*self.decode(snapshot))

    def merge_decoded(self, ticks: int, nodes: list[SnapshotNode[AnyStr]]) -> None:
        self.ticks = max(self.ticks, ticks)
        stack = [(self.root, -1)]
        for edge, tenants, children, ends in nodes:
            while not stack[-1][1]:
                stack.pop()
            above, left = stack[-1]
            stack[-1] = above, left - 1
            path = self._complete(above, edge, *self._find(above, edge))
            for node in path:
                self._learn(node, tenants)
            path[-1].ends = max(path[-1].ends, ends)
            stack.append((path[-1], children))

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
        """Extend the result of `_find` to the whole path of `key`, with a node at its end. New nodes have no tenants yet."""
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

    @classmethod
    def _pack(cls, key: Key) -> tuple[AnyStr, int]:
        """Return the key as it is kept, in whole pages, and its length in units."""
        raise NotImplementedError


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids as a tree keeps them: unsigned 32-bit integers, little-endian.

    A list takes about 10 ns an id. An array or a memoryview of 32-bit integers is copied as it is, and `bytes` count as packed.

    Raises:
        ValueError: an id is negative or needs more than 32 bits, or the length of `bytes` is no multiple of four.
    """
    if isinstance(ids, bytes):
        if len(ids) % 4:
            raise ValueError(f"{len(ids)} bytes are no whole 32-bit ids")
        return ids
    if isinstance(ids, memoryview | array.array) and ids.itemsize == 4 and sys.byteorder == "little":
        kind = ids.format if isinstance(ids, memoryview) else ids.typecode
        if kind in _WORDS:
            return ids.tobytes()
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error as error:
        raise ValueError(f"a token id is a number from 0 to 2^32 - 1: {error}") from None


class StringTree(PrefixTree[str, str]):
    """A prefix tree over texts. A unit is a character."""

    kind = "text"
    page = 1
    width = 1
    empty = ""

    @classmethod
    def _pack(cls, key: str) -> tuple[str, int]:
        return key, len(key)


class TokenTree(PrefixTree[Sequence[int], bytes]):
    """A prefix tree over token ids, in pages of `PAGE`. A unit is an id; an incomplete page is ignored.

    Keys are any sequences of ids. Packing a list costs more than the rest of a match; see `pack_ids` for what is not packed.
    Every method that takes a key raises ValueError for an id that does not fit into 32 bits.
    """

    kind = "ids"
    page = 4 * PAGE
    width = 4
    empty = b""

    @classmethod
    def _pack(cls, key: Sequence[int]) -> tuple[bytes, int]:
        packed = pack_ids(key)
        return packed[: len(packed) - len(packed) % cls.page], len(packed) // cls.width


class ExactTokenTree(TokenTree):
    """A token tree with pages of one id, SGLang's default: it tells apart questions that are shorter than a larger page."""

    page = 4
