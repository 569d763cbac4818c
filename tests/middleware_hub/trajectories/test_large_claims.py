"""Claims of thousands of samples: other requests have their turns in between, and nothing is done by halves."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from middleware_hub.spans.versions import VersionClock
from middleware_hub.trajectories import claims
from middleware_hub.trajectories.calls import TrajectoryCalls
from middleware_hub.trajectories.claims import ClaimRequest, Claims, result
from middleware_hub.trajectories.events import AnyEvent, Claimed, Sampled
from middleware_hub.trajectories.groups import Groups
from middleware_hub.trajectories.journal import MemoryJournal
from middleware_hub.trajectories.ledger import STEP
from middleware_hub.trajectories.samples import Built, GroupSample, Member, dropping
from middleware_hub.trajectories.settling import Settling

STEPS = 12


class Empty:
    """Lays out samples of nothing, without a pause."""

    async def built(self, tenant: str, sample: GroupSample, options: Mapping[str, Any]) -> Built | None:
        return Built([Raw(b"{}")], exact=True, versions=sample.versions)

    async def acknowledged(self, tenant: str, members: Sequence[Member]) -> None:
        pass


def filled(groups: int) -> MemoryJournal:
    """Return a journal with some steps of complete samples, in one group or in several."""
    journal, samples = MemoryJournal(), STEP * STEPS
    for number in range(samples):
        event = Sampled(
            key=number.to_bytes(16, "big"), root=b"", group=f"g{number % groups}", size=samples // groups,
            rollout=None, ended=True, parent=None, lora="", names=(f"n{number}",), inexact=False, versions=("1",),
            time=0.0,
        )  # fmt: skip
        journal.happen(event)
    return journal


async def turns(work: Any) -> tuple[Any, int]:
    """Return what comes of a piece of work, and how many turns another task has had in between."""
    count = 0

    async def others() -> None:
        nonlocal count
        while True:
            count += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    found = await work
    other.cancel()
    return found, count


@pytest.mark.parametrize("groups", [1, 2 * STEPS])
def test_others_have_turns_while_many_samples_are_claimed_and_acknowledged(groups: int) -> None:
    journal = filled(groups)
    claims, settling = Claims(Empty(), VersionClock(), Counter(), lambda: False), Settling(Empty(), Counter())

    async def work() -> None:
        found, had = await turns(claims.claim("", journal, ClaimRequest(groups=groups)))
        assert len(found["samples"]) == STEPS * STEP
        assert had >= 2.5 * STEPS, "they are chosen, named and noted in steps"
        count, had = await turns(settling.acknowledge("", journal, found["claim_id"]))
        assert count == STEPS * STEP
        assert had >= STEPS
        assert len(journal.ledger) == 0

    asyncio.run(work())


def test_others_have_turns_while_a_large_group_is_shown() -> None:
    journal, groups = filled(1), Groups()
    groups._journals["", ""] = journal
    show = TrajectoryCalls(groups, Empty(), VersionClock(), lambda: False, None, max_body_bytes=1).routes[
        "/trajectories"
    ]
    scope = {"type": "http", "method": "GET", "path": "/trajectories", "query_string": b"group=g0", "headers": []}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def work() -> None:
        _, had = await turns(show(scope, receive, send))
        assert had >= STEPS
        shown = json.loads(b"".join(message.get("body", b"") for message in sent))
        assert len(shown["samples"]) == STEPS * STEP

    asyncio.run(work())


def test_others_have_turns_while_many_samples_are_dropped() -> None:
    journal = filled(1)
    members = list(journal.ledger.groups["g0"].members.values())

    async def work() -> None:
        _, had = await turns(journal.append(dropping(members, "dropped", 0.0)))
        assert had >= STEPS
        assert len(journal.ledger) == 0

    asyncio.run(work())


@pytest.mark.parametrize("turns_before", [1, STEPS // 2])
def test_an_event_is_applied_whole_although_its_request_ends(turns_before: int) -> None:
    journal = filled(1)
    samples = tuple(one.taking() for one in list(journal.ledger.groups["g0"].samples()))
    event: AnyEvent = Claimed(claim="c", samples=samples, time=0.0)

    async def work() -> None:
        append = asyncio.create_task(journal.append(event))
        for _ in range(turns_before):
            await asyncio.sleep(0)
        append.cancel()
        with pytest.raises(asyncio.CancelledError):
            await append

    asyncio.run(work())
    held = len(getattr(journal.ledger.claim("c"), "held", ()))
    assert held == len(samples)


@pytest.mark.parametrize("most", [1, 30, 10**6])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_an_answer_in_pieces_is_the_same_answer(count: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "SEND_BYTES", most)
    samples = [{"id": number, "said": 'a "samples":[] b'} for number in range(count)]
    answer = {"claim_id": "c", "groups": [{"group_id": '"samples":[]', "samples": 2}], "samples": samples, "lost": []}
    written = {**answer, "samples": [Raw(msgspec.json.encode(one)) for one in samples]}
    whole = b"".join(asyncio.run(result(claims.in_pieces(written))))
    assert whole == msgspec.json.encode(answer)
    assert json.loads(whole) == answer
