"""The groups of all tenants, and how replies and sessions are entered there."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Final

from middleware_hub.persistence.saving import Saving
from middleware_hub.radix.node import Generation
from middleware_hub.radix.records import Namespace
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import INEXACT, REASONS, SpanFlag, TokenSpan, links, version_names
from middleware_hub.store.chains import Stored
from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.records import Event, new_id
from middleware_hub.trajectories.choosing import overflow
from middleware_hub.trajectories.events import Joined, MemberEnded, Sampled
from middleware_hub.trajectories.journal import (
    MOST_MEMBERS,
    Journal,
    MemoryJournal,
    StoreJournal,
    log_key,
    stored,
)
from middleware_hub.trajectories.members import GroupMembership
from middleware_hub.trajectories.samples import dropping

MOST_LEDGERS: Final = 256
"""Tenants and namespaces whose ledgers are kept at once."""
logger = logging.getLogger(__name__)

_INEXACT_FLAGS: Final = sum({flag for flag, name in REASONS if name in INEXACT} - {SpanFlag.UNASKED})
"""The flags that stay. Look-ups that failed are made when the sample is laid out."""


class Groups:
    """The ledgers of this router: a `Journal` for each tenant and namespace.

    Args:
        saving: appends to the store; None without one.

    Attributes:
        counts: samples `claimed`, `expired` (of these: taken from a claim whose lease was over),
            `acknowledged`, `released` and `lost`; replies and sessions that `joined`, `dropped` and `evicted`.
    """

    def __init__(self, saving: Saving | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._saving = saving
        self._journals: OrderedDict[tuple[str, str], Journal] = OrderedDict()

    def journal(self, tenant: str, namespace: str) -> Journal:
        """Return the journal of a tenant and namespace. The first call makes it."""
        name = tenant, namespace
        found = self._journals.get(name)
        if found is None:
            if len(self._journals) >= MOST_LEDGERS:
                self._forget_one()
            found = MemoryJournal() if self._saving is None else StoreJournal(self._saving, log_key(*name))
            self._journals[name] = found
        self._journals.move_to_end(name)
        return found

    def standing(self, namespace: Namespace, request_id: str) -> tuple[str, float | None] | None:
        """Return the group of a reply, and its reward, if known here; None if it is in no group."""
        journal = self._journals.get((namespace[0], namespace[2]))
        return None if journal is None else journal.ledger.standing(request_id)

    async def read_on(self, tenant: str, namespaces: Iterable[str]) -> None:
        """Read the new events of these namespaces. Raises StoreError."""
        if self._saving is not None:
            for namespace in namespaces:
                await self.journal(tenant, namespace).read_on()

    def held(self) -> tuple[int, int]:
        """Return how many groups there are, and how many replies and sessions they have, if known here."""
        ledgers = [one.ledger for one in self._journals.values()]
        return sum(len(one.groups) for one in ledgers), sum(len(one) for one in ledgers)

    def events(self, tenant: str) -> int:
        """Return how many events of a tenant's ledgers are known here."""
        return sum(one.ledger.last for name, one in self._journals.items() if name[0] == tenant)

    def _forget_one(self) -> None:
        """Forget a ledger: one that the store has, or an empty one, or else the least recently used one."""
        idle = (name for name, one in self._journals.items() if self._saving is not None or not len(one.ledger))
        name = next(idle, next(iter(self._journals)))
        gone = self._journals.pop(name).ledger
        if self._saving is None and len(gone):
            logger.warning(
                "%d replies in groups of namespace %r were given up: more than %d namespaces have groups; a --store keeps them",
                *(len(gone), name[1], MOST_LEDGERS),
            )

    def sampled(self, namespace: Namespace, member: GroupMembership, generation: Generation) -> list[Event]:
        """Return the events that are appended together with the record of a reply. The span of the reply has an id."""
        self.counts["joined"] += 1
        assert self._saving is not None
        event = _sampled(namespace[1], member, generation, self._saving.store.now())
        return [stored(log_key(namespace[0], namespace[2]), event)]

    def note(self, tree: RadixTree, namespace: Namespace, member: GroupMembership, generation: Generation) -> None:
        """Enter a reply if there is no store. The tree finds it by an id as long as it holds it."""
        span = generation.span
        name = new_id()
        above = next((part for part, _ in links(span.parent, span.take) if part.stored is not None), None)
        span.stored = Stored(name, name if above is None else above.stored.root)
        tree.keep(span, name)
        journal = self.journal(namespace[0], namespace[2])
        assert isinstance(journal, MemoryJournal)
        journal.happen(_sampled(namespace[1], member, generation, journal.now()))
        self.counts["joined"] += 1
        too_many = overflow(journal.ledger, MOST_MEMBERS)
        if too_many:
            journal.happen(dropping(too_many, "evicted", journal.now()))
            self.counts["evicted"] += len(too_many)
            logger.warning("%d replies were given up that no trainer had claimed: there were too many", len(too_many))

    def joining(self, tenant: str, namespace: str, member: GroupMembership, session: str) -> Joined:
        """Return the event of a session that is about to be made."""
        now = self.journal(tenant, namespace).now()
        return Joined(key=new_id(), group=member.group, size=member.size, session=session, time=now)

    def beside(self, tenant: str, namespace: str, event: Joined) -> list[Event]:
        """Return the events that are appended together with the first event of a session; nothing without a store.

        Of two routers that make a session of one name, only one may append. Were its group noted by itself, the group of
        the other one could get the session.
        """
        return [] if self._saving is None else [stored(log_key(tenant, namespace), event)]

    def joined(self, tenant: str, namespace: str, event: Joined) -> None:
        """Note that a session was made. Without a store it is entered now."""
        self.counts["joined"] += 1
        journal = self.journal(tenant, namespace)
        if isinstance(journal, MemoryJournal):
            journal.happen(event)

    async def ended(self, tenant: str, namespace: str, session: str) -> bool:
        """Note that a session has ended; return whether the store has taken it (True without a store)."""
        journal = self.journal(tenant, namespace)
        return await journal.keep(MemberEnded(session=session, time=journal.now()))

    async def left(self, tenant: str, namespace: str, session: str) -> None:
        """Note that a session was deleted, now or when the store is back. If a trainer holds it, the trainer keeps it."""
        journal = self.journal(tenant, namespace)
        try:
            await journal.read_on()
        except StoreUnreachableError:  # the session is gone all the same: its client must not be told otherwise
            if journal.ledger.session(session) is None:  # not read yet: a claim finds nothing of it, and drops it
                await journal.keep(MemberEnded(session=session, time=journal.now()))
        member = journal.ledger.session(session)
        if member is not None and not (member.sample and member.sample.held):
            await journal.keep(dropping([member], "dropped", journal.now()))
            self.counts["dropped"] += 1


def _sampled(lora: str, member: GroupMembership, generation: Generation, now: float) -> Sampled:
    span = generation.span
    return Sampled(
        key=span.stored.id,
        root=span.stored.root,
        group=member.group,
        size=member.size,
        rollout=member.rollout,
        ended=member.ends and span.finish != "abort",
        parent=_continued(span),
        lora=lora,
        names=span.request_ids,
        inexact=bool(_own_flags(span) & _INEXACT_FLAGS),
        versions=tuple(version_names(span.versions)),
        kv_version=span.kv_version,
        time=now,
    )


def _continued(span: TokenSpan) -> bytes | None:
    """Return the record of the last reply before this one if its prompt continues that reply."""
    for part, take in links(span.parent, span.take):
        if part.sampled and take:
            return None if part.stored is None else part.stored.id
    return None


def _own_flags(span: TokenSpan) -> int:
    """Return the flags of a reply and of the context before it."""
    flags = SpanFlag.NONE
    for part, _ in links(span, span.count):
        if part is not span and part.sampled:
            break
        flags |= part.flags
    return flags
