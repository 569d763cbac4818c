"""What of a reply is remembered, and what `x-radix-recorded` says of all replies to one request."""

from __future__ import annotations

import json

import pytest

from middleware_hub.radix.judge import ENGINE_MISMATCH, Expectation, Judge, Verdict, summary
from middleware_hub.spans.chain import SpanFlag
from middleware_hub.spans.versions import VersionClock
from router.engines.form.reply import Reply
from router.engines.form.stream import StreamedReply
from tests.middleware_hub.toy import A, B, toy_vocabulary

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


@pytest.mark.parametrize("finish", [None, "length"])
@pytest.mark.parametrize(
    ("readings", "fits"), [(("a", "ab"), "ab"), (("", "ab"), "ab"), (("ab", ""), "ab"), (("a", "abb"), "abb")], ids=str
)
def test_of_two_readings_the_longer_one_fits_a_stream_without_its_end(
    finish: str | None, readings: tuple[str, str], fits: str
) -> None:
    """Its last characters may have been held back. Those of a finished reply were not."""
    ids = [A, B, B]
    reply = Reply(ids, readings[0], None, None, "x", 1, 3, "default", None, finish, None, other_text=readings[1])
    asked = Expectation(prompt_tokens=1, skips_special=True, logprobs=False, rid="x", sent_at=0, steps=0)
    judgement = Judge(toy_vocabulary(), VersionClock()).judge(asked, reply, "http://worker")
    exact = finish is None or fits == "abb"
    assert judgement.verdict.outcome == ("exact" if exact else "inexact")
    assert judgement.verdict.text == (fits if exact else readings[0])


@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize(
    ("versions", "certain"),
    [("2222", True), ("1122", False), ("2212", False), ("1222", False), ("-222", True), ("222-", True)],
)
def test_a_stream_whose_events_are_of_several_versions_is_uncertain(
    versions: str, certain: bool, cumulative: bool
) -> None:
    """Also if nothing else is known of its worker, as with its first reply."""
    stream = StreamedReply()
    for at, version in enumerate(versions, 1):
        ids, logprobs = [A] * at, [[-1.0, A, None]] * at
        meta = {"id": "x", "prompt_tokens": 1, "completion_tokens": at, "finish_reason": None}
        meta |= {"output_token_logprobs": logprobs if cumulative else logprobs[-1:]}
        meta |= {} if version == "-" else {"weight_version": version}
        if at == len(versions):
            meta["finish_reason"] = {"type": "length", "length": at}
        text, sent = ("a" * at, ids) if cumulative else ("a", ids[-1:])
        event = json.dumps({"text": text, "output_ids": sent, "meta_info": meta}, separators=(",", ":"))
        stream.feed(event.encode())
    reply = stream.reply()
    assert reply is not None
    asked = Expectation(prompt_tokens=1, skips_special=True, logprobs=True, rid="x", sent_at=0, steps=0)
    judgement = Judge(toy_vocabulary(), VersionClock()).judge(asked, reply, "http://worker")
    assert judgement.verdict.outcome == "exact"
    assert judgement.reply is not None
    assert bool(judgement.reply.flags & SpanFlag.UNCERTAIN) is not certain
