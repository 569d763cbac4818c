"""The sessions in a store: find them by name, make them, list them, and end them when their time is over.

A name that is used again after its session has ended begins a new log, its next *life*: the log of an ended session stays
closed, so that a router that missed the end cannot continue it.

The time to live counts only while some router serves the store: without a router no client can ask for a session.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, Protocol

from msgspec.structs import replace

from middleware_hub.chat.errors import SessionExistsError
from middleware_hub.chat.keys import KeyFunction
from middleware_hub.metrics import SessionMetrics
from middleware_hub.persistence.saving import Saving
from middleware_hub.persistence.weight_versions import VersionLog
from middleware_hub.sessions.events import (
    DELETED,
    PREFIX,
    Created,
    Exported,
    SessionEnded,
    TurnCommitted,
    as_json,
    id_of,
    life_of,
    log_key,
    name_prefix,
    read,
    stored,
    tenant_of,
    tenant_prefix,
)
from middleware_hub.sessions.log.restored import made_of, new_session
from middleware_hub.sessions.log.stored_log import LogContext, StoredLog
from middleware_hub.sessions.session import Session
from middleware_hub.spans.versions import VersionClock
from middleware_hub.store.errors import (
    ClosedLogError,
    DamagedRecordError,
    LogMovedError,
    MissingRecordError,
    StoreError,
    StoreUnreachableError,
)
from middleware_hub.store.event_log import EventLog
from middleware_hub.store.protocol import Batch, LogInfo, Refill, Store
from middleware_hub.store.records import Event, Serials

logger = logging.getLogger(__name__)

_PAGE: Final = 200
_SWEPT: Final = 100
"""Logs that one round of sweeping looks at, and up to `_PAGES` times as many while there is something to do."""
_PAGES: Final = 20
REMEMBERED: Final = 86_400.0
"""Seconds for which the log of an ended session stays: routers, and files of waiting turns, learn from it that it ended."""
_TELL_SECONDS: Final = 60.0
MOST_DELETED: Final = 10_000
"""Logs of deleted sessions that a router knows."""


class Holder(Protocol):
    """Holds sessions, and is told what happens to them at other routers."""

    def __iter__(self) -> Iterator[Session]:
        """Yield the sessions that are here."""

    def held(self, tokens: int) -> None:
        """Count tokens that a session gained."""

    def closed_elsewhere(self, tenant: str, session_id: str) -> None:
        """Note that a session was finalized or has ended."""


class Archive:
    """See the top of this file.

    Args:
        saving: appends to the store, and has it.
        versions: the log of weight versions.
        holder: holds the sessions of this process.
    """

    def __init__(
        self,
        saving: Saving,
        serials: Serials,
        clock: VersionClock,
        versions: VersionLog,
        key: KeyFunction,
        metrics: SessionMetrics,
        holder: Holder,
    ) -> None:
        self._saving = saving
        self._store: Store = saving.store
        self._versions = versions
        self._others = 0
        self._key = key
        self._metrics = metrics
        self._holder = holder
        self._told = -_TELL_SECONDS
        self._begun = time.monotonic()
        self._swept = PREFIX
        self._deleted: dict[str, float] = {}
        self._half_made: dict[Created, None] = {}
        self._forgotten: set[str] = set()  # logs of which that was said
        self._context = LogContext(
            saving, serials, clock, versions.news, self._failed, holder.held, holder.closed_elsewhere
        )

    def _failed(self, count: int, error: Exception) -> None:
        self._metrics.unsaved.inc(count)
        now = time.monotonic()
        if now - self._told >= _TELL_SECONDS:
            self._told = now
            logger.warning(
                "the store cannot be used, and sessions wait in this process until it can: %s. Look at its disk and its "
                "permissions, and do not stop this process before that",
                error,
            )

    @property
    def _opened(self) -> float:
        """When this router began to serve, by the store's clock, which is known only after a while."""
        return self._store.now() - (time.monotonic() - self._begun)

    async def find(self, tenant: str, session_id: str) -> Session | None:
        """Return a session as its log says; None if there is none.

        Raises StoreUnreachableError, DamagedRecordError.
        """
        await self._look_round()
        newest = await self._newest(tenant, session_id)
        return None if newest is None or self._over(newest) else await self._load(tenant, newest)

    async def refresh(self, session: Session) -> bool:
        """Apply what happened to a session at other routers; return whether it can be used. If not, `find` it again."""
        log = session.log
        if not isinstance(log, StoredLog):
            return True
        await log.read_on()
        await self._look_round()
        return not (session.over or (log.diverged and session.stored))

    async def _look_round(self) -> None:
        """Read the weight versions that other routers noted, if any of them wrote."""
        others = self._store.others()
        if others != self._others:
            with suppress(StoreUnreachableError):
                await self._versions.read()
                self._others = others

    async def _newest(self, tenant: str, session_id: str) -> LogInfo | None:
        return next(iter(await self._store.logs(name_prefix(tenant, session_id), limit=1)), None)

    def _over(self, info: LogInfo) -> bool:
        """Whether a log has ended, or its end waits for a store that takes no writes."""
        return info.closed >= DELETED or self._deleted_here(info.log)

    def _deleted_here(self, log: str) -> bool:
        """Whether the session of a log was deleted here. After a day the log may be that of another session."""
        return time.time() - self._deleted.get(log, -math.inf) < REMEMBERED

    async def undo(self, tenant: str, session_id: str) -> bool:
        """End a session whose client was refused here, and that was never used; return whether there was one."""
        newest = await self._newest(tenant, session_id) if self._half_made else None
        if newest is None:
            return False
        made = next(map(read, await self._store.read(newest.log, limit=1)), None)
        return isinstance(made, Created) and made in self._half_made and await self._end(newest.log, 1, "deleted")

    async def _load(self, tenant: str, info: LogInfo) -> Session | None:
        events = EventLog(self._store, info.log, whole=True)
        first = await events.next_page()
        if not first:
            return None
        session = new_session(info.log, made_of(info.log, first[0]), self._key)
        log = StoredLog(self._context, session, events)
        session.log = log
        try:
            await log.replay(first)
        except MissingRecordError:
            # Not its end: a router that has it in memory may write all of it again.
            if info.log not in self._forgotten:
                if len(self._forgotten) > MOST_DELETED:
                    self._forgotten.clear()
                self._forgotten.add(info.log)
                logger.warning("session %s was forgotten: the store had no room for it", session.id)
            session.apply(SessionEnded(time=time.time(), why="forgotten"))
        except BaseException:
            self._context.held(-session.tokens)
            await session.abort()
            raise
        if not session.over and self._expired(log.time, session.ttl):
            if await self._end(info.log, events.number, "expired"):
                lost = not session.exported and session.trie.head is not None
                self._metrics.expired(session.id, session.ttl, lost=lost)
            session.apply(SessionEnded(time=time.time(), why="expired"))
        if session.over:
            self._context.held(-session.tokens)
            await session.abort()
            return None
        session.used = time.monotonic() - (self._store.now() - max(log.time, self._opened))
        return session

    async def create(self, session: Session, beside: Sequence[Event] = ()) -> None:
        """Write down a new session, together with events of other logs. Raises SessionExistsError, StoreUnreachableError."""
        while True:
            try:
                return await self._create(session, beside)
            except SessionExistsError:
                if not await self.undo(session.tenant, session.id):  # else it was one of `_half_made`
                    raise

    async def _create(self, session: Session, beside: Sequence[Event]) -> None:
        newest = await self._newest(session.tenant, session.id)
        there = SessionExistsError(session.id)
        if newest is not None and not self._over(newest):
            if await self._load(session.tenant, newest) is not None:
                raise there
            if not await self._end(newest.log, newest.last, "forgotten"):
                newest = await self._newest(session.tenant, session.id)  # it had expired, or was written again
                if newest is not None and not self._over(newest):
                    raise there
        life = 1 if newest is None else life_of(newest.log) + 1
        while self._deleted_here(key := log_key(session.tenant, session.id, life)):
            life += 1
        log = StoredLog(self._context, session, EventLog(self._store, key, whole=True))
        session.created_at = self._store.now()
        made = Created(
            time=session.created_at,
            root=log.root,
            ttl=session.ttl,
            sampling=as_json(session.defaults.sampling_params),
            metadata=as_json(session.metadata),
            response_budget=session.response_budget,
            group=session.group,
            defaults=as_json(replace(session.defaults, sampling_params={})),
            key=session.key_digest,
        )
        try:
            await log.begin(made, beside)
        except (LogMovedError, ClosedLogError):
            raise there from None
        except StoreUnreachableError:
            self._half_made[made] = None  # it may still be written, but the next attempt is for the same log
            if len(self._half_made) > MOST_DELETED:
                del self._half_made[next(iter(self._half_made))]
            raise
        session.log = log

    def deleted(self, session: Session) -> None:
        """Note that a session was deleted here. If the store forgets that, no router may bring the session back."""
        if isinstance(session.log, StoredLog):
            self._deleted[session.log.events.key] = time.time()
            if len(self._deleted) > MOST_DELETED:
                del self._deleted[next(iter(self._deleted))]

    async def refill(self, store: Refill) -> None:
        """Write again what the store has lost of the sessions that are here or were deleted. Raises StoreUnreachableError."""
        for log in list(self._deleted):
            if self._deleted_here(log):
                await _close_log(store, log)
        for session in list(self._holder):
            if isinstance(session.log, StoredLog):
                try:
                    await session.log.refill(store)
                except StoreUnreachableError:
                    raise
                except (StoreError, ValueError) as error:
                    logger.error("session %s, which the store has lost, cannot be written again: %s", session.id, error)

    async def listed(self, tenant: str) -> AsyncIterator[tuple[str, int]]:
        """Yield the ids of all sessions of a tenant that have not ended, each with the number of its last event."""
        async for info in self.logs(tenant):
            yield id_of(info.log), info.last

    async def of_log(self, tenant: str, info: LogInfo) -> Session | None:
        """Return what `find` does, given the session's log as `logs` yields it: that is two round trips fewer."""
        return await self._load(tenant, info) or await self.find(tenant, id_of(info.log))

    async def logs(self, tenant: str) -> AsyncIterator[LogInfo]:
        """Yield the logs of all sessions of a tenant that have not ended, in the order of ids."""
        await self._look_round()
        after = before = ""
        while page := await self._store.logs(tenant_prefix(tenant), after=after, limit=_PAGE):
            for info in page:
                name = id_of(info.log)
                if name != before and not self._over(info):
                    yield info
                before = name
            after = page[-1].log

    # Time --------------------------------------------------------------------------------------------------------------

    async def sweep(self, held: Callable[[str, str], bool]) -> None:
        """End some of the sessions whose time is over and that this router does not hold, and count them.

        The logs of those that ended long ago are forgotten. Each call goes on where the last one stopped.
        """
        for _ in range(_PAGES):
            page = await self._store.logs(PREFIX, after=self._swept, limit=_SWEPT)
            self._swept = page[-1].log if len(page) == _SWEPT else PREFIX
            old, over = [], 0
            for info in page:
                if held(tenant_of(info.log), id_of(info.log)):
                    continue
                with suppress(DamagedRecordError):  # `store verify` finds it, and the others are swept all the same
                    last = await self._store.read(info.log, after=info.last - 1, limit=1)
                    used = read(last[0]).time if last else self._store.now()
                    if info.closed < DELETED:
                        over += await self._sweep(info, used)
                    elif self._store.now() - used > REMEMBERED:
                        old.append(info.log)
                await asyncio.sleep(0)
            if old:
                await self._store.forget_logs(old)
            if self._swept == PREFIX or not (old or over):
                break

    async def _sweep(self, info: LogInfo, used: float) -> bool:
        first = await self._store.read(info.log, limit=1)
        made = read(first[0]) if first else None
        if not isinstance(made, Created) or not self._expired(used, made.ttl):
            return False
        if not await self._end(info.log, info.last, "expired"):
            return False
        self._metrics.expired(id_of(info.log), made.ttl, lost=await _unexported(self._store, info.log))
        return True

    def _expired(self, used: float, ttl: float) -> bool:
        return self._store.now() - max(used, self._opened) > ttl

    async def _end(self, log: str, last: int, why: str) -> bool:
        """End a session if its log still has only its first `last` events."""
        try:
            await self._saving.write(Batch(events=stored(log, [SessionEnded(time=self._store.now(), why=why)], last)))
        except (LogMovedError, ClosedLogError):
            return False
        return True


async def _close_log(store: Refill, log: str) -> None:
    """Close the log of a session that was deleted. Another router that has not heard of that may be writing it again."""
    (last,) = await store.ends([log])
    while True:
        try:
            return await store.append(Batch(events=stored(log, [SessionEnded(time=time.time(), why="deleted")], last)))
        except LogMovedError as moved:
            last = moved.last
        except ClosedLogError:
            return None


async def _unexported(store: Store, log: str) -> bool:
    """Whether a session has samples that no client got, by its log alone; a damaged one may have."""
    samples, exported, events = 0, 0, EventLog(store, log, whole=True)
    try:
        while page := await events.next_page():
            for event in map(read, page):
                samples += isinstance(event, TurnCommitted)
                exported = event.samples if isinstance(event, Exported) else exported
            events.take(page[-1])
            await asyncio.sleep(0)
    except DamagedRecordError:
        return True
    return exported < samples
