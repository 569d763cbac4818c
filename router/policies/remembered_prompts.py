"""What is remembered of the prompts that were routed: whose they were, and where they ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from xxhash import xxh3_64_intdigest

K = TypeVar("K", str, memoryview)
"""A prompt: its text, or its ids as 32-bit integers."""

K_contra = TypeVar("K_contra", str, memoryview, contravariant=True)

_ENDS = 1 << 17


class Tree(Protocol[K_contra]):
    """What is needed of a prefix tree."""

    def levels(self, key: K_contra) -> Sequence[tuple[int, Collection[str]]]:
        """The known beginnings of a key, the shortest first, and who holds each."""

    def insert(self, key: K_contra, tenant: str) -> None:
        """It has all of this."""


class Known(NamedTuple):
    """Of a prompt.

    Attributes:
        holders: who has this much of it.
        share: how much that is, 0 to 1.
        end: a mark of the prompt that it continues: just this much was a whole one. None if that is not so.
    """

    holders: Collection[str]
    share: float
    end: int | None = None

    @property
    def continued(self) -> bool:
        """Whether it continues a prompt."""
        return self.end is not None


class RememberedPrompts(Generic[K]):
    """Prompts of one kind. `unit`: what a length in the tree is a multiple of."""

    def __init__(self, tree: Tree[K], unit: int) -> None:
        self.tree: Tree[K] = tree
        self._unit = unit
        # Two generations: when the younger one is full, the older one is forgotten. Not part of a snapshot: it costs a
        # conversation at most one turn elsewhere.
        self._ends: set[int] = set()
        self._older_ends: set[int] = set()

    def known(self, key: K, common: int) -> Known:
        """Who has a prompt, but for `1 / common` of it, by which nobody is told apart. Good until something is learnt."""
        levels, length = self.tree.levels(key), len(key)
        if not levels:
            return Known((), 0.0)
        matched, holders = levels[-1]
        if matched < length:
            end = _digest(key[:matched])
            if end in self._ends or end in self._older_ends:
                return Known(holders, matched / length, end)
        sure = matched - length // common
        holders = next(holders for end, holders in levels if end >= sure)
        return Known(holders, matched / length)

    def learn(self, key: K, worker: str, known: Known) -> None:
        """A worker gets this prompt, of which so much was known.

        A conversation has one next turn. What else begins with the same prompt is a fork of it, or has only its system prompt
        in common with a request that was nothing but that.
        """
        self.tree.insert(key, worker)
        if known.end is not None:
            self._ends.discard(known.end)
            self._older_ends.discard(known.end)
        if len(self._ends) >= _ENDS:
            self._ends, self._older_ends = set(), self._ends
        self._ends.add(_digest(key[: len(key) // self._unit * self._unit]))


def _digest(key: str | memoryview) -> int:
    return xxh3_64_intdigest(key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key.cast("B"))
