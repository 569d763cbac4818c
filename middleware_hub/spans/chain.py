"""Token spans: immutable runs of tokens, linked into chains that own every token this process remembers.

A *span* is what one step added: the context that was encoded for a request, or the tokens that a worker sampled.
Each span is linked to the span before it, so a span together with a count of its tokens names one exact token sequence,
a *chain*, back to its start. A fork anywhere, also in the middle of a span, is one new link:

    prompt span            reply span                       next context
    [ctx ctx ctx] <------- [tok tok tok tok EOS] <--------- [ctx ctx]            parent=reply, take=5
                                    ^--------------------- [ctx ctx ctx]         parent=reply, take=2: a fork inside

The one rule: **tokens of a span never change.** Indexes (the radix tree) point to spans and may be rebuilt at will.

Storage. Ids are int32 and logprobs float32 in `bytes` (33 bytes of overhead each, against 112 for an ndarray, and joined in
one C call when a chain is flattened). Logprobs are kept as float64 as soon as one of them is not exactly a float32: what
the engine sent is what comes back. Mask and weight version are kept once a span where they are constant.
Character ends are not kept at all: `Measure` works them out, on the rare match that ends inside a span.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

ID_BYTES = 4
"""Bytes of one token id in `TokenSpan.ids`."""

_DIALECTS = ("chatcmpl-", "cmpl-", "msg_")
"""What dialects put in front of a generation's id, in the `id` of their replies."""

Versions = str | tuple[tuple[str, int], ...]
"""The weight version of every token of a span, or `(version, end)` runs with ends counted in tokens of the span."""


class SpanFlag:
    """How the tokens of a span lie over its text, and what is known to be wrong with it.

    Bits of a plain int: those of an `IntFlag` cost a function call and a lookup each time two are put together.
    """

    NONE: Final = 0
    BOS: Final = 1
    """The first token is a BOS that the text does not spell: it has no width."""
    DUMMY: Final = 2
    """The spelling begins with one space (a dummy prefix) that the text does not have."""
    SKIPS_SPECIAL = 4
    """Special tokens among the visible ones have no text (`skip_special_tokens`)."""
    WHOLE: Final = 8
    """Where its tokens end in the text is not known: it is reused whole or not at all."""
    GIVEN: Final = 16
    """A context whose ids a client chose: another encoding of its text than the tokenizer's, perhaps."""
    UNCERTAIN: Final = 32
    """`version_uncertain`: the weights may have changed in mid-generation and the engine did not say where."""
    MISMATCH: Final = 64
    """`engine_mismatch`: the ids do not decode to the text that the engine sent with them."""
    SPLIT: Final = 128
    """`split_character`: ids and text differ at an edge only, by a character that was cut in half."""
    RECUT: Final = 256
    """`cut_in_token`: this context spells again the visible part of a token that was sampled and not kept."""
    UNLIKE: Final = 1024
    """`template_mismatch`: this context is not what the chat template makes of the messages."""
    FOREIGN: Final = 512
    """What comes before was recorded under another text than this span's chain has: its character ends mean nothing here."""
    PARENT_LOST: Final = 2048
    """`unknown_parent`: the request for these tokens named a reply whose tokens are not in front of them."""
    AFTER_MISMATCH: Final = 4096
    """`engine_mismatch`: before these tokens ends a reply whose ids do not spell its text; the text was encoded instead."""
    LOST: Final = PARENT_LOST | AFTER_MISMATCH
    """Sampled tokens are known to be missing from what is in front of these."""


REASONS: tuple[tuple[int, str], ...] = (
    (SpanFlag.UNCERTAIN, "version_uncertain"),
    (SpanFlag.MISMATCH, "engine_mismatch"),
    (SpanFlag.SPLIT, "split_character"),
    (SpanFlag.RECUT, "cut_in_token"),
    (SpanFlag.UNLIKE, "template_mismatch"),
    (SpanFlag.PARENT_LOST, "unknown_parent"),
    (SpanFlag.AFTER_MISMATCH, "engine_mismatch"),
)
"""What a flag is called in answers and counters."""

UNKNOWN_REPLY = "unknown_reply"
INEXACT = frozenset({"engine_mismatch", "template_mismatch", "unknown_parent", UNKNOWN_REPLY})
"""Reasons for which a sequence is not `exact`, even where one recorded chain covers all of its text."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as the bytes a span keeps. Raises OverflowError for an id beyond int32."""
    return array("i", ids).tobytes()


