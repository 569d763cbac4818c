"""Rewards that come in the same instant as a claim at another router."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.trajectories.events import (
    Acknowledged,
    AnyEvent,
    Claimed,
    Joined,
    MemberEnded,
    MembersDropped,
    Sampled,
)
from middleware_hub.trajectories.journal import MemoryJournal, StoreJournal
from middleware_hub.trajectories.samples import Built, GroupSample, Member
from middleware_hub.trajectories.settling import HandedOutError, Settling, reward, reward_session
from tests.middleware_hub.store.world import address_of, with_store


@dataclass
class Slow:
    """Appends, but first something else happens."""

    store: Store
    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def save(self, batch: Batch) -> bool:
        await self.write(batch)
        return True

    async def write(self, batch: Batch) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        await self.store.append(batch)


class Nothing:
    """Lays out nothing."""

    async def built(self, tenant: str, sample: GroupSample, options: Mapping[str, Any]) -> Built | None:
        raise AssertionError

    async def acknowledged(self, tenant: str, members: Sequence[Member]) -> None:
        raise AssertionError


def sampled(number: int) -> Sampled:
    return Sampled(
        key=number.to_bytes(16, "big"), root=b"", group=f"g{number}", size=1, rollout=None, ended=True, parent=None,
        lora="", names=(f"n{number}",), inexact=False, versions=("1",), time=0.0,
    )  # fmt: skip


class Routers:
    """Two routers on one store. `here` gives rewards, slowly; `there` does something in between."""

    def __init__(self, store: Store) -> None:
        self.saving = Slow(store)
        self.here = StoreJournal(self.saving, "groups/a/b")
        self.there = StoreJournal(Slow(store), "groups/a/b")
        self.settling = Settling(Nothing(), Counter())

    async def begin(self) -> None:
        for number in (1, 2):
            await self.there.append(sampled(number))
        await self.here.read_on()

    def member(self, at: StoreJournal, number: int) -> Member:
        found = at.ledger.reply(f"n{number}")
        assert found is not None
        return found

    async def reward(self, at: StoreJournal, rewards: Mapping[int, float]) -> bool:
        await at.read_on()
        given = [(self.member(at, number), one, b"") for number, one in rewards.items()]
        return await reward(at, given)

    async def claim(self, number: int, name: str | None = None) -> float | None:
        """Claim a group, whether or not its lease is over; return the reward that its sample is handed out with."""
        await self.there.read_on()
        (sample,) = list(self.there.ledger.groups[f"g{number}"].samples())
        name = name or f"c{number}"
        await self.append(Claimed(claim=name, samples=(sample.taking(),), time=0.0))
        claim = self.there.ledger.claim(name)
        assert claim is not None
        (held,) = claim.held.values()
        return None if held.rewarded is None else held.rewarded.reward

    async def append(self, event: AnyEvent) -> None:
        await self.there.append(event)
        await self.there.read_on()


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
def test_a_reward_that_a_claim_overtakes_is_refused(tmp_path: Path, kind: str) -> None:
    """Of several, none counts then, at no router: the client may give the others by themselves."""

    async def work(store: Store) -> None:
        routers = Routers(store)
        await routers.begin()
        claimed: list[float | None] = []

        async def claim() -> None:
            claimed.append(await routers.claim(1))

        routers.saving.meanwhile = claim
        with pytest.raises(HandedOutError, match="reply 'n1'"):
            await routers.reward(routers.here, {2: 0.25, 1: 0.5})
        assert claimed == [None]
        for one in (routers.here, routers.there):
            await one.read_on()
            assert [routers.member(one, number).rewarded for number in (1, 2)] == [0, 0]
        assert await routers.reward(routers.here, {2: 0.25})
        assert await routers.claim(2) == 0.25

    with_store(address_of(kind, tmp_path), work)


def test_a_reply_that_is_dropped_in_the_same_instant_takes_no_reward() -> None:
    async def work(store: Store) -> None:
        routers = Routers(store)
        await routers.begin()
        dropped = MembersDropped(keys=(sampled(1).key,), why="dropped", time=0.0)
        routers.saving.meanwhile = lambda: routers.append(dropped)
        with pytest.raises(HandedOutError):
            await routers.reward(routers.here, {1: 0.5})

    with_store("memory:process", work)


def test_a_reward_that_was_given_at_both_routers_is_no_error() -> None:
    """A client lost the answer of one router and asked the other; then the sample was claimed with this very reward."""

    async def work(store: Store) -> None:
        routers = Routers(store)
        await routers.begin()

        async def meanwhile() -> None:
            assert await routers.reward(routers.there, {1: 0.5, 2: 0.25})
            assert await routers.claim(1) == 0.5

        routers.saving.meanwhile = meanwhile
        assert await routers.reward(routers.here, {1: 0.5, 2: 0.25})
        assert await routers.claim(2) == 0.25

    with_store("memory:process", work)


def test_of_two_rewards_for_one_reply_the_last_counts() -> None:
    async def work(store: Store) -> None:
        routers = Routers(store)
        await routers.begin()
        one = routers.member(routers.here, 1)
        assert await reward(routers.here, [(one, 0.5, b""), (one, 0.75, b"")])
        assert await routers.claim(1) == 0.75
        await routers.here.read_on()
        assert await reward(routers.here, [(one, 0.5, b""), (one, 0.75, b"")])

    with_store("memory:process", work)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
@pytest.mark.parametrize("lease", ["never claimed", "over"])
def test_a_trainer_keeps_what_another_router_drops_in_the_same_instant(tmp_path: Path, kind: str, lease: str) -> None:
    """Also a sample that was claimed before: the router that drops it took that claim for over."""

    async def work(store: Store) -> None:
        routers = Routers(store)
        await routers.begin()
        if lease == "over":
            await routers.claim(1, "first")
        await routers.here.read_on()

        async def claim() -> None:
            await routers.claim(1)

        routers.saving.meanwhile = claim
        assert await routers.settling.drop(routers.here, routers.here.ledger.groups["g1"]) == 0
        await routers.append(Acknowledged(claim="c1", time=0.0))
        assert routers.there.ledger.claim("c1").acknowledged == 1  # type: ignore[union-attr]
        assert await routers.settling.drop(routers.here, routers.here.ledger.groups["g2"]) == 1

    with_store(address_of(kind, tmp_path), work)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
def test_of_a_claim_and_a_reward_after_a_lease_one_is_first(tmp_path: Path, kind: str) -> None:
    """Two routers see that a lease is over: at one a trainer claims the sample, at the other its reward is changed."""

    async def work(store: Store) -> None:
        routers = Routers(store)
        await routers.begin()
        for number in (1, 2):
            await routers.claim(number, f"over {number}")

        async def claim() -> None:
            assert await routers.claim(1) is None

        routers.saving.meanwhile = claim
        with pytest.raises(HandedOutError):
            await routers.reward(routers.here, {1: 0.5})
        assert await routers.reward(routers.here, {2: 0.5})
        assert await routers.claim(2) == 0.5
        assert routers.there.ledger.claim("over 2").taken == [sampled(2).key]  # type: ignore[union-attr]

    with_store(address_of(kind, tmp_path), work)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
def test_a_reward_of_a_session_that_a_claim_overtakes_is_refused(tmp_path: Path, kind: str) -> None:
    """The claim came before or after the session's log had the reward: no router knows, so the client hears of it."""

    async def work(store: Store) -> None:
        routers = Routers(store)
        for number in (1, 2):
            session = f"s{number}"
            key = number.to_bytes(16, "big")
            await routers.append(Joined(key=key, group=f"g{number}", size=1, session=session, time=0.0))
            await routers.append(MemberEnded(session=session, time=0.0))

        async def claimed_meanwhile() -> bool:
            await routers.claim(1)
            return True

        async def happen() -> bool:
            return True

        with pytest.raises(HandedOutError, match="session 's1'"):
            await reward_session(routers.here, "s1", b"{}", claimed_meanwhile)
        assert await reward_session(routers.here, "s2", b"{}", happen)
        await routers.there.lease("c2", 60)
        await routers.claim(2)
        assert await reward_session(routers.here, "s2", b"{}", happen), "its client lost the answer"
        with pytest.raises(HandedOutError, match="session 's2'"):
            await reward_session(routers.here, "s2", b'{"other":1}', happen)

    with_store(address_of(kind, tmp_path), work)


def test_a_reward_of_a_session_waits_for_a_store_that_is_away() -> None:
    class Away(MemoryJournal):
        async def read_on(self) -> None:
            raise StoreUnreachableError("away")

    async def happen() -> bool:
        return False

    assert asyncio.run(reward_session(Away(), "s", b"{}", happen)) is False
