"""What the radix tree takes in and gives out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from middleware_hub.radix.cut import Cut
from middleware_hub.radix.node import HiddenToken
from middleware_hub.spans.chain import SpanFlag, Versions


class SampledReply(msgspec.Struct, frozen=True):
    """What a worker sampled, aligned with the text it sent; the fields are those of `TokenSpan`."""

    ids: bytes
    text: str
    versions: Versions
    logprobs: bytes | None = None
    visible: int | None = None
    flags: int = SpanFlag.NONE
    ends: bytes | None = None
    tail: tuple[HiddenToken, ...] = ()
    request_ids: tuple[str, ...] = ()
    finish: str = ""
    late: bool = False
    """The current weight version changed after the request was sent."""


class Context(msgspec.Struct, frozen=True):
    """What was put behind a reused chain to make the prompt: the ids, and how they lie over the text."""

    ids: bytes
    flags: int = SpanFlag.NONE
    ends: bytes | None = None


class Recall(msgspec.Struct, frozen=True):
    """What is remembered of a whole text.

    Attributes:
        cut: the chain that covers the text up to `cut.start`; a whole reply includes its hidden tail.
        exact: one recorded chain covers the whole text.
        request_ids: one for each recorded reply that ends where the longest one ends, newest first.
    """

    cut: Cut
    exact: bool
    request_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Departure:
    """Where a text leaves the tree: `matched` characters are recorded, then it differs from each of `recorded_after`."""

    matched: int
    recorded_before: str
    recorded_after: tuple[str, ...]
    replies: int


@dataclass(slots=True)
class TreeStats:
    """Running counts of a tree."""

    nodes: int = 0
    generations: int = 0
    spans: int = 0
    tokens: int = 0
    characters: int = 0
    payload: int = 0
    """Bytes of ids and logprobs."""
    hits: int = 0
    """Recorded requests that continued a chain."""
    misses: int = 0
    evicted: Counter[str] = field(default_factory=Counter)
    evicted_tokens: int = 0
