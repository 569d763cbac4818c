"""Groups and claims: a trainer takes each sample from the router at most once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from middleware_hub.client.trajectory import Trajectory


class ClaimOptions(TypedDict, total=False):
    """The request of a trainer: the fields of `/trajectories/claim`; see the HTTP API.

    Attributes:
        groups, limit: the maximum of groups and of samples.
        group_size: the size of a complete group, if the requests did not give it.
        lease_seconds: how long only this trainer holds the samples.
        wait_seconds: how long to wait for a first complete group.
        allow_partial: whether incomplete groups count.
        partial_after_seconds: incomplete groups count only if nothing happened to them for so long.
        exact_only, max_staleness, kv_staleness: filters for samples.
        media: `inline`: images come with their bytes (default: `ref`, without).
    """

    groups: int
    limit: int
    group_size: int
    lease_seconds: float
    wait_seconds: float
    allow_partial: bool
    partial_after_seconds: float
    exact_only: bool
    max_staleness: int
    kv_staleness: bool
    return_routed_experts: bool
    return_indexer_topk: bool
    return_top_p: bool
    media: Literal["ref", "inline"]


@dataclass(frozen=True)
class Sample:
    """One rollout: a session, or the replies sampled from one prompt on.

    Attributes:
        id: its name; the same whenever it is handed out.
        reward: None if no client gave one.
        reward_info: further data of the reward.
        trajectories: its sequences; each sampled token has mask 1 in one of them, in this sample or in another one.
        details: the other fields of the answer.
    """

    id: str
    group_id: str
    rollout_id: str | None
    session_id: str | None
    reward: float | None
    reward_info: Mapping[str, Any]
    exact: bool
    complete: bool
    trajectories: tuple[Trajectory, ...]
    details: Mapping[str, Any] = field(repr=False, default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Sample:
        """Read a sample of an answer. Raises InconsistentAnswerError."""
        read = Trajectory.of if found["session_id"] is None else Trajectory.of_branch
        names = [name for name in cls.__dataclass_fields__ if name not in ("trajectories", "details")]
        return cls(
            **{name: found[name] for name in names},
            trajectories=tuple(read(one) for one in found["trajectories"]),
            details={name: value for name, value in found.items() if name not in cls.__dataclass_fields__},
        )


@dataclass(frozen=True)
class ClaimedGroup:
    """A group of a claim; `partial`: whether it is incomplete, or no longer complete."""

    group_id: str
    size: int | None
    partial: bool
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Claim:
    """Samples that this trainer holds until the lease is over; acknowledge them when they are trained on or kept.

    Attributes:
        id: None if there was nothing to claim.
        lost: samples whose tokens are gone: `id` and `group_id`. They are not handed out again.
        filtered: how many samples were left out, by reason: `inexact`, `stale`.
        details: the other fields of the answer.
    """

    id: str | None
    groups: tuple[ClaimedGroup, ...]
    lost: tuple[Mapping[str, str], ...]
    filtered: Mapping[str, int]
    details: Mapping[str, Any] = field(repr=False, default_factory=dict)

    def __iter__(self) -> Iterator[Sample]:
        return (sample for group in self.groups for sample in group.samples)

    def __len__(self) -> int:
        return sum(len(group.samples) for group in self.groups)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Claim:
        """Read an answer. Raises InconsistentAnswerError."""
        samples = [Sample.of(one) for one in found["samples"]]
        groups = tuple(
            ClaimedGroup(
                one["group_id"],
                one["size"],
                one["partial"],
                tuple(sample for sample in samples if sample.group_id == one["group_id"]),
            )
            for one in found["groups"]
        )
        read = ("claim_id", "groups", "samples", "lost", "filtered")
        details = {name: value for name, value in found.items() if name not in read}
        return cls(found["claim_id"], groups, tuple(found["lost"]), found["filtered"], details)
