"""Streams of `POST /generate`: server-sent events, in the three forms that SGLang has had."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from router.engines.sglang.json import JSON_ERRORS, decode_any, decode_object, is_null
from router.engines.sglang.reply import LogprobEntry, Meta, Reply, UnreadableReplyError, assemble, decode_entries

DONE = b"[DONE]"

END_BYTES = 64
"""Of a stream's last bytes, what is enough to see its end."""

_END = re.compile(rb"(?:\A|\n)data:[ \t]*\[DONE\]\s*\Z")

_TEXT = b'"text":"'
_IDS = b'"output_ids":['
_LOGPROBS = b'"output_token_logprobs":['


@dataclass(slots=True)
class EventSplitter:
    """Cuts a byte stream into server-sent events, wherever its chunks end."""

    _rest: bytearray = field(default_factory=bytearray)
    _seen: int = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The events that are complete now, each with its empty line."""
        rest = self._rest
        rest += chunk
        begin, at = 0, max(0, self._seen - 1)
        # One line break is found many times as fast as two, and JSON has none inside.
        while (at := rest.find(b"\n", at)) >= 0:
            at += 1
            if rest.startswith(b"\n", at):
                at += 1
                with memoryview(rest) as view:
                    event = bytes(view[begin:at])
                begin = self._seen = at
                yield event
        del rest[:begin]
        self._seen = len(rest)

    def flush(self) -> bytes:
        """What came after the last empty line."""
        rest = bytes(self._rest)
        self._rest.clear()
        self._seen = 0
        return rest


def event_data(event: bytes) -> bytes | None:
    """The payload of a `data:` event."""
    if event.startswith(b"data: {") and event.endswith(b"}\n\n"):
        return event[6:-2]
    return event[5:].strip() if event.startswith(b"data:") else None


def has_ended(stream: bytes | bytearray) -> bool:
    """Whether the last event of (the end of) a stream is the one that says that it is whole."""
    return _END.search(stream, max(0, len(stream) - END_BYTES)) is not None


class _Index(msgspec.Struct):
    index: int | None = None


_index = msgspec.json.Decoder(_Index)
_LAST_INDEX = re.compile(rb'"index":\s*(\d+)\s*\}\s*\Z')


def event_index(data: bytes) -> int:
    """Which generation of a batch an event belongs to; 0 where there is only one."""
    # SGLang writes it last, and before the last brace of all there is no key but one of the top level.
    last = _LAST_INDEX.search(data, max(0, len(data) - 40))
    if last is not None:
        return int(last[1])
    try:
        return _index.decode(data).index or 0
    except JSON_ERRORS:
        return 0


def _joined(known: bytes, new: Raw) -> bytes:
    """The inside of a JSON list, longer by another one."""
    inner = bytes(new).strip()[1:-1]
    return b"".join((known, b",", inner)) if inner else known


def _was_aborted(meta: Meta) -> bool:
    return isinstance(meta.finish_reason, dict) and meta.finish_reason.get("type") == "abort"


@dataclass(slots=True)
class StreamedReply:
    """Puts a reply together from the events of its stream, of which three forms exist.

    Cumulative (the default): every event repeats all before it. Incremental (`--incremental-streaming-output`): text, ids
    and logprobs are deltas, `completion_tokens` stays cumulative. Mixed (up to 0.5.5): ids are deltas, the rest is
    cumulative. Which one it is shows in the numbers: as many ids as `completion_tokens`, or as many as are missing.

    Of a cumulative event only what is new is parsed. That it begins with what came before is seen by comparing bytes, and
    cut out: what is left is small, and is what an incremental event would have said (`news`).
    """

    ids: list[int] = field(default_factory=list)
    done: bool = False
    error: str | None = None
    _meta: Meta | None = None
    _entries: list[LogprobEntry] | None = None
    _raw_ids: bytes = b""
    _raw_logprobs: bytes = b""
    _last_text: bytes = b'""'
    _pieces: list[bytes] = field(default_factory=list)
    _cumulative_text: bool = True
    _cumulative_ids: bool = True
    _grows_ids: bool = False
    _grows_logprobs: bool = False
    _had_ids: bool = False
    news: bytes | None = None
    """The last event without what the one before it had said already; None where it was not cut."""
    _cut: tuple[bytes, bytes] = b"", b""
    last_meta: dict[str, Raw] = field(default_factory=dict)
    """`meta_info` of the last event, raw, without `output_token_logprobs`."""
    last_fields: dict[str, Raw] = field(default_factory=dict)
    """Its top level, in which texts and ids may have been cut short."""
    added: list[bytes] | None = None
    """What events have added to the text, as JSON strings, for a reader who takes them out as they come; None for nobody."""

    def feed(self, data: bytes) -> None:
        """Take in the payload of one event. Sets `done` or `error`; an unreadable event is an error, too."""
        if data == DONE:
            self.done = True
            return
        try:
            self.news = self._shrink(data)
            if self.news is not None and self._take_news(self.news):
                return
            self.news = None
            fields = decode_object(data)
            if "error" in fields:
                self.error = bytes(fields["error"]).decode("utf-8", "replace")[:500]
                return
            raw_meta = decode_object(fields["meta_info"])
            entries = raw_meta.pop("output_token_logprobs", None)
            self.last_fields, self.last_meta = fields, raw_meta
            self._meta = msgspec.json.decode(msgspec.json.encode(raw_meta), type=Meta)
            if entries is not None and not is_null(entries) and _was_aborted(self._meta):
                entries = self._without_repetition(fields, entries, self._meta.completion_tokens)
            if "output_ids" in fields:
                self._had_ids = True
                self._take_ids(bytes(fields["output_ids"]), self._meta.completion_tokens)
            if entries is not None and not is_null(entries):
                self._take_logprobs(bytes(entries), self._meta.completion_tokens)
            self._take_text(bytes(fields["text"]))
        except (*JSON_ERRORS, KeyError, ValueError) as error:
            self.error = f"an event that cannot be read: {error}"

    @property
    def logprobs(self) -> list[LogprobEntry]:
        """The logprobs so far, one entry a token."""
        return self._entries or []

    @property
    def finished(self) -> bool:
        """Whether the last event so far says how the generation ended."""
        return self._meta is not None and self._meta.finish_reason is not None

    def reply(self) -> Reply | None:
        """What has come so far; None before the first event."""
        if self._meta is None:
            return None
        first, other = self._texts()
        meta = self._meta
        if meta.finish_reason is None and meta.completion_tokens is not None and meta.completion_tokens < len(self.ids):
            meta = msgspec.structs.replace(meta, completion_tokens=None)  # it was counted too early, see `_is_delta`
        open_question = self._entries is None and not self._cumulative_ids and first != other
        logprobs = None if self._entries is None else [entry[0] for entry in self._entries]
        logprob_ids = None if self._entries is None else [entry[1] for entry in self._entries]
        ids = self.ids if self._had_ids else list(logprob_ids or ())
        return assemble(meta, ids, first, logprobs, logprob_ids, other if open_question else None)

    def _texts(self) -> tuple[str, str]:
        """The text so far, and what it would be if events had been of the other kind."""
        try:
            cumulative = msgspec.json.decode(self._last_text, type=str)
            joined = "".join(msgspec.json.decode(piece, type=str) for piece in self._pieces)
        except JSON_ERRORS as error:
            raise UnreadableReplyError(f"a text that is none: {error}") from error
        return (cumulative, joined) if self._cumulative_text else (joined, cumulative)

    def _without_repetition(self, fields: dict[str, Raw], entries: Raw, completed: int | None) -> Raw:
        """Take out of a last event what SGLang repeats in it; returns its logprobs.

        A stream of deltas that is retracted by a pause and then aborted ends (0.5.23) with the last id once more, all of the
        text, and all of the logprobs. Sometimes the delta before it is joined to that: then it stands in front. Logprobs tell
        it from an event of another kind, for there are too many of them; without them it is not told.
        """
        ids = msgspec.json.decode(fields.get("output_ids", Raw(b"[]")), type=list[int])
        values, new, known = decode_entries(entries), ids[:-1], self._texts()[0]
        text = msgspec.json.decode(fields["text"], type=str)
        added = text[: (len(text) - len(known)) // 2]
        repeats = (
            len(self.ids) + len(new) == completed
            and len(values) == len(new) + completed
            and ids[-1:] == [*self.ids, *new][-1:]
            and values[len(new) :] == [*(self._entries or ()), *values[: len(new)]]
            and text == added + known + added
        )
        if not repeats:
            return entries
        fields["output_ids"] = Raw(msgspec.json.encode(new))
        fields["text"] = Raw(msgspec.json.encode(added))
        return Raw(msgspec.json.encode(values[: len(new)]))

    def whole(self, news: bytes) -> bytes:
        """An (edited) `news` with the text and the ids put back that were cut out of it."""
        text, ids = self._cut
        before, key, after = news.partition(_TEXT)
        middle, ids_key, behind = after.partition(_IDS)
        comma = b"" if behind.startswith(b"]") else b","
        return b"".join((before, key, text, middle, ids_key, ids, comma, behind))

    def _shrink(self, data: bytes) -> bytes | None:
        """A cumulative event without what is known; None if it is not one, or not laid out as SGLang does."""
        if not self._grows_ids or (self._entries is not None and not self._grows_logprobs):
            return None
        # Inside of strings quotes are escaped: where these stand, there is a key.
        known = [(_TEXT, self._last_text[1:-1]), (_IDS, self._raw_ids)]
        if self._entries is not None:
            known.append((_LOGPROBS, self._raw_logprobs))
        pieces, begin = [], 0
        for key, value in known:
            end = data.find(key, begin) + len(key)
            if end < len(key) or not data.startswith(value, end):
                return None
            pieces.append(data[begin:end])
            begin = end + len(value)
            if key != _TEXT:
                if data.startswith(b",", begin):
                    begin += 1
                elif not data.startswith(b"]", begin):
                    return None
        pieces.append(data[begin:])
        self._cut = known[0][1], known[1][1]
        return b"".join(pieces)

    def _take_news(self, news: bytes) -> bool:
        """Take in what is new in a cumulative event. False, and nothing taken in, if the numbers say that it is not that."""
        fields = decode_object(news)
        raw_meta = decode_object(fields["meta_info"])
        raw_entries = raw_meta.pop("output_token_logprobs", None)
        meta = msgspec.json.decode(msgspec.json.encode(raw_meta), type=Meta)
        ids = msgspec.json.decode(fields["output_ids"], type=list[int])
        entries = decode_entries(raw_entries) if raw_entries is not None and self._entries is not None else []
        completed = meta.completion_tokens
        if completed is None or len(self.ids) + len(ids) < completed:
            return False
        if self._entries is not None:
            if raw_entries is None or len(self._entries) + len(entries) < completed:
                return False
            self._entries += entries
            self._raw_logprobs = _joined(self._raw_logprobs, raw_entries)
        self.ids += ids
        self._raw_ids = _joined(self._raw_ids, fields["output_ids"])
        new = bytes(fields["text"])
        self._last_text = self._last_text[:-1] + new[1:]
        self._pieces[:] = [self._last_text]
        if self.added is not None:
            self.added.append(new)
        self._meta, self.last_meta, self.last_fields = meta, raw_meta, fields
        return True

    def _take_ids(self, raw: bytes, completed: int | None) -> None:
        inner = raw.strip()[1:-1]
        count = inner.count(b",") + 1 if inner else 0
        before = len(self.ids)
        if before and self._is_delta(count, completed, inner, self._raw_ids):
            self._cumulative_ids = False
            self.ids += msgspec.json.decode(raw, type=list[int])
            return
        # Behind deltas `_raw_ids` is none of the beginning of it.
        goes_on = bool(before and self._cumulative_ids and inner.startswith(self._raw_ids))
        self._grows_ids = goes_on and completed is not None
        if goes_on:
            new = inner[len(self._raw_ids) :].lstrip(b", ")
            self.ids += msgspec.json.decode(b"[" + new + b"]", type=list[int])
        else:
            self.ids = msgspec.json.decode(raw, type=list[int])
        self._raw_ids = inner

    def _take_logprobs(self, raw: bytes, completed: int | None) -> None:
        inner = raw.strip()[1:-1]
        plain = b'"' not in inner  # else the entries carry texts, in which anything may stand
        count = (inner.count(b"[") if plain else len(decode_any(raw))) if inner else 0
        if self._entries and self._is_delta(count, completed, inner, self._raw_logprobs):
            self._cumulative_text = False
            self._entries += decode_entries(raw)
            return
        self._grows_logprobs = bool(
            self._entries and plain and completed is not None and inner.startswith(self._raw_logprobs)
        )
        if self._entries and plain and inner.startswith(self._raw_logprobs):
            self._entries += decode_entries(b"[" + inner[len(self._raw_logprobs) :].lstrip(b", ") + b"]")
        else:
            self._entries = decode_entries(raw)
        self._raw_logprobs = inner

    @staticmethod
    def _is_delta(count: int, completed: int | None, inner: bytes, previous: bytes) -> bool:
        """Whether a list that is not the first holds only what is new: then it is shorter than what is complete.

        It may be longer than what is complete, and is not a delta then: of a cumulative event SGLang (0.5.23) counts the tokens
        when it makes it, and prints the list when it sends it, by when a busy one has added to the list.
        """
        return count < completed if completed is not None else not inner.startswith(previous)

    def _take_text(self, raw: bytes) -> None:
        told_by_logprobs = self._entries is not None or self._cumulative_ids
        if not told_by_logprobs and not raw.startswith(self._last_text[:-1]):
            self._cumulative_text = False
        cumulative = told_by_logprobs and self._cumulative_text
        if self.added is not None:
            goes_on = self._cumulative_text and raw.startswith(self._last_text[:-1])
            self.added.append(b'"' + raw[len(self._last_text) - 1 :] if goes_on else raw)
        self._last_text = raw
        if cumulative:
            self._pieces[:] = [raw]
        else:
            self._pieces.append(raw)
