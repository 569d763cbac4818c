"""A flattened chain for a trainer: aligned arrays with one entry per token, and the sampled replies in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from middleware_hub.spans.chain import ID_BYTES, SpanFlag, TokenSpan, Versions, links, reasons_of, unpack_logprobs


class SampledTurn(NamedTuple):
    """A sampled reply in a sequence: its tokens are `start` to `end`, half-open.

    If the sequence leaves a reply in its middle, `end` is the end of the part that it keeps.
    """

    span: TokenSpan
    start: int
    end: int

    @property
    def request_id(self) -> str:
        """Return the reply's first name; empty if neither the client nor the engine gave one."""
        return self.span.request_ids[0] if self.span.request_ids else ""

    @property
    def version(self) -> str:
        """Return the weight version of the last token: an engine also gives one version for a whole reply."""
        versions = self.span.versions
        assert versions is not None
        if isinstance(versions, str):
            return versions
        return next(version for version, end in versions if end >= self.end - self.start)

    def described(self, offset: int = 0) -> dict[str, Any]:
        """Return the turn as answers show it, with positions counted from `offset`."""
        return {
            "request_id": self.request_id,
            "start": self.start - offset,
            "end": self.end - offset,
            "version": self.version,
            "finish": self.span.finish,
            "kv_version": self.span.kv_version,
        }


def kv_versions(turns: Iterable[SampledTurn]) -> dict[str, None]:
    """Return the `kv_version` of each turn of which it is known, each once, in order."""
    return dict.fromkeys(turn.span.kv_version for turn in turns if turn.span.kv_version is not None)


@dataclass(frozen=True, slots=True)
class TokenTrajectory:
    """A flattened chain: aligned arrays, one entry per token.

    Attributes:
        token_ids: int32.
        loss_mask: uint8; 1 where the token was sampled.
        logprobs: float64, 0.0 where the token is context; None if any sampled token came without one.
        weight_versions: half-open token ranges `(version, start, end)` over sampled tokens, in order, equal neighbours joined.
        turns: the sampled replies, in order.
        reasons: why this sequence is not exact, or not exact in every way.
    """

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float64] | None
    weight_versions: tuple[tuple[str, int, int], ...]
    turns: tuple[SampledTurn, ...]
    reasons: tuple[str, ...]

    @property
    def response_length(self) -> int:
        """Return the number of tokens from the first sampled one to the end; 0 if none was sampled."""
        return len(self.token_ids) - self.weight_versions[0][1] if self.weight_versions else 0

    def because(self, *reasons: str) -> TokenTrajectory:
        """Return this sequence with further reasons, each once."""
        return replace(self, reasons=tuple(dict.fromkeys((*self.reasons, *reasons)))) if reasons else self


def flatten(span: TokenSpan | None, take: int, tail: bytes = b"") -> TokenTrajectory:
    """Flatten a chain, followed by `tail` (packed ids, encoded just now: mask 0)."""
    chain = list(links(span, take))
    chain.reverse()
    return flatten_chain(chain, tail)


def flatten_chain(chain: Sequence[tuple[TokenSpan, int]], tail: bytes = b"") -> TokenTrajectory:
    """Flatten a chain given as its spans, first span first, each with the number of its tokens in the chain."""
    token_ids = np.frombuffer(
        b"".join([s.ids[: ID_BYTES * n] for s, n in chain] + ([tail] if tail else [])), dtype=np.int32
    )
    loss_mask = np.zeros(len(token_ids), dtype=np.uint8)
    logprobs: NDArray[np.float64] | None = np.zeros(len(token_ids), dtype=np.float64)
    runs: list[tuple[str, int, int]] = []
    turns: list[SampledTurn] = []
    flags = SpanFlag.NONE
    for s, n in chain:
        flags |= s.flags
        if s.versions is None or not n:
            continue
        low, high = s.offset, s.offset + n
        turns.append(SampledTurn(s, low, high))
        loss_mask[low:high] = 1
        if s.logprobs is None:
            logprobs = None
        elif logprobs is not None:
            logprobs[low:high] = unpack_logprobs(s.logprobs, s.count)[:n]
        for version, begin, end in version_runs(s.versions, n):
            if runs and runs[-1][0] == version and runs[-1][2] == low + begin:
                runs[-1] = (version, runs[-1][1], low + end)
            else:
                runs.append((version, low + begin, low + end))
    reasons = reasons_of(flags)
    if logprobs is None:
        reasons.append("no_logprobs")
    return TokenTrajectory(token_ids, loss_mask, logprobs, tuple(runs), tuple(turns), tuple(reasons))


def version_runs(versions: Versions, count: int) -> Iterable[tuple[str, int, int]]:
    """Yield `(version, start, end)` over the first `count` tokens of a reply."""
    if isinstance(versions, str):
        yield versions, 0, count
        return
    begin = 0
    for version, end in versions:
        if begin < min(end, count):
            yield version, begin, min(end, count)
        begin = max(begin, end)


class SharedMask:
    """Leaves mask 1 of each reply to one sequence: the first of those that hold the most of it.

    Args:
        first: a flattened sequence.
        others: the replies that the other sequences end with; each sequence is the chain up to there.
    """

    def __init__(self, first: TokenTrajectory, others: Sequence[TokenSpan]) -> None:
        self._most: dict[TokenSpan, tuple[int, int]] = {}
        self._note(0, ((turn.span, turn.end - turn.start) for turn in first.turns))
        for number, span in enumerate(others, 1):
            self._note(number, ((part, take) for part, take in links(span, span.count) if part.sampled))

    def _note(self, number: int, turns: Iterable[tuple[TokenSpan, int]]) -> None:
        for span, size in turns:
            if size > self._most.get(span, (0, 0))[0]:
                self._most[span] = size, number

    def apply(self, number: int, sequence: TokenTrajectory) -> None:
        """Set the mask of replies that belong to another sequence to 0; `number` counts the sequences from 0, the first one."""
        for turn in sequence.turns:
            if self._most[turn.span][1] != number:
                sequence.loss_mask[turn.start : turn.end] = 0
