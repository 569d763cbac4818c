"""The only file that knows SGLang's JSON: requests, replies, streams. Pure.

Read off SGLang 0.5.23 (`POST /generate` of its Python frontend); where older versions differ it says so.

Bodies are taken apart only as far as needed: the top level and `meta_info` into raw slices, so that what is passed on is
byte for byte what came, with fields taken out or put in. No float is ever parsed and printed again on its way through.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from router.errors import BadRequestError

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

_LOGPROB_REQUESTS = ("logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs")
_MULTIMODAL = ("image_data", "video_data", "audio_data")
_OURS = ("return_trajectory",)
_object = msgspec.json.Decoder(dict[str, Raw])
_any = msgspec.json.Decoder()
_TRUE, _NULL = b"true", b"null"
_NESTED = re.compile(rb"\s*\[\s*\[")


def parse_object(body: bytes, what: str = "the request body") -> dict[str, Raw]:
    """A JSON object as its keys and raw values. Raises BadRequestError with the place and the reason."""
    try:
        return _object.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequestError(f"{what} must be a JSON object: {error}") from error


def _is_null(raw: Raw | None) -> bool:
    return raw is None or bytes(raw) == _NULL


def _typed(fields: dict[str, Raw], key: str, kind: Any, expected: str) -> Any:
    """One field, typed; None where it is absent or null."""
    raw = fields.get(key)
    if raw is None or _is_null(raw):
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequestError(f"`{key}` must be {expected}: {error}") from error


@dataclass(slots=True)
class GenerateRequest:
    """A body of `POST /generate`, checked as far as the router has to understand it.

    Attributes:
        fields: the top level, raw.
        sampling: `sampling_params`, raw; empty where it is absent or not a single object.
        texts: the prompts, if they came as text.
        ids: the prompts, if they came as ids (ids win over text, as with SGLang).
        batch: whether the client wrote a list of prompts.
    """

    fields: dict[str, Raw]
    sampling: dict[str, Raw]
    texts: list[str] | None
    ids: list[list[int]] | None
    batch: bool
    stream: bool
    wants_logprobs: bool
    wants_trajectory: bool

    @classmethod
    def parse(cls, body: bytes) -> GenerateRequest:
        """Raises BadRequestError for what no worker could serve, and for the two prompts that kill one."""
        fields = parse_object(body)
        nested = _NESTED.match(fields.get("input_ids", b"")) is not None
        ids_kind = list[list[int]] if nested else list[int]
        ids_raw = _typed(fields, "input_ids", ids_kind, "a list of token ids, or a list of such lists")
        text_raw = _typed(fields, "text", str | list[str], "a string, or a list of strings")
        texts: list[str] | None = None
        ids: list[list[int]] | None = None
        batch = False
        if ids_raw is not None:
            batch = nested
            ids = ids_raw if batch else [ids_raw]
            if not ids or not all(ids):
                raise BadRequestError("`input_ids` is empty, or has an empty prompt in it: give at least one token id")
        elif text_raw is not None:
            batch = isinstance(text_raw, list)
            texts = text_raw if batch else [text_raw]
            if not texts or not all(texts):
                raise BadRequestError("`text` is empty, or has an empty prompt in it: give at least one character")
        elif _is_null(fields.get("input_embeds")):
            raise BadRequestError("a prompt is missing: give `text` (a string) or `input_ids` (a list of token ids)")
        sampling_raw = fields.get("sampling_params")
        single = sampling_raw is not None and bytes(sampling_raw).lstrip()[:1] == b"{"
        return cls(
            fields,
            parse_object(bytes(sampling_raw), "`sampling_params`") if single and sampling_raw is not None else {},
            texts,
            ids,
            batch,
            bool(_typed(fields, "stream", bool, "true or false")),
            bool(_typed(fields, "return_logprob", bool | list[bool], "true or false")),
            bool(_typed(fields, "return_trajectory", bool, "true or false")),
        )

    @property
    def unrecordable(self) -> str | None:
        """Why a reply to this request cannot be recorded; None if it can."""
        if self.texts is None and self.ids is None:
            return "input_embeds"
        if any(not _is_null(self.fields.get(key)) for key in _MULTIMODAL):
            return "multimodal"
        if not _is_null(self.fields.get("session_params")):
            return "session_params"
        if self.batch:
            return "batch"
        if self.samples > 1:
            return "n > 1"
        raw = self.fields.get("sampling_params")
        if not _is_null(raw) and not self.sampling and bytes(raw or b"").strip() != b"{}":
            return "sampling_params is not an object"
        return None

    @property
    def samples(self) -> int:
        """`sampling_params.n`."""
        n = _typed(self.sampling, "n", int, "an integer")
        return 1 if n is None else n

    @property
    def skips_special(self) -> bool:
        """`sampling_params.skip_special_tokens`."""
        return _typed(self.sampling, "skip_special_tokens", bool, "true or false") is not False

    @property
    def lora_path(self) -> str:
        """The adapter; empty for none."""
        return _typed(self.fields, "lora_path", str, "a string") or ""

    @property
    def rid(self) -> str | None:
        """The client's request id."""
        rid = _typed(self.fields, "rid", str | list[str], "a string")
        return rid if isinstance(rid, str) else None

    def with_ids(self, ids: Sequence[int], *, force_logprobs: bool) -> bytes:
        """The body a worker gets: the same, with these ids in the place of the prompt."""
        out: dict[str, Raw] = {}
        prompt = Raw(msgspec.json.encode(ids))
        for key, value in self.fields.items():
            if key in ("text", "input_ids"):
                out["input_ids"] = prompt
            elif key in _OURS or (not self.wants_logprobs and force_logprobs and key in _LOGPROB_REQUESTS):
                continue
            elif key == "sampling_params" and _is_null(self.sampling.get("n", Raw(b"1"))):
                # `"n": null` is answered with a 500.
                out[key] = Raw(msgspec.json.encode({k: v for k, v in self.sampling.items() if k != "n"}))
            else:
                out[key] = value
        if force_logprobs:
            out["return_logprob"] = Raw(_TRUE)
        return msgspec.json.encode(out)


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    id: str | None = None
    finish_reason: Any = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    weight_version: str | int | None = None
    weight_versions: list[_VersionSpan] | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None


