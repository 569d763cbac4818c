"""Which worker holds which blocks of KV cache, as the workers report it.

A block is a page of token ids. The same page after another prefix is another block, so a block is identified by a hash of
everything up to its end:

      ids        | block 0 | block 1         | block 2         |
      content    | c0      | c1              | c2              |   of a block's own ids
      prefix     | p0 = c0 | p1 = h(p0 || c1) | p2 = h(p1 || c2) |
      holders    | 0b0111  | 0b0101          | 0b0100          |   one bit for each worker

`find_matches` goes from block to block and keeps the workers that hold all of them so far: a worker that lacks one block drops
out, however many later blocks it has. This is exact, and a step costs the same for one worker as for five hundred.

A worker empties its cache at every weight update, and the whole fleet does so at once. Walking over its blocks would block the
event loop each time. Instead, the worker gets a new bit, and the entries with the old bit, which no lookup reads any more, are
swept a few at a time with the changes that follow.

`block_hashes` computes the hashes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush
from types import MappingProxyType

from router.kv_cache.block_hashes import prefix_hash, prefix_hashes

UNSIGNED = 2**64 - 1
"""Workers send their own hashes signed; `hash & UNSIGNED` is the form used here."""

_SWEEP = 256
"""Stale entries that each change sweeps, plus two for each block that it adds: sweeping outruns what can become stale."""

_REMEMBERED = 4096
"""Sets of workers whose names are cached: most prompts share their prefix, and so its holders, with all others."""


class WorkerNotTrackedError(Exception):
    """The worker is not tracked: call `track` first."""


class ParentNotFoundError(Exception):
    """Blocks continue a block that this worker is not known to have stored."""


class PositionalIndexer:
    """The blocks of any number of workers, all of one block size."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # by prefix hash, the bits of the block's holders; never 0
        self._workers: dict[str, _HeldBlocks] = {}
        self._sizes: dict[str, int] = {}
        self._live = 0  # all bits in use
        self._owners: list[str] = []  # by the number of a bit
        self._free: list[int] = []  # a heap of free bit numbers, lowest first: masks stay short
        self._stale: deque[tuple[int, dict[int, int]]] = deque()  # bit numbers, and the blocks that may still have them
        self._names: dict[int, tuple[str, ...]] = {}

    def track(self, worker: str) -> None:
        """Accept a worker's blocks from now on. Idempotent."""
        if worker not in self._workers:
            self._workers[worker] = _HeldBlocks(self._new_bit(worker))
            self._sizes[worker] = 0

    def __contains__(self, worker: str) -> bool:
        return worker in self._workers

    def apply_stored(
        self, worker: str, blocks: Iterable[tuple[int, int]], parent: int | None = None, root: int | None = None
    ) -> int:
        """Add blocks that a worker stored. Idempotent.

        Args:
            worker: a tracked worker.
            blocks: consecutive blocks: the worker's own hash of each, and its content hash.
            parent: the worker's own hash of the block that they continue; None at the start of a prompt.
            root: the prefix hash in front of the first block, for blocks that not all requests share (`root_of`).

        Returns:
            The number of blocks that the worker gained.

        Raises:
            WorkerNotTrackedError, ParentNotFoundError: nothing is changed then.
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
        """Remove blocks that a worker dropped, but not the blocks after them. Return the number of blocks that it lost.

        Raises WorkerNotTrackedError.
        """
        held = self._held(worker)
        before = self._sizes[worker]
        for own in own_hashes:
            prefix = held.prefixes.pop(own & UNSIGNED, None)
            if prefix is not None:
                self._release(worker, held, prefix)
        self._sweep(0)
        return before - self._sizes[worker]

    def apply_cleared(self, worker: str) -> None:
        """Empty a worker's cache, in constant time. Raise WorkerNotTrackedError."""
        held = self._held(worker)
        if held.prefixes:
            self._retire(held)
            self._workers[worker] = _HeldBlocks(self._new_bit(worker))
            self._sizes[worker] = 0
        self._sweep(0)

    def remove_worker(self, worker: str) -> None:
        """Forget a worker; an unknown worker is no error."""
        held = self._workers.pop(worker, None)
        if held is not None:
            del self._sizes[worker]
            self._retire(held)
            self._sweep(0)

    def holds(self, worker: str, own: int) -> bool:
        """Return whether a worker has the block with this hash of its own. Raise WorkerNotTrackedError."""
        return own & UNSIGNED in self._held(worker).prefixes

    def blocks(self, worker: str) -> Mapping[int, int]:
        """Return a view of a worker's blocks: the prefix hash of each, by its own hash. Raise WorkerNotTrackedError."""
        return MappingProxyType(self._held(worker).prefixes)

    def find_matches(self, contents: Iterable[int], root: int | None = None) -> dict[str, int]:
        """Return, by worker, how many blocks of a prompt it holds from the first one on without a gap, if it holds any.

        Args:
            contents: the prompt's `content_hashes`, consumed only as far as any worker holds them.
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
        return found

    def tree_size(self, worker: str) -> int:
        """Return how many blocks a worker holds; two own hashes of the same block count once. 0 for an unknown worker."""
        return self._sizes.get(worker, 0)

    @property
    def tree_sizes(self) -> Mapping[str, int]:
        """A view of the tree size of each tracked worker."""
        return MappingProxyType(self._sizes)

    @property
    def stale(self) -> int:
        """The number of entries of emptied caches that are not swept yet."""
        return sum(len(prefixes) for _, prefixes in self._stale)

    def _held(self, worker: str) -> _HeldBlocks:
        try:
            return self._workers[worker]
        except KeyError:
            raise WorkerNotTrackedError(worker) from None

    def _hold(self, worker: str, held: _HeldBlocks, prefix: int) -> None:
        mask = self._holders.get(prefix, 0)
        if mask & held.bit:
            held.doubles[prefix] = held.doubles.get(prefix, 0) + 1
        else:
            self._holders[prefix] = mask | held.bit
            self._sizes[worker] += 1

    def _release(self, worker: str, held: _HeldBlocks, prefix: int) -> None:
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

    def _retire(self, held: _HeldBlocks) -> None:
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


class _HeldBlocks:
    """The prefix hash of each block of one worker, by the worker's own hash.

    `doubles` counts further own hashes of a block: a worker may distinguish blocks that look the same from here.
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
