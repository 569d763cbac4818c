"""Whether others wrote: records are numbered in the order of their appending, and a number is never given twice."""

from __future__ import annotations

import sqlite3
from typing import Final

from middleware_hub.store.paths import STEP, TextPath

_MOST_KEPT: Final = 100_000
_NEWEST: Final = (
    "SELECT max(ifnull((SELECT max(n) FROM records), 0), "
    "ifnull((SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'newest'), 0))"
)


def newest(connection: sqlite3.Connection) -> int:
    """Return the largest number that a record of this file ever had; 0 if there was none."""
    (found,) = connection.execute(_NEWEST).fetchone()
    return int(found)


def keep_newest(connection: sqlite3.Connection) -> None:
    """Write the largest number down before records are forgotten."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('newest', ?)", (str(newest(connection)),))


class Others:
    """Compares the numbers in the file with those that this process gave.

    The writer's thread claims numbers before they can be seen in the file, and while nobody else can take them. So whoever
    reads a larger number than was claimed reads what others wrote. What others wrote before a claim is noticed with it.
    """

    def __init__(self, newest: int) -> None:
        """`newest`: the number of the last record at the opening.

        `last` is the number of the last record that is committed. Records behind `horizon` are this process's own, as long as
        `count` stays.
        """
        self._claimed = self.last = self._read = newest
        self.horizon = newest
        self._by_writer = 1 if newest else 0
        self._by_reader = 0

    @property
    def count(self) -> int:
        """Return how often others were noticed. Two threads count."""
        return self._by_writer + self._by_reader

    def locked(self, newest: int) -> None:
        """Say what the last number is at the beginning of a transaction, when nobody else can write."""
        if newest != self.last:
            self.horizon = max(self.horizon, newest)
            self._by_writer += 1
            self.last = newest

    def claim(self, last: int) -> None:
        """Say which number a transaction gives last, before it is committed."""
        self._claimed = last

    def committed(self) -> None:
        self.last = self._claimed

    def rolled_back(self) -> None:
        self._claimed = self.last

    def seen(self, newest: int) -> int:
        """Say which number was read, and return `count`."""
        if newest > self._claimed and newest > self._read:
            self.horizon = max(self.horizon, newest)
            self._by_reader += 1
            self._read = newest
        return self.count

    def missed(self) -> int:
        """Say that no number could be read, and return `count`."""
        self._by_reader += 1
        return self.count


class Ground:
    """Beginnings of texts that nobody else's records go on behind, as digests of paths at `STEP`-th block ends.

    That nobody is there is learned by a look-up, and is carried on to the end of each reply that is appended there. It ends
    when others write.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self._count = 0

    def check(self, count: int) -> None:
        """Say how often others were noticed (`Others.count`)."""
        if count != self._count or len(self._digests) > _MOST_KEPT:
            self._digests.clear()
            self._count = count

    def add(self, digest: bytes) -> None:
        self._digests.add(digest)

    def holds(self, path: TextPath) -> bool:
        """Return whether a text goes on behind one of these beginnings."""
        return bool(self._digests) and any(digest in self._digests for digest in path.digests())

    def carry_on(self, path: TextPath) -> None:
        """Add the end of a text that goes on behind one of these beginnings, since this process appends it."""
        if self.holds(path):
            self._digests.add(path.digest(path.last // STEP * STEP))
