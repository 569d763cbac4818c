"""Forgets whole conversations: a reader plans it, and the writer does it in small transactions.

Only a conversation that is longer than one transaction is split. The first transaction deletes its row of `roots`, and
without it its records are as good as gone (`THERE`): no look-up finds a part of it, and a router that goes on with it appends
all of it again. If the process dies in between, the next opening of the file forgets the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import apsw

from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError
from middleware_hub.store.paths import Place
from middleware_hub.store.records import SpanRecord, decode
from middleware_hub.store.retracing import Retracer
from middleware_hub.store.sqlite.media import own_bytes
from middleware_hub.store.sqlite.others import keep_newest
from middleware_hub.store.sqlite.rows import marks

_RECORDS: Final = 256
"""Records that one transaction forgets, at most."""
_EVENTS: Final = 2_000
_HIDDEN: Final = "forgetting "
"""The beginning of a key of `meta` that names a hidden root."""
MOST_ROOTS: Final = 256
"""Conversations that are planned at once."""


@dataclass(slots=True)
class _Record:
    n: int
    places: list[Place] | None


@dataclass(slots=True)
class Plan:
    """A conversation to forget.

    Attributes:
        records: the latest first.
        size: bytes of its records, and of the files that they alone name.
    """

    root: int
    stamp: str
    retrieved: bool
    records: list[_Record] = field(default_factory=list)
    size: int = 0

    @property
    def last(self) -> int:
        """Return the number of the latest record."""
        return self.records[0].n if self.records else 0


def used_bytes(connection: apsw.Connection) -> int:
    """Return the bytes of the pages that hold something."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").get for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def sizes(connection: apsw.Connection) -> tuple[int, int, int, int]:
    """Return how many records, conversations and logs there are, and their bytes. What is being forgotten is no record."""
    records, roots, logs = (
        connection.execute(f"SELECT count(*) FROM {table}").get for table in ("records", "roots", "logs")
    )
    for root in hidden(connection):
        records -= connection.execute("SELECT count(*) FROM records WHERE root = ?", (root,)).get
    return records, roots, logs, used_bytes(connection)


def plan(connection: apsw.Connection, excess: int) -> list[Plan]:
    """Return the conversations to forget next: enough for about `excess` bytes, or for some transactions."""
    found: list[Plan] = []
    roots = list(
        connection.execute(
            "SELECT root, stamp, retrieved FROM roots ORDER BY retrieved DESC, tick, root LIMIT ?", (MOST_ROOTS,)
        )
    )
    records = 0
    for root, stamp, retrieved in roots:
        if excess <= 0 or records >= _RECORDS:
            break
        one = _planned(connection, Plan(root, stamp, bool(retrieved)))
        found.append(one)
        excess -= one.size
        records += len(one.records)
    return found


def plan_roots(connection: apsw.Connection, roots: Sequence[bytes]) -> list[Plan]:
    """Return the plans for the conversations with these roots. Missing ones are left out."""
    sql = (
        "SELECT roots.root, stamp, retrieved FROM roots JOIN records r ON r.n = roots.root "
        f"WHERE r.id IN ({marks(len(roots))}) ORDER BY roots.root"
    )
    found = list(connection.execute(sql, list(roots)))
    return [_planned(connection, Plan(root, stamp, bool(retrieved))) for root, stamp, retrieved in found]


def _planned(connection: apsw.Connection, found: Plan) -> Plan:
    bodies: dict[int, SpanRecord | None] = {}
    ids: dict[bytes, SpanRecord] = {}
    for n, body in connection.execute("SELECT n, body FROM records WHERE root = ? ORDER BY n", (found.root,)):
        found.size += len(body)
        try:
            bodies[n] = record = decode(body)
            ids[record.id] = record
        except (DamagedRecordError, StoreMismatchError):
            bodies[n] = None
    if any(record is not None and record.media for record in bodies.values()):
        found.size += own_bytes(connection, found.root)
    retracer = Retracer(ids.get)
    for n, held in bodies.items():
        where = None if held is None else retracer.places(held)
        found.records.append(_Record(n, where))
    found.records.reverse()
    return found


