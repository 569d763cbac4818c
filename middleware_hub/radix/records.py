"""The input, the output and the counts of the radix tree."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from middleware_hub.radix.cut import Cut
from middleware_hub.spans.chain import SpanFlag, Versions
from middleware_hub.spans.hidden_tail import HiddenToken
from middleware_hub.spans.media import MediaSpan

Namespace = tuple[str, ...]
"""(tenant, lora path, x-radix-namespace): texts of different namespaces never answer for each other."""

NO_PARENT = "none"
"""As the name of a parent: continue no reply; all of the prompt is context."""


class SampledReply(msgspec.Struct, frozen=True):
    """Sampled tokens, aligned with the text that the worker sent; the fields are those of `TokenSpan`."""

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
    told: dict[str, Raw] = {}
    """Further per-token data of the worker, raw."""
    experts_from: int = 0
    """The first token of which the worker was asked for the experts."""
    kv_version: str | None = None


class Context(msgspec.Struct, frozen=True):
    """What was encoded after a reused chain to make the prompt: the ids, and how they lie over the text."""

    ids: bytes
    flags: int = SpanFlag.NONE
    ends: bytes | None = None
    media: tuple[MediaSpan, ...] = ()


class Recall(msgspec.Struct, frozen=True):
    """The remembered chain of a whole text.

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

    def explained(self, text: str, *, stored: bool) -> dict[str, Any]:
        """Describe where the text leaves the longest recorded chain, with ten characters of each on both sides.

        `stored`: the tree is a cache of a store, which brings no prompt that the text leaves before its end.
        """
        matched = self.matched
        recorded = self.recorded_after
        if matched == len(text):
            message = "the whole text is recorded"
            if recorded and not self.replies:
                message += ", but it ends before the first reply does"
            elif recorded:
                message += ", and a recorded text goes on from there"
        elif matched == 0 and not recorded:
            message = "nothing is recorded for this key, x-radix-namespace and lora_path"
            if stored:
                message += " in the memory of this router, nor does the store have a reply to this text"
        elif matched == 0:
            message = "no recorded text begins like this one"
        elif not recorded:
            message = (
                f"the text goes on after the end of what is recorded, at character {matched}: that is right if an "
                "observation begins there that was not sent to a worker yet"
            )
            if stored:
                message += ", or was sent through another router: that one has its text to compare"
        else:
            message = f"at character {matched} the text has {text[matched]!r} where {recorded[-1][:1]!r} is recorded"
            stripped = recorded[-1].lstrip()
            if (
                not text[matched].isspace()
                and recorded[-1][:1].isspace()
                and (not stripped or stripped[0] == text[matched])
            ):
                message += ": the recorded text has white space there, so something stripped it"
        return {
            "message": message,
            "matched_chars": matched,
            "text_length": len(text),
            "replies_matched": self.replies,
            "text": {"before": text[max(0, matched - 10) : matched], "after": text[matched : matched + 10]},
            "recorded": {"before": self.recorded_before, "after": recorded[-1] if recorded else ""},
            "other_recorded": list(recorded[:-1]),
        }


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

    def forget(self) -> None:
        """Reset the counts to an empty tree; evictions stay counted."""
        self.nodes = self.generations = self.spans = self.tokens = self.characters = self.payload = 0
        self.hits = self.misses = 0
