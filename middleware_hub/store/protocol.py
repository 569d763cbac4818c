"""The interface of every store. Code outside this package need not know which store it uses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import msgspec

from middleware_hub.store.errors import MissingRecordError
from middleware_hub.store.media import MediaFile
from middleware_hub.store.paths import TextPath
from middleware_hub.store.records import Blob, Event, Mark, SpanRecord

Durability = Literal["process", "disk", "off"]
"""An acknowledged append survives the death of this process, a power cut, or nothing (it is acknowledged at once)."""


class Batch(msgspec.Struct, frozen=True):
    """Records, blobs and events that are appended together: all of them, or none.

    Attributes:
        records: each after its links.
        paths: for each reply among them its id and the path of its whole text, from the block where its `text` begins or
            before. A context is found by the path of the record after it. Records without any text are not found by text or by
            name.
        blobs: those of records of this batch, or of earlier ones. An existing blob stays.
        events: in the order of their numbers, even if they belong to different logs.
        gathered: whether the caller has already gathered what can be appended together, so the store need not wait for more.
        media: files that records of this batch name, as far as the caller has them. An existing file stays; lengths are added.
    """

    records: Sequence[SpanRecord] = ()
    paths: Mapping[bytes, TextPath] = {}
    blobs: Sequence[Blob] = ()
    events: Sequence[Event] = ()
    gathered: bool = False
    media: Sequence[MediaFile] = ()


OnMissing = Callable[[Batch, MissingRecordError], Batch | None]
"""Returns a batch with the records that the store has forgotten; None if they are not known here either."""
OnDone = Callable[[bool], None]
"""Called at the end: True if the batch is in the store, False if it was given up."""


class Query(msgspec.Struct, frozen=True):
    """The query of a text's look-up.

    Attributes:
        path: that of the text. `path.first` may be as late as the block of `known_from`.
        known_from: the length up to which the caller knows what is recorded: replies that end before are not looked for,
            those that end just there are.
        known: the ids of records that the caller has, with everything they build on. They are left out.
        parents: names (request ids) of replies that are wanted whatever their text is.
        each: how many replies of each name are wanted, the newest; `MOST_NAMED` at most.
        complete: whether the caller still has everything that it appended through this store object, or found, on the path of
            this text. Then the store spares a look-up if no other process can have written anything on the path.
        logs: the caller wants the number of the last event of each of these logs.
    """

    path: TextPath
    known_from: int = 0
    known: Container[bytes] = ()
    parents: Sequence[str] = ()
    complete: bool = False
    logs: Sequence[str] = ()
    each: int = 1


class Found(msgspec.Struct, frozen=True):
    """The result of a look-up.

    Attributes:
        records: each after its links. The links of a record (`SpanRecord.links`, recursively) are here or known.
        marks: by root, those of the conversations to which the records belong.
        cut_off: how often a bound kept something out (`look_up.MOST_VARIANTS`, `MOST_CHAINS`).
        damaged: how many records were left out, because they or their links cannot be read.
        ends: by log (`Query.logs`), the number of its last event; 0 without a log.
    """

    records: Sequence[SpanRecord] = ()
    marks: Mapping[bytes, Mark] = {}
    cut_off: int = 0
    damaged: int = 0
    ends: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class LogInfo:
    """A log: its key, the number of its last event, and how far it is closed."""

    log: str
    last: int
    closed: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The size of a store, and what happened to it since it was opened here.

    Attributes:
        bytes: used by everything in it.
        groups, appends: groups that were committed, and the batches in them.
        finds, spared: look-ups that were made, and those that needed none (`Query.complete`).
        torn_bytes: those of an append that was never acknowledged; they were cut off when the store was opened.
        media, media_bytes: files of media, and their bytes, which `bytes` has as well.
    """

    records: int = 0
    roots: int = 0
    logs: int = 0
    bytes: int = 0
    groups: int = 0
    appends: int = 0
    finds: int = 0
    spared: int = 0
    cut_off: int = 0
    damaged: int = 0
    conflicts: int = 0
    torn_bytes: int = 0
    media: int = 0
    media_bytes: int = 0


