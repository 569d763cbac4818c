"""What others have written: each group of records that is committed says in a row of `news` where it is entered.

    records    1   2   3   4   5   6   7      numbers are given in the order of appending, and none is given twice
    news           A       B           A      A's row says: behind 1, up to 2. Its next one: behind 4, up to 7

A process reads the rows behind the last number it has seen, when the file has changed. If they leave out a number (they are
deleted after a while, and a router of an earlier version writes none), it starts again, as if it had just been opened.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from middleware_hub.spans.chain import names_of
from middleware_hub.store.paths import BLOCK, NAME, PASS, STEP, WAY, Namespace, TextPath, name_place
from middleware_hub.store.records import new_id

_MOST_KEPT: Final = 200_000
_MOST_GROUND: Final = 50_000
"""Beginnings and names, of about 250 bytes each."""
NEWS_KEPT: Final = 4_000
"""Records that rows of `news` are kept for: some hundred KB. A process that listens less often has to start again."""
FEW_KEPT: Final = 100
"""The same, of a store that is too large."""
_NEWEST: Final = (
    "SELECT max(ifnull((SELECT max(n) FROM records), 0), "
    "ifnull((SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'newest'), 0)), "
    "(SELECT value FROM meta WHERE key = 'forgotten')"
)


class State(NamedTuple):
    """The largest number that a record of this file ever had (0 if there was none), and a count of forgotten records."""

    newest: int
    forgotten: str


def state(connection: sqlite3.Connection) -> State:
    found, forgotten = connection.execute(_NEWEST).fetchone()
    return State(int(found), str(forgotten))


def keep_newest(connection: sqlite3.Connection) -> None:
    """Write the largest number down before records are forgotten."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('newest', ?)", (str(state(connection).newest),))


def trim_news(connection: sqlite3.Connection, kept: int = FEW_KEPT) -> None:
    """Delete rows of `news` that are older than so many records."""
    connection.execute("DELETE FROM news WHERE n <= (SELECT max(n) FROM news) - ?", (kept,))


class _Entered(NamedTuple):
    """Where records are entered that a look-up may bring."""

    passed: list[bytes]
    ends: list[tuple[bytes, int, bytes]]
    """Key, length and hash of the places where one starts or ends."""
    names: list[bytes]


_encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(_Entered)


def entered(places: Iterable[Sequence[Any]]) -> bytes:
    """Return the body of a row of `news`, given the places of its records."""
    found = _Entered([], [], [])
    for key, length, digest, kind, *_ in places:
        if kind == PASS:
            found.passed.append(key)
        elif kind == NAME:
            found.names.append(key)
        elif kind != WAY:
            found.ends.append((key, length, digest))
    return _encode(found)


