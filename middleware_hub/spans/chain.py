"""Token spans: immutable runs of tokens, linked into chains that own every token this process remembers.

A *span* is what one step added: the context that was encoded for a request, or the tokens that a worker sampled.
Each span links to the span before it, so a span and a count of its tokens name one exact token sequence, a *chain*,
back to its start. A fork anywhere, also in the middle of a span, is one new link:

    prompt span            reply span                       next context
    [ctx ctx ctx] <------- [tok tok tok tok EOS] <--------- [ctx ctx]            parent=reply, take=5
                                    ^--------------------- [ctx ctx ctx]         parent=reply, take=2: a fork inside

The only rule: **tokens of a span never change.** Indexes (the radix tree) point to spans and can be rebuilt at will.

Storage. Ids are int32 and logprobs float32 in `bytes`: 33 bytes of overhead each, against 112 for an ndarray, and one
C call joins them when a chain is flattened. Logprobs are float64 if one of them is not exactly a float32, so that they come
back exactly as the engine sent them. Mask and weight version are kept once per span where they are constant. Character ends are
not kept: `Measure` computes them on the rare match that ends inside a span.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

ID_BYTES = 4
"""Bytes of one token id in `TokenSpan.ids`."""

PRINTED = 300_000
"""Ids below this are printed from a table (2.4 MB): no vocabulary is larger. A list with other ids takes longer."""

_DIALECTS = ("chatcmpl-", "cmpl-", "msg_", "resp_")
"""The prefixes that dialects add to a generation's id in the `id` of their replies."""

Versions = str | tuple[tuple[str, int], ...]
"""One weight version for every token of a span, or `(version, end)` runs whose ends count tokens of the span."""


class SpanFlag:
    """How the tokens of a span lie over its text, and what is known to be wrong with the span.

    The flags are bits of a plain int: combining two members of an `IntFlag` costs a function call and a lookup.
    """

    NONE: Final = 0
    BOS: Final = 1
    """The first token is a BOS that the text does not spell: its width is 0."""
    DUMMY: Final = 2
    """The spelling begins with one space (a dummy prefix) that the text lacks."""
    SKIPS_SPECIAL = 4
    """Special tokens among the visible ones have no text (`skip_special_tokens`)."""
    WHOLE: Final = 8
    """It is unknown where its tokens end in the text: it is reused whole or not at all."""
    GIVEN: Final = 16
    """A context whose ids a client chose; they may differ from the tokenizer's encoding of its text."""
    UNCERTAIN: Final = 32
    """`version_uncertain`: the weights may have changed during the generation, and the engine did not say where."""
    MISMATCH: Final = 64
    """`engine_mismatch`: the ids do not decode to the text that the engine sent with them."""
    SPLIT: Final = 128
    """`split_character`: ids and text differ only at an edge, by a character that was cut in half."""
    RECUT: Final = 256
    """`cut_in_token`: this context re-encodes the visible part of a sampled token that was not kept."""
    UNLIKE: Final = 1024
    """`template_mismatch`: this context is not what the chat template renders from the messages."""
    FOREIGN: Final = 512
    """The chain before this span was recorded under another text: its character ends mean nothing here."""
    PARENT_LOST: Final = 2048
    """`unknown_parent`: the request for these tokens named a reply whose tokens do not precede them."""
    AFTER_MISMATCH: Final = 4096
    """`engine_mismatch`: a reply whose ids do not spell its text ends before these tokens; its text was encoded instead."""
    UNASKED: Final = 8192
    """`store_unreachable`: the store, which may know more of the text before these tokens, could not be asked."""
    ASKED_LATE: Final = 16384
    """The same, but the store was asked later, and has no more of that text. Only spans in memory have it, no record."""
    UNHEARD: Final = 32768
    """With `UNASKED`: the prompt is a chat with replies that nobody knew. Its text cannot show whether they were sampled,
    because templates write earlier turns otherwise than they were sampled: so the doubt stays.
    """
    DOUBTFUL: Final = UNASKED | ASKED_LATE
    """One of these may become the other; nothing else of a span changes."""
    LOST: Final = PARENT_LOST | AFTER_MISMATCH | UNASKED | ASKED_LATE
    """Sampled tokens are, or may have been, missing before these."""


REASONS: tuple[tuple[int, str], ...] = (
    (SpanFlag.UNCERTAIN, "version_uncertain"),
    (SpanFlag.MISMATCH, "engine_mismatch"),
    (SpanFlag.SPLIT, "split_character"),
    (SpanFlag.RECUT, "cut_in_token"),
    (SpanFlag.UNLIKE, "template_mismatch"),
    (SpanFlag.PARENT_LOST, "unknown_parent"),
    (SpanFlag.AFTER_MISMATCH, "engine_mismatch"),
    (SpanFlag.UNASKED, "store_unreachable"),
)
"""The name of each flag in answers and counters."""

