"""Claims that are cut off behind their entry in the log, before any trainer has heard of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from middleware_hub.spans.versions import VersionClock
from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.trajectories.claims import Claims, Wanted
from middleware_hub.trajectories.events import AnyEvent, Claimed, Sampled
from middleware_hub.trajectories.journal import MemoryJournal
from middleware_hub.trajectories.samples import Built, Member, Sample


class CutOff(MemoryJournal):
    """Something goes wrong once, when a claim has just been appended."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error: BaseException | None = error

    async def append(self, event: AnyEvent) -> None:
        await super().append(event)
        if isinstance(event, Claimed) and self._error is not None:
            error, self._error = self._error, None
            raise error


class Empty:
    """Lays out samples of nothing."""

    async def built(self, tenant: str, sample: Sample, options: Mapping[str, Any]) -> Built | None:
        return Built([Raw(b"{}")], exact=True, versions=sample.versions)

    async def acknowledged(self, tenant: str, members: Sequence[Member]) -> None:
        raise AssertionError


@pytest.mark.parametrize("error", [asyncio.CancelledError(), StoreUnreachableError("it is away")], ids=type)
def test_a_claim_without_an_answer_holds_nothing(error: BaseException) -> None:
    """Its trainer left in that instant, or the store did: others need not wait for the end of a lease of a day."""
    journal = CutOff(error)
    sampled = Sampled(
        key=b"1", root=b"", group="g", size=1, rollout=None, ended=True, parent=None, lora="", names=("n",),
        inexact=False, versions=("1",), time=0.0,
    )  # fmt: skip
    journal.happen(sampled)
    claims = Claims(Empty(), VersionClock(), Counter(), lambda: False)

    async def work() -> None:
        with pytest.raises(type(error)):
            await claims.claim("", journal, Wanted(lease_seconds=86_400))
        assert journal.ledger.groups["g"].sealed, "it is in the log"
        found = await claims.claim("", journal, Wanted())
        assert [msgspec.json.decode(one)["id"] for one in found["samples"]] == [b"1".hex()]

    asyncio.run(work())
