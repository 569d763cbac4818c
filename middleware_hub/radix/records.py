"""What the radix tree takes in and gives out."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from middleware_hub.radix.cut import Cut
from middleware_hub.spans.chain import SpanFlag, Versions
from middleware_hub.spans.hidden_tail import HiddenToken

Namespace = tuple[str, ...]
"""(tenant, lora path, x-radix-namespace): texts of different namespaces never answer for each other."""

NO_PARENT = "none"
"""As the name of a parent: continue nothing, all of the text is context."""


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
