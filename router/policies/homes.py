"""The worker that each conversation was last sent to, in memory that several processes share.

The turns of a conversation come over any connection, so to any process, and each process remembers only the prompts that it
routed itself. An entry has 16 bytes. A conversation that takes the place of another in the table costs that one a cache, once.
"""

from __future__ import annotations

import mmap
import os
import tempfile

from xxhash import xxh3_64_intdigest

_SLOTS = 1 << 17
_BYTES = 16 * _SLOTS


class ConversationHomes:
    """A table of conversations, and of the workers that have them.

    Processes write without a lock. The first half of an entry is the key xor the second half, so an entry of two halves that
    different processes wrote belongs to no key (R. Hyatt's and T. Mann's lockless transposition table).
    """

    def __init__(self, descriptor: int) -> None:
        """`descriptor` is the one that `create` returned, which the processes inherit."""
        self._halves = memoryview(mmap.mmap(descriptor, _BYTES)).cast("Q")

    @staticmethod
    def create() -> int:
        """Return the descriptor of a new, empty table."""
        with tempfile.TemporaryFile() as file:
            file.truncate(_BYTES)
            return os.dup(file.fileno())

    def put(self, key: int, worker: int) -> None:
        """Remember the worker of a conversation, both as `number_of` gives them."""
        at = 2 * (key % _SLOTS)
        self._halves[at], self._halves[at + 1] = key ^ worker, worker

    def get(self, key: int) -> int | None:
        """Return the worker of a conversation, as it was given to `put`."""
        at = 2 * (key % _SLOTS)
        mixed, worker = self._halves[at], self._halves[at + 1]
        return worker if mixed ^ worker == key and worker else None


def number_of(*names: bytes) -> int:
    """Return the same 64 bits for the same names in each process."""
    return xxh3_64_intdigest(b"\0".join(names))
