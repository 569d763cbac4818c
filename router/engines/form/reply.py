"""Replies of `POST /generate`, as SGLang 0.5.23 sends them; comments say where older versions differ."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
from msgspec import Raw

from router.engines.json import (
    JSON_ERRORS,
    NotNumbersError,
    decode_object,
    is_null,
    read_list,
    read_pairs,
    split_items,
)

PLACES = "prompt_images"
"""The field of a reply with offset and length of each picture's run in `prompt_token_ids`, from engines that tell it."""

DEFAULT_VERSION = "default"
"""SGLang's name for the weights before their first update."""

LOGPROB_FIELDS = frozenset(
    (
        "input_token_logprobs output_token_logprobs output_token_logprobs_length input_top_logprobs "
        "output_top_logprobs input_token_ids_logprobs output_token_ids_logprobs"
    ).split()
)
"""Fields of `meta_info` that are there only if the request asked for logprobs."""

LogprobEntry = tuple[float | None, int, Any]
"""`[logprob, token_id, text or null]`."""
_LOGPROB, _ID = itemgetter(0), itemgetter(1)

_COMMON_FIELDS = frozenset({"text", "output_ids", "meta_info", "index"})
_COMMON_META = LOGPROB_FIELDS.union(
    (
        "id finish_reason prompt_tokens completion_tokens reasoning_tokens cached_tokens "
        "cached_tokens_details weight_version weight_versions num_retractions dp_rank e2e_latency "
        "response_sent_to_client_ts"
    ).split()
)
"""Fields of `meta_info` that SGLang 0.5.23 sends with every reply."""


class Usage(msgspec.Struct):
    """Counts in `meta_info` that only clients read."""

    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


def further_fields(fields: dict[str, Raw], meta: dict[str, Raw]) -> dict[str, Raw]:
    """Return the fields of a reply and its `meta_info` that not every reply has: requested (`routed_experts`) or new ones."""
    return {
        **{key: value for key, value in fields.items() if key not in _COMMON_FIELDS and not is_null(value)},
        **{key: value for key, value in meta.items() if key not in _COMMON_META and not is_null(value)},
    }


def read_fields(body: bytes | Raw) -> tuple[dict[str, Raw], dict[str, Raw]]:
    """Return the raw fields of a reply and of its `meta_info`; both empty if they cannot be read."""
    try:
        fields = decode_object(body)
        return fields, decode_object(fields["meta_info"])
    except (*JSON_ERRORS, KeyError):
        return {}, {}


decode_entries = msgspec.json.Decoder(list[LogprobEntry]).decode


PER_TOKEN_FIELDS = tuple(
    "routed_experts indexer_topk output_token_sampling_mask top_p_token_ids top_p_token_offsets".split()
)
"""Fields of `meta_info` with something for each token, if asked for. Only slime's SGLang has the last two."""

_ABSENT = Raw()


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class Meta(msgspec.Struct):
    """The fields of `meta_info` that the router reads; others are ignored. The router itself adds `prefill_weight_version`."""

    id: str | None = None
    finish_reason: Any = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    weight_version: str | int | None = None
    weight_versions: list[_VersionSpan] | None = None
    prefill_weight_version: str | None = None
    output_token_logprobs: list[LogprobEntry] | int | None = None
    routed_experts: Raw = _ABSENT
    indexer_topk: Raw = _ABSENT
    output_token_sampling_mask: Raw = _ABSENT
    top_p_token_ids: Raw = _ABSENT
    top_p_token_offsets: Raw = _ABSENT


class _ReplyBody(msgspec.Struct):
    text: str
    meta_info: Meta
    output_ids: list[int] | int | None = None
    prompt_token_ids: Raw = _ABSENT
    prompt_images: list[tuple[int, int]] | None = None


_reply = msgspec.json.Decoder(_ReplyBody)


class UnreadableReplyError(Exception):
    """A worker's reply is not an answer of `/generate`; the message says what is wrong."""


