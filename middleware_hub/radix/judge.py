"""The judge of replies: what part of a worker's reply may be remembered, and a verdict: rules 1, 6 and 9 of exactness."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

import msgspec

from middleware_hub.radix.node import Generation
from middleware_hub.radix.records import SampledReply
from middleware_hub.spans.chain import SpanFlag, Versions, pack_ids, pack_logprobs
from middleware_hub.spans.versions import VersionClock, WorkerVersions
from middleware_hub.tokenizer.alignment import Alignment, align_reply
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.engines.form.reply import Reply

RECORDED = b"x-radix-recorded"
"""The header that says what became of the replies to a request."""

ENGINE_MISMATCH = "engine_mismatch"
UNREADABLE = "unreadable reply"
WORKER_ERROR = "worker error"
NO_REPLY = "no reply"
INTERNAL_ERROR = "internal error"


class Verdict(msgspec.Struct):
    """The verdict on a reply.

    Attributes:
        outcome: `exact`, `inexact` (recorded, but its ids do not explain its text) or `no`.
        reason: a label for a counter; empty for `exact`.
        detail: what was wrong, for a person.
        generation: the reply as it was recorded in a tree.
        text: the reply's text, as it was recorded.
        saving: whether the store has acknowledged it, when that is known; None if it is not saved.
    """

    outcome: str
    reason: str = ""
    detail: str = ""
    generation: Generation | None = None
    text: str = ""
    saving: Awaitable[bool] | None = None

    @property
    def level(self) -> int:
        """How severe it is in the log. An empty reply or an error of a worker is not unusual.

        Where there is no reply at all, the proxy has logged why, or the router has refused the request: a line about each
        would fill the log of a router without workers.
        """
        if self.reason in (ENGINE_MISMATCH, UNREADABLE, INTERNAL_ERROR):
            return logging.WARNING
        return logging.DEBUG if self.reason == NO_REPLY and not self.detail else logging.INFO

    @property
    def why(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason

    @property
    def header(self) -> str:
        """The value of `x-radix-recorded`."""
        return f"no; {self.why}" if self.outcome == "no" else self.outcome


class Expectation(msgspec.Struct, frozen=True):
    """The request that a reply must fit, and the state when it was sent.

    Attributes:
        prompt_tokens: the number of prompt tokens that were sent.
        skips_special: whether special tokens are left out of the text.
        logprobs: whether the request asks the worker for logprobs.
        rid: the client's request id, if the worker used it for this generation.
        sent_at: the moment at which it was sent, for `WorkerVersions`.
        steps: how often the current weight version had changed by then.
        experts_from: the first token of which the worker was asked for the experts.
    """

    prompt_tokens: int
    skips_special: bool
    logprobs: bool
    rid: str | None
    sent_at: int
    steps: int
    experts_from: int = 0


class Judgement(msgspec.Struct, frozen=True):
    """A verdict, and what may be remembered of the reply, if anything may."""

    verdict: Verdict
    reply: SampledReply | None = None


class Judge:
    """Compares replies with what was asked, and finds the weights they come from. It keeps no state except the weights."""

    def __init__(self, vocabulary: Vocabulary, clock: VersionClock) -> None:
        self.vocabulary = vocabulary
        self.clock = clock
        self.workers = WorkerVersions()

    def judge(self, asked: Expectation, reply: Reply, worker: str) -> Judgement:
        """Return the judgement on a worker's reply, or on the part of it that has come."""
        if reply.finish_type == "abort" and isinstance(reply.status, int) and 400 <= reply.status < 500:
            # SGLang refuses a stream after it has begun. What it sampled follows a prompt of its own, the one id 0.
            return Judgement(Verdict("no", WORKER_ERROR, f"status {reply.status}"))
        fault = reply.fault(asked.prompt_tokens, logprobs_asked=asked.logprobs)
        if fault is not None:
            return Judgement(Verdict("no", ENGINE_MISMATCH, fault))
        if not reply.ids:
            return Judgement(Verdict("no", "no tokens were sampled", reply.finish_type or ""))
        self.vocabulary.learn(reply.ids)
        alignment, text = self._align(reply, asked.skips_special)
        versions, certain = self._versions(reply, worker, asked.sent_at)
        certain = certain and not reply.mixed  # weights that sample read what others have computed
        sampled = SampledReply(
            ids=pack_ids(reply.ids),
            text=text,
            versions=versions,
            logprobs=None if reply.logprobs is None else pack_logprobs(reply.checked_logprobs()),
            visible=alignment.visible,
            flags=alignment.flags if certain else alignment.flags | SpanFlag.UNCERTAIN,
            ends=alignment.ends,
            tail=alignment.tail,
            late=asked.steps != self.clock.steps,
            request_ids=tuple(dict.fromkeys(filter(None, (asked.rid, reply.request_id)))),
            finish=reply.finish_type or "abort",  # the stream broke off, or its client left
            told=reply.told,
            experts_from=asked.experts_from,
        )
        if alignment.flags & SpanFlag.MISMATCH:
            wrong = "the ids do not decode to the text: is --tokenizer-path the worker's own?"
            return Judgement(Verdict("inexact", ENGINE_MISMATCH, wrong, text=text), sampled)
        return Judgement(Verdict("exact", text=text), sampled)

    def _versions(self, reply: Reply, worker: str, sent_at: int) -> tuple[Versions, bool]:
        """Return the version of every token, and whether it is certain.

        `weight_version` alone is the version at the end of the request. All tokens have it unless the weights changed, as
        earlier events of a stream may show.
        """
        changed = reply.versions is None and (
            reply.updated or self.workers.changed_since(worker, reply.version, sent_at)
        )
        self.workers.observe(worker, reply.version)
        if reply.versions is None:
            return reply.version, not changed
        if len(reply.versions) == 1 and reply.versions[0][1:] == (0, len(reply.ids)):
            return reply.versions[0][0], True
        begin = 0
        for _, run_begin, run_end in reply.versions:
            if run_begin != begin or run_end < run_begin:
                return reply.version, False
            begin = run_end
        if begin != len(reply.ids):
            return reply.version, False
        kept = [(version, end) for version, run_begin, end in reply.versions if end > run_begin]
        return (kept[0][0] if len(kept) == 1 else tuple(kept)), True

    def _align(self, reply: Reply, skips_special: bool) -> tuple[Alignment, str]:
        """Return how the ids lie over the text, with the text. A stream can have two readings; the one that fits counts."""
        for text in (reply.text, reply.other_text):
            if text is not None:
                alignment = align_reply(
                    self.vocabulary, reply.ids, text, skips_special=skips_special, matched=reply.matched
                )
                if not alignment.flags & SpanFlag.MISMATCH:
                    return alignment, text
        if reply.finish_type is None:
            return self._align_beginning(reply, skips_special)
        return Alignment(SpanFlag.WHOLE | SpanFlag.MISMATCH, None, len(reply.ids)), reply.text

    def _align_beginning(self, reply: Reply, skips_special: bool) -> tuple[Alignment, str]:
        """Do the same for a stream without its end, whose text may lack what the worker held back. The longest one counts."""
        texts = [reply.text] if reply.other_text is None else [reply.text, reply.other_text]
        for text in sorted(texts, key=len, reverse=True):
            alignment = align_reply(
                self.vocabulary, reply.ids, text, skips_special=skips_special, matched=reply.matched, unfinished=True
            )
            if not alignment.flags & SpanFlag.MISMATCH:
                return alignment, text
        return alignment, reply.text


def summary(verdicts: list[Verdict]) -> str:
    """Return the value of `x-radix-recorded` for all replies to one request."""
    headers = {verdict.header for verdict in verdicts}
    if len(headers) == 1:
        return headers.pop()
    exact = sum(verdict.outcome == "exact" for verdict in verdicts)
    kept = sum(verdict.outcome != "no" for verdict in verdicts)
    return f"{'inexact' if kept else 'no'}; {exact} of {len(verdicts)} replies are exact"
