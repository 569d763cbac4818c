"""The events of the groups of one tenant and namespace, as in their log.

    sampled  sampled  rewarded  sampled  rewarded  claimed  renewed  acknowledged
       1        2        3         4         5        6        7          8         numbers, given by the store

Any process that applies these events in order has the ledger. Tokens are not in the log: a reply is named by the id of its
record, and `Sampled` is appended together with that record.
"""

from __future__ import annotations

import msgspec


class GroupEvent(msgspec.Struct, tag_field="kind", array_like=True, kw_only=True, frozen=True):
    """Anything that happens.

    Attributes:
        time: when, in seconds since 1970.
    """

    time: float


class _Sampled(GroupEvent, frozen=True):
    """See `Sampled`.

    Attributes:
        key, root: the ids of its record and of its conversation.
        size: how many samples the group will have, if the request said so.
        rollout: the rollout to which it belongs; None: that of the replies that its prompt continues.
        ended: whether it is the last reply of its rollout.
        parent: the reply that its prompt continues, if any.
        names: its request ids.
        inexact: whether its sequence is known not to be exact.
        versions: the weight versions of its tokens.
    """

    key: bytes
    root: bytes
    group: str
    size: int | None
    rollout: str | None
    ended: bool
    parent: bytes | None
    lora: str
    names: tuple[str, ...]
    inexact: bool
    versions: tuple[str, ...]


class Sampled(_Sampled, tag="sampled", kw_only=True, frozen=True):
    """A reply of a group was recorded.

    A field that is new stands here, so that it comes last: behind the fields of events that are in stores already.

    Attributes:
        kv_version: see `TokenSpan`.
    """

    kv_version: str | None = None


class Joined(GroupEvent, tag="joined", frozen=True):
    """A session was made that belongs to a group."""

    key: bytes
    group: str
    size: int | None
    session: str


class MemberEnded(GroupEvent, tag="ended", frozen=True):
    """The agent of a session is done, or the session was finalized."""

    session: str


State = tuple[str, int] | None
"""The claim that had a sample last, with the number of its renewals; None if no claim ever had it.

An event that takes samples says in which state its router saw them. It does not count for a sample that is in another state by
then: another router was faster.
"""


class TakingEvent(GroupEvent, kw_only=True, frozen=True):
    """An event that counts for samples in a certain state only. Here, so that `before` is the last field in the log.

    Attributes:
        before: the states of the samples that it names, in their order. Empty in old logs.
    """

    before: tuple[State, ...] = ()


class Reward(msgspec.Struct, array_like=True, frozen=True):
    """The reward of a reply or a session. `info` is JSON, or nothing; `before`: the state of its sample."""

    key: bytes
    reward: float | None
    info: bytes
    before: State = None


class Rewarded(TakingEvent, tag="rewarded", frozen=True):
    """A reply was given a reward, which ends its rollout. `more` rewards were given with it: all of them count, or none.

    A session may have been given one as well: its log has it, and this event says whether that was in time.
    """

    key: bytes
    reward: float | None
    info: bytes
    more: tuple[Reward, ...] = ()

    @property
    def rewards(self) -> tuple[Reward, ...]:
        """Return all of them."""
        first = self.before[0] if self.before else None
        return Reward(self.key, self.reward, self.info, first), *self.more


class Taken(msgspec.Struct, array_like=True, frozen=True):
    """A sample of a claim.

    Attributes:
        id: the id of the sample.
        members: its replies, or its session.
        before: its state.
    """

    id: bytes
    members: tuple[bytes, ...]
    before: State


class Claimed(GroupEvent, tag="claimed", frozen=True):
    """A trainer asked for these samples. It gets the samples that no other claim took first."""

    claim: str
    samples: tuple[Taken, ...]


class Renewed(GroupEvent, tag="renewed", frozen=True):
    """The lease of a claim began again."""

    claim: str


class Acknowledged(GroupEvent, tag="acknowledged", frozen=True):
    """A trainer has its samples: they are never handed out again."""

    claim: str


class Released(GroupEvent, tag="released", frozen=True):
    """Samples of a claim were given back; none named: all."""

    claim: str
    samples: tuple[bytes, ...] = ()


class _Judged(GroupEvent, frozen=True):
    sample: bytes
    inexact: bool
    versions: tuple[str, ...]


class Judged(_Judged, tag="judged", kw_only=True, frozen=True):
    """The filters' view of a sample, known since its tokens were laid out. A field that is new stands here, as in `Sampled`."""

    kv_versions: tuple[str, ...] = ()


class MembersDropped(TakingEvent, tag="dropped", frozen=True):
    """Replies or sessions are not handed out (any more): `dropped` by a client, `evicted` for lack of room, or `lost`.

    Without `before` it counts in any state.
    """

    keys: tuple[bytes, ...]
    why: str


AnyEvent = (
    Sampled | Joined | MemberEnded | Rewarded | Claimed | Renewed | Acknowledged | Released | Judged | MembersDropped
)
