"""One group of batches as one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import apsw

from middleware_hub.store.errors import (
    ClosedLogError,
    ConflictingRecordError,
    LogMovedError,
    MissingRecordError,
    StoreError,
)
from middleware_hub.store.media import MediaFile
from middleware_hub.store.paths import Place, TextPath
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import (
    Event,
    Mark,
    SpanRecord,
    encode,
    encode_blob,
    encode_event,
    faults,
    path_of,
    places_of,
)
from middleware_hub.store.sqlite.media import write_files
from middleware_hub.store.sqlite.others import Others, entered
from middleware_hub.store.sqlite.rows import THERE, Located, Row, insert, locate, marks, padded

_MOST_KEPT: Final = 20_000
_MOVE_LOG: Final = "ON CONFLICT(log) DO UPDATE SET last = excluded.last, closed = excluded.closed"


class Log(NamedTuple):
    """A log: its number in the file, that of its last event, and how far it is closed."""

    log: int | None
    last: int
    closed: int


_NO_LOG: Final = Log(None, 0, 0)


@dataclass(slots=True)
class EncodedBatch:
    """A batch, ready to be written: all work that needs no connection is done."""

    records: Sequence[SpanRecord]
    bodies: list[bytes] = field(default_factory=list)
    places: list[list[Place]] = field(default_factory=list)
    links: list[bytes] = field(default_factory=list)
    blobs: list[tuple[bytes, str, bytes]] = field(default_factory=list)
    events: list[tuple[Event, bytes]] = field(default_factory=list)
    named: list[tuple[bytes, bytes]] = field(default_factory=list)
    """The files of media that records name: the id of each record with a key."""
    media: Sequence[MediaFile] = ()
    size: int = 0
    """Bytes of all that is encoded."""


def prepare(batch: Batch) -> EncodedBatch:
    """Encode a batch. Raises ValueError for a record that is wrong in itself."""
    done = EncodedBatch(batch.records)
    path: TextPath | None = None
    for record in reversed(batch.records):  # a context has the path of the reply after it
        wrong = faults(record)
        if wrong:
            raise ValueError(f"record {record.id.hex()}: {'; '.join(wrong)}")
        path = path_of(record, batch.paths.get(record.id, path))
        done.bodies.append(encode(record))
        done.places.append(places_of(record, path))
        if record.media:
            done.named += [(record.id, key) for key in record.files]
        done.links += record.links
        done.links.append(record.root)
    done.bodies.reverse()
    done.places.reverse()
    if batch.blobs:
        done.blobs += [(blob.record, blob.name, encode_blob(blob)) for blob in batch.blobs]
        done.links += [blob.record for blob in batch.blobs]
    if batch.events:
        done.events += [(event, encode_event(event)) for event in batch.events]
    done.size = sum(map(len, done.bodies))
    if batch.blobs or batch.events:
        done.size += sum(len(body) for _, _, body in done.blobs) + sum(len(body) for _, body in done.events)
    if batch.media:
        done.media = batch.media
        done.size += sum(one.size for one in batch.media)
    return done


class Whereabouts:
    """The places of records and logs in the file, as this process wrote or read them last.

    The places of records hold until any process forgets some; those of logs until another process writes.
    """

    def __init__(self) -> None:
        self.records: dict[bytes, Located] = {}
        self.logs: dict[str, Log] = {}
        self._forgotten = ""
        self._ends: dict[str, tuple[int, int]] = {}
        self._cleared = 0

    def clear(self) -> None:
        self.records.clear()
        self._clear_logs()

    def _clear_logs(self) -> None:
        self._cleared += 1
        self.logs.clear()
        self._ends.clear()

    def check(self, forgotten: str) -> None:
        """Note that another process has written, and how many records were ever forgotten."""
        self._clear_logs()
        if forgotten != self._forgotten:
            self.records.clear()
            self._forgotten = forgotten

    def shorten(self) -> None:
        """Forget everything once there is too much."""
        if len(self.records) > _MOST_KEPT or len(self.logs) + len(self._ends) > _MOST_KEPT:
            self.clear()

    def end_of(self, log: str, read: Callable[[str], int]) -> int:
        """Return the number of a log's last event; `read` returns it from the file.

        May be called while the thread clears: what was read before a clear is not kept after it.
        """
        own, cleared = self.logs.get(log), self._cleared
        if own is not None:
            return own.last
        at, last = self._ends.get(log, (-1, 0))
        if at != cleared:
            last = read(log)
            self._ends[log] = cleared, last
        return last


class Group:
    """Collects the rows of several batches, each of which is taken whole or refused, and writes them.

    Use it inside a transaction that already holds the lock: its reads stay true until the commit.
    """

    def __init__(
        self,
        connection: apsw.Connection,
        jobs: Sequence[EncodedBatch],
        others: Others,
        known: Whereabouts,
        *,
        careful: bool,
    ) -> None:
        """Read the places of everything on which the batches build.

        Args:
            others: their news has been read.
            known: the known places. What is added belongs to the transaction: it is void after a rollback.
            careful: also check whether the records themselves exist; else `write` fails if one does.
        """
        self.last = self._since = others.last
        self._careful = careful
        self._writer = others.me
        self._connection = connection
        self._located = known.records
        self._logs = known.logs
        wanted = {i for job in jobs for i in job.links}
        own = {record.id for job in jobs for record in job.records}
        wanted = wanted | own if careful else wanted - own
        unknown = [i for i in wanted if i not in known.records]
        if unknown:
            known.records.update(locate(connection, unknown))
        self._read_logs({event.log for job in jobs for event, _ in job.events if event.log not in known.logs})
        self._changed: set[str] = set()
        self._records: list[Row] = []
        self._places: list[Row] = []
        self._roots: list[Row] = []
        self._blobs: list[Row] = []
        self._events: list[tuple[str, int, bytes]] = []
        self._named: list[Row] = []
        self._media: list[MediaFile] = []
        self.hits: list[Mark] = []

    def _read_logs(self, names: Iterable[str]) -> None:
        for some in padded(sorted(names)):
            sql = f"SELECT name, log, last, closed FROM logs WHERE name IN ({marks(len(some))})"
            self._logs.update({row[0]: Log(*row[1:]) for row in self._connection.execute(sql, some)})

    def take(self, job: EncodedBatch) -> list[int]:
        """Take a batch and return the numbers of its events. Raises a StoreError if it is refused: then nothing is taken."""
        located, n = self._located, self.last
        rows: list[Row] = []
        places: list[Row] = []
        roots: list[Row] = []
        hits: list[Mark] = []
        try:
            for record, body, where in zip(job.records, job.bodies, job.places, strict=True):
                key = record.id
                if key in located:
                    self._check_again(record, body, rows)
                    continue
                n += 1
                parent, line = located.get(record.parent or b""), located.get(record.line or b"")
                if record.parent is None and record.line is None:
                    root = n
                    roots.append((n, record.serial, record.stamp, False))
                else:
                    root = self._root_of(record, parent, line)
                    if record.versions is not None:  # a reply
                        hits.append(Mark(record.root, record.serial, record.stamp))
                located[key] = Located(n, root)
                rows.append((n, key, root, parent and parent.n, line and line.n, body))
                places += [(*place, n) for place in where]
            unknown = tuple(one for one, _, _ in job.blobs if one not in located)
            if unknown:
                raise MissingRecordError(unknown)
            numbers = self._number(job) if job.events else []
        except StoreError:
            for row in rows:
                del located[row[1]]
            raise
        self.last = n
        self._records += rows
        self._places += places
        self._roots += roots
        self.hits += hits
        self._blobs += [(located[record].n, name, body) for record, name, body in job.blobs]
        if job.named:
            self._named += dict.fromkeys([(located[record].root, key) for record, key in job.named])
            self._media += job.media
        for (event, body), number in zip(job.events, numbers, strict=True):
            log, _, closed = self._logs.get(event.log, _NO_LOG)
            self._logs[event.log] = Log(log, number, max(closed, event.closes))
            self._changed.add(event.log)
            self._events.append((event.log, number, body))
        return numbers

    def _root_of(self, record: SpanRecord, parent: Located | None, line: Located | None) -> int:
        """Return the number of the root of a record that builds on these. Raises a StoreError."""
        located = self._located
        if (parent is None and record.parent is not None) or (line is None and record.line is not None):
            raise MissingRecordError(tuple(link for link in record.links if link not in located))
        root = located.get(record.root)
        if root is None or (parent or root).root != root.n or (line or root).root != root.n:
            raise ConflictingRecordError(f"record {record.id.hex()} builds on records of another root")
        return root.n

    def _check_again(self, record: SpanRecord, body: bytes, rows: Sequence[Row]) -> None:
        """Raise ConflictingRecordError if a reply that is there already has another content."""
        if record.sampled and self._body(record.id, rows) != body:
            raise ConflictingRecordError(
                f"record {record.id.hex()} is stored with another content: the first one is kept"
            )

    def _body(self, record: bytes, rows: Sequence[Row]) -> bytes:
        """Return the bytes of a record that is in the file, or about to be."""
        for _, key, *_, body in (*rows, *self._records):
            if key == record:
                return bytes(body)
        return bytes(self._connection.execute("SELECT body FROM records WHERE id = ?", (record,)).get)

    def _number(self, job: EncodedBatch) -> list[int]:
        ends: dict[str, tuple[int, int]] = {}
        numbers = []
        for event, _ in job.events:
            last, closed = ends.get(event.log) or self._logs.get(event.log, _NO_LOG)[1:]
            if closed >= max(1, event.closes):
                raise ClosedLogError(f"the log {event.log!r} is closed: {event.kind!r} is refused")
            if event.expected not in (None, last):
                raise LogMovedError(event.log, last)
            ends[event.log] = last + 1, max(closed, event.closes)
            numbers.append(last + 1)
        return numbers

    def write(self) -> None:
        """Write the batches that were taken."""
        connection = self._connection
        if self._careful:  # a record that is about to be forgotten (`THERE`) leaves its id to the new one
            again = [(row[1],) for row in self._records]
            connection.executemany("UPDATE records SET id = randomblob(16) WHERE id = ?", again)
        insert(connection, "records", self._records)
        insert(connection, "places", self._places)
        insert(connection, "roots", self._roots)
        if self._records:
            insert(connection, "news", [(self.last, self._since, self._writer, entered(self._places))])
        insert(connection, "blobs(record, name, body)", self._blobs, verb="INSERT OR IGNORE")
        if self._named:
            write_files(connection, self._named, self._media)
        if self._changed:
            self._write_events()

    def _write_events(self) -> None:
        connection = self._connection
        new = [name for name in self._changed if self._logs[name].log is None]
        if new:
            insert(connection, "logs(name, last, closed)", [(name, *self._logs[name][1:]) for name in new])
            self._read_logs(new)
        rows = [(log.log, name, log.last, log.closed) for name, log in self._logs_changed(new)]
        insert(connection, "logs(log, name, last, closed)", rows, then=_MOVE_LOG)
        insert(connection, "events", [(self._logs[name].log, number, body) for name, number, body in self._events])

    def _logs_changed(self, new: Sequence[str]) -> list[tuple[str, Log]]:
        return [(name, self._logs[name]) for name in self._changed.difference(new)]


def write_marks(connection: apsw.Connection, found: Mapping[bytes, Mark]) -> None:
    """Merge marks into those that are stored. Marks of missing roots are left out."""
    for some in padded(list(found.values()), 64):
        values = ",".join(["(?,?,?,?)"] * len(some))
        connection.execute(
            f"WITH m(id, tick, stamp, retrieved) AS (VALUES {values}) "
            f"INSERT INTO roots SELECT r.n, m.tick, m.stamp, m.retrieved FROM m JOIN records r ON r.id = m.id WHERE {THERE} "
            "ON CONFLICT(root) DO UPDATE SET stamp = iif(excluded.tick > tick, excluded.stamp, stamp), "
            "tick = max(tick, excluded.tick), retrieved = max(retrieved, excluded.retrieved)",
            [v for mark in some for v in ((mark.root, mark.tick, mark.stamp, mark.retrieved) if mark else (None,) * 4)],
        )
