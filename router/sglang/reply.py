"""Replies of `POST /generate`, as SGLang 0.5.23 sends them; where older versions differ it says so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from router.sglang.json import JSON_ERRORS, decode_object

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

decode_entries = msgspec.json.Decoder(list[LogprobEntry]).decode


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
    output_token_logprobs: list[LogprobEntry] | None = None


class _Reply(msgspec.Struct):
    text: str
    meta_info: Meta
    output_ids: list[int] | None = None


_reply = msgspec.json.Decoder(_Reply)


class UnreadableReplyError(Exception):
    """A worker's reply is not what `/generate` answers; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Reply:
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
        return [value for value in self.logprobs or () if value is not None]

    def fault(self, prompt_tokens: int, *, logprobs_asked: bool) -> str | None:
        """What contradicts what was asked, or itself, in this reply; None if all of it holds together (rule 1)."""
        if self.prompt_tokens is not None and self.prompt_tokens != prompt_tokens:
            return f"{self.prompt_tokens} prompt tokens, sent {prompt_tokens}"
        if self.completion_tokens is not None and self.completion_tokens != len(self.ids):
            return f"{len(self.ids)} ids, {self.completion_tokens} completion tokens"
        if any(i < 0 for i in self.ids):
            return "a negative token id"
        if self.logprobs is None:
            return "no logprobs, though asked for" if logprobs_asked and self.ids else None
        if len(self.logprobs) != len(self.ids):
            return f"{len(self.logprobs)} logprobs, {len(self.ids)} ids"
        if self.logprob_ids != self.ids:
            return "the ids of output_token_logprobs are not output_ids"
        if not all(value is not None and math.isfinite(value) for value in self.logprobs):
            return "a logprob that is not a finite number"
        return None


def parse_reply(body: bytes | Raw) -> Reply:
    """A reply to a request for one sample. Raises UnreadableReplyError."""
    try:
        reply = _reply.decode(body)
    except JSON_ERRORS as error:
        raise UnreadableReplyError(str(error)) from error
    entries = reply.meta_info.output_token_logprobs
    ids = reply.output_ids
    if ids is None:  # the Rust frontend for an empty reply, and versions before output_ids
        ids = [entry[1] for entry in entries or ()]
    return assemble(reply.meta_info, ids, reply.text, entries)


def assemble(
    meta: Meta, ids: list[int], text: str, entries: list[LogprobEntry] | None, other_text: str | None = None
) -> Reply:
    """A `Reply` of its parts."""
    finish = meta.finish_reason if isinstance(meta.finish_reason, dict) else {}
    matched = finish.get("matched")
    runs = meta.weight_versions
    return Reply(
        ids=ids,
        text=text,
        logprobs=None if entries is None else [entry[0] for entry in entries],
        logprob_ids=None if entries is None else [entry[1] for entry in entries],
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
