"""Claims that are cut off behind their entry in the log, before any trainer has heard of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from middleware_hub.persistence.saving import Saving
from middleware_hub.spans.versions import VersionClock
from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.trajectories.claims import ClaimRequest, Claims
from middleware_hub.trajectories.events import AnyEvent, Claimed, Released, Sampled
from middleware_hub.trajectories.journal import MemoryJournal, StoreJournal
from middleware_hub.trajectories.samples import Built, GroupSample, Member
from tests.middleware_hub.store.troubled import TroubledStore
from tests.support.dictionary_store import DictionaryStore


class CutOff(MemoryJournal):
    """Something goes wrong once, when a claim (or `at`) has just been appended."""

    def __init__(self, error: BaseException, at: type[AnyEvent] = Claimed) -> None:
        super().__init__()
        self._error: BaseException | None = error
        self._at = at

    async def append(self, event: AnyEvent) -> None:
        await super().append(event)
        if isinstance(event, self._at) and self._error is not None:
            error, self._error = self._error, None
            raise error


class Empty:
    """Lays out samples of nothing; some are lost."""

    def __init__(self, *lost: bytes) -> None:
        self._lost = lost

    async def built(self, tenant: str, sample: GroupSample, options: Mapping[str, Any]) -> Built | None:
        if sample.id in self._lost:
            return None
        return Built([Raw(b"{}")], exact=True, versions=sample.versions)

    async def acknowledged(self, tenant: str, members: Sequence[Member]) -> None:
        raise AssertionError


def sampled(key: bytes, size: int = 1) -> Sampled:
    return Sampled(
        key=key, root=b"", group="g", size=size, rollout=None, ended=True, parent=None, lora="", names=(key.decode(),),
        inexact=False, versions=("1",), time=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("error", [asyncio.CancelledError(), StoreUnreachableError("it is away")], ids=type)
def test_a_claim_without_an_answer_holds_nothing(error: BaseException) -> None:
    """Its trainer left in that instant, or the store did: others need not wait for the end of a lease of a day."""
    journal = CutOff(error)
    journal.happen(sampled(b"1"))
    claims = Claims(Empty(), VersionClock(), Counter(), lambda: False)

    async def work() -> None:
        with pytest.raises(type(error)):
            await claims.claim("", journal, ClaimRequest(lease_seconds=86_400))
        assert journal.ledger.groups["g"].sealed, "it is in the log"
        found = await claims.claim("", journal, ClaimRequest())
        assert [msgspec.json.decode(one)["id"] for one in found["samples"]] == [b"1".hex()]

    asyncio.run(work())


def test_a_claim_that_is_cut_off_when_it_gives_a_sample_back_gives_all_back() -> None:
    """One of two samples was lost, and the trainer left before it was told of the other one."""
    journal = CutOff(asyncio.CancelledError(), Released)
    journal.happen(sampled(b"1", 2))
    journal.happen(sampled(b"2", 2))
    claims = Claims(Empty(b"1"), VersionClock(), Counter(), lambda: False)

    async def work() -> None:
        with pytest.raises(asyncio.CancelledError):
            await claims.claim("", journal, ClaimRequest(lease_seconds=86_400, allow_partial=True))
        found = await claims.claim("", journal, ClaimRequest(allow_partial=True))
        assert [msgspec.json.decode(one)["id"] for one in found["samples"]] == [b"2".hex()]

    asyncio.run(work())


class Away(StoreJournal):
    """The store stops answering when a claim has just been appended."""

    def __init__(self, store: TroubledStore, saving: Saving) -> None:
        super().__init__(saving, "groups//")
        self._troubled = store

    async def append(self, event: AnyEvent) -> None:
        await super().append(event)
        if isinstance(event, Claimed):
            self._troubled.appends = self._troubled.reads = "raises"


class LostOnTheWay(Empty):
    """The store stops answering when samples are laid out."""

    def __init__(self, store: TroubledStore, saving: Saving) -> None:
        super().__init__()
        self._troubled, self._saving = store, saving

    async def built(self, tenant: str, sample: GroupSample, options: Mapping[str, Any]) -> Built | None:
        self._troubled.appends = self._troubled.reads = "raises"
        await self._saving.store.read("any")
        raise AssertionError


@pytest.mark.parametrize("laid_out", [False, True])
def test_what_a_claim_holds_is_free_again_when_the_store_is_back(laid_out: bool) -> None:
    """A store that was away for a second would keep the samples from all trainers to the end of a lease of a day."""

    async def work() -> None:
        store = TroubledStore(DictionaryStore())
        saving = Saving(store)
        journal = StoreJournal(saving, "groups//")
        await journal.append(sampled(b"1"))
        broken = LostOnTheWay(store, saving) if laid_out else Empty()
        claims = Claims(broken, VersionClock(), Counter(), lambda: False)
        with pytest.raises(StoreUnreachableError):
            await claims.claim("", journal if laid_out else Away(store, saving), ClaimRequest(lease_seconds=86_400))
        store.mend()
        async with asyncio.timeout(60):
            while saving.away or not await saving.hand_over():  # noqa: ASYNC110  # it is no event
                await asyncio.sleep(0.01)
        found = await Claims(Empty(), VersionClock(), Counter(), lambda: False).claim("", journal, ClaimRequest())
        assert [msgspec.json.decode(one)["id"] for one in found["samples"]] == [b"1".hex()]
        await saving.close()
        await saving.store.close()

    asyncio.run(work())
