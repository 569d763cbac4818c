"""Prefix trees: which worker was given which beginnings of prompts.

One structure for two kinds of keys: `StringTree` over the characters (code points) of texts, `TokenTree` over pages of 16 token
ids, as an SGLang worker's own radix cache has them. Both are radix trees whose nodes are held by several *tenants*, the workers
(`prefix_node` has a picture). The trees are pure: no await, no clock but a counter of insertions, nothing that is random.

Three rules carry them:

* **Matching reads, inserting writes.** Asking who has a prompt does not make it look used; giving it to somebody does.
* **All that runs over a tenant is kept per tenant.** A match costs what its path is long, whether five or five hundred workers
  hold it; only a split copies the tenants of one node.
* **Comparing is done by slices.** An edge is found whole by one `startswith`, and the place where one is left by bisection.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import AnyStr, ClassVar, Generic, NamedTuple, Self, TypeVar

from router.prefix_tree import check
from router.prefix_tree.core import PrefixCore
from router.prefix_tree.node import PrefixNode
from router.prefix_tree.packed_ids import pack_ids, unpack_ids
from router.prefix_tree.snapshot import TreeCopy, decode

Key = TypeVar("Key")
"""What callers give; it is kept as `AnyStr`."""

PAGE = 16
"""Token ids of a page."""


class Match(NamedTuple):
    """The longest beginning of a key that a tree has.

    Attributes:
        tenant: who used it last; None if nothing matches.
        matched: how long it is, in units: characters, or token ids (whole pages).
        input: how long the key is, in the same units, a rest without a page included.
    """

    tenant: str | None
    matched: int
    input: int


class Walk(NamedTuple, Generic[AnyStr]):
    """How far a key runs through a tree. Good until the tree is changed.

    Attributes:
        key: as the tree keeps it, in whole pages.
        path: the nodes that it runs through, from below the root.
        matched: how much of the key the nodes have, as long as it is kept.
        cut: how much that is of the edge of the last node, if it is not all of it, else 0.
        changes: of the tree, by then.
    """

    key: AnyStr
    path: list[PrefixNode[AnyStr]]
    matched: int
    cut: int
    changes: int


class PrefixTree(PrefixCore[AnyStr], Generic[Key, AnyStr]):
    """See the top of this file; made as one of the kinds below.

    An empty key, and ids that do not fill a page, have no place in it: they match nothing, and inserting them does nothing.

    Attributes:
        kind: what the keys are, as a snapshot tells it.
        width: how long a unit is, as it is kept.
    """

    kind: ClassVar[str]
    width: ClassVar[int]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.size} units of {len(self.holdings)} tenants in {self.nodes} nodes>"

    @property
    def size(self) -> int:
        """Units that the tenants hold, all together: what several hold counts for each."""
        return self._size // self.width

    # Reading -----------------------------------------------------------------------------------------------------------

    def prefix_match(self, key: Key) -> str | None:
        """Of those who hold the longest known beginning of this key, who used it last. None if none is known."""
        return self.prefix_match_with_counts(key).tenant

    def prefix_match_with_counts(self, key: Key) -> Match:
        """The same, and how long that beginning is."""
        packed, given = self._pack(key)
        path, matched, _ = self._descend(self.root, packed)
        return Match(path[-1].last_tenant() if path else None, matched // self.width, given)

    def walk(self, key: Key) -> Walk[AnyStr]:
        """How far this key runs through the tree, for `follow`."""
        packed, _ = self._pack(key)
        return Walk(packed, *self._descend(self.root, packed), self._changes)

    def tenant_size(self, tenant: str) -> int:
        """Units that it holds."""
        holding = self.holdings.get(tenant)
        return 0 if holding is None else holding.size // self.width

    def tenant_sizes(self) -> dict[str, int]:
        """Units that each tenant holds. Who holds nothing is not in it."""
        return {tenant: holding.size // self.width for tenant, holding in self.holdings.items()}

    def entries(self) -> Iterator[tuple[Key, dict[str, int]]]:
        """Each node's whole key, with the ticks of its tenants' last accesses, in order of the keys. For tests and people."""
        pieces: list[AnyStr] = []
        for node, depth in self._walk():
            pieces[depth - 1 :] = [node.edge]
            yield self._unpack(self.root.edge.join(pieces)), dict(node.tenants)

    # Writing -----------------------------------------------------------------------------------------------------------

    def insert(self, key: Key, tenant: str) -> None:
        """The tenant has all of this key, and uses it now."""
        packed, _ = self._pack(key)
        self._hold(packed, tenant, *self._descend(self.root, packed))

    def follow(self, walk: Walk[AnyStr], tenant: str) -> PrefixNode[AnyStr] | None:
        """Insert the key of a walk, which saves another descent. Returns the node at its end; None for an empty key."""
        if walk.changes != self._changes:
            return self._hold(walk.key, tenant, *self._descend(self.root, walk.key))
        return self._hold(walk.key, tenant, walk.path, walk.matched, walk.cut)

    def evict(self, tenant: str, max_units: int) -> int:
        """Let a tenant hold so many units at most: its least recently used leaves go. Gives back how many it lost."""
        holding = self.holdings.get(tenant)
        if holding is None:
            return 0
        before, limit = self._size, max(0, max_units * self.width)
        while holding.size > limit:
            self._release(holding, holding.first()[1])
        return (before - self._size) // self.width

    def evict_all(self, max_units: int) -> int:
        """Let all tenants together hold so many units at most: the least recently used leaves of any go.

        Gives back how many units went. The budget is the tree's, as `--max-tree-size` is.
        """
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
        """It is gone. Gives back how many units it held; costs what these are."""
        return self.evict(tenant, 0)

    def clear(self) -> None:
        """Forget everything but the time. Also for a tree that is dropped: nothing else frees its nodes."""
        for node in [node for node, _ in self._walk()]:
            node.parent = None
            node.children = {}
        self.root.children = {}
        self.holdings.clear()
        self.nodes = self._size = 0
        self._changes += 1

    def check(self) -> None:
        """Hold everything that is kept against a recount. AssertionError tells a bug of ours. Costs the whole tree."""
        check.check(self)

    # Snapshots ---------------------------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """Everything, for a restart or for another replica. Equal trees give equal bytes."""
        copy = self.copy()
        copy.step(self.nodes + 1)
        return copy.encode(self.kind, self.ticks)

    def copy(self) -> TreeCopy[AnyStr]:
        """A copy for a snapshot, to be taken in steps."""
        return TreeCopy(self.root)

    @classmethod
    def load(cls, snapshot: bytes) -> Self:
        """A tree out of a snapshot.

        Raises:
            SnapshotError: it is damaged, of another version, or of the other kind of tree.
        """
        tree = cls()
        tree.merge(snapshot)
        return tree

    def merge(self, snapshot: bytes) -> None:
        """Take in another tree: what a tenant holds in both has the newer of its two accesses.

        Raises:
            SnapshotError: as in `load`. Nothing is changed then.
        """
        ticks, nodes = decode(snapshot, self.kind, self.root.edge, self.page)
        self.ticks = max(self.ticks, ticks)
        stack = [(self.root, -1)]
        for edge, tenants, children, ends in nodes:
            while not stack[-1][1]:
                stack.pop()
            above, left = stack[-1]
            stack[-1] = above, left - 1
            path = self._reach(above, edge, *self._descend(above, edge))
            for node in path:
                self._learn(node, tenants)
            path[-1].ends = max(path[-1].ends, ends)
            stack.append((path[-1], children))

    # Inside ------------------------------------------------------------------------------------------------------------

    @classmethod
    def _pack(cls, key: Key) -> tuple[AnyStr, int]:
        """The key as it is kept, in whole pages, and how many units it had."""
        raise NotImplementedError

    @classmethod
    def _unpack(cls, packed: AnyStr) -> Key:
        raise NotImplementedError


class StringTree(PrefixTree[str, str]):
    """Over texts; a unit is a character."""

    kind = "text"
    page = 1
    width = 1

    @classmethod
    def _nothing(cls) -> str:
        return ""

    @classmethod
    def _pack(cls, key: str) -> tuple[str, int]:
        return key, len(key)

    @classmethod
    def _unpack(cls, packed: str) -> str:
        return packed


class TokenTree(PrefixTree[Sequence[int], bytes]):
    """Over token ids, in pages of `PAGE`; a unit is an id. A rest that fills no page is ignored.

    Keys are any sequences of ids. A list has to be packed (10 ns an id, more than all the rest of a match); arrays and
    memoryviews of 32-bit integers, and `bytes` of such, little-endian, are taken as they are.

    Raises, from every method that takes a key:
        ValueError: an id that has no place in 32 bits.
    """

    kind = "ids"
    page = 4 * PAGE
    width = 4

    @classmethod
    def _nothing(cls) -> bytes:
        return b""

    @classmethod
    def _pack(cls, key: Sequence[int]) -> tuple[bytes, int]:
        packed = pack_ids(key)
        return packed[: len(packed) - len(packed) % cls.page], len(packed) // cls.width

    @classmethod
    def _unpack(cls, packed: bytes) -> Sequence[int]:
        return unpack_ids(packed)


class ExactTokenTree(TokenTree):
    """In pages of one id, as SGLang's own cache has them unless it is told otherwise: questions are told apart that are shorter
    than a longer page."""

    page = 4
