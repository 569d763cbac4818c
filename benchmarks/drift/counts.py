"""Counts the sampled tokens that encoding the text again replaces, with intervals. No model and no engine are needed.

Two ways of encoding again are counted, as `tito-router drift` does: each reply by itself, and the whole text at its end. A
token that has no text, as an end-of-sequence token, is lost in both, and is not counted here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer

from middleware_hub.drift.cli import LoggedReply, drifts

LENGTHS: Final = (16, 32, 64, 128, 256)
"""Tokens of a rollout up to which it is counted too, as if it had ended there."""
REPLACED: Final = "\ufffd"
_ROUNDS: Final = 2_000


@dataclass(frozen=True)
class Share:
    """A share with its interval of 95%; NaN of nothing."""

    part: int
    whole: int
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.part / self.whole if self.whole else math.nan


@dataclass(frozen=True)
class Change:
    """Of one rollout: sampled tokens with a text, and those of them that encoding again does not give back."""

    sampled: int
    alone: int
    whole: int
    example: tuple[str, str] = ("", "")


def wilson(part: int, whole: int) -> Share:
    """Return a share of independent trials with Wilson's score interval."""
    if not whole:
        return Share(0, 0, math.nan, math.nan)
    z, p = 1.959964, part / whole
    middle = (p + z * z / (2 * whole)) / (1 + z * z / whole)
    reach = z * math.sqrt(p * (1 - p) / whole + z * z / (4 * whole * whole)) / (1 + z * z / whole)
    low = 0.0 if not part else middle - reach  # both are exact at the ends
    high = 1.0 if part == whole else middle + reach
    return Share(part, whole, low, high)


def pooled(pairs: Sequence[tuple[int, int]], seed: int = 0) -> Share:
    """Return the share of (part, whole), added up. The interval draws rollouts anew, as tokens of one are not independent.

    If no rollout has a part, drawing anew says nothing: the upper bound is Wilson's, which takes tokens as independent.
    """
    part, whole = sum(one for one, _ in pairs), sum(one for _, one in pairs)
    if not whole:
        return Share(0, 0, math.nan, math.nan)
    if not part:
        return Share(0, whole, 0.0, wilson(0, whole).high)
    chance = random.Random(seed)
    found = []
    for _ in range(_ROUNDS):
        drawn = chance.choices(pairs, k=len(pairs))
        found.append(sum(one for one, _ in drawn) / max(sum(one for _, one in drawn), 1))
    found.sort()
    return Share(part, whole, found[int(0.025 * _ROUNDS)], found[int(0.975 * _ROUNDS)])


def cut(reply: LoggedReply, length: int, tokenizer: Tokenizer) -> LoggedReply | None:
    """Return the reply as if it had ended after so many tokens, or at a whole character before; None if it is shorter."""
    if len(reply.ids) < length:
        return None
    ids = reply.ids[:length]
    while ids and (text := tokenizer.decode(ids)).endswith(REPLACED):
        ids = ids[:-1]
    return LoggedReply(reply.line, reply.conversation, reply.prompt, text, ids) if ids else None


def changes(replies: Iterable[LoggedReply], tokenizer: Tokenizer) -> list[Change]:
    """Return what each rollout of one reply loses."""
    found = drifts([LoggedReply(n, str(n), one.prompt, one.text, one.ids) for n, one in enumerate(replies)], tokenizer)
    return [
        Change(one.sampled - one.hidden, one.alone_changed - one.hidden, one.whole_changed - one.hidden, one.example)
        for one in sorted(found, key=lambda one: one.reply.line)
    ]


def figures(found: Sequence[Change]) -> dict[str, Share | int]:
    """Return the shares of rollouts of one kind."""
    return {
        "rollouts": len(found),
        "tokens": pooled([(one.alone, one.sampled) for one in found]),
        "tokens_whole": pooled([(one.whole, one.sampled) for one in found]),
        "changed": wilson(sum(one.alone > 0 for one in found), len(found)),
    }
