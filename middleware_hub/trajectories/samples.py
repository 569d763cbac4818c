"""The parts of a ledger: members, the samples that they make, groups, claims, and the memory of settled groups.

100,000 members may wait. Python's garbage collector does not track members and samples, because a full pass over them would
hold up the event loop. So the ledger cuts their cycles itself (`SampleGroup.cut`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Raw

from middleware_hub.trajectories.events import MembersDropped, Reward, Sampled, State, Taken

MOST_SETTLED: Final = 10_000
"""Members of settled groups that are remembered: their rewards can still be looked up."""

Standing = tuple[str, float | None]
"""The group of a reply, and its reward."""
T = TypeVar("T")
V = TypeVar("V")


class Member(msgspec.Struct, eq=False, gc=False):
    """A reply or a session; `Sampled` and `Joined` describe the other fields.

    Attributes:
        number: that of its event.
        sample: the sample into which it was sealed.
        done: whether it was acknowledged or dropped.
    """

    key: bytes
    group: SampleGroup
    number: int
    session: str | None = None
    root: bytes = b""
    rollout: str | None = None
    parent: bytes | None = None
    lora: str = ""
    names: tuple[str, ...] = ()
    inexact: bool = False
    versions: tuple[str, ...] = ()
    ended: bool = False
    reward: float | None = None
    info: bytes = b""
    rewarded: int = 0
    sample: GroupSample | None = None
    done: bool = False
    kv_version: str | None = None

    @property
    def state(self) -> State:
        """Return the state of its sample."""
        claim = None if self.sample is None else self.sample.claim
        return None if claim is None else (claim.id, claim.renewals)

    def is_open(self, live: Collection[str]) -> bool:
        """Return whether no trainer has it: it may be claimed, rewarded and dropped. `live`: as in `GroupSample.open_to`."""
        return not self.done and (self.sample is None or self.sample.open_to(live))

    def has(self, reward: Reward) -> bool:
        """Return whether it has this very reward: then a client sends it again."""
        return self.rewarded > 0 and (self.reward, self.info) == (reward.reward, reward.info)

    def takes(self, reward: Reward) -> bool:
        """Return whether a reward counts: no trainer was faster, or the member has it already."""
        return (not self.done and self.state == reward.before) or self.has(reward)


class GroupSample(msgspec.Struct, eq=False, gc=False):
    """One rollout. Its id is the key of its first member.

    Attributes:
        complete: whether a reward, `x-rollout-end` or the session's end has ended it.
        claim: the claim that has it, or had it last.
        inexact, versions, kv_versions: as known before its tokens are laid out.
    """

    members: tuple[Member, ...]
    complete: bool
    claim: LedgerClaim | None = None
    inexact: bool = False
    versions: tuple[str, ...] = ()
    kv_versions: tuple[str, ...] = ()

    @property
    def id(self) -> bytes:
        return self.members[0].key

    @property
    def group(self) -> SampleGroup:
        return self.members[0].group

    @property
    def held(self) -> bool:
        """Return whether a claim has it, whether or not the lease is over."""
        return self.claim is not None and self.id in self.claim.held

    def open_to(self, live: Collection[str]) -> bool:
        """Return whether it may be claimed. `live`: the claims whose lease is not over."""
        return not self.held or (self.claim is not None and self.claim.id not in live)

    def taking(self) -> Taken:
        """Return it as `Claimed` names it, in its present state."""
        return Taken(self.id, tuple(one.key for one in self.members), self.members[0].state)

    @property
    def rewarded(self) -> Member | None:
        """Return the member that has the sample's reward: the newest reward, and of several given at once the last."""
        continued = {one.parent for one in self.members}
        ends = [one for one in self.members if one.rollout is not None or one.key not in continued]
        return max((one for one in reversed(ends) if one.rewarded), key=lambda one: one.rewarded, default=None)


