"""Replies of `POST /generate`, as SGLang 0.5.23 sends them; where older versions differ it says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from msgspec import Raw

from router.engines.sglang.json import JSON_ERRORS, decode_object, is_null

DEFAULT_VERSION = "default"
"""What SGLang itself calls the weights before their first update."""

LOGPROB_FIELDS = frozenset(
    {
        "input_token_logprobs",
        "output_token_logprobs",
        "output_token_logprobs_length",
        "input_top_logprobs",
        "output_top_logprobs",
        "input_token_ids_logprobs",
        "output_token_ids_logprobs",
    }
)
"""Fields of `meta_info` that exist only because logprobs were asked for."""


LogprobEntry = tuple[float | None, int, Any]
"""`[logprob, token_id, text or null]`."""

_COMMON_FIELDS = frozenset({"text", "output_ids", "meta_info", "index"})
_COMMON_META = LOGPROB_FIELDS | {
    "id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "cached_tokens",
    "cached_tokens_details",
    "weight_version",
    "weight_versions",
    "num_retractions",
    "dp_rank",
    "e2e_latency",
    "response_sent_to_client_ts",
}
"""What SGLang 0.5.23 says in `meta_info` of every reply."""


class Usage(msgspec.Struct):
    """Counts in `meta_info` that nobody but a client reads."""

    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


def further_fields(fields: dict[str, Raw], meta: dict[str, Raw]) -> dict[str, Raw]:
    """What a reply and its `meta_info` have beyond what is in every one: what was asked for (`routed_experts`), or is new."""
    return {
        **{key: value for key, value in fields.items() if key not in _COMMON_FIELDS and not is_null(value)},
        **{key: value for key, value in meta.items() if key not in _COMMON_META and not is_null(value)},
    }


def read_fields(body: bytes | Raw) -> tuple[dict[str, Raw], dict[str, Raw]]:
    """The top level of a reply that was read already, and its `meta_info`, raw; empty if they cannot be read."""
    try:
        fields = decode_object(body)
        return fields, decode_object(fields["meta_info"])
    except (*JSON_ERRORS, KeyError):
        return {}, {}


decode_entries = msgspec.json.Decoder(list[LogprobEntry]).decode
_decode_flat = msgspec.json.Decoder(list[float | int | None]).decode


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class Meta(msgspec.Struct):
    """`meta_info`, as far as it is read; unknown keys are passed over."""

    id: str | None = None
    finish_reason: Any = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    weight_version: str | int | None = None
    weight_versions: list[_VersionSpan] | None = None
    output_token_logprobs: list[LogprobEntry] | int | None = None


class _Reply(msgspec.Struct):
    text: str
    meta_info: Meta
    output_ids: list[int] | None = None


_reply = msgspec.json.Decoder(_Reply)


class UnreadableReplyError(Exception):
    """A worker's reply is not what `/generate` answers; the message says what is wrong with it."""


class Reply(msgspec.Struct, frozen=True):
    """One finished generation, or what there is of one.

    Attributes:
        ids: sampled token ids.
        text: their text.
        logprobs: one a token, as sent (None where the engine sent null); None if none came.
        logprob_ids: the ids that came along with them.
        versions: half-open token runs `(version, start, end)`; None if the engine gives only the version at the end.
        version: the weight version at the end of the request.
        finish_type: `stop`, `length`, `abort`; None while running.
        matched: the stop token or stop string that ended it.
        other_text: a stream without logprobs can be read in two ways; this is the other one.
    """

    ids: list[int]
    text: str
    logprobs: list[float | None] | None
    logprob_ids: list[int] | None
    request_id: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    version: str
    versions: list[tuple[str, int, int]] | None
    finish_type: str | None
    matched: int | str | None
    other_text: str | None = None

    def checked_logprobs(self) -> list[float]:
        """The logprobs of a reply without `fault`."""
        return cast(list[float], self.logprobs or [])

    def fault(self, prompt_tokens: int, *, logprobs_asked: bool) -> str | None:
        """What contradicts what was asked, or itself, in this reply; None if all of it holds together (rule 1)."""
        if self.prompt_tokens is not None and self.prompt_tokens != prompt_tokens:
            return f"{self.prompt_tokens} prompt tokens, sent {prompt_tokens}"
        if self.completion_tokens is not None and self.completion_tokens != len(self.ids):
            return f"{len(self.ids)} ids, {self.completion_tokens} completion tokens"
        if min(self.ids, default=0) < 0:
            return "a negative token id"
        if self.logprobs is None:
            return "no logprobs, though asked for" if logprobs_asked and self.ids else None
        if len(self.logprobs) != len(self.ids):
            return f"{len(self.logprobs)} logprobs, {len(self.ids)} ids"
        if self.logprob_ids != self.ids:
            return "the ids of output_token_logprobs are not output_ids"
        if not _all_finite(self.logprobs):
            return "a logprob that is not a finite number"
        return None


def _all_finite(values: Sequence[float | None]) -> bool:
    try:
        return math.isfinite(math.fsum(values))  # type: ignore[arg-type] # None is what the TypeError is for
    except (TypeError, ValueError, OverflowError):
        return all(value is not None and math.isfinite(value) for value in values)