class Numbers(array):  # type: ignore[type-arg] # it takes a parameter since Python 3.12
    """Token ids, none of them negative, or finite floats: an array that equals every sequence of the same numbers."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, array):
            return super().__eq__(other)
        return isinstance(other, Sequence) and self.tolist() == list(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def packed_ids(ids: Sequence[int]) -> Sequence[int]:
    """Return token ids as `Numbers`; unchanged if one of them is negative, or beyond int32."""
    if isinstance(ids, Numbers) or min(ids, default=0) < 0:
        return ids
    try:
        return Numbers("i", ids)
    except OverflowError:
        return ids


def all_finite(values: Sequence[float | None]) -> bool:
    """Return whether every value is a finite number."""
    try:
        return math.isfinite(math.fsum(values))  # type: ignore[arg-type] # None is what the TypeError is for
    except (TypeError, ValueError, OverflowError):
        return all(value is not None and math.isfinite(value) for value in values)


class Reply(msgspec.Struct, frozen=True):
    """A generation, finished or as far as it has come.

    Attributes:
        ids: the sampled token ids.
        text: their text.
        logprobs: one per token as sent, None for null; None if none were sent.
        logprob_ids: the ids that came with the logprobs; usually the same object as `ids`.
        version: the weight version at the end of the request.
        versions: half-open token runs `(version, start, end)`; None if the engine sent only the version at the end.
        updated: whether the events of its stream were of several versions.
        mixed: whether the prompt was prefilled elsewhere, by other weights than sampled its first token.
        prompt_ids: the ids that the engine computed with, as a JSON list; empty if it was not asked for them.
        places: offset and length of each picture's run among them; None if the engine does not tell.
        finish_type: `stop`, `length` or `abort`; None while running.
        matched: the stop token or stop string that ended it.
        status: the HTTP status of the error that an abort stands for.
        other_text: the second possible text, for a stream without logprobs that can be read in two ways.
        told: further fields with something for each token (`PER_TOKEN_FIELDS`), raw.
    """

    ids: Sequence[int]
    text: str
    logprobs: Sequence[float | None] | None
    logprob_ids: Sequence[int] | None
    request_id: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    version: str
    versions: list[tuple[str, int, int]] | None
    finish_type: str | None
    matched: int | str | None
    status: int | None = None
    other_text: str | None = None
    told: dict[str, Raw] = {}
    updated: bool = False
    mixed: bool = False
    prompt_ids: bytes = b""
    places: list[tuple[int, int]] | None = None

    def checked_logprobs(self) -> Sequence[float]:
        """Return the logprobs of a reply that has no `fault`."""
        return cast("Sequence[float]", self.logprobs or [])

    def fault(self, prompt_tokens: int, *, logprobs_asked: bool) -> str | None:
        """Return how this reply contradicts the request or itself; None if it is consistent."""
        if self.prompt_tokens is not None and self.prompt_tokens != prompt_tokens:
            return f"{self.prompt_tokens} prompt tokens, sent {prompt_tokens}"
        if self.completion_tokens is not None and self.completion_tokens != len(self.ids):
            return f"{len(self.ids)} ids, {self.completion_tokens} completion tokens"
        if not isinstance(self.ids, Numbers) and not isinstance(packed_ids(self.ids), Numbers):
            return "a token id that is negative, or beyond int32"
        if self.logprobs is None or not self.ids:  # with `max_new_tokens: 0` SGLang may send a logprob and no id
            return "no logprobs, though asked for" if logprobs_asked and self.ids else None
        if len(self.logprobs) != len(self.ids):
            return f"{len(self.logprobs)} logprobs, {len(self.ids)} ids"
        if self.logprob_ids is not self.ids and self.logprob_ids != self.ids:
            return "the ids of output_token_logprobs are not output_ids"
        if not isinstance(self.logprobs, Numbers) and not all_finite(self.logprobs):
            return "a logprob that is not a finite number"
        return None


class ShortBody(NamedTuple):
    """The body of a reply, possibly without its lists of numbers. `ids`: the `output_ids` that were cut out of it, if any."""

    body: bytes
    ids: bytes | None = None


def read_reply(body: bytes | Raw) -> tuple[Reply, ShortBody]:
    """Read the reply to a request for one sample. Raises UnreadableReplyError.

    Nine tenths of a long reply are lists of numbers. SGLang always prints them in the same form, so they can be cut out and
    read separately, and the rest is short:

        {"text":"..","output_ids":[13],"meta_info":{..,"output_token_logprobs":[[-3.25,13,null]],..}}
        {"text":"..","output_ids":CUT,"meta_info":{..,"output_token_logprobs":CUT,..}}
    """
    body = bytes(body)
    return (_read_cut(body) if len(body) > SHORT_BYTES else None) or _read_in_place(body)


SHORT_BYTES = 6_000
"""A reply of up to this length, of about 130 tokens, is read faster as it is: numpy takes its time to begin."""
_IDS = b'"output_ids":['
_ENTRIES = b'"output_token_logprobs":[['
_END = b",null]]"
_CUT = -(2**62)
"""Stands where a list was cut out. No worker sends this in place of a list."""
_PRINTED_CUT = b"%d" % _CUT


def _read_cut(body: bytes) -> tuple[Reply, ShortBody] | None:
    """Read a reply by cutting it; None if its lists are not in SGLang's form, or their ids differ."""
    # Quotes are escaped inside strings, so these bytes can only be a key.
    ids_begin = body.find(_IDS) + len(_IDS) - 1
    ids_end = body.find(b"]", ids_begin) + 1
    begin = body.find(_ENTRIES, ids_end) + len(_ENTRIES) - 2
    end = body.rfind(_END) + len(_END)
    if ids_begin < len(_IDS) or ids_end < ids_begin or begin < ids_end or end < begin:
        return None
    printed = body[ids_begin:ids_end]
    numbers = read_numbers(printed, memoryview(body)[begin:end])
    if numbers is None:
        return None
    ids, logprobs = numbers
    short = b"".join((body[:ids_begin], _PRINTED_CUT, body[ids_end:begin], _PRINTED_CUT, body[end:]))
    reply = _decode_reply(short)
    if reply.output_ids != _CUT or reply.meta_info.output_token_logprobs != _CUT:
        return None  # those were other fields of the same names
    told = bytes(reply.prompt_token_ids)
    found = assemble(reply.meta_info, ids, reply.text, logprobs, ids, None, told, reply.prompt_images)
    return found, ShortBody(short, printed)


