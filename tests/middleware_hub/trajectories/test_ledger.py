"""Claims of samples that changed between the look of a router and its claim."""

from __future__ import annotations

import pytest

from middleware_hub.trajectories.events import Acknowledged, AnyEvent, Claimed, Dropped, Sampled
from middleware_hub.trajectories.ledger import Ledger


def sampled(number: int) -> Sampled:
    return Sampled(
        key=number.to_bytes(16, "big"), root=b"", group="g", size=None, rollout=None, ended=True, parent=None,
        lora="", names=("n",), inexact=False, versions=("1",), time=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    "meanwhile",
    [Acknowledged(claim="first", time=0.0), Dropped(keys=(sampled(1).key,), why="dropped", time=0.0)],
    ids=type,
)
def test_a_sample_that_is_done_is_not_taken_over(meanwhile: AnyEvent) -> None:
    """A router took the first claim for over, and claims its sample; meanwhile that is acknowledged, or dropped."""
    ledger = Ledger()
    for number, event in enumerate((sampled(1), sampled(2)), 1):
        ledger.apply(number, event)
    one = ledger.samples(ledger.groups["g"])[0]
    ledger.apply(3, Claimed(claim="first", samples=(ledger.taking(one),), time=0.0))
    (late,) = (ledger.taking(held) for held in ledger.claim("first").held.values())  # type: ignore[union-attr]
    ledger.apply(4, meanwhile)
    ledger.apply(5, Claimed(claim="second", samples=(late,), time=0.0))
    second = ledger.claim("second")
    assert second is not None
    assert second.held == {}
