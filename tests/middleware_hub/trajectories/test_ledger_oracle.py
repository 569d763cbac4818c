"""Random lives of groups, told to a ledger event by event, and to an oracle that counts all events each time.

Two routers claim from one log. What each of them appends may come behind what the other appended meanwhile: that is how they
race. The oracle knows nothing of drafts, seals, or claims as objects: it has only lists.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from middleware_hub.trajectories.choosing import ChosenGroup, choosing
from middleware_hub.trajectories.claims import result
from middleware_hub.trajectories.events import (
    Acknowledged,
    AnyEvent,
    Claimed,
    Joined,
    MemberEnded,
    MembersDropped,
    Released,
    Renewed,
    Rewarded,
    Sampled,
)
from middleware_hub.trajectories.ledger import Ledger
from middleware_hub.trajectories.samples import Member
from tests.conftest import DEAR, examples

GROUPS = ("g", "h")
SIZES = (None, None, 1, 1, 2, 3)
MOSTLY = st.sampled_from((True, True, False))


@dataclass
class Oracle:
    """What must be true of a log, found out by reading all of it."""

    events: list[AnyEvent] = field(default_factory=list)

    def replies(self) -> dict[bytes, Sampled | Joined]:
        return {one.key: one for one in self.events if isinstance(one, Sampled | Joined)}

    def held(self) -> tuple[dict[bytes, str], dict[bytes, tuple[bytes, ...]], dict[bytes, int]]:
        """Who has which sample last; of which members each sample is; how often each member was acknowledged."""
        holder: dict[bytes, str] = {}
        had: dict[bytes, tuple[str, int]] = {}
        parts: dict[bytes, tuple[bytes, ...]] = {}
        acknowledged: Counter[bytes] = Counter()
        renewals: Counter[str] = Counter()
        gone: set[bytes] = set()
        over: set[str] = set()
        here: set[bytes] = set()
        known: set[str] = set()
        for event in self.events:
            match event:
                case Sampled(key=key) | Joined(key=key):
                    here.add(key)
                case Claimed(claim=claim, samples=samples):
                    known.add(claim)
                    for taken in samples:
                        if taken.before is None:
                            inside = {key for one in parts.values() for key in one}
                            free = not inside & set(taken.members) and not gone & set(taken.members)
                        else:
                            last = had.get(taken.id)
                            now = None if last is None else (last[0], renewals[last[0]])
                            free = taken.id in parts and taken.id not in gone and now == taken.before
                        if free:
                            parts[taken.id] = parts.get(taken.id, taken.members)
                            holder[taken.id] = claim
                            had[taken.id] = claim, 0
                case Renewed(claim=claim) if claim in known:
                    renewals[claim] += 1
                case Acknowledged(claim=claim) if claim in known - over:
                    over.add(claim)
                    for name in [name for name, who in holder.items() if who == claim]:
                        acknowledged.update(parts[name])
                        gone.update(parts[name])
                        del holder[name]
                case Released(claim=claim, samples=samples) if claim in known:
                    if not samples:
                        over.add(claim)
                    for name in samples or list(holder):
                        if holder.get(name) == claim:
                            del holder[name]
                case MembersDropped(keys=keys, before=before):
                    for key, state in zip(keys, before, strict=True):
                        whole = next((name for name, one in parts.items() if key in one), None)
                        last = had.get(whole or b"")
                        if key not in here or state != (None if last is None else (last[0], renewals[last[0]])):
                            continue
                        gone.update((key,) if whole is None else parts[whole])
                        if whole is not None:
                            holder.pop(whole, None)
                case Rewarded(key=key, before=(before,)) if before is not None and key not in gone:
                    whole = next((name for name, one in parts.items() if key in one), b"")
                    last = had.get(whole)
                    if last is not None and before == (last[0], renewals[last[0]]):
                        holder.pop(whole, None)  # the trainer whose lease is over does not know of the reward
        self.gone = gone
        return holder, parts, acknowledged

    def complete(self) -> set[bytes]:
        """The open replies and sessions that end a complete rollout."""
        _, parts, _ = self.held()
        sealed = {key for one in parts.values() for key in one}
        free = {key: one for key, one in self.replies().items() if key not in sealed | self.gone}
        ended = {one.key for one in free.values() if isinstance(one, Sampled) and one.ended}
        for at, one in enumerate(self.events):
            if isinstance(one, Joined) and any(
                isinstance(o, MemberEnded) and o.session == one.session for o in self.events[at:]
            ):
                ended.add(one.key)
            if isinstance(one, Sampled) and any(isinstance(o, Rewarded) and o.key == one.key for o in self.events[at:]):
                ended.add(one.key)
        ended &= free.keys()
        found = set()
        for key, one in free.items():
            if isinstance(one, Joined):
                same = [key]
            elif one.rollout is not None:
                same = [
                    k
                    for k, o in free.items()
                    if isinstance(o, Sampled) and (o.group, o.rollout) == (one.group, one.rollout)
                ]
            else:
                children = [
                    o for o in free.values() if isinstance(o, Sampled) and (o.group, o.parent) == (one.group, key)
                ]
                same = [] if children else [key]
            if ended & set(same):
                found.add(key)
        return found


class Trainers(RuleBasedStateMachine):
    """Two routers and their trainers, over one log. A router sees the log up to where it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle()
        self.routers = [Ledger(), Ledger()]
        self.live: set[str] = set()
        self.numbers = itertools.count(1)
        self.claims: list[str] = []
        self.pending: list[tuple[str, list[ChosenGroup], Any]] = []
        self.trained: Counter[bytes] = Counter()
        self.sessions = 0

    def append(self, *events: AnyEvent) -> None:
        self.oracle.events += events

    def read_on(self, router: int) -> Ledger:
        ledger = self.routers[router]
        for number, event in enumerate(self.oracle.events[ledger.last :], ledger.last + 1):
            ledger.apply(number, event)
        return ledger

    def key(self) -> bytes:
        return next(self.numbers).to_bytes(16, "big")

    # What workflows do -------------------------------------------------------------------------------------------------

    @rule(
        group=st.sampled_from(GROUPS),
        size=st.sampled_from(SIZES),
        rollout=st.sampled_from((None, None, "r", "s")),
        ended=MOSTLY,
        parent=st.integers(0, 5),
    )
    def sample(self, group: str, size: int | None, rollout: str | None, ended: bool, parent: int) -> None:
        known = [key for key, one in self.oracle.replies().items() if isinstance(one, Sampled)]
        before = known[-parent] if 0 < parent <= len(known) else None
        self.append(
            Sampled(
                key=self.key(), root=b"", group=group, size=size, rollout=rollout, ended=ended, parent=before,
                lora="", names=("n",), inexact=False, versions=("1",), time=0.0,
            )
        )  # fmt: skip

    @rule(group=st.sampled_from(GROUPS), twice=st.booleans())
    def join(self, group: str, twice: bool) -> None:
        self.sessions += 1
        one = Joined(key=self.key(), group=group, size=None, session=f"s{self.sessions}", time=0.0)
        self.append(one)
        if twice:
            again = Joined(key=self.key(), group=group, size=None, session=f"s{self.sessions}", time=0.0)
            self.read_on(0)
            ledger = self.read_on(1)
            ledger.apply(ledger.last + 1, again)
            assert ledger.session(again.session).key == one.key  # type: ignore[union-attr]
            self.routers[1] = Ledger()

    @rule(number=st.integers(0, 7))
    def end(self, number: int) -> None:
        self.append(MemberEnded(session=f"s{number}", time=0.0))

    @rule(number=st.integers(1, 12), router=st.integers(0, 1))
    def reward(self, number: int, router: int) -> None:
        """A reward of what a trainer has is refused where it is asked for. Here it may be in the log all the same."""
        key = number.to_bytes(16, "big")
        member = self.member(router, key)
        self.append(Rewarded(key=key, reward=1.0, info=b"", before=(member and member.state,), time=0.0))

    def member(self, router: int, key: bytes) -> Member | None:
        """A reply or a session as a router knows it, which has perhaps not read on."""
        return next((one.members[key] for one in self.routers[router].groups.values() if key in one.members), None)

    # What trainers do --------------------------------------------------------------------------------------------------

    @rule(
        router=st.integers(0, 1),
        groups=st.integers(1, 3),
        size=st.sampled_from(SIZES),
        limit=st.sampled_from((None, 1, 3)),
        partial=MOSTLY,
    )
    def choose(self, router: int, groups: int, size: int | None, limit: int | None, partial: bool) -> None:
        """Look for samples; the claim is appended later, when the other router may have claimed them."""
        ledger = self.read_on(router)
        found = chosen(
            ledger, self.live, groups=groups, limit=limit, size=size, partial_before=1.0 if partial else None
        )
        assert len(found) <= groups
        assert limit is None or sum(len(one.samples) for one in found) <= limit
        for one in found:
            assert one.partial <= partial
            wanted = size or one.group.size
            assert one.partial or len(one.samples) == wanted
        if found:
            samples = tuple(sample.taking() for one in found for sample in one.samples)
            self.pending.append((f"c{len(self.claims)}", found, samples))
            self.claims.append(f"c{len(self.claims)}")

    @precondition(lambda self: self.pending)
    @rule(at=st.integers(0, 3), router=st.integers(0, 1))
    def claim(self, at: int, router: int) -> None:
        name, _, samples = self.pending.pop(at % len(self.pending))
        self.live.add(name)
        self.append(Claimed(claim=name, samples=samples, time=0.0))
        ledger = self.read_on(router)
        claim = ledger.claim(name)
        assert claim is not None
        holder, parts, _ = self.oracle.held()
        assert set(claim.held) == {one for one, who in holder.items() if who == name}
        assert all(tuple(m.key for m in s.members) == parts[i] for i, s in claim.held.items())

    @rule(over=st.booleans(), renewed=st.booleans())
    def race(self, over: bool, renewed: bool) -> None:
        """Both routers choose, and both claim; the lease of what the second one would take over may be renewed in between."""
        while self.pending:
            self.claim(0, 0)
        if over:
            self.live.clear()
        for router in (0, 1):
            self.choose(router, 3, 1, None, True)
        if renewed and self.claims:
            self.renew(len(self.claims) - 3 if len(self.claims) > 2 else 0, 0)
        while self.pending:
            self.claim(0, 0)

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 5))
    def run_out(self, at: int) -> None:
        self.live.discard(sorted(self.live)[at % len(self.live)])

    @precondition(lambda self: self.claims)
    @rule(at=st.integers(0, 9), router=st.integers(0, 1))
    def renew(self, at: int, router: int) -> None:
        name = self.claims[at % len(self.claims)]
        ledger = self.read_on(router)
        claim = ledger.claim(name)
        if claim is not None and claim.held and not claim.taken:
            self.live.add(name)
            self.append(Renewed(claim=name, time=0.0))

    @precondition(lambda self: self.claims)
    @rule(at=st.integers(0, 9), router=st.integers(0, 1))
    def acknowledge(self, at: int, router: int) -> None:
        name = self.claims[at % len(self.claims)]
        holder, parts, _ = self.oracle.held()
        mine = [key for one, who in holder.items() if who == name for key in parts[one]]
        self.append(Acknowledged(claim=name, time=0.0))
        self.trained.update(mine)
        self.read_on(router)

    @precondition(lambda self: self.claims)
    @rule(at=st.integers(0, 9), some=st.booleans())
    def release(self, at: int, some: bool) -> None:
        name = self.claims[at % len(self.claims)]
        holder, _, _ = self.oracle.held()
        mine = [one for one, who in holder.items() if who == name]
        self.append(Released(claim=name, samples=tuple(mine[:1]) if some else (), time=0.0))

    @rule(number=st.integers(1, 12), router=st.integers(0, 1))
    def drop(self, number: int, router: int) -> None:
        key = number.to_bytes(16, "big")
        member = self.member(router, key)
        self.append(MembersDropped(keys=(key,), why="dropped", before=(member and member.state,), time=0.0))

    @rule(router=st.integers(0, 1))
    def restart(self, router: int) -> None:
        """A router that was killed reads the log from its beginning."""
        self.routers[router] = Ledger()

    @rule(router=st.integers(0, 1))
    def forget(self, router: int) -> None:
        """A router that starts when nothing depends on the beginning of the log any more has the same to give."""
        whole, late = self.read_on(router), Ledger()
        for number, event in list(enumerate(self.oracle.events, 1))[whole.needed - 1 :]:
            late.apply(number, event)
        assert given(late, self.live) == given(whole, self.live)

    # What must hold ----------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        assert all(count == 1 for count in self.trained.values()), self.trained

    @invariant()
    def groups_know_what_is_left_of_them(self) -> None:
        for ledger in self.routers:
            for group in ledger.groups.values():
                members = group.members.values()
                assert group.left == sum(not one.done for one in members) > 0
                rollouts = {one.rollout: [o for o in members if o.rollout == one.rollout] for one in members}
                assert group.rollouts == {name: of for name, of in rollouts.items() if name is not None}

    @invariant()
    def nothing_is_lost(self) -> None:
        """What is complete and nobody has is what a trainer that takes everything is given: no less, no more, each once."""
        for router in (0, 1):
            ledger = self.read_on(router)
            holder, parts, _ = self.oracle.held()
            free = {one for one in parts if one not in self.oracle.gone}
            free -= {one for one, who in holder.items() if who in self.live}
            found = given(ledger, self.live)
            members = [key for _, one in found for key in one]
            assert len(members) == len(set(members))
            assert {name for name, _ in found} & set(parts) == free
            open_ones = {key for name, one in found for key in one if name not in free}
            assert self.oracle.complete() <= open_ones


def chosen(ledger: Ledger, live: set[str], **wanted: Any) -> list[ChosenGroup]:
    return asyncio.run(result(choosing(ledger, live, lambda _: None, **wanted)))[0]


def given(ledger: Ledger, live: set[str]) -> list[tuple[bytes, tuple[bytes, ...]]]:
    """What a trainer that takes everything would get."""
    found = chosen(ledger, live, groups=100, size=10**6, partial_before=1.0)
    return [(sample.id, tuple(m.key for m in sample.members)) for one in found for sample in one.samples]


Trainers.TestCase.settings = settings(max_examples=examples(300, DEAR), stateful_step_count=60, deadline=None)
TestTrainers = Trainers.TestCase
