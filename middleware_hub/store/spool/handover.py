"""Empties spool files into a store, in order: each event is appended once, whatever happened before.

A batch may be in the store already: its acknowledgement was lost, or a router died between handing it over and noting that.
Records may be appended again. Events may not: if a log has gone on since, they are compared with the log, and new events are
appended after it. A turn of a session that was finalized or has ended meanwhile is refused, as any such turn is. What came
together with it or later is appended all the same: a reward, or the end of the session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import msgspec

from middleware_hub.store.errors import (
    ClosedLogError,
    LogMovedError,
    MissingRecordError,
    StoreError,
    StoreUnreachableError,
)
from middleware_hub.store.media import MediaFile
from middleware_hub.store.paths import TextPath
from middleware_hub.store.protocol import Batch, OnMissing, Store
from middleware_hub.store.records import Blob, Event, SpanRecord
from middleware_hub.store.spool.file import SpoolFile
from middleware_hub.store.spool.packing import unpack

logger = logging.getLogger(__name__)

Another = Callable[[], Awaitable[Store]]
"""Makes a second object for the store."""

GIVE_UP_SECONDS: Final = 30.0
"""Seconds after which an unanswered append is cancelled. Whether it happened is unknown."""
_GROUP: Final = 64
_GROUP_BYTES: Final = 256 << 10
"""The most batches, and bytes of batches, that are appended in one step: fewer after a refusal."""
_PAGE: Final = 500
_TRIES: Final = 100
TURN: Final = "turn"
OVER: Final = frozenset({"finalized", "ended"})
"""Kinds of a session's events, see `sessions.log.events`."""


class EndedElsewhereError(StoreError):
    """The log takes no more of these events: the session was finalized, or has ended."""

    type = "store_log_ended"


@dataclass(slots=True)
class _Tail:
    """The known events of a log after a number."""

    last: int
    seen: set[tuple[str, bytes]] = field(default_factory=set)
    over: bool = False
    closed: int = 0


