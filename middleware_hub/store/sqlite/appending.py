"""One group of batches as one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from middleware_hub.store.errors import (
    ClosedLogError,
    ConflictingRecordError,
    LogMovedError,
    MissingRecordError,
)
from middleware_hub.store.paths import Place, name_key
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Event, Mark, SpanRecord, encode, encode_blob, encode_event, faults, places_of
from middleware_hub.store.sqlite.rows import Located, Row, insert, locate, marks, padded


@dataclass(slots=True)
class Prepared:
    """A batch, ready to be written: what takes time and no connection is done."""

    records: Sequence[SpanRecord]
    bodies: list[bytes] = field(default_factory=list)
    places: list[list[Place]] = field(default_factory=list)
    names: list[set[bytes]] = field(default_factory=list)
    blobs: list[tuple[bytes, str, bytes]] = field(default_factory=list)
    events: list[tuple[Event, bytes]] = field(default_factory=list)


def prepare(batch: Batch) -> Prepared:
    """Encode a batch. Raises ValueError for a record that is wrong in itself."""
    done = Prepared(batch.records)
    for record in batch.records:
        wrong = faults(record)
        if wrong:
            raise ValueError(f"record {record.id.hex()}: {'; '.join(wrong)}")
        done.bodies.append(encode(record))
        done.places.append(places_of(record, batch.paths[record.id]) if record.sampled else [])
        done.names.append({name_key(record.namespace, name) for name in record.request_ids})
    done.blobs += [(blob.record, blob.name, encode_blob(blob)) for blob in batch.blobs]
    done.events += [(event, encode_event(event)) for event in batch.events]
    return done


class Group:
    """Collects the rows of several batches, each of which is taken whole or refused, and writes them.

    It is used inside a transaction that already holds the lock: what it reads stays true until the commit.
    """

    def __init__(self, connection: sqlite3.Connection, jobs: Sequence[Prepared], last: int) -> None:
        """`last`: the largest number that a record ever had."""
        self._connection = connection
        wanted = {i for job in jobs for record in job.records for i in (record.id, record.root, *record.links)}
        wanted |= {record for job in jobs for record, _, _ in job.blobs}
        self._located = locate(connection, wanted) if wanted else {}
        self.last = last
        self._logs = self._read_logs({event.log for job in jobs for event, _ in job.events})
        self._changed: set[str] = set()
        self._records: list[Row] = []
        self._pending: dict[bytes, bytes] = {}
        self._places: list[Row] = []
        self._names: list[Row] = []
        self._blobs: list[Row] = []
        self._events: list[tuple[str, int, bytes]] = []
        self.new_roots: list[Mark] = []
        self.hits: list[Mark] = []

    def _read_logs(self, names: set[str]) -> dict[str, tuple[int, int, int]]:
        found: dict[str, tuple[int, int, int]] = {}
        for some in padded(sorted(names)):
            sql = f"SELECT name, log, last, closed FROM logs WHERE name IN ({marks(len(some))})"
            found.update({name: (log, last, closed) for name, log, last, closed in self._connection.execute(sql, some)})
        return found

    def take(self, job: Prepared) -> list[int]:
        """Take a batch and return the numbers of its events. Raises a StoreError if it is refused: then nothing is taken."""
        new = self._check(job)
        numbers = self._number(job)
        for record, body, where, names in zip(job.records, job.bodies, job.places, job.names, strict=True):
            located = new.pop(record.id, None)
            if located is None:
                continue
            n, root = located
            self._located[record.id] = located
            parent = None if record.parent is None else self._located[record.parent].n
            line = None if record.line is None else self._located[record.line].n
            self._records.append((n, record.id, root, parent, line, body))
            self._pending[record.id] = body
            self._places += [(*place, n) for place in where]
            self._names += [(name, n) for name in names]
            mark = Mark(record.root, record.serial, record.stamp)
            (self.new_roots if n == root else self.hits).append(mark)
            self.last = n
        self._blobs += [(self._located[record].n, name, body) for record, name, body in job.blobs]
        for (event, body), number in zip(job.events, numbers, strict=True):
            log, _, closed = self._logs.get(event.log, (0, 0, 0))
            self._logs[event.log] = log, number, max(closed, event.closes)
            self._changed.add(event.log)
            self._events.append((event.log, number, body))
        return numbers

    def _check(self, job: Prepared) -> dict[bytes, Located]:
        """Return where the new records of a batch will be."""
        new: dict[bytes, Located] = {}
        for record, body in zip(job.records, job.bodies, strict=True):
            if record.id in new or record.id in self._located:
                if record.sampled and self._body(job, record) != body:
                    raise ConflictingRecordError(
                        f"record {record.id.hex()} is stored with another content: the first one is kept"
                    )
                continue
            n = self.last + 1 + len(new)
            links = [new.get(link) or self._located.get(link) for link in record.links]
            if None in links:
                raise MissingRecordError(tuple(i for i, at in zip(record.links, links, strict=True) if at is None))
            root = new.get(record.root) or self._located.get(record.root) if links else Located(n, n)
            if root is None or any(link is not None and link.root != root.n for link in links):
                raise ConflictingRecordError(f"record {record.id.hex()} builds on records of another root")
            new[record.id] = Located(n, root.n)
        unknown = tuple(i for i, _, _ in job.blobs if i not in new and i not in self._located)
        if unknown:
            raise MissingRecordError(unknown)
        return new

    def _body(self, job: Prepared, record: SpanRecord) -> bytes:
        pending = self._pending.get(record.id)
        if pending is None and record.id in self._located:
            (pending,) = self._connection.execute("SELECT body FROM records WHERE id = ?", (record.id,)).fetchone()
        return pending or next(b for r, b in zip(job.records, job.bodies, strict=True) if r.id == record.id)

    def _number(self, job: Prepared) -> list[int]:
        ends: dict[str, tuple[int, int]] = {}
        numbers = []
        for event, _ in job.events:
            last, closed = ends.get(event.log) or self._logs.get(event.log, (0, 0, 0))[1:]
            if closed >= max(1, event.closes):
                raise ClosedLogError(f"the log {event.log!r} is closed: {event.kind!r} is refused")
            if event.expected not in (None, last):
                raise LogMovedError(event.log, last)
            ends[event.log] = last + 1, max(closed, event.closes)
            numbers.append(last + 1)
        return numbers

    def write(self) -> None:
        """Write what was taken."""
        connection = self._connection
        insert(connection, "records", self._records)
        insert(connection, "places", self._places)
        insert(connection, "names", self._names)
        insert(connection, "blobs(record, name, body)", self._blobs, verb="INSERT OR IGNORE")
        write_marks(connection, self.new_roots)
        if self._changed:
            self._write_events()

    def _write_events(self) -> None:
        connection = self._connection
        rows = [
            (log or None, name, last, closed)
            for name, (log, last, closed) in self._logs.items()
            if name in self._changed
        ]
        insert(connection, "logs(log, name, last, closed)", [row for row in rows if row[0] is None])
        for log, _, last, closed in rows:
            if log is not None:
                connection.execute("UPDATE logs SET last = ?, closed = ? WHERE log = ?", (last, closed, log))
        logs = self._read_logs(self._changed)
        insert(connection, "events", [(logs[name][0], number, body) for name, number, body in self._events])


def write_marks(connection: sqlite3.Connection, found: Sequence[Mark] | Mapping[bytes, Mark]) -> None:
    """Merge marks into those that are stored. Marks of roots that are not there are left out."""
    held = list(found.values()) if isinstance(found, Mapping) else list(found)
    for some in padded(held, 64):
        values = ",".join(["(?,?,?,?)"] * len(some))
        connection.execute(
            f"WITH m(id, tick, stamp, retrieved) AS (VALUES {values}) "
            "INSERT INTO roots SELECT r.n, m.tick, m.stamp, m.retrieved FROM m JOIN records r ON r.id = m.id WHERE true "
            "ON CONFLICT(root) DO UPDATE SET stamp = iif(excluded.tick > tick, excluded.stamp, stamp), "
            "tick = max(tick, excluded.tick), retrieved = max(retrieved, excluded.retrieved)",
            [v for mark in some for v in ((mark.root, mark.tick, mark.stamp, mark.retrieved) if mark else (None,) * 4)],
        )
