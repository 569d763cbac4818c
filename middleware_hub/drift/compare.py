"""Compares sampled ids with those of the same text, encoded again.

Two ways of encoding are in use, and both are compared. `whole` encodes the conversation at its end, and takes the tokens that
lie in the reply. `alone` encodes each reply by itself. A sampled token is trained on only if it is among the new ones, in
order:

    sampled   [ four][ty][-two][<|im_end|>]
    whole     [ forty][-two]                       2 of 4 changed, 1 of them without a text; 1 new token that was not sampled
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby

from tokenizers import Tokenizer as Backend

from middleware_hub.drift.log import LoggedReply


@dataclass(frozen=True)
class Drift:
    """The result for one reply.

    Attributes:
        reply: as it was logged.
        sampled: its tokens.
        hidden: tokens at its end that its text lacks: an EOS, a stop string. No text can bring them back.
        whole_changed, whole_new: tokens that the encoding of the whole text lacks, and those that it has instead.
        alone_changed, alone_new: the same for the reply's own encoding.
        left_out: whether the conversation's last text no longer begins with this reply: then nothing of it is trained on.
        mismatch: whether the ids do not spell the text at all: another tokenizer, or another reply.
        example: the first difference, as the pieces that were sampled and those that were encoded.
    """

    reply: LoggedReply
    sampled: int
    hidden: int
    whole_changed: int
    whole_new: int
    alone_changed: int
    alone_new: int
    left_out: bool
    mismatch: bool
    example: tuple[str, str]


def drifts(replies: Sequence[LoggedReply], backend: Backend) -> Iterator[Drift]:
    """Yield the result for each reply, conversation by conversation."""
    for last, members in _by_last_text(replies):
        encoded = backend.encode(last, add_special_tokens=False)
        for reply, left_out in members:
            begin, end = len(reply.prompt), len(reply.whole)
            whole = encoded
            if left_out:  # it is compared with its own text: that is what would have been trained on
                whole = backend.encode(reply.whole, add_special_tokens=False)
            inside = [
                token
                for token, (low, high) in zip(whole.ids, whole.offsets, strict=True)
                if (low < end and high > begin) or begin <= low == high < end
            ]
            alone = backend.encode(reply.text, add_special_tokens=False).ids
            yield _drift(reply, inside, alone, backend, left_out=left_out)


def _by_last_text(replies: Sequence[LoggedReply]) -> Iterator[tuple[str, list[tuple[LoggedReply, bool]]]]:
    """Yield the last text of each conversation, with its replies and whether each one is no longer in it."""
    named = sorted((one for one in replies if one.conversation), key=lambda one: one.conversation)
    for _, group in groupby(named, key=lambda one: one.conversation):
        members = sorted(group, key=lambda one: one.line)
        last = members[-1].whole
        yield last, [(one, not last.startswith(one.whole)) for one in members]
    # Without names: a text belongs to the next longer text that begins with it. Sorted, texts that begin alike are neighbours.
    chain: list[LoggedReply] = []
    for one in sorted((one for one in replies if not one.conversation), key=lambda one: one.whole):
        if chain and not one.whole.startswith(chain[-1].whole):
            yield chain[-1].whole, [(member, False) for member in chain]
            chain = []
        chain.append(one)
    if chain:
        yield chain[-1].whole, [(member, False) for member in chain]


def _drift(
    reply: LoggedReply, whole: Sequence[int], alone: Sequence[int], backend: Backend, *, left_out: bool
) -> Drift:
    in_whole, example = _kept(reply.ids, whole, backend)
    in_alone, _ = _kept(reply.ids, alone, backend)
    spelled = backend.decode(reply.ids, skip_special_tokens=False)
    bare = backend.decode(reply.ids, skip_special_tokens=True)
    return Drift(
        reply=reply,
        sampled=len(reply.ids),
        hidden=_hidden(reply, backend),
        whole_changed=len(reply.ids) - in_whole,
        whole_new=len(whole) - in_whole,
        alone_changed=len(reply.ids) - in_alone,
        alone_new=len(alone) - in_alone,
        left_out=left_out,
        mismatch=not any(one.strip().startswith(reply.text.strip()[:40]) for one in (spelled, bare)),
        example=example,
    )


def _kept(sampled: Sequence[int], encoded: Sequence[int], backend: Backend) -> tuple[int, tuple[str, str]]:
    """Return how many sampled tokens are in an encoding, in order, and the first difference."""
    matcher = SequenceMatcher(None, sampled, encoded, autojunk=False)
    codes = matcher.get_opcodes()
    kept = sum(end - begin for kind, begin, end, _, _ in codes if kind == "equal")
    for kind, low, high, begin, end in codes:
        if kind == "replace":
            return kept, (_pieces(sampled[low:high], backend), _pieces(encoded[begin:end], backend))
    return kept, ("", "")


def _pieces(ids: Iterable[int], backend: Backend) -> str:
    return " ".join(repr(backend.decode([one], skip_special_tokens=False)) for one in ids)


def _hidden(reply: LoggedReply, backend: Backend) -> int:
    """Return how many tokens at the end contribute nothing to the text."""
    count = 0
    while count < len(reply.ids):
        shorter = backend.decode(reply.ids[: len(reply.ids) - count - 1], skip_special_tokens=False)
        if not shorter.startswith(reply.text):
            break
        count += 1
    return count
