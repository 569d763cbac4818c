"""Which recorded chain a list of ids begins with, whatever its text.

A client that sends ids (a partial rollout, resumed from what was retrieved) continues a chain although the text of its ids
need not be the text under which the chain was recorded: special tokens are spelled in the one and may be silent in the
other. So chains are found by a fingerprint of their ids, too: a polynomial over all of them modulo 2^64, which grows by the
new tokens only, and of which all prefixes of a request cost one running sum. A hit is compared id for id before it counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from middleware_hub.radix.node import Generation
from middleware_hub.spans.chain import ID_BYTES, TokenSpan, links

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers never vanish
_MASK = (1 << 64) - 1
_FEW = 8
"""Up to so many tokens Python adds up faster than numpy begins."""


class IdsIndex:
    """Chains by namespace and fingerprint, each with its hidden tail and without."""

    def __init__(self) -> None:
        self._powers: NDArray[np.uint64] = np.ones(1, dtype=np.uint64)
        self._chains: dict[tuple[str, ...], dict[int, Generation]] = {}

    def add(self, namespace: tuple[str, ...], generation: Generation) -> None:
        """A reply was recorded; of equal chains the newest answers."""
        span = generation.span
        whole = self._fingerprint(span)
        generation.namespace, generation.fingerprints = namespace, (whole,)
        if span.width and 0 < span.visible < len(span):
            # An empty reply is not there at all without its hidden tail.
            generation.fingerprints = whole, (whole - self._sum(span, span.visible, len(span))) & _MASK
        self._chains.setdefault(namespace, {}).update(dict.fromkeys(generation.fingerprints, generation))

    def remove(self, generation: Generation) -> None:
        """A reply is gone; an equal chain with the same text takes its place."""
        chains = self._chains[generation.namespace]
        for fingerprint in generation.fingerprints:
            if chains.get(fingerprint) is generation:
                del chains[fingerprint]
                for other in generation.node.generations():
                    if other is not generation and fingerprint in other.fingerprints:
                        chains[fingerprint] = other
        if not chains:
            del self._chains[generation.namespace]

    def clear(self) -> None:
        """Forget all chains."""
        self._chains.clear()

    def longest(self, namespace: tuple[str, ...], ids: bytes, parent: str | None) -> tuple[Generation, int] | None:
        """The longest chain that packed ids begin with, and how many tokens of its reply are among them.

        Args:
            namespace: where to look.
            ids: all of the request's.
            parent: only a reply with this request id.
        """
        chains = self._chains.get(namespace)
        if not chains:
            return None
        for fingerprint in reversed(np.cumsum(np.multiply(*self._factors(ids, 0)), dtype=np.uint64).tolist()):
            found = chains.get(fingerprint)
            if found is None:
                continue
            for generation in (found, *reversed(found.node.generations())):
                if parent is not None and not generation.span.named(parent):
                    continue
                for known, take in zip(
                    generation.fingerprints, (len(generation.span), generation.span.visible), strict=False
                ):
                    if known == fingerprint and begins_with(ids, generation.span, take):
                        return generation, take
        return None

    def _fingerprint(self, span: TokenSpan) -> int:
        """Of a whole chain, from the last reply in it whose own fingerprint is known."""
        total = self._sum(span, 0, len(span))
        for part, count in links(span.parent, span.take):
            owner: Any = part.owner
            if isinstance(owner, Generation) and owner.fingerprints:
                total += owner.fingerprints[0]
                if count < len(part):
                    total -= self._sum(part, count, len(part))
                break
            total += self._sum(part, 0, count)
        return total & _MASK

    def _sum(self, span: TokenSpan, begin: int, end: int) -> int:
        """What some tokens of a span add to the fingerprint of their chain."""
        if end - begin > _FEW:
            return int(np.dot(*self._factors(span.ids[ID_BYTES * begin : ID_BYTES * end], span.offset + begin)))
        self._reach(span.offset + end)
        ids = memoryview(span.ids).cast("i")
        return sum((ids[k] + 1) * int(self._powers[span.offset + k]) for k in range(begin, end))

    def _factors(self, ids: bytes, offset: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """What each token at its place adds is a product of these (modulo 2^64, as uint64 goes)."""
        values = np.frombuffer(ids, dtype=np.int32).astype(np.uint64) + np.uint64(1)
        end = offset + len(values)
        self._reach(end)
        return values, self._powers[offset:end]

    def _reach(self, end: int) -> None:
        """Have as many powers as that."""
        while len(self._powers) < end:
            grown = self._powers * _power(len(self._powers))
            self._powers = np.concatenate([self._powers, grown])


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(int(_BASE), exponent, 1 << 64))


def begins_with(ids: bytes, span: TokenSpan, take: int) -> bool:
    """Whether packed ids begin with a chain."""
    for part, count in links(span, take):
        low, size = ID_BYTES * part.offset, ID_BYTES * count
        if ids[low : low + size] != (part.ids if size == len(part.ids) else part.ids[:size]):
            return False
    return True
