"""Routers whose clocks differ by ten minutes: incomplete groups are handed out neither early nor never."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from middleware_hub.spans.versions import VersionClock
from middleware_hub.store.protocol import Batch
from middleware_hub.store.redis.store import RedisStore
from middleware_hub.trajectories.claims import ClaimRequest, Claims
from middleware_hub.trajectories.events import Sampled
from middleware_hub.trajectories.journal import StoreJournal
from middleware_hub.trajectories.samples import Built, GroupSample
from tests.support.redis_server import empty_redis

PARTIAL_AFTER = 300.0


class Empty:
    """Lays out samples of nothing."""

    async def built(self, tenant: str, sample: GroupSample, options: Any) -> Built | None:
        return Built([], exact=True, versions=sample.versions)

    async def acknowledged(self, tenant: str, members: Any) -> None:
        raise AssertionError


class Saves:
    """Appends at once."""

    def __init__(self, store: RedisStore) -> None:
        self.store = store

    async def save(self, batch: Batch) -> bool:
        await self.store.append(batch)
        return True

    async def write(self, batch: Batch) -> None:
        await self.store.append(batch)


async def journal_of(address: str, ahead: float) -> tuple[RedisStore, StoreJournal]:
    """Return the journal of a router whose clock is ahead of the others, and which has announced itself."""
    store = RedisStore(address, clock=lambda: time.time() + ahead)
    await store.open("toy")
    await store.announce(f"router/{ahead}", b"", 60)
    return store, StoreJournal(Saves(store), "groups/a/b")


@pytest.mark.parametrize("ahead", [(0, 600), (0, -600), (600, 0), (-600, 0), (-600, 600), (600, -600)])
@pytest.mark.parametrize("age", [0.0, PARTIAL_AFTER + 60])
def test_an_incomplete_group_is_handed_out_when_it_is_old_enough(ahead: tuple[float, float], age: float) -> None:
    async def work() -> None:
        address = empty_redis()
        (here, sampling), (there, claiming) = [await journal_of(address, one) for one in ahead]
        try:
            sampled = Sampled(
                key=b"1" * 16, root=b"", group="g", size=2, rollout=None, ended=True, parent=None, lora="",
                names=("n",), inexact=False, versions=("1",), time=sampling.now() - age,
            )  # fmt: skip
            await sampling.append(sampled)
            claims = Claims(Empty(), VersionClock(), Counter(), lambda: False)
            wanted = ClaimRequest(allow_partial=True, partial_after_seconds=PARTIAL_AFTER)
            found = await claims.claim("", claiming, wanted)
            assert len(found["samples"]) == (age > PARTIAL_AFTER)
        finally:
            await here.close()
            await there.close()

    asyncio.run(work())
