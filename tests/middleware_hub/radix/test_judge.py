"""What `x-radix-recorded` says of all replies to one request."""

from __future__ import annotations

import pytest

from middleware_hub.radix.judge import ENGINE_MISMATCH, Verdict, summary

EXACT, INEXACT = Verdict("exact"), Verdict("inexact", ENGINE_MISMATCH, "why")
NO, OTHER = Verdict("no", "no tokens were sampled", "abort"), Verdict("no", ENGINE_MISMATCH, "2 logprobs, 3 ids")


@pytest.mark.parametrize(
    ("verdicts", "told"),
    [
        ([EXACT], "exact"),
        ([EXACT, EXACT], "exact"),
        ([INEXACT], "inexact"),
        ([NO], "no; no tokens were sampled: abort"),
        ([NO, NO], "no; no tokens were sampled: abort"),
        ([EXACT, INEXACT], "inexact; 1 of 2 replies are exact"),
        ([EXACT, NO, EXACT], "inexact; 2 of 3 replies are exact"),
        ([INEXACT, NO], "inexact; 0 of 2 replies are exact"),
        ([NO, OTHER], "no; 0 of 2 replies are exact"),
    ],
)
def test_the_header_is_no_better_than_its_worst_reply(verdicts: list[Verdict], told: str) -> None:
    """`no` only where none of them is recorded, `exact` only where all of them are."""
    assert summary(verdicts) == told
