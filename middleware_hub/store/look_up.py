"""Which records on the path of a text a look-up brings: the same for every store that has places.

Of a crowd of replies it brings only some (see `Store.find`), so its cost does not grow with the number of replies that begin
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final, Generic, NamedTuple, TypeVar

from middleware_hub.store.paths import BLOCK, STEP
from middleware_hub.store.records import SpanRecord

MOST_VARIANTS: Final = 64
"""How many of the replies that end at exactly the same text a look-up brings: the newest ones."""
MOST_CHAINS: Final = 16
"""How many of the chains that a text leaves midway a look-up brings of each place (the newest), and in all."""
MOST_NAMED: Final = 8
"""How many of the replies of one name a look-up brings. If the newest is forgotten, its predecessor becomes the newest."""

R = TypeVar("R", bound=Hashable)
"""A store's key for a record."""


class Hit(NamedTuple, Generic[R]):
    """A place under which our text, or its first `length` characters, is entered; with the newest records of each kind."""

    block: int
    length: int
    starts: list[R]
    passes: list[R]
    ends: list[R]
    alone: list[R]


class Choice(Generic[R]):
    """Takes the records that a look-up brings.

    Attributes:
        taken: the records, in the order of taking.
        cut_off: how often a bound kept something out.
    """

    def __init__(self, known_from: int, size: int, one_each: Callable[[list[R]], Iterable[R]]) -> None:
        """`known_from` is the query's, and `size` the length of its text.

        `one_each` returns, of the replies to one prompt, one for each of its tokenizations.
        """
        self.taken: dict[R, None] = {}
        self.cut_off = 0
        self._known_from = known_from
        self._size = size
        self._one_each = one_each
        self._chains: set[R] = set()

    def take(self, hits: Sequence[Hit[R]], named: Iterable[tuple[R, int]]) -> None:
        """Take the wanted records of all hits, in the order of the text, and the named parents, with their text ends."""
        floor = self._known_from
        for hit in hits:
            if hit.length >= max(1, self._known_from):
                for variants in (hit.ends, hit.alone):
                    self.cut_off += len(variants) > MOST_VARIANTS
                    self._take(variants[:MOST_VARIANTS])
                if hit.ends:
                    floor = max(floor, hit.length)
        for parent, end in named:
            self._take((parent,))
            floor = min(floor, end)
        first = last_step(max(floor, self._known_from))
        self._take_chains(hit for hit in reversed(hits) if hit.block >= first)

    def _take(self, some: Iterable[R]) -> None:
        self.taken.update(dict.fromkeys(some))

    def _take_chains(self, hits: Iterator[Hit[R]]) -> None:
        """Take chains that the text leaves midway: those that go furthest first, and of one block the newest."""
        for _, group in groupby(hits, key=lambda hit: hit.block):
            if len(self._chains) == MOST_CHAINS:
                self.cut_off += 1
                return
            of_block = list(group)
            for hit in of_block:
                self._take_some(hit.passes)
            for hit in of_block:
                if hit.length == self._size:
                    self._take(self._one_each(hit.starts))
                else:
                    self._take_some(hit.starts)

    def _take_some(self, some: Iterable[R]) -> None:
        for one in some:
            if one not in self._chains:
                if len(self._chains) == MOST_CHAINS:
                    self.cut_off += 1
                    return
                self._chains.add(one)
                self._take((one,))


def last_step(at: int) -> int:
    """Return the last `STEP`-th block end at or before a character."""
    return at // BLOCK // STEP * STEP


def complete(records: Iterable[SpanRecord], known: Container[bytes]) -> tuple[list[SpanRecord], int]:
    """Return the records whose links are all there or known, each after those it builds on, and the number left out."""
    waiting = {record.id: record for record in records}
    in_order = sorted(waiting.values(), key=attrgetter("serial"))
    if _all_there(in_order, known):  # nearly always
        return in_order, 0
    done = dict[bytes, SpanRecord]()
    stack = in_order[::-1]
    visited = set[bytes]()
    while stack:
        record = stack[-1]
        open_links = [link for link in record.links if link in waiting and link not in visited]
        if open_links and record.id not in visited:
            visited.add(record.id)
            stack += [waiting[link] for link in open_links]
            continue
        visited.add(stack.pop().id)
        if record.id not in done and all(link in done or link in known for link in record.links):
            done[record.id] = record
    return list(done.values()), len(waiting) - len(done)


def _all_there(in_order: Iterable[SpanRecord], known: Container[bytes]) -> bool:
    """Return whether the links of each record are among the records before it, or known."""
    there = set[bytes]()
    for record in in_order:
        for link in record.links:
            if link not in there and link not in known:
                return False
        there.add(record.id)
    return True