def forget_some(connection: apsw.Connection, plans: list[Plan]) -> tuple[list[Plan], int]:
    """Forget as much as fits into one transaction, in place; return the conversations that are gone, and how many records.

    A conversation that has grown since it was planned is left out.
    """
    gone, left = [], _RECORDS
    keep_newest(connection)
    while plans and left > 0:
        first = plans[0]
        last = connection.execute("SELECT max(n) FROM records WHERE root = ?", (first.root,)).get
        if (last or 0) > first.last:
            plans.pop(0)
            continue
        if left < _RECORDS and len(first.records) > left:
            break
        if len(first.records) > left:
            _hide(connection, first.root)
        some, first.records = first.records[:left], first.records[left:]
        _delete(connection, some)
        left -= len(some)
        if not first.records:
            _gone(connection, first.root)
            gone.append(plans.pop(0))
    return gone, _RECORDS - left


def _hide(connection: apsw.Connection, root: int) -> None:
    """Hide a conversation from everything but `forget_rest`, before its first records are deleted."""
    connection.execute("DELETE FROM roots WHERE root = ?", (root,))
    connection.execute("INSERT OR IGNORE INTO meta VALUES (? || ?, ?)", (_HIDDEN, root, root))


def _gone(connection: apsw.Connection, root: int) -> None:
    connection.execute("DELETE FROM roots WHERE root = ?", (root,))
    connection.execute("DELETE FROM meta WHERE key = ? || ?", (_HIDDEN, root))


def hidden(connection: apsw.Connection) -> list[int]:
    """Return the hidden conversations: a process died while it forgot them, or another one is at it now."""
    rows = list(connection.execute("SELECT value FROM meta WHERE key LIKE ? || '%'", (_HIDDEN,)))
    return [int(value) for (value,) in rows]


def forget_rest(connection: apsw.Connection) -> None:
    """Forget the rest of hidden conversations."""
    for root in hidden(connection):
        keep_newest(connection)
        rest = _planned(connection, Plan(root, "", retrieved=False)).records
        for at in range(0, len(rest), _RECORDS):
            _delete(connection, rest[at : at + _RECORDS])
        _gone(connection, root)


def _delete(connection: apsw.Connection, records: list[_Record]) -> None:
    numbers = [record.n for record in records]
    connection.executemany(
        "DELETE FROM places WHERE key = ? AND length = ? AND hash = ? AND kind = ? AND record = ?",
        [(*place, record.n) for record in records for place in record.places or ()],
    )
    unreadable = [record.n for record in records if record.places is None]
    for table, some in (("places", unreadable), ("blobs", numbers)):
        if some:
            connection.execute(f"DELETE FROM {table} WHERE record IN ({marks(len(some))})", some)
    connection.execute(f"DELETE FROM records WHERE n IN ({marks(len(numbers))})", numbers)


def trim(connection: apsw.Connection, log: str, before: int) -> None:
    """Forget the events of a log before a number."""
    connection.execute("UPDATE logs SET first = max(first, min(?2, last + 1)) WHERE name = ?1", (log, before))
    connection.execute(
        "DELETE FROM events WHERE log = (SELECT log FROM logs WHERE name = ?1) AND number < ?2", (log, before)
    )


def forget_events(connection: apsw.Connection) -> int:
    """Forget some events of deleted logs, and return how many: all but the last one of each log."""
    connection.execute(
        "DELETE FROM events WHERE rowid IN (SELECT e.rowid FROM logs l JOIN events e ON e.log = l.log AND e.number < l.last "
        "WHERE l.closed >= 2 LIMIT ?)",
        (_EVENTS,),
    )
    return connection.changes()


def forget_logs(connection: apsw.Connection, names: Sequence[str]) -> int:
    """Forget those of these logs that are deleted, and return how many."""
    gone = 0
    for name in names:
        connection.execute(
            "DELETE FROM events WHERE log = (SELECT log FROM logs WHERE name = ? AND closed >= 2)", (name,)
        )
        connection.execute("DELETE FROM logs WHERE name = ? AND closed >= 2", (name,))
        gone += connection.changes()
    return gone
