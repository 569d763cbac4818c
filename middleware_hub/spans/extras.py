"""Per-token data of engines besides logprobs: which experts read a token, and from which tokens it was sampled.

They are arrays of int32, kept beside the span of a reply and never in it: they take up to a hundred times its bytes.

    routed_experts, indexer_topk   [rows, width]: the last rows that the worker reported, see `per_token`
    top_p_ids                      [n]: the tokens that were left to sample from, sampled token by sampled token
    top_p_offsets                  [tokens + 1]: where those of each sampled token begin and end in `top_p_ids`

**A row that an earlier reply of the chain has is not kept again**: it is never read from here, and a worker reports the rows of
the whole conversation at every turn.

**What has another shape is dropped**, counted, and never guessed. SGLang gives no shape, but the number of rows is known: one
less than prompt and reply have tokens, from `routed_experts_start_len` on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec import Raw

from middleware_hub.spans.chain import TokenSpan, links
from middleware_hub.spans.per_token import ROW_FIELDS, count_in, numbers_from
from middleware_hub.spans.sampling_sets import reported_sets

TOP_P_IDS: Final = "top_p_ids"
TOP_P_OFFSETS: Final = "top_p_offsets"
MOST_BYTES: Final = 1 << 30
"""Bytes of arrays that a process keeps without a store; the oldest are dropped first, and are lost."""
MOST_STORED_BYTES: Final = 64 << 20
"""Bytes of arrays that a process keeps with a store, which has them too."""


class Extra(NamedTuple):
    """An array of little-endian int32."""

    shape: tuple[int, ...]
    data: bytes


class _Told(NamedTuple):
    """The first `rows` rows of a chain are kept, all of this width."""

    rows: int
    width: int


class Extras:
    """The arrays of the replies of one tree.

    Args:
        stored: whether a store has everything that is here.

    Attributes:
        bytes: of all arrays.
        counts: of fields of replies, by name and outcome: `kept`, `shape` (dropped), `evicted`.
    """

    def __init__(self, *, stored: bool = False) -> None:
        self.most_bytes = MOST_STORED_BYTES if stored else MOST_BYTES
        self._stored = stored
        self.bytes = 0
        self.counts: Counter[tuple[str, str]] = Counter()
        self._kept: dict[TokenSpan, dict[str, Extra]] = {}
        self._told: dict[TokenSpan, dict[str, _Told]] = {}

    def keep(self, span: TokenSpan, told: Mapping[str, Raw], experts_from: int = 0) -> None:
        """Keep what a worker reported of the tokens of a reply and its prompt, as far as it has the right shape."""
        found: dict[str, Extra] = {}
        for name in ROW_FIELDS:
            if name in told:
                rows = self._rows(span, name, told[name], experts_from if name == "routed_experts" else 0)
                self.counts[name, "shape" if rows is None else "kept"] += 1
                if rows is not None:
                    found[name] = rows
        if any(name not in ROW_FIELDS for name in told):
            top_p = _top_p(told, span.count)
            self.counts["top_p", "kept" if top_p else "shape"] += 1
            found.update(top_p)
        if found:
            self._kept[span] = found
            self.bytes += _size(found)
        while self.bytes > self.most_bytes:
            self._evict(next(iter(self._kept)))

    def of(self, span: TokenSpan) -> Mapping[str, Extra]:
        return self._kept.get(span, {})

    def _evict(self, span: TokenSpan) -> None:
        if self._stored:
            self._drop(span)
        else:
            self.counts.update((name, "evicted") for name in self._kept[span])
            self.forget(span)  # a later reply has to keep its rows again

    def _drop(self, span: TokenSpan) -> None:
        found = self._kept.pop(span, None)
        if found is not None:
            self.bytes -= _size(found)

    def forget(self, span: TokenSpan) -> None:
        """Drop the arrays of a reply that is removed."""
        self._told.pop(span, None)
        self._drop(span)

    def clear(self) -> None:
        self._kept.clear()
        self._told.clear()
        self.bytes = 0

    def _rows(self, span: TokenSpan, name: str, value: Raw, first: int) -> Extra | None:
        """Return the rows of a field after those that the chain before the span has; None if the field has another shape."""
        last = span.offset + span.count - 1
        count, rows = count_in(value), last - first
        if not count or first < 0 or rows < 1 or count % rows:
            return None
        width, before = count // rows, self._before(span, name)
        if before is not None and before.width != width:
            return None
        known = 0 if before is None else before.rows
        skipped = max(0, known - first)
        numbers = numbers_from(value, skipped * width)
        if numbers is None:
            return None
        self._told.setdefault(span, {})[name] = _Told(last if first <= known else known, width)
        return Extra((rows - skipped, width), numbers)

    def _before(self, span: TokenSpan, name: str) -> _Told | None:
        """Return the rows that the chain before a reply has."""
        for part, take in links(span.parent, span.take):
            told = self._told.get(part, {}).get(name)
            if told is not None:
                return _Told(min(told.rows, part.offset + take), told.width)
        return None


def _top_p(told: Mapping[str, Raw], tokens: int) -> dict[str, Extra]:
    """Return the tokens from which each sampled token was sampled; nothing if these fields do not say it."""
    sets = reported_sets(told, tokens)
    if sets is None:
        return {}
    ids, offsets = sets
    return {TOP_P_IDS: Extra((len(ids) // 4,), ids), TOP_P_OFFSETS: Extra((tokens + 1,), offsets)}


def _size(found: Mapping[str, Extra]) -> int:
    return sum(len(one.data) for one in found.values())