UNKNOWN_REPLY = "unknown_reply"
STORE_UNREACHABLE = "store_unreachable"
MEDIA_MISSING = "media_missing"
INEXACT = frozenset(
    {"engine_mismatch", "template_mismatch", "unknown_parent", UNKNOWN_REPLY, STORE_UNREACHABLE, MEDIA_MISSING}
)
"""Reasons for which a sequence is not `exact`, even if one recorded chain covers all of its text."""
INEXACT_TOKENS = INEXACT - {MEDIA_MISSING}
"""Those of them that are about its tokens. The files of its images may be there for the next answer."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as the bytes a span keeps. Raises OverflowError for an id beyond int32."""
    return array("i", ids).tobytes()


def unpack_ids(ids: bytes) -> list[int]:
    return memoryview(ids).cast("i").tolist()


def version_names(versions: Versions | None) -> list[str]:
    """Return the weight versions of a span, each once, in the order of their first tokens; a context has none."""
    if versions is None:
        return []
    return [versions] if isinstance(versions, str) else list(dict.fromkeys(name for name, _ in versions))


def reasons_of(flags: int) -> list[str]:
    """Return the reasons that flags stand for, each once, in the order of `REASONS`."""
    return list(dict.fromkeys(name for flag, name in REASONS if flags & flag)) if flags else []


@np.errstate(over="ignore")
def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Return logprobs as bytes: float32 if every one of them is exactly a float32, else float64. Lossless either way."""
    exact = array("d", logprobs).tobytes()
    short = np.frombuffer(exact).astype(np.float32)
    return short.tobytes() if short.astype(np.float64).tobytes() == exact else exact


def unpack_logprobs(packed: bytes, count: int) -> NDArray[np.floating[Any]]:
    """Return the `count` logprobs that `pack_logprobs` packed."""
    return np.frombuffer(packed, np.float32 if len(packed) == 4 * count else np.float64)


class TokenSpan(msgspec.Struct, gc=False, eq=False):
    """A run of tokens added by one step, after the first `take` tokens of `parent`.

    Python's garbage collector does not track this `msgspec.Struct`: its full passes would stall an event loop (50 ms at 60,000
    objects, measured). The one cycle (`owner`) is cut by hand when a span is removed.

    Attributes:
        parent: the span before this one, or None at the start of a chain.
        take: how many tokens of `parent` the chain goes through (fewer than all for a fork inside it).
        start: the character of the chain's text at which this span begins. Ends of earlier tokens are clipped to it,
            because a hidden tail is as wide as the later text spelled it: ten characters for `<|im_end|>`, or none.
        ids: int32 token ids, packed.
        width: characters of the span's text.
        logprobs: float32 or float64, packed; None for a context, and for a reply without logprobs.
        versions: weight version(s) of sampled tokens; None for a context (loss mask 0).
        flags: see `SpanFlag`.
        visible: the number of leading tokens whose text is in the span's text; the rest is the hidden tail. -1: all.
        ends: int32 character ends relative to `start`, packed, where they cannot be computed from the ids; else None
            until a match needs them.
        request_ids: names of a sampled reply: the client's `rid`, SGLang's `meta_info.id`.
        finish: how a sampled reply ended: `stop`, `length`, or `abort` for every reply that was cut short.
        media: the pictures among the ids: `(start, length, digest)` each, see `spans.media`.
        kv_version: the oldest weight version by which the engine's cache of the tokens before a sampled reply may have been
            computed; None if that is not known.
        offset: tokens of the chain before this span; computed.
        count: tokens of this span; computed.
        answered: the character of the chain's text at which its first sampled span begins; -1 if there is none; computed.
        users: spans, generations and requests in progress that build on this span (kept by `RadixTree`).
        owner: what the tree checks when `users` falls (a Generation, or the node of a context).
        stored: what the span keeps of its record in a store (see `store.chains`); None without a record.
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
    media: tuple[tuple[int, int, str], ...] = ()
    kv_version: str | None = None
    offset: int = 0
    count: int = 0
    answered: int = -1
    users: int = 0
    owner: Any = None
    stored: Any = None

    def __post_init__(self) -> None:
        self.count = count = len(self.ids) // ID_BYTES
        assert self.parent is None or 0 <= self.take <= self.parent.count
        assert self.logprobs is None or (self.versions is not None and len(self.logprobs) in (4 * count, 8 * count))
        assert isinstance(self.versions, str | None) or (self.versions and self.versions[-1][1] == count)
        assert self.ends is None or len(self.ends) == len(self.ids)
        if self.versions is not None:
            self.answered = self.start
        if self.parent is not None:
            self.offset = self.parent.offset + self.take
            if self.parent.answered >= 0:
                self.answered = self.parent.answered
        if self.visible < 0:
            self.visible = count

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        kind = "context" if self.versions is None else f"sampled under {self.versions!r}"
        return f"<TokenSpan {kind}: {len(self)} tokens at {self.offset}, characters {self.start}..{self.text_end}>"

    @property
    def sampled(self) -> bool:
        """Return whether a worker sampled these tokens (loss mask 1)."""
        return self.versions is not None

    def named(self, request_id: str) -> bool:
        """Return whether this reply has a name: as recorded, or as the id that a dialect made of it."""
        return bool(self.request_ids) and any(name in self.request_ids for name in names_of(request_id))

    @property
    def text_end(self) -> int:
        """Return the character of the chain's text at which this span's own text ends."""
        return self.start + self.width


