"""The groups of one tenant and namespace: which samples can be claimed, which claims hold them, and which are settled.

                 sampled, joined             claimed                    acknowledged
    (nothing) ---------------------> open ------------> sealed, held ----------------> done, and soon forgotten
                                                          |      ^
                                        lease over,       v      |  claimed
                                        released       sealed, free

A *member* is a reply, or a session. A trainer gets one *sample* for one rollout: a session; the replies of one rollout
id; or else a reply that no other reply continues, with those that it continues. Which replies make a sample is open until it is
claimed. Then it is sealed, and it keeps its id and its members: later replies make another sample. So each reply
belongs to one sample.

The only rule: **the order of the log decides.** A claim says of each sample in which state it saw the sample (free, or held by
a claim whose lease was over), and gets the sample if that state still holds at the claim's place in the log. So no append has
to expect a number, and all routers agree. Leases are not in the log: a claim names the earlier claims that it took for over.
A ledger has no clock and no store: the events have the times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from middleware_hub.spans.chain import names_of
from middleware_hub.trajectories.events import (
    Acknowledged,
    AnyEvent,
    Claimed,
    Joined,
    Judged,
    MemberEnded,
    MembersDropped,
    Released,
    Renewed,
    Rewarded,
    Sampled,
    State,
    Taken,
)
from middleware_hub.trajectories.samples import (
    GroupSample,
    LedgerClaim,
    Member,
    SampleGroup,
    Settled,
    Standing,
    member_of,
    sample_of,
)

MOST_CLAIMS: Final = 10_000
"""Finished claims that are remembered, so that an acknowledgement may be sent twice."""
STEP: Final = 256
"""Samples of an event that are settled in one step."""


class Ledger:
    """See the top of this file.

    Attributes:
        last: the number of the last event.
        counts: those of samples `claimed`, `acknowledged`, `released`, `expired` (claimed from a trainer whose lease was over);
            of members `dropped`, `evicted`, `lost`.
    """

    def __init__(self) -> None:
        self.last = 0
        self.groups: dict[str, SampleGroup] = {}
        self.counts: Counter[str] = Counter()
        self._members: dict[bytes, Member] = {}
        self._names: dict[str, list[Member]] = {}
        self._sessions: dict[str, Member] = {}
        self._claims: dict[str, LedgerClaim] = {}
        self._over: dict[str, None] = {}
        self._settled = Settled()

    def __del__(self) -> None:
        for group in self.groups.values():
            group.cut()
        for claim in self._claims.values():
            claim.held = {}

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._members)

    def __repr__(self) -> str:
        return f"<Ledger {len(self.groups)} groups, {len(self)} members, {len(self._claims)} claims>"

    # Events ------------------------------------------------------------------------------------------------------------

    def apply(self, number: int, event: AnyEvent) -> None:
        """Apply an event. An event that is not possible (any more) changes nothing."""
        for _ in self.applying(number, event):
            pass

    def applying(self, number: int, event: AnyEvent) -> Iterator[None]:
        """Apply an event like `apply`, and yield after each step of a large one. All steps must be taken."""
        self.last = number
        match event:
            case Sampled() | Joined():
                self._join(number, event)
            case MemberEnded(session=session):
                if (member := self._sessions.get(session)) is not None:
                    self._end(member, event.time)
            case Rewarded():
                self._reward(number, event)
            case Claimed():
                yield from self._claim(number, event)
            case Renewed(claim=claim):
                if claim in self._claims:
                    self._claims[claim].renewals += 1
            case Acknowledged(claim=claim):
                yield from self._acknowledge(self._claims.get(claim))
            case Released(claim=claim, samples=samples):
                self._release(self._claims.get(claim), samples)
            case Judged(sample=sample, inexact=inexact, versions=versions, kv_versions=caches):
                member = self._members.get(sample)
                if member is not None and member.sample is not None:
                    member.sample.inexact, member.sample.versions = inexact, versions
                    member.sample.kv_versions = caches
            case MembersDropped(keys=keys, why=why, before=before):
                yield from self._drop_all(keys, why, before)

    def _join(self, number: int, event: Sampled | Joined) -> None:
        if event.key in self._members:
            return
        group = self.groups.get(event.group)
        if group is None:
            group = self.groups[event.group] = SampleGroup(event.group, members={}, sealed={}, rollouts={})
        group.size = group.size if event.size is None else event.size
        if isinstance(event, Joined):
            known = self._sessions.get(event.session)
            if known is not None and known.group is group and known.sample is None and not known.done:
                return  # the event came twice
            if known is not None:
                known.session = ""  # the old session was deleted, and another has its name
            member = Member(event.key, group, number, event.session)
            self._sessions[event.session] = member
            self._settled.begin(event.session)
        else:
            member = member_of(event, group, number)
            for name in event.names:
                self._names.setdefault(name, []).append(member)
        self._members[event.key] = member
        group.add(member)
        group.touch(event.time)

    def _end(self, member: Member, time: float) -> None:
        member.ended = True
        member.group.touch(time)

    def _reward(self, number: int, event: Rewarded) -> None:
        """Note all rewards of an event, but for members that are gone; none if one of them came too late."""
        given = [(self._members.get(one.key), one) for one in event.rewards]
        if not all((member or self._settled).takes(one) for member, one in given):
            return
        for member, one in given:
            if member is None or member.done or member.state != one.before:
                continue
            member.reward, member.info, member.rewarded = one.reward, one.info, number
            if member.sample is not None:
                self._take_away(member.sample)  # the trainer whose lease is over does not know of this reward
            if member.session is None:
                self._end(member, event.time)

    def _claim(self, number: int, event: Claimed) -> Iterator[None]:
        if event.claim in self._claims:
            return
        claim = self._claims[event.claim] = LedgerClaim(event.claim, number, held={}, taken=[])
        for at, taken in enumerate(event.samples, 1):
            sample = self._seal(taken) if taken.before is None else self._take_over(taken)
            if sample is not None:
                sample.claim = claim
                claim.held[sample.id] = sample
                self.counts["claimed"] += 1
            for key in taken.members:
                if key not in self._members:
                    self._settled.claim(key, taken.before, claim)
            if at % STEP == 0:
                yield
        if not claim.held:
            self._finish(claim)

    def _seal(self, taken: Taken) -> GroupSample | None:
        here = self._known(taken)
        if not here or any(one.sample or one.done or one.group is not here[0].group for one in here):
            return None
        sample = sample_of(tuple(here), complete=True)
        for one in here:
            one.sample = sample
        here[0].group.sealed[sample.id] = sample
        here[0].group.change()
        return sample

    def _take_over(self, taken: Taken) -> GroupSample | None:
        member = next(iter(self._known(taken)), None)
        if member is None or member.done or member.sample is None or member.state != taken.before:
            return None  # acknowledged, dropped or claimed meanwhile
        self.counts["expired"] += self._take_away(member.sample)
        return member.sample

    def _known(self, taken: Taken) -> list[Member]:
        """Return the members of a sample. The events of its first ones may be trimmed, if by now all of it is settled."""
        return [member for key in taken.members if (member := self._members.get(key)) is not None]

    def _take_away(self, sample: GroupSample) -> bool:
        """Take a sample from a claim whose lease is over; return whether the claim still had it."""
        claim = sample.claim
        if claim is None or claim.held.pop(sample.id, None) is None:
            return False
        claim.taken.append(sample.id)
        if not claim.held:
            self._finish(claim)
        return True

    def _acknowledge(self, claim: LedgerClaim | None) -> Iterator[None]:
        if claim is None or claim.acknowledged is not None or claim.released:
            return
        claim.acknowledged = len(claim.held)
        self.counts["acknowledged"] += len(claim.held)
        held, claim.held = claim.held, {}
        for at, sample in enumerate(held.values(), 1):
            sample.group.acknowledged += 1
            yield from self._done(sample)
            if at % STEP == 0:
                yield
        self._finish(claim)

    def _release(self, claim: LedgerClaim | None, samples: Sequence[bytes]) -> None:
        """Give samples back: they stay sealed, and their claim does not hold them any more."""
        if claim is None:
            return
        for name in samples or tuple(claim.held):
            if claim.held.pop(name, None) is not None:
                self.counts["released"] += 1
        if not samples:
            claim.released = claim.acknowledged is None
        if not claim.held:
            self._finish(claim)

    def _drop_all(self, keys: Sequence[bytes], why: str, before: Sequence[State]) -> Iterator[None]:
        for at, (key, member) in enumerate([(key, self._members.get(key)) for key in keys]):
            if member is None:
                self._settled.drop(key, before[at : at + 1])
            elif not member.done and (not before or member.state == before[at]):
                yield from self._drop(member, why)
                self.counts[why] += 1
            if at % STEP == STEP - 1:
                yield

    def _drop(self, member: Member, why: str) -> Iterator[None]:
        """Drop a member, and its sample if that is sealed. A trainer never had a sample that is lost."""
        sample = member.sample
        if sample is None:
            member.group.settle(member)
            member.group.change()
            yield from self._forget_done(member.group)
            return
        if why != "lost":
            self._take_away(sample)
        elif sample.claim is not None:
            sample.claim.held.pop(sample.id, None)
        yield from self._done(sample)

    def _done(self, sample: GroupSample) -> Iterator[None]:
        group = sample.group
        for member in sample.members:
            group.settle(member)
        group.sealed.pop(sample.id, None)
        yield from self._forget_done(group)

    def _forget_done(self, group: SampleGroup) -> Iterator[None]:
        """Forget a group once nothing of it is left to be claimed."""
        if group.left:
            return
        del self.groups[group.id]
        for at, member in enumerate(group.members.values(), 1):
            del self._members[member.key]
            if member.session is not None and self._sessions.get(member.session) is member:
                del self._sessions[member.session]
            self._settled.add(member)
            if at % STEP == 0:
                yield
        for at, name in enumerate({name for member in group.members.values() for name in member.names}, 1):
            left = [one for one in self._names[name] if one.group is not group]
            if left:
                self._names[name] = left
            else:
                del self._names[name]
            if at % STEP == 0:
                yield
        group.cut()

    def _finish(self, claim: LedgerClaim) -> None:
        self._over[claim.id] = None
        while len(self._over) > MOST_CLAIMS:
            oldest = next(iter(self._over))
            del self._over[oldest], self._claims[oldest]

    # Finding -----------------------------------------------------------------------------------------------------------

    def claim(self, name: str) -> LedgerClaim | None:
        """Return the claim of this id; None if it is unknown, or ended long ago."""
        return self._claims.get(name)

    def reply(self, request_id: str, group: str | None = None) -> Member | None:
        """Return the newest reply of this name, of any group or of this one."""
        for name in names_of(request_id):
            for member in reversed(self._names.get(name, ())):
                if group is None or member.group.id == group:
                    return member
        return None

    def standing(self, request_id: str) -> Standing | None:
        """Return the group and the reward of the newest reply of this name, even if its group was settled lately."""
        member = self.reply(request_id)
        if member is not None:
            return member.group.id, member.reward
        return next(filter(None, map(self._settled.standing, names_of(request_id))), None)

    def rollout(self, group: str, rollout: str) -> Member | None:
        """Return the last reply of a rollout: an open reply, if there is one."""
        found = self.groups.get(group)
        members = [] if found is None else found.rollouts.get(rollout, [])
        return next((one for one in reversed(members) if one.sample is None), members[-1] if members else None)

    def session(self, session: str) -> Member | None:
        """Return the member for this session."""
        return self._sessions.get(session)

    def trained(self, session: str) -> bytes | None:
        """Return the `info` of a session that a trainer has, and whose group was settled lately; None if there is none."""
        return self._settled.trained(session)

    @property
    def needed(self) -> int:
        """Return the number of the first event that something still depends on."""
        for group in self.groups.values():  # the oldest, and its oldest member
            return next(iter(group.members.values())).number
        return self.last + 1