def read_numbers(ids: bytes, entries: memoryview) -> tuple[Numbers, Numbers] | None:
    """Read token ids, and the logprobs of the same tokens. Return None if the ids differ, or do not fit into int32.

    Args:
        ids: from one bracket to the next.
        entries: from `[[` to `,null]]`: `[[logprob, id, null], ...]`.
    """
    try:
        own, pairs = read_list(ids, "i"), read_pairs(entries)
    except NotNumbersError:
        return None
    # Bytes are compared, because numpy takes longer to start than to compare.
    if (
        pairs[:, 1].copy().tobytes() != own.astype(np.float64).tobytes()
        or np.maximum.reduce(own.view(np.uint64)) >= 2**31
    ):
        return None
    return Numbers("i", own.astype(np.int32).tobytes()), Numbers("d", pairs[:, 0].copy().tobytes())


def _read_in_place(body: bytes) -> tuple[Reply, ShortBody]:
    reply = _decode_reply(body)
    entries = reply.meta_info.output_token_logprobs
    if isinstance(reply.output_ids, int) or isinstance(entries, int):
        raise UnreadableReplyError("output_ids or output_token_logprobs is a number, not a list")
    logprobs, logprob_ids = columns(entries)
    ids: Sequence[int] | None = reply.output_ids
    if ids is None:  # an empty reply of the Rust frontend, or a version without `output_ids`
        ids = [*(logprob_ids or ())]
    packed = logprob_ids if logprob_ids is not None and [*logprob_ids] == ids else packed_ids(ids)
    told, places = bytes(reply.prompt_token_ids), reply.prompt_images
    found = assemble(reply.meta_info, packed, reply.text, logprobs, logprob_ids, None, told, places)
    return found, ShortBody(body)