class Others:
    """What others wrote since this process began to listen. Two threads may use it.

    Attributes:
        me: tells this process's rows of `news` from those of others.
        last: the number of the last record that is committed, as far as the writer knows.
        horizon: the number of the last record when it began to listen: what was there before is not known here.
        epoch: how often it began.
        count: how often others were noticed; what was there at the opening counts once.
    """

    def __init__(self, newest: int) -> None:
        self.me = new_id()
        self._lock = threading.Lock()
        self._claimed = self.last = self._seen = self.horizon = newest
        self.count = 1 if newest else 0
        self.epoch = 0
        self._passed: set[bytes] = set()
        self._lengths: dict[bytes, set[int]] = {}
        self._hashes: set[bytes] = set()
        self._names: set[bytes] = set()

    def listen(self, connection: sqlite3.Connection) -> State:
        """Take in what others wrote, within one moment of the store."""
        with self._lock:
            rows = connection.execute(
                "SELECT n, since, writer, entered FROM news WHERE n > ? ORDER BY n", (self._seen,)
            ).fetchall()
            found, whole, seen = state(connection), True, self._seen
            for n, since, writer, body in rows:
                whole = whole and since <= seen
                seen = n
                if writer != self.me:
                    self.count += 1
                    whole = whole and self._take(body)
            if not whole or found.newest > seen:
                self._begin_anew(max(found.newest, seen))
            self._seen = max(found.newest, seen)
            return found

    def _take(self, body: bytes) -> bool:
        """Take in what one row says; return whether it could be."""
        try:
            new = _decoder.decode(body)
        except msgspec.MsgspecError:
            return False
        self._passed.update(new.passed)
        self._names.update(new.names)
        for key, length, digest in new.ends:
            self._lengths.setdefault(key, set()).add(length)
            self._hashes.add(digest)
        return len(self._passed) + len(self._hashes) + len(self._names) <= _MOST_KEPT

    def _begin_anew(self, newest: int) -> None:
        self.count += 1
        self.epoch += 1
        self.horizon = newest
        for held in (self._passed, self._lengths, self._hashes, self._names):
            held.clear()

    def wrote_on(self, path: TextPath, known_from: int) -> bool:
        """Return whether a look-up of a text may bring anything that others wrote since `horizon`."""
        if not self._hashes:
            return False
        size = len(path.text)
        with self._lock:
            for block in range(max(path.first, known_from // BLOCK // STEP * STEP), path.last + 1):
                key, at = path.key(block), BLOCK * block
                if key in self._passed:
                    return True
                for length in self._lengths.get(key, ()):
                    if at <= length <= min(size, at + BLOCK - 1) and path.hash(length) in self._hashes:
                        return True
        return False

    def named(self, namespace: Namespace, parent: str) -> bool:
        """Return whether others gave a reply this name since `horizon`."""
        return bool(self._names) and any(name_place(namespace, name).key in self._names for name in names_of(parent))

    # The writer's numbers: claimed while nobody else can take them, and before they can be seen in the file -------------

    def locked(self, newest: int) -> None:
        """Say what the last number is when this process is not writing, or nobody else can."""
        self.last = newest

    def claim(self, last: int) -> None:
        """Say which number a transaction gives last, before it is committed."""
        self._claimed = last

    def committed(self) -> None:
        """Say that the numbers that were claimed are in the file. All before them have been listened to."""
        with self._lock:
            self.last = self._claimed
            self._seen = max(self._seen, self._claimed)

    def rolled_back(self) -> None:
        self._claimed = self.last

    def missed(self) -> int:
        """Say that nothing could be read, and return `count`."""
        with self._lock:
            self.count += 1
            return self.count


class Ground:
    """What of the records up to a horizon (`Others.horizon`) a caller has that keeps all it found and appended.

    - Beginnings of texts that none of those records goes on behind, as digests of paths at `STEP`-th block ends. That is
      learned by a look-up, and carried on to the end of each reply that is appended there.
    - Names that it looked up, or gave.

    All of it ends with the horizon, and when there is too much of it.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self._names: set[tuple[Namespace, str]] = set()
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._digests) + len(self._names)

    def check(self, epoch: int) -> None:
        """Say which horizon it is (`Others.epoch`). To be called before anything is added."""
        if epoch != self._epoch or len(self) > _MOST_GROUND:
            self._digests.clear()
            self._names.clear()
            self._epoch = epoch

    def add(self, digest: bytes) -> None:
        self._digests.add(digest)

    def add_name(self, namespace: Namespace, name: str) -> None:
        self._names.add((namespace, name))

    def holds(self, path: TextPath) -> bool:
        """Return whether a text goes on behind one of these beginnings."""
        return bool(self._digests) and any(digest in self._digests for digest in path.digests())

    def holds_name(self, namespace: Namespace, name: str) -> bool:
        return (namespace, name) in self._names

    def carry_on(self, path: TextPath) -> None:
        """Add the end of a text that goes on behind one of these beginnings, since this process appends it."""
        if self.holds(path):
            self._digests.add(path.digest(path.last // STEP * STEP))
