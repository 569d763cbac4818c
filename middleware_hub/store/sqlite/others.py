"""The writes of other processes: each committed group of records has a row of `news` with its places.

    records    1   2   3   4   5   6   7      numbers are given in the order of appending, and none is given twice
    news           A       B           A      A's row says: after 1, up to 2. Its next one: after 4, up to 7

When the file has changed, a process reads the rows after the last number it has seen. If they leave out a number (rows are
deleted after a while, and a router of an earlier version writes none), it starts again, as if it had just opened the file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import apsw
import msgspec

from middleware_hub.spans.chain import names_of
from middleware_hub.store.paths import BLOCK, NAME, PASS, STEP, WAY, Namespace, TextPath, name_place
from middleware_hub.store.records import new_id

_MOST_KEPT: Final = 200_000
_MOST_ABSENT: Final = 50_000
"""Beginnings and names, of about 250 bytes each."""
NEWS_KEPT: Final = 4_000
"""Records for which rows of `news` are kept: some hundred KB. A process that reads them less often has to start again."""
FEW_KEPT: Final = 100
"""The same for a store that is too large."""
_NEWEST: Final = (
    "SELECT max(ifnull((SELECT max(n) FROM records), 0), "
    "ifnull((SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'newest'), 0)), "
    "(SELECT value FROM meta WHERE key = 'forgotten')"
)


class State(NamedTuple):
    """The largest number that a record of this file ever had (0 if there was none), and a count of forgotten records."""

    newest: int
    forgotten: str


def state(connection: apsw.Connection) -> State:
    found, forgotten = connection.execute(_NEWEST).get
    return State(int(found), str(forgotten))


def keep_newest(connection: apsw.Connection) -> None:
    """Write the largest number down before records are forgotten."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('newest', ?)", (str(state(connection).newest),))


def trim_news(connection: apsw.Connection, kept: int = FEW_KEPT) -> None:
    """Delete rows of `news` that are older than so many records."""
    connection.execute("DELETE FROM news WHERE n <= (SELECT max(n) FROM news) - ?", (kept,))


class _Entered(NamedTuple):
    """The places of records that a look-up may bring."""

    passed: list[bytes]
    ends: list[tuple[bytes, int, bytes]]
    """Key, length and hash of the places where a record starts or ends."""
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
    """Knows the writes of other processes since this process began to listen. Two threads may use it.

    Attributes:
        me: distinguishes this process's rows of `news` from those of others.
        last: the number of the last record that is committed, as far as the writer knows.
        horizon: the number of the last record when it began to listen: earlier records are not known here.
        epoch: how often it began to listen.
        count: how often writes of others were noticed; what was there at the opening counts once.
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

    def listen(self, connection: apsw.Connection) -> State:
        """Read the writes of others, within one moment of the store."""
        with self._lock:
            rows = list(
                connection.execute("SELECT n, since, writer, entered FROM news WHERE n > ? ORDER BY n", (self._seen,))
            )
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
        """Take in one row; return whether that was possible."""
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

    # The writer's numbers: claimed while no other process can take them, and before they are visible in the file ------

    def locked(self, newest: int) -> None:
        """Set the last number, while this process does not write or no other process can."""
        self.last = newest

    def claim(self, last: int) -> None:
        """Set the last number of a transaction, before it is committed."""
        self._claimed = last

    def committed(self) -> None:
        """Note that the claimed numbers are in the file. The news before them has been read."""
        with self._lock:
            self.last = self._claimed
            self._seen = max(self._seen, self._claimed)

    def rolled_back(self) -> None:
        self._claimed = self.last

    def missed(self) -> int:
        """Note that nothing could be read, and return `count`."""
        with self._lock:
            self.count += 1
            return self.count


class AbsentPaths:
    """Knows what the store lacks, up to a horizon (`Others.horizon`), for a caller that keeps all results and appends.

    - Beginnings of texts that no record in it continues, as digests of paths at `STEP`-th block ends. A look-up finds them,
      and each reply that is appended there moves the beginning to its end.
    - Names that the caller looked up, or gave: the caller has all of their replies.

    All of it is dropped with the horizon, and when there is too much of it.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self._names: set[tuple[Namespace, str]] = set()
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._digests) + len(self._names)

    def check(self, epoch: int) -> None:
        """Set the horizon (`Others.epoch`). Call this before anything is added."""
        if epoch != self._epoch or len(self) > _MOST_ABSENT:
            self._digests.clear()
            self._names.clear()
            self._epoch = epoch

    def add(self, digest: bytes) -> None:
        self._digests.add(digest)

    def add_name(self, namespace: Namespace, name: str) -> None:
        self._names.add((namespace, name))

    def holds(self, path: TextPath) -> bool:
        """Return whether a text continues one of these beginnings."""
        return bool(self._digests) and any(digest in self._digests for digest in path.digests())

    def holds_name(self, namespace: Namespace, name: str) -> bool:
        return (namespace, name) in self._names

    def carry_on(self, path: TextPath) -> None:
        """Add the end of a text that continues one of these beginnings, because this process appends it."""
        if self.holds(path):
            self._digests.add(path.digest(path.last // STEP * STEP))
