"""Whether others wrote: records are numbered in the order of their appending, and a number is never given twice."""

from __future__ import annotations

import sqlite3
from typing import Final

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
        """`newest`: the number of the last record at the opening."""
        self._claimed = self._last = self._read = newest
        self._by_writer = 1 if newest else 0
        self._by_reader = 0

    @property
    def count(self) -> int:
        """Return how often others were noticed. Two threads count."""
        return self._by_writer + self._by_reader

    def locked(self, newest: int) -> None:
        """Say what the last number is at the beginning of a transaction, when nobody else can write."""
        if newest != self._last:
            self._by_writer += 1
            self._last = newest

    def claim(self, last: int) -> None:
        """Say which number a transaction gives last, before it is committed."""
        self._claimed = last

    def committed(self) -> None:
        self._last = self._claimed

    def rolled_back(self) -> None:
        self._claimed = self._last

    def seen(self, newest: int) -> int:
        """Say which number was read, and return `count`."""
        if newest > self._claimed and newest > self._read:
            self._by_reader += 1
            self._read = newest
        return self.count

    def missed(self) -> int:
        """Say that no number could be read, and return `count`."""
        self._by_reader += 1
        return self.count
