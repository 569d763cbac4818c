"""The figures of a run, counted from chains."""

from __future__ import annotations

from typing import Any

import pytest

from middleware_hub.inspector.conversations.chain import Chain
from middleware_hub.inspector.reports import run
from middleware_hub.inspector.reports.drift import ChainDrift, Drifted
from middleware_hub.inspector.reports.run import RunFigures
from middleware_hub.spans.chain import TokenSpan, links, pack_ids
from tests.middleware_hub.toy import toy_vocabulary


def span(parent: TokenSpan | None, ids: list[int], version: str | None = "1") -> TokenSpan:
    take = 0 if parent is None else parent.count
    return TokenSpan(parent, take, 0, pack_ids(ids), 0, versions=version)


def chain(last: TokenSpan) -> Chain:
    return Chain(list(links(last, last.count))[::-1])


def counted(
    found: list[tuple[Chain, ChainDrift | None]], moments: dict[TokenSpan, float] | None = None
) -> dict[str, Any]:
    made = RunFigures(toy_vocabulary(), lambda _: 0)
    for number, (one, drift) in enumerate(found):
        made.add(number, one, drift, [], key=lambda one: one, moment=(moments or {}).get if moments else lambda _: 0.0)  # type: ignore[arg-type]
    return made.report(progress=1.0)


def test_a_prompt_reuses_the_replies_in_it_with_their_context() -> None:
    first = span(span(None, [1, 2, 3], None), [4, 5])
    second = span(span(first, [6], None), [7])
    report = counted([(chain(first), None), (chain(second), None)])
    assert report["reuse"] == {"prompt_tokens": 3 + 6, "reused_tokens": 5}
    assert (report["tokens"], report["sampled_tokens"]) == (7, 3)


def test_a_difference_over_two_replies_is_one_pair() -> None:
    """A reply that is continued at once: its end and the beginning of the next one become other tokens together."""
    first = span(span(None, [1, 2], None), [4, 5])
    whole = chain(span(first, [5, 6]))
    drift = ChainDrift(whole, [Drifted(3, 5, (7,), "ab")])
    found = counted([(whole, drift)])["drift"]
    assert (found["drifted_tokens"], [pair["count"] for pair in found["pairs"]]) == (2, [1])
    again = counted([(chain(first), None), (whole, drift)])["drift"]
    assert (again["drifted_tokens"], [pair["count"] for pair in again["pairs"]]) == (1, [1])


def test_a_long_run_has_fewer_and_longer_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MOST_BUCKETS", 2)
    spans = [span(None, [1] * (1 + number)) for number in range(40)]
    report = counted([(chain(one), None) for one in spans], {one: 10.0 * number for number, one in enumerate(spans)})
    over_time = report["sampled_over_time"]
    assert len(over_time) <= 2
    assert sum(one["tokens"] for one in over_time) == report["sampled_tokens"] == sum(range(1, 41))
    assert all(one["time"] % report["bucket_seconds"] == 0 for one in over_time)
