"""Which reply is collected next: the leaf that was hit least recently, replies that nobody retrieved after all others."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from middleware_hub.radix.node import Generation

_Entry = tuple[int, int, Generation]
_FEW = 64


class Leaves:
    """Two heaps by last hit. An entry is not removed when it gets out of date, but recognised when it comes up.

    It is out of date when its generation was hit again, is no leaf any more, was retrieved meanwhile, or is gone. Where all is
    retrieved sooner or later nothing comes up in the heap of the others. So a heap is also looked through when it is twice as
    long as it was after the last time: what is gone must not be kept in memory by it.
    """

    def __init__(self) -> None:
        self._heaps: dict[bool, list[_Entry]] = {True: [], False: []}
        self._kept = {True: 0, False: 0}
        self._pushes = 0

    def offer(self, generation: Generation) -> None:
        """A generation became a leaf, or one of the other kind."""
        if not generation.leaf:
            return
        kind = generation.retrieved
        heap = self._heaps[kind]
        self._pushes += 1
        heapq.heappush(heap, (generation.tick, self._pushes, generation))
        if len(heap) > 2 * self._kept[kind] + _FEW:
            heap[:] = [entry for entry in heap if _current(entry, kind)]
            heapq.heapify(heap)
            self._kept[kind] = len(heap)

    def pop(self, outdated: Callable[[Generation], bool]) -> Generation | None:
        """The next one to go; None if there is nothing that may.

        `outdated` says of what nobody retrieved whether it is so old that nobody will: that goes before all others.
        """
        unretrieved = self._first(retrieved=False)
        kinds = (False,) if unretrieved is not None and outdated(unretrieved) else (True, False)
        for retrieved in kinds:
            found = self._first(retrieved=retrieved)
            if found is not None:
                heapq.heappop(self._heaps[retrieved])
                return found
        return None

    def _first(self, *, retrieved: bool) -> Generation | None:
        """The least recently hit of a kind."""
        heap = self._heaps[retrieved]
        while heap and not _current(heap[0], retrieved):
            heapq.heappop(heap)
        return heap[0][2] if heap else None


def _current(entry: _Entry, retrieved: bool) -> bool:
    tick, _, generation = entry
    return (
        generation.tick == tick
        and generation.retrieved is retrieved
        and generation.span.owner is generation
        and generation.leaf
    )
