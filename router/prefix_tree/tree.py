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

import heapq
from collections.abc import Sequence
from typing import AnyStr, ClassVar, Generic, NamedTuple, Self, TypeVar

from router.prefix_tree.core import PrefixCore
from router.prefix_tree.node import PrefixNode
from router.prefix_tree.packed_ids import pack_ids, unpack_ids
from router.prefix_tree.snapshot import SnapshotNode, TreeCopy, decode

Key = TypeVar("Key")
"""The keys of callers; a tree keeps them as `AnyStr`."""

PAGE = 16
"""Token ids in a page."""


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


class PrefixTree(PrefixCore[AnyStr], Generic[Key, AnyStr]):
    """The base class of the kinds below; see the top of this file.

    An empty key, or ids that do not fill a page, match nothing, and inserting them does nothing.

    Attributes:
        kind: the name of the kind of keys in a snapshot.
        width: the length of a unit as it is kept.
    """

    kind: ClassVar[str]
    width: ClassVar[int]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.size} units of {len(self.holdings)} tenants in {self.nodes} nodes>"

    @property
    def size(self) -> int:
        """The units that all tenants hold together: what several hold counts for each."""
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
        """Add another tree. What a tenant holds in both gets the later of its two ticks.

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

    @classmethod
    def _pack(cls, key: Key) -> tuple[AnyStr, int]:
        """Return the key as it is kept, in whole pages, and its length in units."""
        raise NotImplementedError

    @classmethod
    def _unpack(cls, packed: AnyStr) -> Key:
        raise NotImplementedError


class StringTree(PrefixTree[str, str]):
    """A prefix tree over texts. A unit is a character."""

    kind = "text"
    page = 1
    width = 1
    empty = ""

    @classmethod
    def _pack(cls, key: str) -> tuple[str, int]:
        return key, len(key)

    @classmethod
    def _unpack(cls, packed: str) -> str:
        return packed


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

    @classmethod
    def _unpack(cls, packed: bytes) -> Sequence[int]:
        return unpack_ids(packed)


class ExactTokenTree(TokenTree):
    """A token tree with pages of one id, SGLang's default: it tells apart questions that are shorter than a larger page."""

    page = 4
