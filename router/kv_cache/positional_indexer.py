"""Which worker holds which blocks of KV cache, by the workers' own word.

A block is a page of token ids. The same page behind another beginning is another block, so a block is known by a hash of
everything up to its end:

      ids        | block 0 | block 1         | block 2         |
      content    | c0      | c1              | c2              |   of a block's own ids
      prefix     | p0 = c0 | p1 = h(p0 || c1) | p2 = h(p1 || c2) |
      holders    | 0b0111  | 0b0101          | 0b0100          |   a bit for each worker

`find_matches` goes from block to block and keeps the workers that have held each of them: whoever lacks one is out, however
much it has behind it. That is exact, and a step costs the same for one worker as for five hundred.

A worker empties its cache at every update of its weights, and so does the whole fleet at once. To walk over its blocks would
hold up the router each time. Instead the worker gets another bit, and the entries with the old one, which nobody reads any
more, are swept up a few at a time with the changes that follow.

The hashes are those of `router/kv_cache/block_hashes.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from types import MappingProxyType

from router.kv_cache.block_hashes import prefix_hash, prefix_hashes

UNSIGNED = 2**64 - 1
"""Workers' own hashes are signed on the wire. `hash & UNSIGNED` is how they are known here."""

_SWEEP = 256
"""Stale entries that go with each change, beside two for each block that it brings: they go faster than they can come."""

_REMEMBERED = 4096
"""Sets of workers whose names are remembered: most prompts share their beginning with all others, and so its holders."""


class WorkerNotTrackedError(Exception):
    """Nothing is known of this worker's cache: `track` it first."""


class ParentNotFoundError(Exception):
    """Blocks continue one that this worker has not stored, as far as is known."""


class OverlapScores:
    """How much of a prompt each worker holds.

    Attributes:
        blocks: by worker, the blocks that it holds from the first one on without a gap. Who holds none is not in it.
        tree_sizes: by worker, how many blocks it holds in all. A view: it moves on with the index.
    """

    __slots__ = ("blocks", "tree_sizes")

    def __init__(self, blocks: dict[str, int], tree_sizes: Mapping[str, int]) -> None:
        self.blocks = blocks
        self.tree_sizes = tree_sizes

    def best(self, load: Callable[[str], float]) -> str | None:
        """The worker with the most; among equals the one with less load, then with the smaller tree. None if nobody has any."""
        most = max(self.blocks.values(), default=0)
        equals = (worker for worker, count in self.blocks.items() if count == most)
        return min(equals, key=lambda worker: (load(worker), self.tree_sizes[worker]), default=None)

    def __repr__(self) -> str:
        return f"<OverlapScores {self.blocks}>"