def read_reply(body: bytes | Raw) -> tuple[Reply, bytes | Raw]:
    """A reply to a request for one sample, and as much of its body as matters to whoever leaves the logprobs out of it.

    Raises UnreadableReplyError.

    Of a long reply nine tenths are `output_token_logprobs`. SGLang prints them in one way, so they can be cut out and parsed by
    themselves, and what remains is short:

        {"text":"..","output_ids":[..],"meta_info":{..,"output_token_logprobs":[[-3.25,13,null],..],..}}
        {"text":"..","output_ids":[..],"meta_info":{..,"output_token_logprobs":0,..}}       [-3.25,13,null,..]
    """
    cut = _cut_logprobs(bytes(body))
    if cut is not None:
        short, values, ids = cut
        reply = _decode_reply(short)
        # With the right ids, and 0 where they stood, they are these ids' logprobs and no other field of this name.
        if reply.meta_info.output_token_logprobs == 0 and ids == reply.output_ids:
            return _assembled(reply, values, ids), short
    reply = _decode_reply(body)
    entries = _entries(reply.meta_info)
    if entries is None:
        return _assembled(reply, None, None), body
    return _assembled(reply, [entry[0] for entry in entries], [entry[1] for entry in entries]), body


_ENTRIES = b'"output_token_logprobs":[['
_END = b",null]]"


def _cut_logprobs(body: bytes) -> tuple[bytes, list[float | None], list[int]] | None:
    """The body with 0 in the place of its logprobs, the values, the ids; None if they are not there, or not in that form."""
    begin = body.find(_ENTRIES) + len(_ENTRIES)
    end = body.rfind(_END) + len(_END) - 2
    if begin < len(_ENTRIES) or end < begin:
        return None
    entries = body[begin:end]
    flat = entries.translate(None, b"[]")
    try:
        items: list[Any] = _decode_flat(b"[%b]" % flat)
    except JSON_ERRORS:
        return None
    values, ids, texts = items[0::3], items[1::3], items[2::3]
    count = len(texts)
    if len(items) != 3 * count or texts.count(None) != count or len(entries) - len(flat) != 2 * (count - 1):
        return None
    return b"%b0%b" % (body[: begin - 2], body[end + 2 :]), values, ids


def _decode_reply(body: bytes | Raw) -> _Reply:
    try:
        return _reply.decode(body)
    except JSON_ERRORS as error:
        raise UnreadableReplyError(str(error)) from error


def _entries(meta: Meta) -> list[LogprobEntry] | None:
    entries = meta.output_token_logprobs
    if isinstance(entries, int):
        raise UnreadableReplyError(f"output_token_logprobs is {entries}, not a list")
    return entries


def _assembled(reply: _Reply, logprobs: list[float | None] | None, logprob_ids: list[int] | None) -> Reply:
    ids = reply.output_ids
    if ids is None:  # the Rust frontend for an empty reply, and versions before output_ids
        ids = list(logprob_ids or ())
    return assemble(reply.meta_info, ids, reply.text, logprobs, logprob_ids)


def assemble(
    meta: Meta,
    ids: list[int],
    text: str,
    logprobs: list[float | None] | None,
    logprob_ids: list[int] | None,
    other_text: str | None = None,
) -> Reply:
    """A `Reply` of its parts."""
    finish = meta.finish_reason if isinstance(meta.finish_reason, dict) else {}
    matched = finish.get("matched")
    runs = meta.weight_versions
    return Reply(
        ids=ids,
        text=text,
        logprobs=logprobs,
        logprob_ids=logprob_ids,
        request_id=meta.id,
        prompt_tokens=meta.prompt_tokens,
        completion_tokens=meta.completion_tokens,
        version=DEFAULT_VERSION if meta.weight_version is None else str(meta.weight_version),
        versions=None if not runs else [(run.version, run.start, run.end) for run in runs],
        finish_type=finish.get("type"),
        matched=matched if isinstance(matched, int | str) else None,
        other_text=other_text,
    )


def edit_meta(body: bytes | Raw, *, drop: frozenset[str] = frozenset(), add: dict[str, bytes] | None = None) -> bytes:
    """A reply with fields of its `meta_info` taken out or put in, and everything else byte for byte as it was.

    Raises UnreadableReplyError if it is not a JSON object that holds one.
    """
    try:
        fields = decode_object(body)
        meta = decode_object(fields["meta_info"])
    except (*JSON_ERRORS, KeyError) as error:
        raise UnreadableReplyError(f"no object with meta_info: {error}") from error
    kept = {key: value for key, value in meta.items() if key not in drop}
    kept.update({key: Raw(value) for key, value in (add or {}).items()})
    fields["meta_info"] = Raw(msgspec.json.encode(kept))
    return msgspec.json.encode(fields)


def split_list(body: bytes, count: int) -> list[Raw]:
    """The replies to a batch, raw. Raises UnreadableReplyError if they are not as many as were asked for."""
    try:
        replies = msgspec.json.decode(body, type=list[Raw])
    except JSON_ERRORS as error:
        raise UnreadableReplyError(f"not a list of replies: {error}") from error
    if len(replies) != count:
        raise UnreadableReplyError(f"{len(replies)} replies, asked for {count}")
    return replies