def names_of(request_id: str) -> tuple[str, ...]:
    """Return the names under which a reply may be recorded: the given name, and the same without a dialect's prefix."""
    prefix = next((prefix for prefix in _DIALECTS if request_id.startswith(prefix)), None)
    return (request_id,) if prefix is None else (request_id, request_id.removeprefix(prefix))


class Measure(Protocol):
    """Computes where tokens end in their text; the tokenizer's vocabulary implements it."""

    def ends(self, span: TokenSpan) -> NDArray[np.int32]:
        """Return character ends relative to `span.start`, one per token, never falling."""
        ...

    def textless(self, span: TokenSpan, index: int) -> bool:
        """Return whether token `index` of a span has no text of its own at its place."""
        ...

    def last_boundary(self, span: TokenSpan, count: int) -> int:
        """Return how many of the first `count` tokens end where encoding is provably compositional; 0 for no such place.

        Such a place follows an added token that the text spells and that no neighbour can swallow or lengthen.
        """
        ...

    def learn(self, ids: NDArray[np.int32]) -> None:
        """Note ids that a worker sampled: the model has them."""
        ...

    def straddled(self, text: str, position: int) -> int | None:
        """Return the beginning of the added token that a text spells around `position`, or None."""
        ...


def settle(span: TokenSpan, *, missed: bool) -> None:
    """Note whether the store, asked late, has more of the text before a span than its prompt used."""
    missed = missed or bool(span.flags & SpanFlag.UNHEARD)
    span.flags = span.flags & ~SpanFlag.DOUBTFUL | (SpanFlag.UNASKED if missed else SpanFlag.ASKED_LATE)


def links(span: TokenSpan | None, take: int) -> Iterator[tuple[TokenSpan, int]]:
    """Yield the spans of a chain, last one first, each with the number of its tokens in the chain."""
    while span is not None:
        yield span, take
        take = span.take
        span = span.parent


def began_with(span: TokenSpan | None, take: int) -> str | None:
    """Return the weight version with which a chain's conversation began; None if nothing in it was sampled.

    That is the version whose cache its first turn read, or, where that is not known, the one that sampled the first token.
    """
    found = None
    for part, count in links(span, take):
        if count and part.versions is not None:
            found = part
    if found is None:
        return None
    return version_names(found.versions)[0] if found.kv_version is None else found.kv_version


def chain_ids(span: TokenSpan | None, take: int) -> bytes:
    """Return all token ids of a chain, packed, in one pass."""
    parts = []
    while span is not None:
        parts.append(span.ids if take == span.count else span.ids[: ID_BYTES * take])
        take = span.take
        span = span.parent
    parts.reverse()
    return b"".join(parts)


def printed_ids(packed: bytes) -> bytes:
    """Return packed ids as a JSON list. The blanks before its short numbers mean nothing in JSON.

    A worker gets all ids of a conversation at every turn, so they are printed without a Python object for each: one call of
    numpy picks them out of a table (1 ns an id, where Python integers take 20).
    """
    try:
        numbers = _numbers().take(np.frombuffer(packed, np.uint32))
    except IndexError:
        return msgspec.json.encode(unpack_ids(packed))
    return b"".join((b"[", numbers.view(np.uint8)[:-1].data, b"]"))  # without the last comma


@cache
def _numbers() -> NDArray[np.uint64]:
    """Return the numbers from 0 on, each as eight bytes: blanks, digits and a comma."""
    table = np.empty((PRINTED // 1000, 1000, 2), np.uint32)
    table[:, :, 0] = _words([b"    ", *(b"%4d" % thousands for thousands in range(1, PRINTED // 1000))])[:, None]
    table[:, :, 1] = _words([b"%03d," % rest for rest in range(1000)])
    table[0, :, 1] = _words([b"%3d," % number for number in range(1000)])
    return table.view(np.uint64).ravel()


def _words(fours: list[bytes]) -> NDArray[np.uint32]:
    return np.frombuffer(b"".join(fours), np.uint32)
