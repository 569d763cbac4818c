"""Sessions as samples of their groups, for the trainers that claim them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Raw

from middleware_hub.chat.errors import SessionOverError
from middleware_hub.sessions.export.trajectories import branches
from middleware_hub.sessions.export.trajectory_json import trajectory_json
from middleware_hub.sessions.exports import check_known, filled
from middleware_hub.sessions.log.events import Exported
from middleware_hub.sessions.registry import SessionRegistry
from middleware_hub.store.errors import DamagedRecordError, StoreError
from middleware_hub.trajectories.samples import Built, Member, Sample

logger = logging.getLogger(__name__)


class SessionSamples:
    """Implements `SampleTrajectories` for samples that are sessions."""

    def __init__(self, registry: SessionRegistry) -> None:
        self._registry = registry

    async def built(self, tenant: str, sample: Sample, options: Mapping[str, Any]) -> Built | None:
        """Return a session as `finalize` gives it; None if there is none, or it is damaged. Raises StoreUnreachableError."""
        try:
            return await self._built(tenant, sample)
        except DamagedRecordError as error:  # it must not stand in front of all samples that can be read
            logger.error("session %r of group %r cannot be read: %s", sample.members[0].session, sample.group.id, error)
            return None

    async def _built(self, tenant: str, sample: Sample) -> Built | None:
        session = await self._registry.reach(tenant, sample.members[0].session or "")
        if session is None:
            return None
        session.visitors += 1
        try:
            unread = session.stale or not await filled(session)
            check_known(session, unread=unread)
            ends, lost = session.trie.checkpoints(terminal=True), session.lost
            known, head = session.trie.passed_over, session.trie.head_root
            found = list(branches(ends, session.reward_info, missing=lost, unread=unread, passed_over=known, head=head))
            session.touch()
        finally:
            session.visitors -= 1
        return Built(
            [Raw(b"".join(trajectory_json(one))) for one in found],
            bool(found) and all(one.exact for one in found),
            tuple(dict.fromkeys(version for one in found for version, _, _ in one.weight_versions)),
            session.reward_info,
        )

    async def acknowledged(self, tenant: str, members: Sequence[Member]) -> None:
        """Note that a trainer has these sessions."""
        for member in members:
            with suppress(SessionOverError, StoreError):  # the session is over, or the store does not take the note
                session = await self._registry.reach(tenant, member.session or "")
                if session is not None:
                    await session.happen(Exported(session.samples, time=time.time()))
