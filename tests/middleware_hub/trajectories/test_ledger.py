"""Claims of samples that changed between the look of a router and its claim."""

from __future__ import annotations

import weakref

import pytest
from msgspec import structs

from middleware_hub.trajectories.events import (
    Acknowledged,
    AnyEvent,
    Claimed,
    Joined,
    MembersDropped,
    Rewarded,
    Sampled,
    Taken,
)
from middleware_hub.trajectories.ledger import Ledger
from middleware_hub.trajectories.samples import Member, dropping


def sampled(number: int) -> Sampled:
    return Sampled(
        key=number.to_bytes(16, "big"), root=b"", group="g", size=None, rollout=None, ended=True, parent=None,
        lora="", names=("n",), inexact=False, versions=("1",), time=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    "meanwhile",
    [Acknowledged(claim="first", time=0.0), MembersDropped(keys=(sampled(1).key,), why="dropped", time=0.0)],
    ids=type,
)
def test_a_sample_that_is_done_is_not_taken_over(meanwhile: AnyEvent) -> None:
    """A router took the first claim for over, and claims its sample; meanwhile that is acknowledged, or dropped."""
    ledger = Ledger()
    for number, event in enumerate((sampled(1), sampled(2)), 1):
        ledger.apply(number, event)
    one = next(ledger.groups["g"].samples())
    ledger.apply(3, Claimed(claim="first", samples=(one.taking(),), time=0.0))
    (late,) = (held.taking() for held in ledger.claim("first").held.values())  # type: ignore[union-attr]
    ledger.apply(4, meanwhile)
    ledger.apply(5, Claimed(claim="second", samples=(late,), time=0.0))
    second = ledger.claim("second")
    assert second is not None
    assert second.held == {}


@pytest.mark.parametrize("taken_over", [False, True])
def test_what_was_trained_is_not_given_again_where_its_beginning_was_trimmed(taken_over: bool) -> None:
    """The log is trimmed up to the first member of a waiting group, which may lie between the members of a settled sample."""
    events: list[AnyEvent] = [
        structs.replace(sampled(1), rollout="r"),
        structs.replace(sampled(2), group="h"),
        structs.replace(sampled(3), rollout="r"),
    ]
    whole, late = Ledger(), Ledger()
    for number, event in enumerate(events, 1):
        whole.apply(number, event)
    (sample,) = whole.groups["g"].samples()
    for claim in ("c", "d")[: 1 + taken_over]:
        events.append(Claimed(claim=claim, samples=(sample.taking(),), time=0.0))
        whole.apply(len(events), events[-1])
        (sample,) = whole.groups["g"].sealed.values()
    events.append(Acknowledged(claim="d" if taken_over else "c", time=0.0))
    whole.apply(len(events), events[-1])
    assert whole.needed == 2
    for number, event in list(enumerate(events, 1))[whole.needed - 1 :]:
        late.apply(number, event)
    assert whole.groups.keys() == late.groups.keys() == {"h"}


class Name(str):
    """A name of which one can see whether something still refers to it."""


@pytest.mark.parametrize("end", ["acknowledged", "dropped", "held", "waiting"])
def test_nothing_of_a_group_stays(end: str) -> None:
    """Members and samples are freed with their group, or with the ledger: the garbage collector does not see them."""
    name, ledger = Name("adapter"), Ledger()
    gone = weakref.ref(name)
    for number in (1, 2):
        ledger.apply(number, structs.replace(sampled(number), lora=name))
    del name
    samples = list(ledger.groups["g"].samples())
    if end in ("acknowledged", "held"):
        ledger.apply(3, Claimed(claim="c", samples=tuple(one.taking() for one in samples), time=0.0))
    if end == "acknowledged":
        ledger.apply(4, Acknowledged(claim="c", time=0.0))
    if end == "dropped":
        ledger.apply(4, dropping([sample.members[0] for sample in samples], "dropped", 0.0))
    del samples
    assert (ledger.groups == {}) is (end in ("acknowledged", "dropped"))
    if ledger.groups:
        del ledger
    assert gone() is None


def ledger_of(*events: AnyEvent) -> Ledger:
    ledger = Ledger()
    for number, event in enumerate(events, 1):
        ledger.apply(number, event)
    return ledger


def rewarded(member: Member | None) -> Rewarded:
    assert member is not None
    return Rewarded(key=member.key, reward=1.0, info=b"", before=(member.state,), time=0.0)


def test_of_replies_of_one_name_the_newest_is_meant_or_that_of_the_named_group() -> None:
    ledger = ledger_of(sampled(1), sampled(2), structs.replace(sampled(3), group="h"))

    def key(name: str, group: str | None = None) -> bytes | None:
        found = ledger.reply(name, group)
        return found and found.key

    assert (key("n"), key("n", "g"), key("n", "h")) == (sampled(3).key, sampled(2).key, sampled(3).key)
    assert key("n", "other") is None
    assert key("other") is None


def test_of_a_rollout_the_last_reply_is_meant_an_open_one_first() -> None:
    one, two, three = (structs.replace(sampled(number), rollout="r") for number in (1, 2, 3))

    def key(*events: AnyEvent) -> bytes | None:
        found = ledger_of(*events).rollout("g", "r")
        return found and found.key

    def claimed(*members: Sampled) -> Claimed:
        taken = Taken(members[0].key, tuple(member.key for member in members), None)
        return Claimed(claim="c", samples=(taken,), time=0.0)

    assert key(one, two) == two.key
    assert key(one, two, claimed(one, two)) == two.key
    assert key(one, two, claimed(one, two), three) == three.key
    assert key(one, two, claimed(two)) == one.key
    assert key(structs.replace(one, group="h")) is None


def test_a_reward_ends_a_reply_but_no_session() -> None:
    """A session may be given a reward for each turn."""
    joined = Joined(key=sampled(2).key, group="g", size=None, session="s", time=0.0)
    ledger = ledger_of(structs.replace(sampled(1), ended=False), joined)
    for number, member in enumerate((ledger.reply("n"), ledger.session("s")), 3):
        ledger.apply(number, rewarded(member))
    assert {one.members[0].session: one.complete for one in ledger.groups["g"].samples()} == {
        None: True,
        "s": False,
    }


def test_a_reward_that_came_after_the_lease_takes_the_sample_from_its_claim() -> None:
    """The trainer knows nothing of it."""
    ledger = ledger_of(sampled(1))
    (sample,) = ledger.groups["g"].samples()
    ledger.apply(2, Claimed(claim="c", samples=(sample.taking(),), time=0.0))
    ledger.apply(3, rewarded(ledger.reply("n")))
    claim = ledger.claim("c")
    assert claim is not None
    assert (claim.held, claim.taken) == ({}, [sampled(1).key])
    ledger.apply(4, Acknowledged(claim="c", time=0.0))
    assert ledger.counts["acknowledged"] == 0
    assert ledger.groups.keys() == {"g"}


def test_a_settled_reply_is_remembered_for_a_while_and_needs_no_event() -> None:
    ledger = ledger_of(sampled(1))
    assert ledger.needed == 1
    ledger.apply(2, rewarded(ledger.reply("n")))
    assert ledger.standing("n") == ("g", 1.0)
    (sample,) = ledger.groups["g"].samples()
    ledger.apply(3, dropping(sample.members, "dropped", 0.0))
    assert ledger.reply("n") is None
    assert ledger.standing("n") == ("g", 1.0)
    assert ledger.standing("other") is None
    assert ledger.needed == 4
