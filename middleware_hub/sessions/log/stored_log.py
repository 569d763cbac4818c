"""The log of one session in a store. It is written before an event is applied here, and read before a request uses the session.

    append   waiting events -> one batch, right after the last event that is known here -> they are applied here, in this order
                               the log moved on meanwhile: read on, and try again
    read on  events of other routers -> they are applied here, by the code that commits

So all routers apply the same events in the same order. While the store cannot be written, events are applied here and wait
for it in the spool, in order. They are appended after the events that other routers have appended meanwhile.

                     here and in the log       waits for the store      elsewhere in the log, or lost
    new        ->    current                   -                        -
    current    ->    current                   ahead                    diverged
    ahead      ->    current                   ahead                    diverged
    diverged   ->    diverged                  diverged                 diverged

A session whose log has diverged is used as long as a request needs it. Then it is read again from the log. Whether a log is
also *stale*, because the store could not be asked for news, is another question: a store that cannot be read may be written,
and the other way round.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from msgspec.structs import replace

from middleware_hub.chat.errors import SessionOverError
from middleware_hub.persistence.saving import Saving
from middleware_hub.sessions.events import (
    ENDS,
    AnyEvent,
    Created,
    Exported,
    SessionEnded,
    Touched,
    TurnCommitted,
    read,
    stored,
)
from middleware_hub.sessions.log import replay
from middleware_hub.sessions.log.span_book import Packed, SpanBook, packed
from middleware_hub.sessions.session import Session
from middleware_hub.sessions.trie.nodes import BranchHandle, NewTurn
from middleware_hub.sessions.trie.trie import TrieClosedError
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.spans.versions import DEFAULT, VersionClock
from middleware_hub.store.errors import (
    ClosedLogError,
    DamagedRecordError,
    LogMovedError,
    MissingRecordError,
    StoreUnreachableError,
)
from middleware_hub.store.event_log import EventLog
from middleware_hub.store.protocol import Batch, Refill, Store
from middleware_hub.store.records import Blob, Event, Mark, Serials, SpanRecord
from router.errors import RouterError

logger = logging.getLogger(__name__)

_WRITTEN_AT_ONCE: Final = 200
"""Records, or events, that are written again in one step after the store has lost them."""
_AT_ONCE: Final = 16  # turns that are replayed before the event loop serves other requests
_TRIES: Final = 100
_SILENT: Final = 1 / 8  # of a session's time to live, then other routers are told again that it is used
_LARGE: Final = 64 * 1024  # bytes of further fields, then they are packed in a thread


class LogState(enum.Enum):
    """See the table at the top of this file."""

    NEW = "new"
    CURRENT = "current"
    AHEAD = "ahead"
    DIVERGED = "diverged"


class EventPlace(enum.Enum):
    """Where the events are that happened here: the columns of the table."""

    IN_LOG = "in the log"
    WAITING = "waiting"
    ELSEWHERE = "elsewhere"


_READ: Final = dict(zip(EventPlace, (LogState.CURRENT, LogState.AHEAD, LogState.DIVERGED), strict=True))
_NEXT: Final = {
    LogState.NEW: {EventPlace.IN_LOG: LogState.CURRENT},
    LogState.CURRENT: _READ,
    LogState.AHEAD: _READ,
    LogState.DIVERGED: dict.fromkeys(EventPlace, LogState.DIVERGED),
}


def _future() -> asyncio.Future[bool]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class PendingEvent:
    """An event that waits to be appended to the log of its session.

    Attributes:
        act: applies it here.
        records, blobs, news: appended together with it; news are events of other logs.
        span: the sampled tokens of a turn.
        done: tells the caller that waits whether it is in the store.
    """

    event: AnyEvent
    act: Callable[[], object]
    records: Sequence[SpanRecord] = ()
    blobs: Sequence[Blob] = ()
    span: TokenSpan | None = None
    news: Sequence[Event] = ()
    done: asyncio.Future[bool] = field(default_factory=_future)

    def tell(self, outcome: bool | Exception) -> None:
        """Answer the caller that waits for it. May be called twice."""
        if self.done.done():
            return
        if isinstance(outcome, Exception):
            self.done.set_exception(outcome)
            self.done.exception()  # the caller may be gone
        else:
            self.done.set_result(outcome)


@dataclass(frozen=True, slots=True)
class LogContext:
    """The parts that the logs of all sessions of one router share.

    Attributes:
        saving: appends to the store.
        news: returns events of other logs that have to be appended with the next turn.
        failed: called with the number of events that could not be written, and why.
        held: called with the tokens that a turn of another router adds.
        closed: called with tenant and id of a session that was finalized or ended elsewhere.
    """

    saving: Saving
    serials: Serials
    clock: VersionClock
    news: Callable[[], Sequence[Event]]
    failed: Callable[[int, Exception], None]
    held: Callable[[int], None]
    closed: Callable[[str, str], None]

    @property
    def store(self) -> Store:
        return self.saving.store


class History:
    """The events of one session's log as they are in the store, kept by a router that has the session.

    If a store was emptied or set back, the missing events are written again with the same numbers. So several routers that have
    the session may do that at once, and none of them has to read it again.

    Args:
        log: the key of the log.
    """

    def __init__(self, log: str) -> None:
        self._log = log
        self._events: list[Event] = []

    def __len__(self) -> int:
        return len(self._events)

    def add(self, after: int, events: Iterable[Event]) -> None:
        """Take the events of the log after a number."""
        self._events[after:] = events

    async def refill(self, store: Refill, book: SpanBook, stamp: str, with_media: Callable[[Batch], Batch]) -> bool:
        """Append the records and events that a store lacks; return whether its log is as it was known.

        `with_media` adds to a batch the files that its records name. Raises StoreError.
        """
        events = tuple(self._events)
        (end,) = await store.ends([self._log])
        if not await self._is_same(store, events[:end], 0):
            return False
        lacking = await store.lacking(dict.fromkeys(book.kept, book.root))
        records = book.again([one for one in book.kept if one in lacking], stamp)
        for at in range(0, len(records), _WRITTEN_AT_ONCE):
            some = records[at : at + _WRITTEN_AT_ONCE]
            batch = Batch(some, book.paths(some), book.blobs(some))
            await store.append(with_media(batch))
        while end < len(events):
            new = [replace(one, expected=at) for at, one in enumerate(events[end : end + _WRITTEN_AT_ONCE], end)]
            try:
                await store.append(Batch(events=new))
                end += len(new)
            except LogMovedError as moved:  # another router does the same work, or goes on with the log as it is now
                if not await self._is_same(store, events[: moved.last], end):
                    return False
                end = moved.last
            except ClosedLogError:
                return False
        return True

    async def _is_same(self, store: Refill, events: Sequence[Event], after: int) -> bool:
        """Return whether a store has these first events of the log. `after`: how many of them were compared before.

        All are compared: a server may get the last one again, behind others, from a router that keeps its last writes.
        """
        for at in range(after, len(events), _WRITTEN_AT_ONCE):
            known = events[at : at + _WRITTEN_AT_ONCE]
            there = await store.events(self._log, at, len(known))
            if [(one.kind, one.data) for one in there] != [(one.kind, one.data) for one in known]:
                return False
        return True


class StoredLog:
    """Implements `SessionLog`; see the top of this file.

    Attributes:
        events: as far as they were applied here.
        time: of the last event that was applied here, in seconds since 1970. The store's clock, as routers' may differ.
        state: whether the log has the events that happened here.
        stale: whether the store was unreachable when it was asked for news, or lacks events of a dead router.
    """

    def __init__(self, context: LogContext, session: Session, events: EventLog) -> None:
        self.events = events
        self.time = 0.0
        self.state = LogState.NEW
        self.stale = False
        self._context = context
        self._session = session
        self._book = SpanBook(context.store, context.serials, session.tenant, events.key)
        self._history = History(events.key)
        self._lock = asyncio.Lock()
        self._waiting: list[PendingEvent] = []
        self._unsaved: list[AnyEvent] = []
        """Events that were applied here and wait for the store, or are in the store and were not read yet."""
        self._writing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<StoredLog {self.events!r}, {self.state.value}, {len(self._unsaved)} unsaved>"

    def _found(self, place: EventPlace) -> None:
        """Note the place of events that happened here. Raises RuntimeError for a log of which nothing was read."""
        after = _NEXT[self.state].get(place)
        if after is None:
            raise RuntimeError(f"an event cannot be {place.value} while {self!r} is {self.state.value}")
        self.state = after

    @property
    def diverged(self) -> bool:
        return self.state is LogState.DIVERGED

    @property
    def root(self) -> bytes:
        return self._book.root

    @property
    def settled(self) -> bool:
        return not (self._waiting or self._unsaved or self._writing or self._lock.locked())

    async def begin(self, made: Created, beside: Sequence[Event] = ()) -> None:
        """Write the first event, with events of other logs. Raises LogMovedError if there is one, StoreUnreachableError."""
        root = [self._book.root_record(self._stamp)]
        events = stored(self.events.key, [made], 0)
        await self._context.saving.write(Batch(root, self._book.paths(root), events=[*events, *beside]))
        self._history.add(0, events)
        self.events.number, self.time = 1, made.time
        self._found(EventPlace.IN_LOG)

    @property
    def unsaved(self) -> bool:
        return bool(self._unsaved)

    # Writing -----------------------------------------------------------------------------------------------------------

    async def append(self, event: AnyEvent) -> bool:
        event = replace(event, time=self._context.store.now())
        saved = await self._submit(PendingEvent(event, lambda: self._session.apply(event)))
        if isinstance(event, Exported | SessionEnded):
            # The store forgets exported sessions first.
            with suppress(StoreUnreachableError):
                self._context.store.note([Mark(self.root, self._context.serials.next(), self._stamp, retrieved=True)])
        return saved

    def touched(self) -> None:
        if self._unsaved or self._session.over or self._context.store.now() - self.time < _SILENT * self._session.ttl:
            return
        self.time = self._context.store.now()
        self._waiting.append(PendingEvent(Touched(time=self.time), lambda: None))
        self._begin_writing()

    async def append_turn(self, handle: BranchHandle, turn: NewTurn, lora: str, commit: Callable[[], object]) -> bool:
        extra = turn.extra
        if sum(map(len, extra.values())) < _LARGE:
            fields = {name: packed(name, value) for name, value in extra.items()}
            return await self._append_turn(handle, turn, lora, commit, fields)

        async def with_extra() -> bool:
            fields = await asyncio.to_thread(lambda: {name: packed(name, value) for name, value in extra.items()})
            return await self._append_turn(handle, turn, lora, commit, fields)

        return await asyncio.shield(asyncio.create_task(with_extra()))

    async def _append_turn(
        self,
        handle: BranchHandle,
        turn: NewTurn,
        lora: str,
        commit: Callable[[], object],
        fields: dict[str, Packed],
    ) -> bool:
        trie, span = self._session.trie, turn.span
        turn.time = self._context.store.now()
        if trie.closed or not handle.open:
            raise TrieClosedError
        trie.key(turn.message)  # if a function of the user's own fails, the turn must not be in the log
        context = replay.context_of(span)
        shared = context is not None and context.stored is not None
        records = self._book.records(span, lora, self._stamp, turn.tail, fields)
        event = replay.logged(handle, turn, shared=shared)
        return await self._submit(
            PendingEvent(event, commit, records, self._book.blobs(records), span, self._context.news())
        )

    async def _submit(self, entry: PendingEvent) -> bool:
        self._waiting.append(entry)
        self._begin_writing()
        # A caller that is cancelled leaves the event to the log: it may be in the store already.
        return await asyncio.shield(entry.done)

    def _begin_writing(self) -> None:
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        try:
            async with self._lock:
                while self._waiting:
                    ends = (at for at, entry in enumerate(self._waiting, 1) if isinstance(entry.event, ENDS))
                    count = next(ends, None)  # events after an end are no longer allowed
                    entries, self._waiting = self._waiting[:count], self._waiting[count:] if count else []
                    if not await self._append(entries):
                        break
        finally:
            self._writing = None
            if self._waiting:
                self._begin_writing()

    async def hand_over(self) -> None:
        """Write the waiting events, as far as the store takes them."""
        await self._context.saving.hand_over()
        await self.read_on()

    async def _append(self, entries: list[PendingEvent]) -> bool:
        """Append these after the unsaved events, and apply them; return whether that was possible."""
        for _ in range(_TRIES):
            entries = [entry for entry in entries if self._wanted(entry)]
            if not entries:
                return True
            records = [record for entry in entries for record in entry.records]
            events = [entry.event for entry in entries]
            blobs = [blob for entry in entries for blob in entry.blobs]
            logged = stored(self.events.key, events, self.events.number + len(self._unsaved))
            logged += [event for entry in entries for event in entry.news]
            batch = Batch(records, self._book.paths(records), blobs, logged)
            try:
                saved = await self._context.saving.save(
                    batch, on_missing=self._mended, on_done=partial(self._over, events)
                )
                if not saved:
                    self._unsaved += events
                    self._found(EventPlace.WAITING)
                    self._context.failed(len(events), StoreUnreachableError("it takes no writes"))
            except (LogMovedError, ClosedLogError) as moved:
                if isinstance(moved, LogMovedError) and not moved.last:  # it ended, unnoticed here: `Archive.sweep`
                    self._session.apply(SessionEnded(time=time.time(), why="deleted"))
                    self._context.closed(self._session.tenant, self._session.id)
                elif isinstance(moved, LogMovedError) and (lost := self.events.lost(moved)):
                    self._lose(lost, "it was set back")
                    return self._refuse(entries, StoreUnreachableError("the store has lost the end of this session"))
                try:
                    await self._read()
                except RouterError as error:
                    return self._refuse(entries, error)
            except Exception as error:  # noqa: BLE001 - it goes to the callers that wait
                return self._refuse(entries, error)
            else:
                if saved:  # appended at the expected number, so the unsaved events come before it
                    self._history.add(
                        self.events.number, stored(self.events.key, [*self._unsaved, *events], self.events.number)
                    )
                    self.events.number += len(self._unsaved) + len(events)
                    self.time = events[-1].time
                    self._unsaved.clear()
                    self._found(EventPlace.IN_LOG)
                for entry in entries:
                    self._happen(entry, saved=saved)
                return True
        return self._refuse(entries, StoreUnreachableError("other routers append to the session without a pause"))

    def _refuse(self, entries: list[PendingEvent], error: Exception) -> bool:
        """Fail these events: the store does not have them, and the spool does not either."""
        if isinstance(error, MissingRecordError):  # a turn of another router was forgotten: the session is gone here
            self._found(EventPlace.ELSEWHERE)
            error = SessionOverError("the session was forgotten: the store had no room for it")
        else:
            self._context.failed(len(entries), error)
        for entry in entries:
            entry.tell(error)
        return False

    def _mended(self, batch: Batch, error: MissingRecordError) -> Batch | None:
        """Return a batch with all records of a session that goes on here although the store has forgotten it."""
        new, order = {record.id for record in batch.records}, {one: at for at, one in enumerate(self._book.kept)}
        missing = order if self.root in error.missing else error.missing  # the log still names all of them
        if self._session.over or not (again := set(missing) - new) or not order.keys() >= again:
            return None  # the chains of a session that is over are cut
        made = self._book.again(again, self._stamp)
        paths, blobs = {**batch.paths, **self._book.paths(made)}, [*self._book.blobs(made), *batch.blobs]
        records = sorted([*made, *batch.records], key=lambda record: order[record.id])
        return replace(batch, records=records, paths=paths, blobs=blobs)

    def _over(self, events: list[AnyEvent], saved: bool) -> None:
        """Note that events are in the store or were given up. After a loss, the session is read again once it is idle."""
        if not saved and any(event in self._unsaved for event in events):
            self._unsaved = [event for event in self._unsaved if event not in events]
            self._lose(len(events), "it could not be written")

    def _lose(self, count: int, why: str) -> None:
        self._found(EventPlace.ELSEWHERE)
        logger.error("session %s: %d events that were answered are not in the store: %s", self._session.id, count, why)

    def _wanted(self, entry: PendingEvent) -> bool:
        """Whether an event is still allowed and needed. If not, the caller that waits for it is answered."""
        try:
            self._session.check(entry.event)
        except (RouterError, TrieClosedError) as error:
            entry.tell(error)
            return False
        if not self._session.needs(entry.event):
            entry.tell(True)
            return False
        return True

    def _happen(self, entry: PendingEvent, *, saved: bool) -> None:
        try:
            entry.act()
        except TrieClosedError as error:
            # The caller of this turn is gone. The turn is in the log, so it is replayed like a turn of another router.
            if isinstance(entry.event, TurnCommitted) and not self._session.over:
                self._replay(entry.event, {record.id: record for record in entry.records}, entry.span)
            entry.tell(error)
        except Exception as error:
            logger.exception("an event of session %s could not happen", self._session.id)
            entry.tell(error)
        entry.tell(saved)

    # Reading -----------------------------------------------------------------------------------------------------------

    async def read_on(self) -> None:
        async with self._lock:
            in_store = bool(self._unsaved) and not self._context.saving.waiting_bytes
            try:
                await self._read()
            except StoreUnreachableError as error:
                self.stale = True
                self._context.failed(0, error)
                return
            except MissingRecordError:
                self._found(EventPlace.ELSEWHERE)  # a turn of another router was forgotten
            if in_store and self._unsaved:  # but they cannot be read: the session has ended, or was forgotten
                self._unsaved = []
                self._found(EventPlace.ELSEWHERE)

    async def replay(self, first: Sequence[Event]) -> None:
        """Apply everything that is in the log, of which `first` are the first events.

        Raises StoreUnreachableError, DamagedRecordError, UnknownSessionError.
        """
        async with self._lock:
            await self._read(first)

    async def _read(self, first: Sequence[Event] = ()) -> None:
        session, before, used = self._session, self._session.trie.closed, self._session.used
        page = first
        while page := page or await self.events.next_page():
            events = [(event.number, read(event)) for event in page]
            records = await self._book.fetch([event for _, event in events if isinstance(event, TurnCommitted)])
            self._history.add(self.events.number, page)
            for done, (number, event) in enumerate(events):
                if self._unsaved and self._unsaved[0] == event:
                    del self._unsaved[0]  # it was handed over, or had been written already
                    self.events.number, self.time = number, event.time
                    continue
                if self._unsaved:
                    self._found(EventPlace.ELSEWHERE)
                if session.over or (session.trie.closed and isinstance(event, TurnCommitted)):
                    pass  # the second error: this router has ended the session, and could not write that (`diverged`)
                elif isinstance(event, TurnCommitted):
                    if done % _AT_ONCE == _AT_ONCE - 1:
                        await asyncio.sleep(0)
                    self._replay(event, records)
                elif number > 1:
                    session.apply(event)
                self.events.number, self.time = number, event.time
            if not self._unsaved:
                self._found(EventPlace.IN_LOG)
            session.used = max(used, time.monotonic() - max(0.0, self._context.store.now() - self.time))
            page = ()
        self.stale = self._context.saving.incomplete
        if session.trie.closed and not before:
            self._context.closed(session.tenant, session.id)

    def _replay(self, turn: TurnCommitted, records: Mapping[bytes, SpanRecord], span: TokenSpan | None = None) -> None:
        """Commit a turn of another router, or of a request that was given up (`span`). Raises DamagedRecordError."""
        try:
            record = records[turn.span]
            span = self._book.restore(turn, records) if span is None else span
            checkpoint = replay.commit(self._session.trie, turn, span, record.tail, record.namespace[1])
        except KeyError as error:
            raise DamagedRecordError(
                f"the log {self.events.key!r} lacks what turn {turn.generation} continues"
            ) from error
        self._book.bare(checkpoint.id, record)
        self._context.held(self._session.committed(checkpoint))

    async def fill(self) -> None:
        await self._book.fill(self._session.trie)

    async def refill(self, store: Refill) -> None:
        """Write the records and events of this session that the store has lost. Raises StoreUnreachableError."""
        if not await self._history.refill(store, self._book, self._stamp, self._context.saving.with_media):
            self._lose(len(self._history), "the store was set back, and the session has gone on otherwise")

    @property
    def _stamp(self) -> str:
        return self._context.clock.current or DEFAULT
