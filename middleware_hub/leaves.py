"""Which reply is collected next: the leaf that was hit least recently, replies that nobody retrieved after all others."""

from __future__ import annotations

import heapq

from middleware_hub.radix_node import Generation

_Entry = tuple[int, int, Generation]


class Leaves:
    """Two heaps by last hit. An entry is never removed: one that is out of date is recognised when it comes up.

    It is out of date when its generation was hit again, is no leaf any more, was retrieved meanwhile, or is gone.
    """

    def __init__(self) -> None:
        self._heaps: dict[bool, list[_Entry]] = {True: [], False: []}
        self._pushes = 0

    def offer(self, generation: Generation, generations: int) -> None:
        """A generation became a leaf, or one of the other kind; `generations` is how many there are in all."""
        if not generation.leaf:
            return
        heap = self._heaps[generation.retrieved]
        self._pushes += 1
        heapq.heappush(heap, (generation.tick, self._pushes, generation))
        if len(heap) > 64 and len(heap) > 4 * generations:
            heap[:] = [entry for entry in heap if _current(entry, generation.retrieved)]
            heapq.heapify(heap)

    def pop(self) -> Generation | None:
        """The next one to go; None if there is nothing that may."""
        for retrieved in (True, False):
            heap = self._heaps[retrieved]
            while heap:
                entry = heapq.heappop(heap)
                if _current(entry, retrieved):
                    return entry[2]
        return None


def _current(entry: _Entry, retrieved: bool) -> bool:
    tick, _, generation = entry
    return (
        generation.tick == tick
        and generation.retrieved is retrieved
        and generation.span.owner is generation
        and generation.leaf
    )