class LookUps:
    """Counts the look-ups of a store that is open."""

    def __init__(self) -> None:
        self.spared = self.damaged = 0
        self._finds = self._cut_off = 0

    def counted(self, found: Found) -> Found:
        """Count a look-up, and return its result."""
        self._finds += 1
        self._cut_off += found.cut_off
        self.damaged += found.damaged
        return found

    def added_to(self, stats: StoreStats) -> StoreStats:
        """Return the statistics of a store with these counts."""
        return replace(stats, finds=self._finds, spared=self.spared, cut_off=self._cut_off, damaged=self.damaged)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with a store.

    Attributes:
        kind: `file`, `record`, `link`, `index`, `blob`, `media`, or `event`.
        message: what is wrong, with ids in hex.
        record: the id of the record, if the finding is about one.
    """

    kind: str
    message: str
    record: bytes | None = None


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Counts of forgotten conversations, retrieved and never retrieved, and of all of their records."""

    retrieved: int = 0
    unretrieved: int = 0
    records: int = 0
    events: int = 0
    stamps: Sequence[str] = ()
    """The weight version of the last hit of each conversation, in the order of forgetting."""

    def plus(self, other: Forgotten) -> Forgotten:
        """Return both together."""
        return Forgotten(
            self.retrieved + other.retrieved,
            self.unretrieved + other.unretrieved,
            self.records + other.records,
            self.events + other.events,
            (*self.stamps, *other.stamps),
        )


class Refill(Protocol):
    """A store that has lost something, for callers that still know it (`Store.on_loss`). Every method raises StoreError."""

    async def lacking(self, records: Mapping[bytes, bytes]) -> set[bytes]:
        """Return which of these records, given by their ids with their roots, are missing."""
        ...

    async def finds(self, batch: Batch) -> bool:
        """Return whether a text finds the records of a batch, if the store can lose that without losing the records."""
        ...

    async def ends(self, logs: Sequence[str]) -> list[int]:
        """Return the number of the last event of each log; 0 for a log that is not there."""
        ...

    async def events(self, log: str, after: int, limit: int) -> Sequence[Event]:
        """Return the events after a number, `limit` at most. Raises DamagedRecordError."""
        ...

    async def append(self, batch: Batch) -> None:
        """Append a batch while no other caller can. See `Store.append`."""
        ...


Loss = Callable[[Refill], Awaitable[None]]
"""Appends what a process knows and a store has lost."""


