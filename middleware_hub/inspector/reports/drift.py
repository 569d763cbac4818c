"""Drift: where the text of a chain, encoded again, gives other tokens than those that were sampled.

The text is the spelling of the chain's ids, special tokens by their names, with one placeholder for each image. It is encoded
as a worker would encode it, in segments: after an added token, encoding is provably the sum of its parts. Equal segments are
encoded once, whichever chains they are in.
"""

from __future__ import annotations

import asyncio
import hashlib
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from middleware_hub.drift.alignment import differences
from middleware_hub.inspector.conversations.chain import Chain
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.errors import RouterError
from router.http.offload import offload


class Drifted(NamedTuple):
    """Tokens `start` to `end` of a chain become `encoded` if their text is encoded again."""

    start: int
    end: int
    encoded: tuple[int, ...]
    text: str


class ChainDrift:
    """What re-encoding would change in one chain."""

    def __init__(self, chain: Chain, found: list[Drifted]) -> None:
        mask = chain.mask()
        counts = np.concatenate(([0], np.cumsum(mask)))
        self.sampled_tokens = chain.sampled
        self.found = [one for one in found if counts[one.end] > counts[one.start]]
        """Only the differences that affect a sampled token."""
        self.drifted_tokens = int(sum(counts[one.end] - counts[one.start] for one in self.found))
        self._ends = [one.end for one in self.found]
        self._starts = [one.start for one in self.found]

    def described(self) -> dict[str, Any]:
        share = self.drifted_tokens / self.sampled_tokens if self.sampled_tokens else 0.0
        return {
            "sampled_tokens": self.sampled_tokens,
            "drifted_tokens": self.drifted_tokens,
            "share": share,
            "spans": len(self.found),
        }

    def between(self, start: int, end: int) -> list[Drifted]:
        """Return the differences that overlap a window."""
        return self.found[bisect_right(self._ends, start) : bisect_left(self._starts, end)]

    def within(self, start: int, end: int) -> int:
        """Return how many tokens of a reply drifted."""
        return sum(min(one.end, end) - max(one.start, start) for one in self.between(start, end))

    def next(self, start: int) -> Drifted | None:
        """Return the first difference that begins at a token or after it."""
        at = bisect_left(self._starts, start)
        return self.found[at] if at < len(self.found) else None


SEGMENT = 1_000
"""Tokens of a segment, or more, up to the next place where a text can be cut."""
MOST_SEGMENTS = 4_096
"""Segments whose differences are kept."""
HEAVY = 2_000

Ids = NDArray[np.int32]


class Drifts:
    """Computes drifts in the background, one at a time, and keeps them as long as their chains are kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = tokenizer.vocabulary
        self._segments: OrderedDict[bytes, tuple[Drifted, ...]] = OrderedDict()
        self._tasks: WeakKeyDictionary[Chain, asyncio.Task[ChainDrift | None]] = WeakKeyDictionary()
        self._one = asyncio.Semaphore(1)

    async def soon(self, chain: Chain, seconds: float | None) -> ChainDrift | None:
        """Return the drift of a chain if it is known within `seconds`; None waits however long it takes.

        Returns None if it is not known yet, or if the text is too long to be encoded.
        """
        task = self._tasks.get(chain)
        if task is None:
            task = self._tasks[chain] = asyncio.create_task(self._guarded(chain))
        done, _ = await asyncio.wait([task], timeout=seconds)
        return task.result() if done else None

    async def _guarded(self, chain: Chain) -> ChainDrift | None:
        async with self._one:
            try:
                return await self.of(chain)
            except RouterError:
                return None

    async def of(self, chain: Chain) -> ChainDrift:
        """Return the drift of a chain. Raises TextTooLongError."""
        compact, found = chain.compact(), list[Drifted]()
        ids, place = compact.ids, compact.place
        for start, end in segments(self._vocabulary.boundaries(ids), len(ids)):
            inside = await self._segment(ids[start:end], first=start == 0)
            found += [Drifted(place(one.start + start), place(one.end + start), *one[2:]) for one in inside]
            await asyncio.sleep(0)
        return await offload(len(ids) > HEAVY, ChainDrift, chain, found)

    async def _segment(self, ids: Ids, *, first: bool) -> tuple[Drifted, ...]:
        packed = ids.tobytes()
        key = hashlib.blake2b(packed, digest_size=16, person=b"first" if first else b"").digest()
        known = self._segments.get(key)
        if known is None:
            known = self._segments[key] = await self._compared(ids, packed, first=first)
            if len(self._segments) > MOST_SEGMENTS:
                self._segments.popitem(last=False)
        return known

    async def _compared(self, ids: Ids, packed: bytes, *, first: bool) -> tuple[Drifted, ...]:
        heavy = len(ids) > HEAVY
        text = await offload(heavy, self._spelled, ids, first)
        encoded = await self._tokenizer.encode_packed(text, start=first) if text else b""
        if encoded == packed or not text:
            return ()
        return await offload(heavy, self._laid_over, ids, np.frombuffer(encoded, np.int32), text, first)

    def _spelled(self, ids: Ids, first: bool) -> str:
        spell = self._tokenizer.spell_prompt if first else self._vocabulary.spell
        return spell(ids.tolist())

    def _laid_over(self, ids: Ids, encoded: Ids, text: str, first: bool) -> tuple[Drifted, ...]:
        ends, other_ends = self._ends(ids, text, first), self._ends(encoded, text, first)
        found = []
        for one in differences(ids, ends, encoded, other_ends):
            begin = int(ends[one.start - 1]) if one.start else 0
            stop = int(ends[one.end - 1]) if one.end else 0
            others = tuple(encoded[one.other_start : one.other_end].tolist())
            found.append(Drifted(one.start, one.end, others, text[begin:stop]))
        return tuple(found)

    def _ends(self, ids: Ids, text: str, first: bool) -> NDArray[np.int32]:
        """Return where ids end in their text."""
        laid = self._tokenizer.align(ids.tolist(), text, start=first)
        span = TokenSpan(None, 0, 0, ids.tobytes(), len(text), flags=laid.flags, ends=laid.ends)
        return self._vocabulary.ends(span)


def segments(boundaries: NDArray[np.intp], total: int) -> list[tuple[int, int]]:
    """Return segments of at least `SEGMENT` tokens, if there are places to cut."""
    found = []
    start = 0
    while start < total:
        at = int(np.searchsorted(boundaries, start + SEGMENT))
        end = int(boundaries[at]) if at < len(boundaries) else total
        found.append((start, end))
        start = end
    return found