class _Reply(msgspec.Struct):
    text: str
    meta_info: _Meta
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
        versions: half-open token runs `(version, start, end)`; None if the engine gives only the version at the end.
        version: the weight version at the end of the request.
        finish_type: `stop`, `length`, `abort`; None while running.
        matched: the stop token or stop string that ended it.
        other_text: a stream without logprobs can be read in two ways; this is the other one.
    """

    ids: list[int]
    text: str
    logprobs: list[float | None] | None
    request_id: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    version: str
    versions: list[tuple[str, int, int]] | None
    finish_type: str | None
    matched: int | str | None
    other_text: str | None = None

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
        if not all(value is not None and math.isfinite(value) for value in self.logprobs):
            return "a logprob that is not a finite number"
        return None


def parse_reply(body: bytes | Raw) -> Reply:
    """A reply to a request for one sample. Raises UnreadableReplyError."""
    try:
        reply = _reply.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnreadableReplyError(str(error)) from error
    entries = reply.meta_info.output_token_logprobs
    ids = reply.output_ids
    if ids is None:  # before 0.4, and the Rust frontend for an empty reply
        ids = [entry[1] for entry in entries or ()]
    elif entries is not None and [entry[1] for entry in entries] != ids:
        raise UnreadableReplyError("the ids of output_token_logprobs are not output_ids")
    return _assemble(reply.meta_info, ids, reply.text, None if entries is None else [entry[0] for entry in entries])


def _assemble(
    meta: _Meta, ids: list[int], text: str, logprobs: list[float | None] | None, other_text: str | None = None
) -> Reply:
    finish = meta.finish_reason if isinstance(meta.finish_reason, dict) else {}
    matched = finish.get("matched")
    runs = meta.weight_versions
    return Reply(
        ids=ids,
        text=text,
        logprobs=logprobs,
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
        fields = _object.decode(body)
        meta = _object.decode(fields["meta_info"])
    except (msgspec.DecodeError, KeyError, RecursionError) as error:
        raise UnreadableReplyError(f"no object with meta_info: {error}") from error
    kept = {key: value for key, value in meta.items() if key not in drop}
    kept.update({key: Raw(value) for key, value in (add or {}).items()})
    fields["meta_info"] = Raw(msgspec.json.encode(kept))
    return msgspec.json.encode(fields)


# Streams ---------------------------------------------------------------------------------------------------------------

DONE = b"[DONE]"


@dataclass(slots=True)
class EventSplitter:
    """Cuts a byte stream into server-sent events, wherever its chunks end."""

    _rest: bytearray = field(default_factory=bytearray)
    _seen: int = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The events that are complete now, each with its empty line."""
        self._rest += chunk
        begin = 0
        while (end := self._rest.find(b"\n\n", max(begin, self._seen - 1))) >= 0:
            yield bytes(self._rest[begin : end + 2])
            begin = self._seen = end + 2
        del self._rest[:begin]
        self._seen = len(self._rest)

    def flush(self) -> bytes:
        """What came after the last empty line."""
        rest = bytes(self._rest)
        self._rest.clear()
        self._seen = 0
        return rest


def event_data(event: bytes) -> bytes | None:
    """The payload of a `data:` event."""
    return event[5:].strip() if event.startswith(b"data:") else None