def unpack_ids(ids: bytes) -> list[int]:
    """The opposite of `pack_ids`."""
    return memoryview(ids).cast("i").tolist()


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Logprobs as bytes: float32 if every one of them is exactly a float32, else float64. Lossless either way."""
    short = array("f", logprobs)
    return short.tobytes() if short.tolist() == list(logprobs) else array("d", logprobs).tobytes()


class TokenSpan(msgspec.Struct, gc=False, eq=False):
    """A run of tokens added by one step, behind the first `take` tokens of `parent`.

    A `msgspec.Struct` that Python's garbage collector does not track: its full passes would stall an event loop for as long
    as there are spans (50 ms at 60,000 objects, measured). What is cyclic here (`owner`) is cut by hand when it goes.

    Attributes:
        parent: the span before this one, or None at the start of a chain.
        take: how many tokens of `parent` the chain goes through (a fork inside it takes fewer than all).
        start: the character of the chain's text at which this span begins. Ends of earlier tokens are clipped to it,
            because a hidden tail is as wide as the later text spelled it: ten characters for `<|im_end|>`, or none.
        ids: int32 token ids, packed.
        width: characters of the span's text.
        logprobs: float32 or float64, packed; None for a context, and for a reply that came without.
        versions: weight version(s) of sampled tokens; None for a context (loss mask 0).
        request_ids: names of a sampled reply: the client's `rid`, SGLang's `meta_info.id`.
        finish: how a sampled reply ended: `stop`, `length`, or `abort` for all that did not come to its end.
        flags: see `SpanFlag`.
        visible: the first so many tokens have their text in the span's text; behind them is the hidden tail. -1: all.
        ends: int32 character ends relative to `start`, packed, where they cannot be worked out from the ids; else None
            until a match needs them.
        offset: tokens of the chain before this span; worked out.
        users: spans, generations and requests in flight that build on this span (kept by `RadixTree`).
        owner: what the tree has to look at when `users` falls (a Generation, or the node of a context).
    """

    parent: TokenSpan | None
    take: int
    start: int
    ids: bytes
    width: int
    logprobs: bytes | None = None
    versions: Versions | None = None
    flags: int = SpanFlag.NONE
    visible: int = -1
    ends: bytes | None = None
    request_ids: tuple[str, ...] = ()
    finish: str = ""
    offset: int = 0
    users: int = 0
    owner: Any = None

    def __post_init__(self) -> None:
        count = len(self.ids) // ID_BYTES
        assert self.parent is None or 0 <= self.take <= len(self.parent)
        assert self.logprobs is None or (self.sampled and len(self.logprobs) in (4 * count, 8 * count))
        assert isinstance(self.versions, str | None) or (self.versions and self.versions[-1][1] == count)
        assert self.ends is None or len(self.ends) == len(self.ids)
        if self.parent is not None:
            self.offset = self.parent.offset + self.take
        if self.visible < 0:
            self.visible = count

    def __len__(self) -> int:
        """Tokens of this span."""
        return len(self.ids) // ID_BYTES

    def __repr__(self) -> str:
        kind = "context" if self.versions is None else f"sampled under {self.versions!r}"
        return f"<TokenSpan {kind}: {len(self)} tokens at {self.offset}, characters {self.start}..{self.text_end}>"

    @property
    def sampled(self) -> bool:
        """Whether a worker sampled these tokens (loss mask 1)."""
        return self.versions is not None

    def named(self, request_id: str) -> bool:
        """Whether this reply is called so: as it was recorded, or as a dialect made its own id of the name."""
        return bool(self.request_ids) and any(name in self.request_ids for name in names_of(request_id))

    @property
    def text_end(self) -> int:
        """The character of the chain's text at which this span's own text ends."""
        return self.start + self.width


def names_of(request_id: str) -> tuple[str, ...]:
    """The names that a reply may be recorded under: as the caller wrote it, and without the prefix of a dialect."""
    prefix = next((prefix for prefix in _DIALECTS if request_id.startswith(prefix)), None)
    return (request_id,) if prefix is None else (request_id, request_id.removeprefix(prefix))


class Measure(Protocol):
    """Works out where tokens end in their text; the tokenizer seam implements it."""

    def ends(self, span: TokenSpan) -> NDArray[np.int32]:
        """Character ends relative to `span.start`, one a token, never falling."""
        ...

    def textless(self, span: TokenSpan, index: int) -> bool:
        """Whether token `index` of a span has no text of its own where it stands."""
        ...

    def last_boundary(self, span: TokenSpan, count: int) -> int:
        """How many of the first `count` tokens end at a place behind which encoding is provably compositional; 0: none.

        Such a place is behind an added token that the text spells (and that no neighbour can swallow or lengthen).
        """
        ...

    def straddled(self, text: str, position: int) -> int | None:
        """Where an added token begins that a text spells around `position`; None if there is none."""
        ...


def links(span: TokenSpan | None, take: int) -> Iterator[tuple[TokenSpan, int]]:
    """The spans of a chain with the number of their tokens that belong to it, last one first."""
    while span is not None:
        yield span, take
        take = span.take
        span = span.parent


def chain_ids(span: TokenSpan | None, take: int) -> bytes:
    """All token ids of a chain, packed, in one pass."""
    parts = [s.ids if ID_BYTES * n == len(s.ids) else s.ids[: ID_BYTES * n] for s, n in links(span, take)]
    parts.reverse()
    return b"".join(parts)


class Turn(NamedTuple):
    """A sampled reply in a sequence: its tokens are `start` to `end`, half-open.

    Of a reply that the sequence leaves in its middle these are the tokens up to there.
    """

    span: TokenSpan
    start: int
    end: int

    @property
    def request_id(self) -> str:
        """What it is called; empty if neither the client nor the engine gave it a name."""
        return self.span.request_ids[0] if self.span.request_ids else ""

    @property
    def version(self) -> str:
        """The weight version of its last token, as an engine gives one version for a whole reply."""
        versions = self.span.versions
        assert versions is not None
        if isinstance(versions, str):
            return versions
        return next(version for version, end in versions if end >= self.end - self.start)

    def described(self, offset: int = 0) -> dict[str, Any]:
        """As it stands in answers, with positions counted from `offset`."""
        return {
            "request_id": self.request_id,
            "start": self.start - offset,
            "end": self.end - offset,
            "version": self.version,
            "finish": self.span.finish,
        }


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A chain laid flat: aligned arrays, one entry a token.

    Attributes:
        token_ids: int32.
        loss_mask: uint8; 1 where the token was sampled.
        logprobs: float64, 0.0 where the token is context; None if any sampled token came without one.
        weight_versions: half-open token ranges `(version, start, end)` over sampled tokens, in order, joined where equal.
        turns: the sampled replies, in order.
        reasons: why this sequence is not, or not in every way, exact.
    """

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float64] | None
    weight_versions: tuple[tuple[str, int, int], ...]
    turns: tuple[Turn, ...]
    reasons: tuple[str, ...]

    @property
    def response_length(self) -> int:
        """Tokens from the first sampled one to the end; 0 if none was sampled."""
        return len(self.token_ids) - self.weight_versions[0][1] if self.weight_versions else 0