class PositionalIndexer:
    """The blocks of any number of workers, all of one size."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # by prefix hash, the bits of who holds that block; never 0
        self._workers: dict[str, _Holdings] = {}
        self._sizes: dict[str, int] = {}
        self._live = 0  # all bits in use
        self._owners: list[str] = []  # by the number of a bit
        self._free: list[int] = []  # numbers of bits, a heap: masks stay short
        self._stale: deque[tuple[int, dict[int, int]]] = deque()  # numbers of bits, and what may still have them
        self._names: dict[int, tuple[str, ...]] = {}

    def track(self, worker: str) -> None:
        """From now on this worker's blocks are told. Again is no error."""
        if worker not in self._workers:
            self._workers[worker] = _Holdings(self._new_bit(worker))
            self._sizes[worker] = 0

    def __contains__(self, worker: str) -> bool:
        return worker in self._workers

    def apply_stored(
        self, worker: str, blocks: Iterable[tuple[int, int]], parent: int | None = None, root: int | None = None
    ) -> int:
        """A worker stored blocks. Telling it again changes nothing.

        Args:
            worker: a tracked one.
            blocks: one behind the other: the worker's own hash of each, and the hash of its content.
            parent: the worker's own hash of the block that they continue; None for none.
            root: what stands before the first block of all, for blocks that are not everybody's (`root_of`).

        Returns:
            By how many blocks the worker's tree has grown.

        Raises:
            WorkerNotTrackedError, ParentNotFoundError: then nothing has changed.
        """
        held = self._held(worker)
        prefix = root
        if parent is not None:
            prefix = held.prefixes.get(parent & UNSIGNED)
            if prefix is None:
                raise ParentNotFoundError(worker)
        before = self._sizes[worker]
        count = 0
        for own, content in blocks:
            prefix = prefix_hash(prefix, content)
            own &= UNSIGNED
            count += 1
            known = held.prefixes.get(own)
            if known == prefix:
                continue
            if known is not None:
                self._release(worker, held, known)
            held.prefixes[own] = prefix
            self._hold(worker, held, prefix)
        self._sweep(2 * count)
        return self._sizes[worker] - before

    def apply_removed(self, worker: str, own_hashes: Iterable[int]) -> int:
        """A worker dropped these blocks, and none of those behind them. By how many its tree shrank. WorkerNotTrackedError."""
        held = self._held(worker)
        before = self._sizes[worker]
        for own in own_hashes:
            prefix = held.prefixes.pop(own & UNSIGNED, None)
            if prefix is not None:
                self._release(worker, held, prefix)
        self._sweep(0)
        return before - self._sizes[worker]

    def apply_cleared(self, worker: str) -> None:
        """A worker emptied its cache. At once, however much that was. WorkerNotTrackedError."""
        held = self._held(worker)
        if held.prefixes:
            self._retire(held)
            self._workers[worker] = _Holdings(self._new_bit(worker))
            self._sizes[worker] = 0
        self._sweep(0)

    def remove_worker(self, worker: str) -> None:
        """Forget a worker. One that is not known is no error."""
        held = self._workers.pop(worker, None)
        if held is not None:
            del self._sizes[worker]
            self._retire(held)
            self._sweep(0)

    def holds(self, worker: str, own: int) -> bool:
        """Whether a worker has the block that it calls so. WorkerNotTrackedError."""
        return own & UNSIGNED in self._held(worker).prefixes

    def find_matches(self, contents: Iterable[int], root: int | None = None) -> OverlapScores:
        """How many blocks of a prompt each worker holds, from the first one on without a gap.

        Args:
            contents: the hashes of its blocks (`content_hashes`). Read no further than anybody has it.
            root: as in `apply_stored`.
        """
        found: dict[str, int] = {}
        active, depth = self._live, 0
        holders = self._holders
        for prefix in prefix_hashes(contents, root):
            left = active & holders.get(prefix, 0)
            if left != active:
                if depth:
                    found.update(dict.fromkeys(self._named(active ^ left), depth))
                active = left
                if not active:
                    break
            depth += 1
        if depth and active:
            found.update(dict.fromkeys(self._named(active), depth))
        return OverlapScores(found, MappingProxyType(self._sizes))

    def tree_size(self, worker: str) -> int:
        """How many blocks a worker holds; two names for the same block count once. 0 for an unknown worker."""
        return self._sizes.get(worker, 0)

    @property
    def tree_sizes(self) -> Mapping[str, int]:
        """The same for each tracked worker."""
        return MappingProxyType(self._sizes)

    @property
    def stale(self) -> int:
        """Entries of emptied caches that are still to be swept up."""
        return sum(len(prefixes) for _, prefixes in self._stale)

    def check(self) -> None:
        """Recount everything. AssertionError if what is kept differs."""
        expected: dict[int, int] = {}
        for worker, held in self._workers.items():
            distinct = set(held.prefixes.values())
            assert self._sizes[worker] == len(distinct), worker
            names = len(held.prefixes)
            assert names == len(distinct) + sum(held.doubles.values()), worker
            assert all(count > 0 for count in held.doubles.values()), worker
            assert self._owners[held.number] == worker
            for prefix in distinct:
                expected[prefix] = expected.get(prefix, 0) | 1 << held.number
        assert self._sizes.keys() == self._workers.keys()
        seen = {prefix: mask & self._live for prefix, mask in self._holders.items() if mask & self._live}
        assert seen == expected
        assert all(self._holders.values()), "an entry that nobody holds"
        for number, prefixes in self._stale:
            old = {prefix for prefix, mask in self._holders.items() if mask >> number & 1}
            assert old <= set(prefixes.values())
        used = [held.number for held in self._workers.values()]
        assert self._live == sum(1 << number for number in used)
        numbers = [*used, *self._free, *(number for number, _ in self._stale)]
        assert sorted(numbers) == list(range(len(self._owners))), "each bit has one use"
        unread = sum(1 << number for number in self._free)
        assert not any(mask & unread for mask in self._holders.values())

    def _held(self, worker: str) -> _Holdings:
        try:
            return self._workers[worker]
        except KeyError:
            raise WorkerNotTrackedError(worker) from None

    def _hold(self, worker: str, held: _Holdings, prefix: int) -> None:
        mask = self._holders.get(prefix, 0)
        if mask & held.bit:
            held.doubles[prefix] = held.doubles.get(prefix, 0) + 1
        else:
            self._holders[prefix] = mask | held.bit
            self._sizes[worker] += 1

    def _release(self, worker: str, held: _Holdings, prefix: int) -> None:
        others = held.doubles.get(prefix, 0)
        if others > 1:
            held.doubles[prefix] = others - 1
        elif others:
            del held.doubles[prefix]
        else:
            self._clear_bit(prefix, held.bit)
            self._sizes[worker] -= 1

    def _clear_bit(self, prefix: int, bit: int) -> None:
        mask = self._holders.get(prefix, 0) & ~bit
        if mask:
            self._holders[prefix] = mask
        else:
            self._holders.pop(prefix, None)

    def _new_bit(self, worker: str) -> int:
        if self._free:
            number = heappop(self._free)
            self._owners[number] = worker
        else:
            number = len(self._owners)
            self._owners.append(worker)
        self._live |= 1 << number
        self._names.clear()
        return number

    def _retire(self, held: _Holdings) -> None:
        self._live &= ~held.bit
        self._stale.append((held.number, held.prefixes))

    def _sweep(self, more: int) -> None:
        left = _SWEEP + more
        while self._stale and left:
            number, prefixes = self._stale[0]
            bit = 1 << number
            while prefixes and left:
                self._clear_bit(prefixes.popitem()[1], bit)
                left -= 1
            if not prefixes:
                self._stale.popleft()
                heappush(self._free, number)

    def _named(self, mask: int) -> tuple[str, ...]:
        names = self._names.get(mask)
        if names is None:
            if len(self._names) >= _REMEMBERED:
                self._names.clear()
            names = self._names[mask] = tuple(self._owners[number] for number in _bits(mask))
        return names


class _Holdings:
    """What one worker holds: the prefix hash of each block by the worker's own hash.

    `doubles` counts further names of the same block: a worker may tell blocks apart that look alike from here.
    """

    __slots__ = ("bit", "doubles", "number", "prefixes")

    def __init__(self, number: int) -> None:
        self.number = number
        self.bit = 1 << number
        self.prefixes: dict[int, int] = {}
        self.doubles: dict[int, int] = {}


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