@dataclass(slots=True)
class StreamedReply:
    """Puts a reply together from the events of its stream, of which three forms exist.

    Cumulative (the default): every event repeats all before it. Incremental (`--incremental-streaming-output`): text, ids
    and logprobs are deltas, `completion_tokens` stays cumulative. Mixed (up to 0.5.5): ids are deltas, the rest is
    cumulative. Which one it is shows in the numbers: as many ids as `completion_tokens`, or as many as are missing.

    Of a cumulative event only what is new is parsed: that what came before stands at its beginning is one `memcmp`.
    """

    ids: list[int] = field(default_factory=list)
    done: bool = False
    error: str | None = None
    _meta: _Meta | None = None
    _logprobs: list[float | None] | None = None
    _raw_ids: bytes = b""
    _raw_logprobs: bytes = b""
    _last_text: bytes = b'""'
    _pieces: list[bytes] = field(default_factory=list)
    _cumulative_text: bool = True
    _cumulative_ids: bool = True

    def feed(self, data: bytes) -> None:
        """Take in the payload of one event. Sets `done` or `error`; an unreadable event is an error, too."""
        if data == DONE:
            self.done = True
            return
        try:
            fields = _object.decode(data)
            if "error" in fields:
                self.error = bytes(fields["error"]).decode("utf-8", "replace")[:500]
                return
            raw_meta = _object.decode(fields["meta_info"])
            entries = raw_meta.pop("output_token_logprobs", None)
            self._meta = msgspec.json.decode(msgspec.json.encode(raw_meta), type=_Meta)
            if "output_ids" in fields:
                self._take_ids(bytes(fields["output_ids"]), self._meta.completion_tokens)
            if entries is not None and not _is_null(entries):
                self._take_logprobs(bytes(entries), self._meta.completion_tokens)
            self._take_text(bytes(fields["text"]))
        except (msgspec.DecodeError, KeyError, RecursionError, ValueError) as error:
            self.error = f"an event that cannot be read: {error}"

    @property
    def finished(self) -> bool:
        """Whether the last event so far says how the generation ended."""
        return self._meta is not None and self._meta.finish_reason is not None

    def reply(self) -> Reply | None:
        """What has come so far; None before the first event."""
        if self._meta is None:
            return None
        cumulative = msgspec.json.decode(self._last_text, type=str)
        joined = "".join(msgspec.json.decode(piece, type=str) for piece in self._pieces)
        first, other = (cumulative, joined) if self._cumulative_text else (joined, cumulative)
        open_question = self._logprobs is None and not self._cumulative_ids and first != other
        return _assemble(self._meta, self.ids, first, self._logprobs, other if open_question else None)

    def _take_ids(self, raw: bytes, completed: int | None) -> None:
        inner = raw.strip()[1:-1]
        count = inner.count(b",") + 1 if inner else 0
        before = len(self.ids)
        if before and self._is_delta(count, completed, inner, self._raw_ids):
            self._cumulative_ids = False
            self.ids += msgspec.json.decode(raw, type=list[int])
            return
        if before and inner.startswith(self._raw_ids):
            new = inner[len(self._raw_ids) :].lstrip(b", ")
            self.ids += msgspec.json.decode(b"[" + new + b"]", type=list[int])
        else:
            self.ids = msgspec.json.decode(raw, type=list[int])
        self._raw_ids = inner

    def _take_logprobs(self, raw: bytes, completed: int | None) -> None:
        inner = raw.strip()[1:-1]
        plain = b'"' not in inner  # else the entries carry texts, in which anything may stand
        count = (inner.count(b"[") if plain else len(_any.decode(raw))) if inner else 0
        before = self._logprobs or []
        if before and self._is_delta(count, completed, inner, self._raw_logprobs):
            self._cumulative_text = False
            self._logprobs = before + _first_of_each(raw)
            return
        if before and plain and inner.startswith(self._raw_logprobs):
            before += _first_of_each(b"[" + inner[len(self._raw_logprobs) :].lstrip(b", ") + b"]")
            self._logprobs = before
        else:
            self._logprobs = _first_of_each(raw)
        self._raw_logprobs = inner

    @staticmethod
    def _is_delta(count: int, completed: int | None, inner: bytes, previous: bytes) -> bool:
        """Whether a list that is not the first holds only what is new: then it is shorter than what is complete."""
        return count != completed if completed is not None else not inner.startswith(previous)

    def _take_text(self, raw: bytes) -> None:
        told_by_logprobs = self._logprobs is not None or self._cumulative_ids
        if not told_by_logprobs and not raw.startswith(self._last_text[:-1]):
            self._cumulative_text = False
        self._last_text = raw
        if told_by_logprobs and self._cumulative_text:
            self._pieces[:] = [raw]
        else:
            self._pieces.append(raw)


def _first_of_each(raw: bytes) -> list[float | None]:
    return [entry[0] for entry in msgspec.json.decode(raw, type=list[tuple[float | None, int, Any]])]
