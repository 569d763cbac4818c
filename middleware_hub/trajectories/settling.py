"""Settles claims and samples: claims are acknowledged, given back or renewed; samples are rewarded or dropped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from middleware_hub.trajectories.events import Acknowledged, Dropped, Released, Renewed, Reward, Rewarded
from middleware_hub.trajectories.journal import Journal
from middleware_hub.trajectories.samples import Claim, Group, Member, SampleTrajectories
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
            await journal.append(Acknowledged(claim=name, time=time.time()))
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
            await journal.append(Released(claim=name, time=time.time()))
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
        await journal.append(Renewed(claim=name, time=time.time()))
        await journal.read_on()
        if not claim.held or claim.taken:
            raise _over(claim)
        return len(claim.held)

    async def _known(self, journal: Journal, name: str) -> Claim:
        await journal.read_on()
        claim = journal.ledger.claim(name)
        if claim is None:
            raise NotFoundError(
                f"there is no claim {name[:140]!r} of this key and namespace: it was never made, or was over long ago"
            )
        return claim

    # Rewards and drops -------------------------------------------------------------------------------------------------

    async def reward(self, journal: Journal, given: Sequence[tuple[Member, float | None, bytes]]) -> bool:
        """Give rewards to replies; return whether the store has taken them. Raises HandedOutError: then nothing has changed.

        A reward with which the sample was handed out is no error: a client that lost the answer sends it again.
        """
        newest = {member.key: (member, Reward(member.key, reward, info)) for member, reward, info in given}
        _require_in_time(newest.values())
        fresh = [one for member, one in newest.values() if not member.handed_out]
        if not fresh:
            return True
        first, *more = fresh
        event = Rewarded(key=first.key, reward=first.reward, info=first.info, more=tuple(more), time=time.time())
        saved = await journal.keep(event)
        if saved:
            await journal.read_on()
            _require_in_time(newest.values())  # a claim may have come first, at another router or here
        return saved

    async def drop(self, journal: Journal, group: Group) -> int:
        """Drop what no trainer holds of a group; return the number of replies and sessions."""
        live = await journal.live()
        members = [one for one in group.members.values() if not one.done]
        keys = tuple(one.key for one in members if one.sample is None or one.sample.open_to(live))
        if keys:
            await journal.append(Dropped(keys=keys, why="dropped", time=time.time()))
            self._counts["dropped"] += len(keys)
            await journal.read_on()
        return len(keys)


def _require_in_time(given: Iterable[tuple[Member, Reward]]) -> None:
    for member, one in given:
        if not member.takes(one.reward, one.info):
            raise HandedOutError(
                f"the sample of {_called(member)} was handed out already: give a reward before a trainer claims it"
            )


def _called(member: Member) -> str:
    return f"rollout {member.rollout!r}" if member.rollout is not None else f"reply {next(iter(member.names), '')!r}"


def _over(claim: Claim) -> ClaimOverError:
    if claim.released and not claim.taken:
        return ClaimOverError(f"the claim {claim.id!r} was given back: its samples are handed out again")
    if claim.acknowledged is not None and not claim.taken:
        return ClaimOverError(
            f"the claim {claim.id!r} was acknowledged: its samples are the trainer's own, and cannot be renewed or given back",
            acknowledged=claim.acknowledged,
        )
    return ClaimOverError(
        f"the lease of claim {claim.id!r} was over, and {len(claim.taken)} of its samples were handed out again: ask for a "
        "longer lease_seconds, or renew it in time",
        acknowledged=claim.acknowledged or 0,
        taken=[one.hex() for one in claim.taken],
    )