def flatten(span: TokenSpan | None, take: int, tail: bytes = b"") -> Trajectory:
    """Lay a chain flat, with `tail` (packed ids, encoded just now: mask 0) behind it."""
    chain = list(links(span, take))
    chain.reverse()
    return flatten_chain(chain, tail)


def flatten_chain(chain: Sequence[tuple[TokenSpan, int]], tail: bytes = b"") -> Trajectory:
    """The same for a chain that was taken down already: its spans, first one first, with how many of their tokens are in it."""
    token_ids = np.frombuffer(
        b"".join([s.ids[: ID_BYTES * n] for s, n in chain] + ([tail] if tail else [])), dtype=np.int32
    )
    loss_mask = np.zeros(len(token_ids), dtype=np.uint8)
    logprobs: NDArray[np.float64] | None = np.zeros(len(token_ids), dtype=np.float64)
    runs: list[tuple[str, int, int]] = []
    turns: list[Turn] = []
    flags = SpanFlag.NONE
    for s, n in chain:
        flags |= s.flags
        if s.versions is None or not n:
            continue
        low, high = s.offset, s.offset + n
        turns.append(Turn(s, low, high))
        loss_mask[low:high] = 1
        if s.logprobs is None:
            logprobs = None
        elif logprobs is not None:
            kind = np.float32 if len(s.logprobs) == len(s.ids) else np.float64
            logprobs[low:high] = np.frombuffer(s.logprobs, dtype=kind)[:n]
        for version, begin, end in _version_runs(s.versions, n):
            if runs and runs[-1][0] == version and runs[-1][2] == low + begin:
                runs[-1] = (version, runs[-1][1], low + end)
            else:
                runs.append((version, low + begin, low + end))
    reasons = list(dict.fromkeys(name for flag, name in REASONS if flags & flag))
    if logprobs is None:
        reasons.append("no_logprobs")
    return Trajectory(token_ids, loss_mask, logprobs, tuple(runs), tuple(turns), tuple(reasons))


def _version_runs(versions: Versions, count: int) -> Iterable[tuple[str, int, int]]:
    if isinstance(versions, str):
        yield versions, 0, count
        return
    begin = 0
    for version, end in versions:
        if begin < min(end, count):
            yield version, begin, min(end, count)
        begin = max(begin, end)