class SampleGroup(msgspec.Struct, eq=False):
    """A group: its members in order, and the time of their last event.

    Attributes:
        acknowledged: how many samples were.
        drafts: the samples of its open members; None if they have to be computed.
        changes: how often the samples of its open members have changed.
        left: how many members are not done.
        rollouts: the replies of each rollout that a client named.
    """

    id: str
    size: int | None = None
    touched: float = 0.0
    members: dict[bytes, Member] = {}
    sealed: dict[bytes, GroupSample] = {}
    acknowledged: int = 0
    drafts: list[GroupSample] | None = None
    changes: int = 0
    left: int = 0
    rollouts: dict[str, list[Member]] = {}

    def add(self, member: Member) -> None:
        """Add a new member."""
        self.members[member.key] = member
        self.left += 1
        if member.rollout is not None:
            self.rollouts.setdefault(member.rollout, []).append(member)

    def touch(self, time: float) -> None:
        """Note that something has happened to its members."""
        self.touched = max(self.touched, time)
        self.change()

    def change(self) -> None:
        """Note that its open members make other samples than before."""
        self.drafts = None
        self.changes += 1

    def samples(self) -> Iterator[GroupSample]:
        """Yield all samples that are not done, the sealed ones first. The group may change meanwhile."""
        yield from tuple(self.sealed.values())
        if self.drafts is not None:
            yield from self.drafts
            return
        changes, drafts = self.changes, list[GroupSample]()
        for draft in drafts_of(self):
            drafts.append(draft)
            yield draft
        if self.changes == changes:
            self.drafts = drafts

    def settle(self, member: Member) -> None:
        """Note that a member is done."""
        self.left -= not member.done
        member.done = True

    def cut(self) -> None:
        """Let go of the members, and of their samples."""
        for member in self.members.values():
            member.sample = None
        self.members, self.sealed, self.rollouts, self.drafts = {}, {}, {}, None


class LedgerClaim(msgspec.Struct, eq=False):
    """The samples that one trainer took.

    Attributes:
        number: of its event.
        renewals: how often its lease began again.
        held: the samples that it holds.
        taken: the samples that it held, and that others took, rewarded or dropped when its lease was over.
        acknowledged: how many samples were acknowledged; None before.
        released: whether it was given back.
    """

    id: str
    number: int
    renewals: int = 0
    held: dict[bytes, GroupSample] = {}
    taken: list[bytes] = []
    acknowledged: int | None = None
    released: bool = False


class Settled:
    """The memory of members that a ledger does not know (any more): their groups are settled.

    The log is trimmed up to the first member that is not settled. So events may name members whose first events are not there:
    these are settled by events that are still to come. Nothing else is known of such a member.
    """

    def __init__(self) -> None:
        self._claims: dict[bytes, LedgerClaim | None] = {}
        self._standings: dict[str, Standing] = {}
        self._trained: dict[str, bytes] = {}

    def add(self, member: Member) -> None:
        """Note a member whose group was settled just now."""
        _put(self._claims, member.key, None)
        for name in member.names:
            _put(self._standings, name, (member.group.id, member.reward))
        if member.session and member.sample is not None:
            _put(self._trained, member.session, member.info)

    def drop(self, key: bytes, before: Sequence[State]) -> None:
        """Note that a member that is not known was dropped, in a state or in any."""
        if not before or self._is_in(key, before[0]):
            _put(self._claims, key, None)

    def claim(self, key: bytes, before: State, claim: LedgerClaim) -> None:
        """Note that a claim takes a member that is not known."""
        if self._is_in(key, before):
            _put(self._claims, key, claim)

    def takes(self, reward: Reward) -> bool:
        """Return whether a reward of a member that is not known came in time.

        It did if nothing is known of the member: the router that gave the reward knew all members of the event. One of them is
        not settled, so the log has all events in between.
        """
        return self._is_in(reward.key, reward.before)

    def _is_in(self, key: bytes, state: State) -> bool:
        if key not in self._claims:
            return True
        claim = self._claims[key]
        return claim is not None and claim.acknowledged is None and (claim.id, claim.renewals) == state

    def standing(self, name: str) -> Standing | None:
        """Return the standing of the newest reply of this name."""
        return self._standings.get(name)

    def trained(self, session: str) -> bytes | None:
        """Return the `info` of a session that a trainer has; None if there is none."""
        return self._trained.get(session)

    def begin(self, session: str) -> None:
        """Note that a session was made: it may have the name of one that a trainer has."""
        self._trained.pop(session, None)


def _put(kept: dict[T, V], key: T, value: V) -> None:
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > MOST_SETTLED:
        del kept[next(iter(kept))]


