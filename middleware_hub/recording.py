"""From what a worker answered to what is remembered, with a verdict: rules 1, 6 and 9 of exactness."""

from __future__ import annotations

from dataclasses import dataclass

from middleware_hub.alignment import align_reply
from middleware_hub.prompting import Prompt
from middleware_hub.radix_node import Generation
from middleware_hub.radix_tree import RadixTree, SampledReply
from middleware_hub.spans import SpanFlag, Versions, pack_ids, pack_logprobs
from middleware_hub.tokenizer import Tokenizer
from router.sglang import GenerateRequest, Reply

ENGINE_MISMATCH = "engine_mismatch"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a reply.

    Attributes:
        outcome: `exact`, `inexact` (recorded, but its ids do not explain its text) or `no`.
        reason: a word for a counter; empty for `exact`.
        detail: what exactly was wrong, for a person.
    """

    outcome: str
    reason: str = ""
    detail: str = ""
    generation: Generation | None = None
    text: str = ""
    """The reply's text, as it was recorded."""

    @property
    def header(self) -> str:
        """The value of `x-radix-recorded`."""
        if self.outcome != "no":
            return self.outcome
        return f"no; {self.reason}: {self.detail}" if self.detail else f"no; {self.reason}"


def record(
    tree: RadixTree,
    tokenizer: Tokenizer,
    prompt: Prompt,
    request: GenerateRequest,
    reply: Reply,
    *,
    logprobs_asked: bool,
    sent_under: str | None,
) -> Verdict:
    """Check a reply and remember it.

    Args:
        tree: where to.
        tokenizer: what the ids should spell.
        prompt: what was sent; its match is still pinned.
        request: what the client asked for.
        reply: what came, or what has come of it.
        logprobs_asked: whether the worker was told to send logprobs.
        sent_under: the current weight version when the request was sent.
    """
    fault = reply.fault(len(prompt.ids), logprobs_asked=logprobs_asked)
    if fault is not None:
        return Verdict("no", ENGINE_MISMATCH, fault)
    if not reply.ids:
        return Verdict("no", "no tokens were sampled", "" if reply.finish_type is None else reply.finish_type)
    tokenizer.learn(reply.ids)
    text = reply.text
    alignment = align_reply(
        tokenizer.vocabulary, reply.ids, text, skips_special=request.skips_special, matched=reply.matched
    )
    if alignment.flags & SpanFlag.MISMATCH and reply.other_text is not None:
        other = align_reply(
            tokenizer.vocabulary,
            reply.ids,
            reply.other_text,
            skips_special=request.skips_special,
            matched=reply.matched,
        )
        if not other.flags & SpanFlag.MISMATCH:
            alignment, text = other, reply.other_text
    versions, certain = _versions(tree, reply, sent_under)
    generation = tree.record(
        prompt.match,
        prompt.context,
        SampledReply(
            ids=pack_ids(reply.ids),
            text=text,
            versions=versions,
            logprobs=None if reply.logprobs is None else pack_logprobs([value or 0.0 for value in reply.logprobs]),
            visible=alignment.visible,
            flags=alignment.flags if certain else alignment.flags | SpanFlag.UNCERTAIN,
            ends=alignment.ends,
            tail=alignment.tail,
            request_ids=tuple(dict.fromkeys(i for i in (request.rid, reply.request_id) if i)),
            aborted=reply.finish_type == "abort",
        ),
    )
    if alignment.flags & SpanFlag.MISMATCH:
        return Verdict("inexact", ENGINE_MISMATCH, "the ids do not decode to the text", generation, text)
    return Verdict("exact", generation=generation, text=text)


def _versions(tree: RadixTree, reply: Reply, sent_under: str | None) -> tuple[Versions, bool]:
    """The version of every token, and whether it is certain.

    `weight_version` alone is the one at the end of the request; all tokens are of it unless the weights changed meanwhile.
    """
    runs = reply.versions
    if runs is None:
        changed = sent_under is not None and tree.clock.order(reply.version) > tree.clock.order(sent_under)
        return reply.version, not changed
    begin = 0
    for _, run_begin, run_end in runs:
        if run_begin != begin or run_end < run_begin:
            return reply.version, False
        begin = run_end
    if begin != len(reply.ids):
        return reply.version, False
    kept = [(version, end) for version, run_begin, end in runs if end > run_begin]
    return (kept[0][0] if len(kept) == 1 else tuple(kept)), True
