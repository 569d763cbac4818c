"""All sessions of a router: found by tenant and name, counted, and forgotten in time.

A session holds tokens that cannot be sampled again, so it is never dropped for lack of room before it was exported. First, the
sessions that were finalized and exported are dropped, oldest first; then new sessions and new turns are refused with 429. A
session that expires before it was exported is logged and counted.

With a store this memory is a cache of it. Any session that no request uses makes room for others, the least recently used
first, and is loaded again when it is asked for. Only what the store does not take is refused room.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from middleware_hub.chat.errors import CapacityError, SessionExistsError, SessionOverError, UnknownSessionError
from middleware_hub.chat.keys import KeyFunction, canonical
from middleware_hub.metrics import SessionMetrics
from middleware_hub.sessions.events import SessionEnded, SessionLog, id_of
from middleware_hub.sessions.exchange import Exchange
from middleware_hub.sessions.log.archive import Archive
from middleware_hub.sessions.session import Session, SessionPhase
from middleware_hub.store.errors import DamagedRecordError
from middleware_hub.store.protocol import LogInfo
from middleware_hub.store.records import Event
from router.errors import RouterError

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 5.0
_STEP = 256
"""Sessions that are listed before the event loop serves other requests."""
_MOST_LOST = 1_000
"""Sessions whose lost turns are remembered."""
_READ_AT_ONCE = 32
"""Sessions that are read from the store at the same time for a list."""


class LostTurns:
    """Answered turns that the store may have lost, by tenant and session, until the session is read again."""

    def __init__(self) -> None:
        self._answered: dict[tuple[str, str], tuple[str, ...]] = {}

    def note(self, session: Session, *, diverged: bool = False) -> None:
        """Remember the turns of a session that are known to be lost.

        `diverged`: its log lacks events that were applied here, so remember every turn.
        """
        answered = (*session.lost, *(one.id for one in session.trie.checkpoints() if diverged))
        if answered:
            self._answered[session.tenant, session.id] = answered
            if len(self._answered) > _MOST_LOST:
                del self._answered[next(iter(self._answered))]

    def take(self, session: Session) -> tuple[str, ...]:
        """Return the remembered turns that a session lacks after it was read again, and forget them."""
        answered = self._answered.pop((session.tenant, session.id), ())
        return tuple(one for one in answered if session.trie.checkpoint(one) is None)


class SessionRegistry:
    """See the top of this file.

    Args:
        chats: chats without a session, to be swept and closed with the sessions.
        max_tokens: how many tokens all sessions together may hold.
    """

    def __init__(
        self,
        metrics: SessionMetrics,
        chats: Iterable[Session] = (),
        *,
        max_tokens: int,
        key: KeyFunction = canonical,
    ) -> None:
        self._metrics = metrics
        self._max_tokens = max_tokens
        self._key = key
        self._sessions: dict[tuple[str, str], Session] = {}
        self._chats = chats
        self._ending: set[asyncio.Task[None]] = set()
        self._loading: dict[tuple[str, str], asyncio.Task[Session | None]] = {}
        self._owing: set[SessionLog] = set()
        self._lost = LostTurns()
        self._left: dict[tuple[str, str], tuple[float, list[Exchange[Any]]]] = {}
        """Of sessions that are read again: when they were made, and their replies that are kept for a resend."""
        self.archive: Archive | None = None
        self.tokens = 0
        metrics.watch(
            lambda: len(self),
            lambda: sum(session.trie.nodes for session in self),
            lambda: sum(session.samples for session in self),
            lambda: self.tokens,
        )

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, tenant: str, session_id: str) -> Session:
        if (found := self.find(tenant, session_id)) is None:
            raise UnknownSessionError(f"there is no session {session_id!r}: POST /sessions makes one")
        return found

    def find(self, tenant: str, session_id: str) -> Session | None:
        return self._sessions.get((tenant, session_id))

    def of(self, tenant: str) -> list[Session]:
        return [session for session in self if session.tenant == tenant]

    async def reach(self, tenant: str, session_id: str) -> Session | None:
        """Return a session as it is now, whichever router used it last; None if there is none.

        Between this and the use of the session the caller must not await anything, or must count as its visitor.

        Raises StoreUnreachableError for a session that is not here, if the store cannot be asked.
        """
        archive, name = self.archive, (tenant, session_id)
        if archive is None:
            return self._sessions.get(name)
        while True:
            found = self._sessions.get(name)
            if found is None:
                loading = self._loading.get(name)
                if loading is None or loading.done():  # to await one that is done would not let the loop go on
                    loading = self._loading[name] = asyncio.create_task(self._load(archive, name))
                    loading.add_done_callback(partial(self._loaded, name))
                found = await asyncio.shield(loading)
                if found is None:
                    return None
            elif not await archive.refresh(found):
                self._lost.note(found, diverged=not found.over)
                if not found.over and (replies := found.leave_replies()):
                    self._left[name] = found.created_at, replies
                self._end(found)
                continue
            if self._sessions.get(name) is found:
                return found

    def _loaded(self, name: tuple[str, str], done: asyncio.Task[Session | None]) -> None:
        if self._loading.get(name) is done:
            del self._loading[name]

    async def _load(self, archive: Archive, name: tuple[str, str]) -> Session | None:
        found = await archive.find(*name)
        made, replies = self._left.pop(name, (0.0, []))
        if found is not None:
            for reply in replies if found.created_at == made else ():
                found.begin(reply)
                found.settle(reply)
            found.lost = tuple(dict.fromkeys((*found.lost, *self._lost.take(found))))
            self._metrics.sessions.labels("loaded").inc()
            self._sessions[name] = found
            self._make_room(found)
        return found

    async def summaries(self, tenant: str) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the states of all sessions of a tenant, oldest first, and the ids of the unreadable sessions.

        Sessions that only the store has are read for it.
        """
        archive = self.archive
        if archive is None:
            shown = []
            for number, held in enumerate(self.of(tenant), 1):
                if number % _STEP == 0:
                    await asyncio.sleep(0)
                if self.find(tenant, held.id) is held:  # else it has ended meanwhile
                    shown.append(held.summary())
            return shown, []

        async def summary(info: LogInfo) -> dict[str, Any] | None:
            name = id_of(info.log)
            here = (tenant, name) in self._sessions
            try:
                session = await (self.reach(tenant, name) if here else archive.of_log(tenant, info))
            except DamagedRecordError as error:
                logger.error("session %s: %s", name, error)
                damaged.append(name)
                return None
            if session is None:
                return None
            found = session.summary()
            if self._sessions.get((tenant, name)) is not session:
                self.tokens -= session.tokens
                await session.abort()
            return found

        logs = [info async for info in archive.logs(tenant)]
        shown, damaged = [], list[str]()
        for at in range(0, len(logs), _READ_AT_ONCE):
            some = await asyncio.gather(*map(summary, logs[at : at + _READ_AT_ONCE]))
            shown += [found for found in some if found is not None]
        return sorted(shown, key=lambda found: float(found["created_at"])), damaged

    async def create(self, session: Session, beside: Sequence[Event] = ()) -> Session:
        """Add a new session, also to the store, together with events of other logs: all of it or nothing.

        Raises SessionExistsError, CapacityError and StoreUnreachableError.
        """
        if self.archive is not None:
            await self.require_new(session)
            self.require_room(session)
            await self.archive.create(session, beside)
            if (loaded := self.find(session.tenant, session.id)) is not None:
                return loaded  # by a request that found it in the store at once
        return self.add(session)

    async def require_new(self, session: Session) -> None:
        """Raise SessionExistsError if there is a session of this name. One whose client was refused here is ended first."""
        if self.archive is not None:
            await self.archive.undo(session.tenant, session.id)
        if await self.reach(session.tenant, session.id) is not None:
            raise SessionExistsError(session.id)

    def add(self, session: Session) -> Session:
        """Add a session. Raises SessionExistsError, and CapacityError if there is no room."""
        name = session.tenant, session.id
        if name in self._sessions:
            raise SessionExistsError(session.id)
        self.require_room(session)
        self._sessions[name] = session
        self._metrics.sessions.labels("created").inc()
        return session

    def require_room(self, user: Session) -> None:
        """Make room for a turn of a session. Raises CapacityError if there is none."""
        if self.tokens < self._max_tokens:
            return
        if self.archive is not None:
            if not self._make_room(user) and any(one.log is not None and one.log.unsaved for one in self):
                raise CapacityError(
                    f"sessions hold {self.tokens} tokens, and may hold {self._max_tokens} (--session-max-tokens) while the "
                    "store takes nothing"
                )
            return
        for session in list(self._sessions.values()):
            if session.phase is SessionPhase.FINALIZED and session.exported:
                self._metrics.sessions.labels("evicted").inc()
                self._end(session)
                if self.tokens < self._max_tokens:
                    return
        raise CapacityError(
            f"sessions hold {self.tokens} tokens, and may hold {self._max_tokens} (--session-max-tokens): finalize or "
            "DELETE some that are done with"
        )

    def _make_room(self, user: Session) -> bool:
        """Drop sessions that the store has until there is room; return whether there is room."""
        if self.tokens >= self._max_tokens:
            for session in sorted(self._sessions.values(), key=lambda one: one.used):
                if session is not user and session.idle:
                    self._metrics.sessions.labels("evicted").inc()
                    self._lost.note(session)
                    self._end(session)
                    if self.tokens < self._max_tokens:
                        break
        return self.tokens < self._max_tokens

    def held(self, tokens: int) -> None:
        self.tokens += tokens

    async def delete(self, session: Session) -> None:
        """Forget a session, everywhere. Raises SessionOverError if that has happened already."""
        if session.log is not None and self.archive is not None:
            await session.happen(SessionEnded("deleted", time=time.time()))
            self._owing.add(session.log)
            self.archive.deleted(session)
        self._remove(session)
        self._metrics.sessions.labels("deleted").inc()
        await session.abort()

    def _remove(self, session: Session) -> None:
        if self.find(session.tenant, session.id) is session:  # else it was removed before, and another has its name
            del self._sessions[session.tenant, session.id]
            self.tokens -= session.tokens

    def _end(self, session: Session) -> None:
        self._remove(session)
        self._later(session.abort())

    def _later(self, end: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(end)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def closed_elsewhere(self, tenant: str, session_id: str) -> None:
        """End the generations of a session that was finalized or ended at another router."""
        session = self.find(tenant, session_id)
        if session is not None and session.over:
            self._end(session)
        elif session is not None:
            self._later(session.end_exchanges())

    def sweep(self, now: float | None = None) -> None:
        """Forget sessions whose time to live has passed, and in the others the replies that no client asked for in time."""
        moment = time.monotonic() if now is None else now
        for session in (*self._sessions.values(), *self._chats):
            if session.trie.in_flight or session.visitors:
                # A generation is use, and so is a body that still comes, or a client that waits for the end of the session.
                # Other routers see only what the log says.
                session.touch()
            session.sweep(moment)
        for name, (_, replies) in list(self._left.items()):
            if all(reply.stale(moment) for reply in replies):
                del self._left[name]
        for session in [one for one in self._sessions.values() if one.log is None and one.expired(moment)]:
            self._expire(session)

    def _expire(self, session: Session) -> None:
        lost = not session.exported and session.trie.head is not None
        self._metrics.expired(session.id, session.ttl, lost=lost)
        self._end(session)

    async def sweep_store(self, archive: Archive) -> None:
        """Do for the sessions in a store what `sweep` does for others, and write what the store did not take before."""
        moment = time.monotonic()
        await self._hand_over()
        running = [one for one in self._sessions.values() if one.trie.in_flight]  # another router may have ended them
        await asyncio.gather(*map(archive.refresh, running), return_exceptions=True)
        for session in [one for one in self._sessions.values() if one.expired(moment) and one.idle]:
            # Another router may have used it.
            if not await archive.refresh(session):
                self._lost.note(session, diverged=not session.over)
                self._end(session)
            elif session.expired(moment) and session.idle:
                with suppress(SessionOverError):  # this router has missed that it ended, see `StoredLog`
                    if await session.happen(SessionEnded("expired", time=time.time())):
                        self._expire(session)
        await archive.sweep(lambda *name: name in self._sessions)

    async def _hand_over(self) -> None:
        """Write the events that the store did not take before, also of sessions that were deleted since."""
        for log in [*self._owing, *(one.log for one in self._sessions.values() if one.log is not None)]:
            if log.unsaved:
                await log.hand_over()
        self._owing = {log for log in self._owing if log.unsaved}

    async def keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()
            if self.archive is not None:
                try:
                    await self.sweep_store(self.archive)
                except RouterError as error:
                    logger.warning("sessions in the store were not swept: %s", error)

    async def close(self) -> None:
        everything = (*self._sessions.values(), *self._chats)
        # What was sampled in a session with a log is kept: another process continues the session.
        await asyncio.gather(*(session.end_exchanges() for session in everything if session.log is not None))
        await self._hand_over()
        await asyncio.gather(*(session.abort() for session in everything))
        self._sessions.clear()
        if self._ending:
            await asyncio.wait(self._ending)
