"""Sessions that only the store has, as they were when they were last read.

A store lists only the names of its sessions. So each session is read once, in the background, and again when its log has grown.
A store cannot list texts: it finds them only by their beginning, or by a reply's id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from middleware_hub.inspector.conversations.conversation import Branch, Conversation, Opened
from middleware_hub.sessions.session import Session
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.store.errors import StoreUnreachableError
from router.errors import RouterError

logger = logging.getLogger(__name__)

MOST_STORED = 2_000
"""Sessions of a tenant that are read for the list, in the order of their names."""
AGAIN = 10.0
"""Seconds until a look at the list reads the store again."""
MOST_TENANTS = 32


class SessionArchive(Protocol):
    """Finds the sessions in a store; `sessions.log.archive` implements it."""

    def listed(self, tenant: str) -> AsyncIterator[tuple[str, int]]:
        """Yield the ids of all sessions of a tenant that have not ended, each with the number of its last event."""
        ...

    async def find(self, tenant: str, session_id: str) -> Session | None:
        """Return a session as its log says."""
        ...


class Registry(Protocol):
    """Has the sessions; `SessionRegistry` is one.

    Attributes:
        archive: finds the sessions in the store; None without a store.
        tokens: those of all sessions in memory.
    """

    archive: Any  # a `SessionArchive`, or None
    tokens: int

    def find(self, tenant: str, session_id: str) -> Session | None:
        """Return a session that is in memory."""
        ...


class StoredSession:
    """A session as it was read. Its branches are read again when it is opened."""

    def __init__(self, conversation: Conversation, events: int, opened: Callable[[], Opened]) -> None:
        self.opened = opened
        self.id = conversation.id
        self.events = events
        self.updated = conversation.updated
        self._summary = conversation.summary()
        self._names = frozenset(branch.id for branch in conversation.branches())

    def summary(self) -> dict[str, Any]:
        return {**self._summary, "stored": True}

    def branches(self) -> Iterator[Branch]:
        return iter(())

    def branch(self, name: str) -> Branch | None:
        return None

    def named(self, name: str) -> bool:
        return name in (self.id, self.id.removeprefix("session:")) or name in self._names

    def moment(self, span: TokenSpan) -> float | None:
        return None

    def texts(self) -> None:
        return None

    def nodes(self) -> tuple[list[dict[str, Any]], bool]:
        return [], False


class _Survey:
    """What is known of a tenant's sessions in the store."""

    def __init__(self) -> None:
        self.found: dict[str, StoredSession] = {}
        self.more = False
        self.over = -AGAIN
        self.task: asyncio.Task[None] | None = None


class StoredSessions:
    """See the top of this file. `describe` makes a conversation of a session."""

    def __init__(self, registry: Registry, describe: Callable[[Session], Conversation]) -> None:
        self._registry = registry
        self._describe = describe
        self._surveys: dict[str, _Survey] = {}

    async def of(self, tenant: str) -> tuple[list[StoredSession], bool]:
        """Return what is known by now, without the sessions in memory, and whether there is more."""
        if self._registry.archive is None:
            return [], False
        survey = self._surveys.pop(tenant, None) or _Survey()
        self._surveys[tenant] = survey
        if len(self._surveys) > MOST_TENANTS:
            oldest = self._surveys.pop(next(iter(self._surveys)))
            if oldest.task is not None:
                oldest.task.cancel()
        if survey.task is None and time.monotonic() - survey.over > AGAIN:
            survey.task = asyncio.create_task(self._look(tenant, survey))
        if survey.task is not None:
            await asyncio.wait([survey.task], timeout=0.1)
        held = self._registry.find
        return [one for name, one in survey.found.items() if held(tenant, name) is None], survey.more

    async def _look(self, tenant: str, survey: _Survey) -> None:
        seen: dict[str, StoredSession] = {}
        survey.more = True
        try:
            archive: SessionArchive = self._registry.archive
            async for name, events in archive.listed(tenant):
                if len(seen) == MOST_STORED:
                    return
                known = survey.found.get(name)
                if known is None or known.events != events:
                    try:
                        known = await self._read(tenant, name, events)
                    except StoreUnreachableError:
                        raise
                    except RouterError as error:
                        known = None
                        logger.warning("the session %s in the store cannot be read, and is not listed: %s", name, error)
                if known is not None:
                    seen[name] = survey.found[name] = known
                await asyncio.sleep(0)
            survey.more = False
        except RouterError as error:
            logger.warning("the sessions in the store are not listed: %s", error)
        finally:
            survey.found = seen
            survey.over = time.monotonic()
            survey.task = None

    async def _read(self, tenant: str, name: str, events: int) -> StoredSession | None:
        if self._registry.find(tenant, name) is not None:
            return None
        async with self._opened(tenant, name) as found:
            return None if found is None else StoredSession(found, events, lambda: self._opened(tenant, name))

    @asynccontextmanager
    async def _opened(self, tenant: str, name: str) -> AsyncIterator[Conversation | None]:
        registry = self._registry
        held = registry.find(tenant, name)
        session = held or await registry.archive.find(tenant, name)
        try:
            yield None if session is None else self._describe(session)
        finally:
            if session is not None and held is None and registry.find(tenant, name) is not session:
                registry.tokens -= session.tokens  # they were counted when it was read
                await session.abort()
