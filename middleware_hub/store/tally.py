"""The counts of an open store."""

from __future__ import annotations

from typing import Protocol

from middleware_hub.store.protocol import Found, StoreStats


class Writer(Protocol):
    """What a store's writer counts, see `StoreStats`."""

    groups: int
    appends: int
    conflicts: int


class Tally:
    """Counts the look-ups of a store that is open."""

    def __init__(self) -> None:
        self.spared = 0
        self._finds = self._cut_off = self.damaged = 0

    def counted(self, found: Found) -> Found:
        """Count a look-up, and return what it found."""
        self._finds += 1
        self._cut_off += found.cut_off
        self.damaged += found.damaged
        return found

    def stats(self, sizes: tuple[int, int, int, int], writer: Writer, torn_bytes: int = 0) -> StoreStats:
        """Return everything that a store reports of itself. `sizes`: records, conversations, logs, and bytes."""
        records, roots, logs, size = sizes
        return StoreStats(
            records=records,
            roots=roots,
            logs=logs,
            bytes=size,
            groups=writer.groups,
            appends=writer.appends,
            finds=self._finds,
            spared=self.spared,
            cut_off=self._cut_off,
            damaged=self.damaged,
            conflicts=writer.conflicts,
            torn_bytes=torn_bytes,
        )