def columns(entries: list[LogprobEntry] | None) -> tuple[Sequence[float | None] | None, Sequence[int] | None]:
    """Return the logprobs of some tokens, and their ids."""
    if entries is None:
        return None, None
    logprobs = [*map(_LOGPROB, entries)]
    packed: Sequence[float | None] = Numbers("d", logprobs) if all_finite(logprobs) else logprobs
    return packed, packed_ids([*map(_ID, entries)])


def _decode_reply(body: bytes | Raw) -> _ReplyBody:
    try:
        return _reply.decode(body)
    except JSON_ERRORS as error:
        raise UnreadableReplyError(str(error)) from error


def assemble(
    meta: Meta,
    ids: Sequence[int],
    text: str,
    logprobs: Sequence[float | None] | None,
    logprob_ids: Sequence[int] | None,
    other_text: str | None = None,
    prompt_ids: bytes = b"",
    places: list[tuple[int, int]] | None = None,
) -> Reply:
    finish = meta.finish_reason if isinstance(meta.finish_reason, dict) else {}
    kind, matched = finish.get("type"), finish.get("matched")
    versions = None
    if meta.weight_versions:
        versions = [(run.version, run.start, run.end) for run in meta.weight_versions]
    told: dict[str, Raw] = {}
    for name in PER_TOKEN_FIELDS:
        raw: Raw = getattr(meta, name)
        if raw is not _ABSENT and not is_null(raw):
            told[name] = raw
    return Reply(
        ids=ids,
        text=text,
        logprobs=logprobs,
        logprob_ids=logprob_ids,
        request_id=meta.id,
        prompt_tokens=meta.prompt_tokens,
        completion_tokens=meta.completion_tokens,
        version=DEFAULT_VERSION if meta.weight_version is None else str(meta.weight_version),
        versions=versions,
        finish_type=kind if isinstance(kind, str) else None,
        matched=matched if type(matched) in (int, str) else None,
        status=finish.get("status_code"),
        other_text=other_text,
        mixed=meta.prefill_weight_version is not None,
        prompt_ids=prompt_ids,
        places=places,
        told=told,
    )


def edit_meta(
    body: bytes | Raw,
    *,
    drop: frozenset[str] = frozenset(),
    add: dict[str, bytes] | None = None,
    ids: bytes | None = None,
    without: Iterable[str] = (),
) -> bytes:
    """Return a reply with fields of its `meta_info` removed or added, and all other values byte for byte as they were.

    `without` are fields of the top level that are removed. `ids` are those of a `ShortBody`. Raises UnreadableReplyError if the
    body is not a JSON object with a `meta_info` object.
    """
    try:
        fields = decode_object(body)
        meta = decode_object(fields["meta_info"])
    except (*JSON_ERRORS, KeyError) as error:
        raise UnreadableReplyError(f"no object with meta_info: {error}") from error
    for key in drop:
        meta.pop(key, None)
    if add:
        meta.update({key: Raw(value) for key, value in add.items()})
    fields["meta_info"] = Raw(msgspec.json.encode(meta))
    if ids is not None:
        fields["output_ids"] = Raw(ids)
    for key in without:
        fields.pop(key, None)
    return msgspec.json.encode(fields)


def split_list(body: bytes, count: int) -> list[Raw]:
    """Return the raw replies to a batch. Raise UnreadableReplyError if their number is not `count`."""
    try:
        replies = split_items(body)
    except JSON_ERRORS as error:
        raise UnreadableReplyError(f"not a list of replies: {error}") from error
    if len(replies) != count:
        raise UnreadableReplyError(f"{len(replies)} replies, asked for {count}")
    return replies
