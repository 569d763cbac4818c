"""Ledgers that are behind, and ledgers that have to make room."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from middleware_hub.spans.versions import VersionClock
from middleware_hub.store import event_log
from middleware_hub.store.errors import DamagedRecordError
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Event
from middleware_hub.trajectories import groups, journal
from middleware_hub.trajectories.choosing import overflow
from middleware_hub.trajectories.claims import ClaimRequest, Claims
from middleware_hub.trajectories.events import (
    Acknowledged,
    AnyEvent,
    Claimed,
    MembersDropped,
    Released,
    Renewed,
    Reward,
    Rewarded,
    Sampled,
    State,
    Taken,
)
from middleware_hub.trajectories.groups import Groups
from middleware_hub.trajectories.journal import MemoryJournal, StoreJournal
from middleware_hub.trajectories.samples import Built, GroupSample, Member
from tests.middleware_hub.store.world import address_of, with_store
from tests.support.redis_server import empty_redis


@dataclass
class Saves:
    """Appends at once."""

    store: Store

    async def save(self, batch: Batch) -> bool:
        await self.store.append(batch)
        return True

    async def write(self, batch: Batch) -> None:
        await self.store.append(batch)


def sampled(number: int, group: str) -> Sampled:
    return Sampled(
        key=number.to_bytes(16, "big"), root=b"", group=group, size=1, rollout=None, ended=True, parent=None, lora="",
        names=(f"n{number}",), inexact=False, versions=("1",), time=0.0,
    )  # fmt: skip


async def told(one: StoreJournal, *events: AnyEvent) -> None:
    for event in events:
        await one.append(event)
    await one.read_on()


async def take(one: StoreJournal, group: str, claim: str) -> None:
    """Claim and acknowledge the only sample of a group."""
    (sample,) = list(one.ledger.groups[group].samples())
    taken = (sample.taking(),)
    await told(one, Claimed(claim=claim, samples=taken, time=0.0), Acknowledged(claim=claim, time=0.0))


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
def test_a_router_that_is_behind_a_trimmed_log_begins_anew(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_SPARE", 6)
    monkeypatch.setattr(journal, "_TRIM_EVERY", 6)
    monkeypatch.setattr(event_log, "PAGE", 7)

    async def work(store: Store) -> None:
        busy, idle = (StoreJournal(Saves(store), "groups/a/b") for _ in range(2))
        await told(busy, sampled(1, "old"))
        await idle.read_on()
        assert "old" in idle.ledger.groups
        await take(busy, "old", "c1")
        for number in range(2, 40):
            await told(busy, sampled(number, f"g{number}"))
            await take(busy, f"g{number}", f"c{number}")
        await told(busy, sampled(40, "new"))
        assert (await store.read("groups/a/b", limit=1))[0].number > 3, "the acknowledgement is trimmed"
        await idle.read_on()
        assert list(idle.ledger.groups) == list(busy.ledger.groups) == ["new"]
        await take(idle, "new", "last")
        await busy.read_on()
        assert (len(busy.ledger), len(idle.ledger)) == (0, 0)
        assert busy.ledger.last == idle.ledger.last

    with_store(address_of(kind, tmp_path), work)


@pytest.mark.parametrize("new", [1, 5])
def test_a_log_that_was_lost_begins_again_at_all_routers(new: int, caplog: pytest.LogCaptureFixture) -> None:
    """Also if it has become as long as before: nothing new is passed over, and nothing is taken twice."""

    async def work(store: Store) -> None:
        one, two = (StoreJournal(Saves(store), "groups/a/b") for _ in range(2))
        await told(one, *(sampled(number, f"lost {number}") for number in range(3)))
        await two.read_on()
        empty_redis()
        await store.announce("router", b"", 5.0)  # the store notices
        await told(two, *(sampled(number, f"new {number}") for number in range(10, 10 + new)))
        await one.read_on()
        assert list(one.ledger.groups) == list(two.ledger.groups) == [f"new {number}" for number in range(10, 10 + new)]
        await take(one, "new 10", "claim")
        await two.read_on()
        assert one.ledger.last == two.ledger.last == new + 2
        assert "new 10" not in two.ledger.groups
        assert caplog.text.count("was set back") == 2

    with_store(empty_redis(), work)


def test_one_namespace_more_than_are_kept_has_a_ledger(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(groups, "MOST_LEDGERS", 2)
    all_of_them = Groups()
    for number, namespace in enumerate("abc"):
        one = all_of_them.journal("", namespace)
        assert isinstance(one, MemoryJournal)
        one.happen(sampled(number, "g"))
        assert all_of_them.journal("", namespace) is one
    assert "'a' were given up" in caplog.text
    assert all_of_them.journal("", "a").ledger.groups == {}


def rewards(*given: tuple[int, State]) -> Rewarded:
    """Return rewards of 0.5, given at once, each with the state in which its router saw the sample."""
    first, *more = (Reward(number.to_bytes(16, "big"), 0.5, b"", before) for number, before in given)
    return Rewarded(key=first.key, reward=0.5, info=b"", more=tuple(more), before=(first.before,), time=0.0)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
@pytest.mark.parametrize(
    ("between", "state", "counts"),
    [
        ([], None, True),
        (["claim"], None, False),
        (["drop"], None, False),
        (["claim"], ("mine", 0), True),
        (["claim", "acknowledge"], ("mine", 0), False),
        (["claim", "renew"], ("mine", 0), False),
        (["claim", "release"], ("mine", 0), True),
        (["claim", "claim again"], ("mine", 0), False),
    ],
)
def test_rewards_of_one_call_count_at_a_new_router_as_they_did_at_the_others(
    tmp_path: Path, kind: str, between: list[str], state: State, counts: bool
) -> None:
    """Also if one of their groups is settled by then, and its beginning is trimmed away."""
    settled = (1).to_bytes(16, "big")
    names: dict[str, AnyEvent] = {
        "claim": Claimed(claim="mine", samples=(Taken(settled, (settled,), None),), time=0.0),
        "claim again": Claimed(claim="other", samples=(Taken(settled, (settled,), ("mine", 0)),), time=0.0),
        "acknowledge": Acknowledged(claim="mine", time=0.0),
        "renew": Renewed(claim="mine", time=0.0),
        "release": Released(claim="mine", time=0.0),
        "drop": MembersDropped(keys=(settled,), why="dropped", before=(None,), time=0.0),
    }

    async def work(store: Store) -> None:
        old, new = (StoreJournal(Saves(store), "groups/a/b") for _ in range(2))
        await told(old, sampled(1, "settled"), sampled(2, "left"), *(names[one] for one in between))
        await told(old, rewards((1, state), (2, None)), MembersDropped(keys=(settled,), why="dropped", time=0.0))
        assert list(old.ledger.groups) == ["left"]
        assert old.ledger.needed == 2
        await store.trim(old.log, old.ledger.needed)
        await new.read_on()
        for one in (old, new):
            member = one.ledger.reply("n2")
            assert member is not None
            assert member.reward == (0.5 if counts else None), one.ledger

    with_store(address_of(kind, tmp_path), work)


def test_events_of_old_logs_are_read() -> None:
    """They do not say in which state samples were seen. A router that has not been updated yet reads new events."""
    log, reward = "groups/a/b", Reward(b"l", 0.5, b"")
    dropped = MembersDropped(keys=(b"k",), why="dropped", before=(("c", 1),), time=2.0)
    rewarded = Rewarded(key=b"k", reward=1.0, info=b"{}", more=(reward,), before=(None,), time=2.0)
    for event, old in (
        (dropped, ["dropped", [b"k"], "dropped", 2.0]),
        (rewarded, ["rewarded", b"k", 1.0, b"{}", [[b"l", 0.5, b""]], 2.0]),
    ):
        new = msgspec.msgpack.decode(journal.stored(log, event).data)
        assert new[: len(old) - 2] == old[:-2]
        assert new[len(old) - 1] == old[-1], "the fields of old events have their places"
        assert journal.read(Event(log, "", msgspec.msgpack.encode(old))) == structs.replace(event, before=())


def test_groups_of_another_version_are_told_as_such(tmp_path: Path) -> None:
    """The first logs had no rewards of several replies. To leave out such an event would hand out what it settled."""
    log = "groups/a/b"
    old = Event(log, "rewarded", msgspec.msgpack.encode(["rewarded", b"k", 1.0, b"{}", 2.0]))

    async def work(store: Store) -> None:
        saving = Saves(store)
        await saving.write(Batch(events=[old]))
        with pytest.raises(DamagedRecordError, match="Claim what waits with that version") as found:
            await StoreJournal(saving, log).read_on()
        assert (found.value.status, found.value.type) == (409, "unknown_event")

    with_store(f"sqlite:{tmp_path}/store", work)


def test_what_nobody_claims_does_not_keep_the_log_for_ever() -> None:
    one = MemoryJournal()
    one.happen(sampled(1, "left"))
    for number in range(2, 13):
        one.happen(sampled(number, "used"))
    first = (1).to_bytes(16, "big")
    assert overflow(one.ledger, 100, 1) == []
    assert [member.key for member in overflow(one.ledger, 100, 2)] == [first]
    assert [member.key for member in overflow(one.ledger, 11)] == [first]
    assert len(overflow(one.ledger, 100, 4)) == 3, "of a group that goes on only what is too old"
    assert len(overflow(one.ledger, 10)) == 12, "of groups that are too many all"
    one.happen(MembersDropped(keys=(first,), why="evicted", time=0.0))
    assert one.ledger.needed == 2


def test_looks_at_many_groups_hold_up_nobody() -> None:
    """Not the first one, which finds out the samples of each group, and not those behind it."""
    one = MemoryJournal()
    for number in range(1_000):
        one.happen(msgspec.structs.replace(sampled(number, f"g{number}"), ended=False))
    turns = [0]

    async def others() -> None:
        while True:
            await asyncio.sleep(0)
            turns[-1] += 1

    async def look() -> None:
        running = asyncio.create_task(others())
        for _ in range(2):
            found = await Claims(Nothing(), VersionClock(), Counter(), lambda: False).claim("", one, ClaimRequest())
            assert found["waiting"]["open_samples"] == 1_000
            turns.append(0)
        running.cancel()

    asyncio.run(look())
    assert turns[0] > 10
    assert turns[1] > 20, "it chooses in steps, and counts in steps what waits"


class Nothing:
    """Lays out nothing."""

    async def built(self, tenant: str, sample: GroupSample, options: Mapping[str, Any]) -> Built | None:
        raise AssertionError

    async def acknowledged(self, tenant: str, members: Sequence[Member]) -> None:
        raise AssertionError