class Built(msgspec.Struct, frozen=True):
    """The sequences of a sample: their JSON, and the values for the filters of a claim.

    Attributes:
        exact: whether all of them are, as they are answered.
        rewards: of a session.
        exact_tokens: whether all of them are but for files of images that are missing in this answer; None: as `exact`.
        adapters: of a session, each once.
    """

    trajectories: Sequence[Raw]
    exact: bool
    versions: tuple[str, ...]
    rewards: Mapping[str, Any] | None = None
    kv_versions: tuple[str, ...] = ()
    exact_tokens: bool | None = None
    adapters: tuple[str, ...] = ()

    @property
    def inexact(self) -> bool:
        """Whether the sample itself is not exact, whatever this answer has of it."""
        return not (self.exact if self.exact_tokens is None else self.exact_tokens)


class SampleTrajectories(Protocol):
    """Lays out samples; see `sequences` and `middleware_hub.sessions.samples`."""

    async def built(self, tenant: str, sample: GroupSample, options: Mapping[str, Any]) -> Built | None:
        """Return the sequences of a sample; None if some of its tokens are lost. Raises StoreError.

        `options`: `media`, and for samples of texts fields of `/retrieve_from_text`.
        """
        ...

    async def acknowledged(self, tenant: str, members: Sequence[Member]) -> None:
        """Note that a trainer has these replies and sessions."""


def member_of(event: Sampled, group: SampleGroup, number: int) -> Member:
    """Return the member for a reply."""
    return Member(
        event.key,
        group,
        number,
        root=event.root,
        rollout=event.rollout,
        parent=event.parent,
        lora=event.lora,
        names=event.names,
        inexact=event.inexact,
        versions=event.versions,
        ended=event.ended,
        kv_version=event.kv_version,
    )


def dropping(members: Sequence[Member], why: str, time: float) -> MembersDropped:
    """Return the event that drops members unless another router takes their samples first."""
    keys, states = tuple(one.key for one in members), tuple(one.state for one in members)
    return MembersDropped(keys=keys, why=why, before=states, time=time)


def drafts_of(group: SampleGroup) -> Iterator[GroupSample]:
    """Yield the samples that the open members of a group make, in the order of their ends, complete ones first.

    Replies that two samples share belong to the first: the other may end with a reply that was lost, and never be complete.
    """
    free = {key: one for key, one in group.members.items() if one.sample is None and not one.done}
    continued = {one.parent for one in free.values()}
    rollouts: dict[str, list[Member]] = {}
    for one in free.values():
        if one.rollout is not None:
            rollouts.setdefault(one.rollout, []).append(one)
    ends: list[tuple[bool, list[Member]]] = []
    for one in free.values():
        found = [] if one.key in continued else [one]
        if one.rollout is not None:
            found = rollouts.pop(one.rollout, [])
        if found:
            ends.append((any(end.ended for end in found), found))
    taken: set[bytes] = set()
    for complete, found in sorted(ends, key=lambda one: not one[0]):
        yield _draft(free, taken, found, complete)


def _draft(free: dict[bytes, Member], taken: set[bytes], ends: list[Member], complete: bool) -> GroupSample:
    """Return the sample of these replies, with everything that they continue and that no earlier sample has."""
    keys = {one.key for one in ends}
    for end in ends:
        above = free.get(end.parent or b"")
        while above is not None and above.key not in taken and above.key not in keys:
            if above.rollout is None:
                keys.add(above.key)
            above = free.get(above.parent or b"")
    taken |= keys
    members = tuple(sorted((free[key] for key in keys), key=lambda one: one.number))
    return sample_of(members, complete=complete)


def sample_of(members: tuple[Member, ...], *, complete: bool) -> GroupSample:
    """Return the sample of just these members."""
    inexact, versions = any(one.inexact for one in members), versions_of(members)
    caches = tuple(dict.fromkeys(one.kv_version for one in members if one.kv_version is not None))
    return GroupSample(members, complete, inexact=inexact, versions=versions, kv_versions=caches)


def versions_of(members: Sequence[Member]) -> tuple[str, ...]:
    """Return the weight versions of members, each once."""
    return tuple(dict.fromkeys(version for one in members for version in one.versions))
