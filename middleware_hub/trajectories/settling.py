"""Settles claims and samples: claims are acknowledged, given back or renewed; samples are rewarded or dropped.

A reward counts for a sample that no trainer has: it was never claimed, it was given back, or the lease of its claim is over.
That claim then has lost the sample, which is handed out again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.trajectories.events import Acknowledged, Released, Renewed, Reward, Rewarded
from middleware_hub.trajectories.journal import Journal
from middleware_hub.trajectories.samples import LedgerClaim, Member, SampleGroup, SampleTrajectories, dropping
from router.errors import NotFoundError, RouterError


class ClaimOverError(RouterError):
    """The lease of a claim is over and others have its samples, or it was given back."""

    status = 409
    type = "claim_over"


class HandedOutError(RouterError):
    """A sample was handed out before its reward came."""

    status = 409
    type = "handed_out"


class Settling:
    """Serves the calls that follow a claim. `counts`: see `Groups`."""

    def __init__(self, sequences: SampleTrajectories, counts: Counter[str]) -> None:
        self._sequences = sequences
        self._counts = counts

    async def acknowledge(self, tenant: str, journal: Journal, name: str) -> int:
        """Note that a trainer has its samples; return how many. A repeated call gets the same answer.

        Raises NotFoundError, and ClaimOverError if others have some of them; the rest is acknowledged.
        """
        claim = await self._known(journal, name)
        members = [member for sample in claim.held.values() for member in sample.members]
        if claim.acknowledged is None:
            await journal.append(Acknowledged(claim=name, time=journal.now()))
            await journal.read_on()
            self._counts["acknowledged"] += claim.acknowledged or 0
            await self._sequences.acknowledged(tenant, [one for one in members if one.done])
            await journal.lease(name, 0)
        if claim.acknowledged is None or claim.taken:
            raise _over(claim)
        return claim.acknowledged

    async def release(self, journal: Journal, name: str) -> int:
        """Give back the samples of a claim; return how many. Raises NotFoundError; ClaimOverError if it was acknowledged."""
        claim = await self._known(journal, name)
        count = len(claim.held)
        if claim.acknowledged is None:
            await journal.append(Released(claim=name, time=journal.now()))
            await journal.read_on()
            self._counts["released"] += count if claim.acknowledged is None else 0
        if claim.acknowledged is not None:  # perhaps acknowledged meanwhile
            raise _over(claim)
        await journal.lease(name, 0)
        return count

    async def renew(self, journal: Journal, name: str, seconds: float) -> int:
        """Begin the lease of a claim again; return how many samples the claim has. Raises NotFoundError, ClaimOverError."""
        claim = await self._known(journal, name)
        if not claim.held or claim.taken:
            raise _over(claim)
        await journal.lease(name, seconds)
        await journal.append(Renewed(claim=name, time=journal.now()))
        await journal.read_on()
        if not claim.held or claim.taken:
            raise _over(claim)
        return len(claim.held)

    async def _known(self, journal: Journal, name: str) -> LedgerClaim:
        await journal.read_on()
        claim = journal.ledger.claim(name)
        if claim is None:
            raise NotFoundError(
                f"there is no claim {name[:140]!r} of this key and namespace: it was never made, or was over long ago"
            )
        return claim

    async def drop(self, journal: Journal, group: SampleGroup) -> int:
        """Drop the members of a group that no trainer holds; return the number of replies and sessions."""
        live = await journal.live()
        members = [one for one in group.members.values() if one.is_open(live)]
        if members:
            await journal.append(dropping(members, "dropped", journal.now()))
            await journal.read_on()
        count = sum(one.done for one in members)  # a trainer keeps what it has claimed meanwhile
        self._counts["dropped"] += count
        return count


Given = tuple[Member, float | None, bytes]
"""A reply or a session, its reward, and the `info` of that."""


async def _require_in_time(journal: Journal, given: Sequence[Given]) -> list[tuple[Member, Reward]]:
    """Return the rewards of members that do not have them yet. Raises HandedOutError if a trainer has a sample without them.

    Of several for one member the last counts. A reward with which the sample was handed out is no error: a client that lost the
    answer sends it again.
    """
    newest = {member.key: (member, Reward(member.key, reward, info, member.state)) for member, reward, info in given}
    live = await journal.live() if any(member.sample is not None for member, _ in newest.values()) else ()
    for member, one in newest.values():
        if not (member.is_open(live) or member.has(one)):
            raise _handed_out(_called(member))
    return [(member, one) for member, one in newest.values() if member.sample is None or not member.has(one)]


async def reward(journal: Journal, given: Sequence[Given]) -> bool:
    """Note rewards; return whether the store has taken them. Raises HandedOutError: then none counts."""
    fresh = await _require_in_time(journal, given)
    if not fresh:
        return True
    (_, first), *others = fresh
    more, now = tuple(one for _, one in others), journal.now()
    saved = await journal.keep(
        Rewarded(key=first.key, reward=first.reward, info=first.info, more=more, before=(first.before,), time=now)
    )
    if saved:
        await journal.read_on()
        for member, one in fresh:
            if not member.takes(one):  # a claim came first, at another router or here
                raise _handed_out(_called(member))
    return saved


async def reward_session(journal: Journal, session: str, info: bytes, happen: Callable[[], Awaitable[bool]]) -> bool:
    """Give a session a reward, by `happen`; return whether the store has taken it. Raises HandedOutError.

    The reward is in the session's own log. The event after it says in which order the reward and a claim came: a claim behind
    it reads the reward.
    """
    given = list[Given]()
    with suppress(StoreUnreachableError):  # then the reward waits for the store, and the answer says so
        await journal.read_on()
        member = journal.ledger.session(session)
        if member is None and journal.ledger.trained(session) not in (None, info):
            raise _handed_out(f"session {session!r}")
        if member is not None and (member.sample is not None or not member.done):
            given.append((member, None, info))
        await _require_in_time(journal, given)
    return await happen() and (not given or await reward(journal, given))


def _handed_out(what: str) -> HandedOutError:
    """Return the error for a reward of this."""
    return HandedOutError(
        f"the sample of {what} was handed out already: give a reward before a trainer claims it, or when its lease is over"
    )


def _called(member: Member) -> str:
    if member.session is not None:
        return f"session {member.session!r}"
    return f"rollout {member.rollout!r}" if member.rollout is not None else f"reply {next(iter(member.names), '')!r}"


def _over(claim: LedgerClaim) -> ClaimOverError:
    if claim.released and not claim.taken:
        return ClaimOverError(f"the claim {claim.id!r} was given back: its samples are handed out again")
    if claim.acknowledged is not None and not claim.taken:
        return ClaimOverError(
            f"the claim {claim.id!r} was acknowledged: its samples are the trainer's own, and cannot be renewed or given back",
            acknowledged=claim.acknowledged,
        )
    return ClaimOverError(
        f"the lease of claim {claim.id!r} was over, and {len(claim.taken)} of its samples were handed out again, given a "
        "reward, or dropped: ask for a longer lease_seconds, or renew it in time",
        acknowledged=claim.acknowledged or 0,
        taken=[one.hex() for one in claim.taken],
    )