class Store(Protocol):
    """Remembers records beyond a process. Several processes may use one store at once, each with its own object.

    Every method but `note` may raise StoreUnreachableError.
    """

    async def open(self, fingerprint: str | None) -> None:
        """Make or open the store of the tokenizer with this fingerprint. Raises StoreMismatchError.

        None opens an existing store of any tokenizer: for programs that use no tokenizer.
        """
        ...

    async def close(self) -> None:
        """Write what is waiting, and release the store. It may not be used again. A second close does nothing."""
        ...

    async def append(self, batch: Batch) -> list[int]:
        """Append all of a batch or nothing; return the numbers of its events when it is as durable as required.

        Records that are there already, with the same content, are no error. A caller that is cancelled does not know
        whether the batch was appended; it may append the records again, but not the events.

        Raises:
            MissingRecordError: something on which a record builds is missing, perhaps forgotten.
            ConflictingRecordError: the reply exists with another content; or a record has another root than its links.
            ClosedLogError, LogMovedError: an event is refused.
            ValueError: a record is wrong in itself, or a text cannot be stored.
        """
        ...

    def on_loss(self, refill: Loss) -> None:
        """Call `refill` when the store has lost something that it had acknowledged, before it answers anything again.

        Several may be given; they are called in that order. The store is open. Not every store can lose something and survive:
        a file loses nothing unless the whole file is lost.
        """
        ...

    def note(self, marks: Sequence[Mark]) -> None:
        """Keep marks. They are written with the next append, or after a second; a killed process loses only these."""
        ...

    def others(self) -> int:
        """Return a number that has grown if others may have appended records: 0 as long as this object wrote all of them.

        It counts from the opening: all records that were there then count once. A call costs about 2 us. A store that cannot
        know without asking another machine returns a greater number each time.
        """
        ...

    def spared(self, query: Query) -> Found | None:
        """Return at once the answer of a look-up to a `complete` caller, if it would bring nothing new.

        None: ask `find`. A name in `parents` is spared if the caller gave it or looked it up, and no other process has given it
        since.
        """
        ...

    async def find(self, query: Query) -> Found:
        """Return what is recorded on the path of a text, in the namespace of its path:

        - all replies whose whole text (of at least one character) the text begins with, or equals, from `known_from` on
          (`MOST_VARIANTS` of each text);
        - chains that the text leaves midway, furthest first, as far as they go beyond the deepest continuable of those
          replies, or beyond a named parent that ends before it; of a prompt that is the whole text one reply for each
          tokenization of it;
        - the replies called `parents`;
        - and what all of these build on.

        The cost grows with the text after `known_from` and with what is found, not with what else is stored.
        """
        ...

    async def get(
        self, ids: Sequence[bytes], *, known: Container[bytes] = (), roots: Mapping[bytes, bytes] | None = None
    ) -> Found:
        """Return these records, and everything unknown on which they build. Missing ids are left out.

        `roots` has the roots of records by their ids. In some stores, a record without a known root costs a search.
        """
        ...

    async def blobs(
        self, record: bytes, names: Sequence[str] | None = None, *, root: bytes | None = None
    ) -> list[Blob]:
        """Return the blobs beside a record: all, or those of these names. `root` is the record's, see `get`."""
        ...

    async def media(self, tenant: str, digests: Sequence[str], *, data: bool = True) -> Mapping[str, MediaFile]:
        """Return a tenant's files of these digests, as far as they are here and whole. `data`: with their bytes.

        Reading and hashing the bytes does not hold up the event loop.
        """
        ...

    async def media_unnamed(self) -> int:
        """Return how many files no record names: what processes left that were killed. It may take long."""
        ...

    async def sweep_media(self) -> int:
        """Remove these files, and return how many."""
        ...

    async def read(self, log: str, *, after: int = 0, limit: int = 1_000) -> list[Event]:
        """Return the events of a log after a number, in order. Raises DamagedRecordError."""
        ...

    async def wait(self, log: str, after: int, seconds: float) -> int:
        """Return the number of the last event of a log as soon as it is greater than `after`, or when the time is up.

        A log without events has the number 0. A caller that is cancelled has changed nothing.
        """
        ...

    async def trim(self, log: str, before: int) -> None:
        """Forget the events of a log before a number. `read` begins with the first that is left.

        Numbers are not reused: a log whose events were all forgotten goes on, and stays as closed as it was.
        """
        ...

    async def logs(self, prefix: str = "", *, after: str = "", limit: int = 1_000) -> list[LogInfo]:
        """Return the logs whose key begins with `prefix` and is greater than `after`, in the order of keys."""
        ...

    async def forget_logs(self, logs: Sequence[str]) -> int:
        """Forget deleted logs (`closes` >= 2) as a whole; return how many. Others are kept.

        A log that is appended to after this begins again with number 1, and is open.
        """
        ...

    async def announce(self, name: str, data: bytes, seconds: float) -> None:
        """Announce a value that holds for some seconds from now on; it replaces the earlier value of this name.

        0 seconds withdraw it. It is not a record: a store that was restarted may have lost it.
        """
        ...

    async def announced(self, prefix: str = "") -> Mapping[str, bytes]:
        """Return the announcements that hold now, by name, whose names begin with `prefix`.

        The clock is that of the store (for a file, of the machine), not that of the process that announced.
        """
        ...

    def now(self) -> float:
        """Return the time by the same clock, in seconds since 1970, as far as this process knows it from announcements."""
        ...

    def scan(self) -> AsyncIterator[SpanRecord]:
        """Yield all records, those that others build on first; damaged ones are left out."""
        ...

    def verify(self, checked: Callable[[int], None] | None = None) -> AsyncIterator[Finding]:
        """Check everything that is stored, page by page, while others use the store; yield what is wrong.

        `checked` is told how many more records were checked, from time to time.
        """
        ...

    async def forget(self, max_bytes: int) -> Forgotten:
        """Forget whole conversations until no more than `max_bytes` are used.

        Retrieved conversations go first, the least recently hit (`Mark.tick`) first; those never retrieved go last. Before all
        of them, the events of deleted logs (`closes` >= 2) go, except each log's last event: such a log stays closed.
        """
        ...

    async def forget_roots(self, roots: Sequence[bytes]) -> Forgotten:
        """Forget these conversations, named by the root of their records. A conversation that grows meanwhile is kept."""
        ...

    async def stats(self) -> StoreStats:
        """Return the size and the counters of this store."""
        ...