class HandOver:
    """Appends batches that may be in the store already. Made for each run through a file."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tails: dict[str, _Tail] = {}
        self._broken: set[str] = set()
        self._added: set[bytes] = set()

    async def several(self, batches: Sequence[Batch]) -> bool:
        """Append batches in one step, if possible; return whether that was done. Raises StoreUnreachableError."""
        if any(event.expected is None for batch in batches for event in batch.events):
            return False
        records: list[SpanRecord] = []
        blobs: list[Blob] = []
        events: list[Event] = []
        media: list[MediaFile] = []
        paths: dict[bytes, TextPath] = {}
        for batch in batches:
            records += batch.records
            blobs += batch.blobs
            events += batch.events
            media += batch.media
            paths.update(batch.paths)
        if any(event.log in self._broken or event.log in self._tails for event in events):
            return False
        try:
            await self._store.append(Batch(records, paths, blobs, events, media=media))
        except (LogMovedError, ClosedLogError, MissingRecordError):
            return False
        return True

    async def one(self, batch: Batch, on_missing: OnMissing | None) -> None:
        """Append a batch.

        Raises:
            StoreUnreachableError: the outcome is unknown. Try again later.
            MissingRecordError: its links are not in the store (yet).
            EndedElsewhereError: its turns are refused; everything else that it says of their sessions is in the store.
            StoreError, ValueError: no store will take it.
        """
        known = self._tails.keys() | self._broken
        moved = any(event.expected is None or event.log in known for event in batch.events)
        refused: EndedElsewhereError | None = None
        for _ in range(_TRIES):
            try:
                events: Sequence[Event] = batch.events
                if moved:
                    events, refused = await self._new(events)
                if refused is None:
                    await self._store.append(msgspec.structs.replace(batch, events=events))
                elif events:
                    await self._store.append(Batch(events=events))
                self._added.update(event.data for event in events)
                if refused is None:
                    return
                raise refused
            except LogMovedError as error:
                moved = True
                for log in {event.log for event in batch.events if event.expected is not None} & self._tails.keys():
                    if 0 < error.last < self._tails[log].last:  # turns before these events were refused
                        self._tails[log] = _Tail(0)
            except ClosedLogError:
                if moved:
                    raise
                moved = True
            except MissingRecordError as error:
                if await self._continued_and_forgotten(batch, error):
                    raise EndedElsewhereError(
                        "the store has forgotten a session that other routers went on with"
                    ) from error
                mended = None if on_missing is None else on_missing(batch, error)
                if mended is None:
                    raise
                batch = mended
        raise LogMovedError(batch.events[0].log if batch.events else "", 0)

    async def _continued_and_forgotten(self, batch: Batch, error: MissingRecordError) -> bool:
        """Return whether turns of other routers are lost with the conversation: writing it again would leave them out."""
        if not {record.root for record in batch.records}.intersection(error.missing):
            return False
        turns = [event for event in batch.events if event.kind == TURN and event.expected is not None]
        own = {event.data for event in turns} | self._added
        for event in turns:
            tail = await self._read_on(event)
            if any(kind == TURN and data not in own for kind, data in tail.seen):
                return True
        return False

    def broken(self, batch: Batch) -> None:
        """Note that a batch is given up: later turns of its session cannot be kept either."""
        self._broken.update(event.log for event in batch.events if event.kind == TURN)

    async def _new(self, events: Sequence[Event]) -> tuple[list[Event], EndedElsewhereError | None]:
        """Return the events that are not in the store, to be appended after those that are, and why turns are left out."""
        new: list[Event] = []
        refused: EndedElsewhereError | None = None
        added: dict[str, int] = {}
        for event in events:
            tail = await self._read_on(event)
            if (event.kind, event.data) in tail.seen or 0 < event.closes <= tail.closed:
                continue  # it is there, or what it says has happened elsewhere
            if event.kind == TURN and (tail.over or event.log in self._broken):
                refused = EndedElsewhereError(f"the log {event.log!r} takes no more turns: its session ended elsewhere")
                continue
            if event.expected is not None:
                event = msgspec.structs.replace(event, expected=tail.last + added.get(event.log, 0))
            added[event.log] = added.get(event.log, 0) + 1
            new.append(event)
        return new, refused

    async def _read_on(self, event: Event) -> _Tail:
        tail = self._tails.setdefault(event.log, _Tail(event.expected or 0))
        while page := await self._store.read(event.log, after=tail.last, limit=_PAGE):
            tail.last = page[-1].number
            tail.seen.update((one.kind, one.data) for one in page)
            tail.over = tail.over or any(one.kind in OVER for one in page)
            tail.closed = max(tail.closed, *(one.closes for one in page))
        return tail


class Drain:
    """See the top of this file.

    Attributes:
        handed_over: replies that are in the store now.
        lost: replies that the store refused, or that could not be read.
        why: the reason for which the last run stopped early.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.handed_over = self.lost = self._steps = 0
        self._group = _GROUP
        self.why = ""

    async def empty(self, spool: SpoolFile) -> bool:
        """Append the batches that wait in a file; return whether all of it is in the store, or given up. Raises OSError."""
        over = HandOver(self._store)
        while spool.waiting:
            try:
                async with asyncio.timeout(GIVE_UP_SECONDS):
                    if not await self._several(spool, over):
                        await self._one(spool, over)
            except StoreUnreachableError as error:
                self.why = error.message
                return False
            except TimeoutError:
                self.why = f"the store has not answered for {GIVE_UP_SECONDS:.0f} s"
                return False
        return True

    async def _several(self, spool: SpoolFile, over: HandOver) -> bool:
        """Append the first batches in one step, if possible; return whether that was done."""
        group: list[Batch] = []
        size = 0
        try:
            for waiting in islice(spool.waiting, self._group):
                size += waiting.size
                if group and size > _GROUP_BYTES:
                    break
                group.append(unpack(spool.read(waiting)))
            done = len(group) > 1 and await over.several(group)
        except StoreUnreachableError:
            raise
        except (StoreError, ValueError):
            done = False  # tried again alone
        if done:
            self._done(spool, len(group))
        self._group = min(_GROUP, 2 * self._group) if done or len(group) < 2 else self._group // 2
        return done

    async def _one(self, spool: SpoolFile, over: HandOver) -> None:
        first, ordered = spool.waiting[0], False
        try:
            batch = unpack(spool.read(first))
            ordered = any(event.kind == TURN for event in batch.events)
            await over.one(batch, first.on_missing)
        except StoreUnreachableError:
            raise
        except MissingRecordError as error:
            if ordered or first.tried == self._steps:  # a turn builds on nothing after it, and later ones may name it
                self._give_up(spool, over, error)
            else:
                first.tried = self._steps
                spool.move_back()  # what it builds on may come after it
        except (StoreError, ValueError) as error:
            self._give_up(spool, over, error)
        else:
            self._done(spool, 1)

    def _done(self, spool: SpoolFile, count: int) -> None:
        self._steps += 1
        for one in spool.done(count):
            self.handed_over += one.replies
            if one.on_done is not None:
                one.on_done(True)

    def _give_up(self, spool: SpoolFile, over: HandOver, error: Exception) -> None:
        with suppress(StoreError):
            over.broken(unpack(spool.read(spool.waiting[0])))
        try:
            beside = spool.refuse()
        except (OSError, StoreError) as fault:
            logger.error("what the store refused cannot be kept: %s", fault)
            beside = None
        self.lost += spool.waiting[0].replies
        logger.error("a reply that waited is refused by the store, and kept in %s: %s", beside or "no file", error)
        (one,) = spool.done()
        if one.on_done is not None:
            one.on_done(False)


class Adoption:
    """Hands over the files that dead routers left behind.

    It has a separate store object for that: what is appended there counts as written by others, so it is looked up.

    Attributes:
        left: files whose batches are not all in the store yet.
        handed_over, lost: as `Drain` has them.
    """

    def __init__(self, left_behind: Callable[[], Iterable[SpoolFile]], another: Another) -> None:
        self._left_behind = left_behind
        self._another = another
        self.left: list[SpoolFile] = []
        self.handed_over = self.lost = 0

    async def run(self) -> None:
        """Look for files, and hand them over as far as the store takes them. Raises OSError, StoreError."""
        for spool in await asyncio.to_thread(lambda: list(self._left_behind())):
            if spool.waiting:
                self.left.append(spool)
            else:
                spool.close()
        if not self.left:
            return
        store = await self._another()
        drain = Drain(store)
        try:
            while self.left and await drain.empty(self.left[0]):
                self.left.pop(0).close()
        finally:
            self.handed_over += drain.handed_over
            self.lost += drain.lost
            await store.close()
        if drain.handed_over:
            logger.warning("%d replies of a router that died are in the store", drain.handed_over)
