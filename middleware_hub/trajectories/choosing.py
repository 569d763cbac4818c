"""Which samples a claim gets: whole groups first, oldest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from itertools import count
from typing import Final, TypeVar

import msgspec

from middleware_hub.trajectories.ledger import STEP, Ledger
from middleware_hub.trajectories.samples import GroupSample, Member, SampleGroup

Refusal = Callable[[GroupSample], str | None]
"""Returns the reason for which a sample is not wanted; None if it is wanted."""


T = TypeVar("T")
Steps = Generator[None, None, T]
"""A walk over a whole ledger that yields after each step, and returns its result. A router that has just started may
have 100,000 replies to look at. The ledger may have changed when the walk goes on."""

GROUPS_AT_ONCE: Final = 64


class ChosenGroup(msgspec.Struct, frozen=True):
    """A group that may be claimed, with its samples; `partial`: whether it is incomplete."""

    group: SampleGroup
    samples: tuple[GroupSample, ...]
    partial: bool


def groups_in_steps(ledger: Ledger) -> Iterator[Sequence[SampleGroup]]:
    """Return the groups that a ledger has now, oldest first, a few at a time."""
    groups = list(ledger.groups.values())
    for begin in range(0, len(groups), GROUPS_AT_ONCE):
        yield groups[begin : begin + GROUPS_AT_ONCE]


def overflow(ledger: Ledger, most: int, before: int = 0) -> list[Member]:
    """Return the members to drop: of the oldest groups, so that at most `most` are left, and early members.

    An early member's event has a number less than `before`: the log is kept from the first member's event on.
    """
    found: list[Member] = []
    for group in ledger.groups.values():
        crowded = len(ledger) - len(found) > most
        if not crowded and next(iter(group.members.values())).number >= before:
            break
        found += [
            one
            for one in group.members.values()
            if (crowded or one.number < before) and not one.done and not (one.sample and one.sample.held)
        ]
    return found


def choosing(
    ledger: Ledger,
    live: Collection[str],
    refuse: Refusal,
    *,
    groups: int,
    limit: int | None = None,
    size: int | None = None,
    partial_before: float | None = None,
) -> Steps[tuple[list[ChosenGroup], Counter[str]]]:
    """Find the samples that a trainer may be given now, oldest groups first, and how many were refused, by reason.

    A change between two steps does no harm: the claim then gets fewer samples than were chosen.

    Args:
        groups, limit: the maximum of groups and of samples.
        size: the size of a complete group, instead of the group's own.
        partial_before: incomplete groups count too if nothing has happened to them since that time; they come last.
    """
    chosen: list[ChosenGroup] = []
    partial: list[ChosenGroup] = []
    refused: Counter[str] = Counter()
    room, looked = limit, count(1)
    for few in groups_in_steps(ledger):
        for group in few:
            if len(chosen) == groups:
                return chosen, refused
            found = []
            for sample in group.samples():
                if next(looked) % STEP == 0:
                    yield
                if sample.complete and sample.open_to(live):
                    why = refuse(sample)
                    if why is None:
                        found.append(sample)
                    else:
                        refused[why] += 1
            wanted = size or group.size
            if wanted is not None and len(found) >= wanted:
                if room is None or wanted <= room:
                    chosen.append(ChosenGroup(group, tuple(found[:wanted]), partial=False))
                    room = None if room is None else room - wanted
            elif found and partial_before is not None and group.touched <= partial_before:
                partial.append(ChosenGroup(group, tuple(found), partial=True))
        yield
    for choice in partial[: groups - len(chosen)]:
        part = choice.samples if room is None else choice.samples[:room]
        if part:
            chosen.append(ChosenGroup(choice.group, part, partial=True))
            room = None if room is None else room - len(part)
    return chosen, refused
