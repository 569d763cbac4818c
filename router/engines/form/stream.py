"""Streams of `POST /generate`: server-sent events, in the three forms that versions of SGLang send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from router.engines.events import DONE, FRAME
from router.engines.form.event_shape import ENTRIES, NUMBERS, EventLayout, EventShape, layout_of
from router.engines.form.reply import (
    PLACES,
    LogprobEntry,
    Meta,
    Reply,
    UnreadableReplyError,
    assemble,
    columns,
    decode_entries,
    packed_ids,
)
from router.engines.json import JSON_ERRORS, decode_any, decode_object, is_null

_TEXT = b'"text":"'
_IDS = b'"output_ids":['
_LOGPROBS = b'"output_token_logprobs":['


def _joined(known: bytes | bytearray, new: Raw) -> bytes:
    """Return the inside of a JSON list, extended by another list."""
    inner = bytes(new).strip()[1:-1]
    return b"".join((known, b",", inner)) if inner else bytes(known)


_TRIES = 4
"""Events of a stream that are looked at for their layout one after the other, although none is like the one before."""
_KEPT = 64
"""Alike events that are decoded together."""

_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_text = msgspec.json.Decoder(str).decode
_split_texts = msgspec.json.Decoder(list[Raw]).decode

_places = msgspec.json.Decoder(list[tuple[int, int]] | None).decode


def _was_aborted(meta: Meta) -> bool:
    return isinstance(meta.finish_reason, dict) and meta.finish_reason.get("type") == "abort"


@dataclass(slots=True)
class _Kept:
    """What alike events have added, as JSON, with a comma behind each: in few objects, because many streams are open."""

    count: int = 0
    texts: bytearray = field(default_factory=bytearray)
    ids: bytearray = field(default_factory=bytearray)
    entries: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class StreamedReply:
    """Assembles a reply from the events of its stream, which come in three forms.

    Cumulative (the default): every event repeats everything before it. Incremental (`--incremental-streaming-output`): text,
    ids and logprobs are deltas, `completion_tokens` is cumulative. Mixed (up to 0.5.5): ids are deltas, the rest is
    cumulative. The numbers show the form: an event has as many ids as `completion_tokens`, or as many as are missing.

    Only the new part of a cumulative event is parsed. The event starts with what is known, which a comparison of bytes shows,
    and the known part is cut out. The rest is small, and is what an incremental event would have contained (`news`).

    Once the form is known, an event that is like one before it is not decoded (`EventShape`): what it adds is kept as bytes,
    and decoded with that of later events, at the latest when the stream ends or somebody asks.

    Attributes:
        done: whether `[DONE]` has come.
        error: what the stream's error event says, or why an event cannot be read.
        unreadable: whether an event cannot be read.
        shape: that of the last event; None before there is one.
        values: what stands in the places of the last event in its `shape`; None if it was decoded.
        news: the last event without its known part; None if it was not cut, or not decoded.
        last_meta: the raw `meta_info` of the last event, without `output_token_logprobs`.
        last_fields: the top level of the last event, in which text and ids may be cut.
        added: what events have added to the text, as JSON strings, for a reader that takes them out; None if there is no
        reader.
    """

    done: bool = False
    error: str | None = None
    unreadable: bool = False
    _ids: list[int] = field(default_factory=list)
    _meta: Meta | None = None
    _entries: list[LogprobEntry] | None = None
    _raw_ids: bytes = b""
    _raw_logprobs: bytes | bytearray = b""
    _last_text: bytes = b'""'
    _pieces: list[bytes] = field(default_factory=list)
    _cumulative_text: bool = True
    _cumulative_ids: bool = True
    _grows_ids: bool = False
    _grows_logprobs: bool = False
    _had_ids: bool = False
    _miscounted: bool = False
    _updated: bool = False
    _prompt: tuple[bytes, bytes] | None = None
    news: bytes | None = None
    _cut: tuple[bytes, bytes] = b"", b""
    last_meta: dict[str, Raw] = field(default_factory=dict)
    last_fields: dict[str, Raw] = field(default_factory=dict)
    added: list[bytes] | None = None
    shape: EventShape | None = None
    values: Sequence[bytes | bytearray] | None = None
    _layout: EventLayout | None = None
    _tries: int = _TRIES
    _count: int = 0
    _kept: _Kept = field(default_factory=_Kept)

    def feed(self, data: bytes) -> None:
        """Take the payload of one event. Sets `done` or `error`; an unreadable event is an error, too."""
        if self.shape is None or not self.alike(FRAME % data):
            self.decode(data)

    def alike(self, event: bytes) -> bool:
        """Take an event, as it is sent, if it is like the one that `shape` is of: what it adds is kept as bytes.

        Return False and change nothing for any other event, also if its numbers show another form.
        """
        shape = self.shape
        if shape is None:
            return False
        news = self._shrink(event) if self._grows_ids else event
        found = None if news is None else shape.match(news)
        if found is None or found.group(*shape.fixed) != shape.constants:
            return False
        values = found.group(*shape.growing)
        ids = values[shape.ids]
        new = ids.count(b",") + 1 if ids else 0
        count = self._count + new
        if values[shape.completed] != b"%d" % count:
            return False
        if shape.entries is not None and values[shape.entries].count(b"[") != new:
            return False
        self.news = None
        self._count = count
        self._tries = _TRIES
        text = b'"%b"' % values[shape.text]
        if self.added is not None:
            self.added.append(text)
        kept = self._kept
        kept.count += 1
        kept.texts += b"%b," % text
        if ids:
            kept.ids += b"%b," % ids
        if shape.entries is not None and (entries := values[shape.entries]):
            kept.entries += b"%b," % entries
        self.values = self._grown(shape, values) if self._grows_ids else values
        if kept.count >= _KEPT:
            self._settle()
        return True

    def decode(self, data: bytes) -> None:
        """Take the payload of one event that is not `alike`. Sets `done` or `error` as `feed` does."""
        if self.shape is not None:
            self._settle()
            self.shape = self.values = None
        if data == DONE:
            self.done = True
            return
        self._decode(data)
        if self._tries and not self.finished and self.error is None:
            self._learn(data)

    def _decode(self, data: bytes) -> None:
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
            if "prompt_token_ids" in fields:
                self._prompt = bytes(fields["prompt_token_ids"]), bytes(fields.get(PLACES, b"null"))
            meta = msgspec.json.decode(msgspec.json.encode(raw_meta), type=Meta)
            self._take_meta(meta)
            if entries is not None and not is_null(entries) and _was_aborted(meta):
                entries = self._without_repetition(fields, entries, meta.completion_tokens)
            if "output_ids" in fields:
                self._had_ids = True
                self._take_ids(bytes(fields["output_ids"]), meta.completion_tokens)
            if entries is not None and not is_null(entries):
                self._take_logprobs(bytes(entries), meta.completion_tokens)
            self._take_text(bytes(fields["text"]))
        except (*JSON_ERRORS, KeyError, ValueError, UnreadableReplyError) as error:
            self.error, self.unreadable = f"an event that cannot be read: {error}", True

    def _learn(self, data: bytes) -> None:
        """Learn the shape of two events of one layout that were decoded, if the form of the stream is certain by now."""
        if self._grows_ids:
            if self._entries is not None and not self._grows_logprobs:
                return
        elif self._cumulative_ids or self._cumulative_text or self._entries is None:
            return
        self._tries -= 1
        found = layout_of(data)
        if found is None:
            return
        before, (self._layout, values) = self._layout, found
        if before == self._layout and (ENTRIES in before.names) == (self._entries is not None):
            self.shape = EventShape.of(before, values)
            self._raw_logprobs = bytearray(self._raw_logprobs)  # it grows with each event of a cumulative stream
            self._count = len(self._ids)

    def _grown(self, shape: EventShape, news: tuple[bytes, ...]) -> Sequence[bytes | bytearray]:
        """Add the values of an event without its known part to what is known; return those of the whole event."""
        ids = news[shape.ids]
        self._last_text = b'%b%b"' % (self._last_text[:-1], news[shape.text])
        values: list[bytes | bytearray] = [*news]
        if ids:
            self._raw_ids = b"%b,%b" % (self._raw_ids, ids)
        if shape.entries is not None:
            if entries := news[shape.entries]:
                self._raw_logprobs += b",%b" % entries
            values[shape.entries] = self._raw_logprobs
        values[shape.text], values[shape.ids] = self._last_text[1:-1], self._raw_ids
        return values

    def _settle(self) -> None:
        """Decode what alike events have added."""
        kept, shape, values = self._kept, self.shape, self.values
        if not kept.count:
            return
        assert shape is not None
        assert values is not None
        assert self._meta is not None
        self._kept = _Kept()
        self._meta.completion_tokens = self._count
        for name, value in zip(shape.names, values, strict=True):
            if name in NUMBERS:
                self.last_meta[name] = Raw(value)
        try:
            ids = _decode_ids(b"[" + kept.ids[:-1] + b"]")
            entries = decode_entries(b"[" + kept.entries[:-1] + b"]")
            texts = _split_texts(b"[" + kept.texts[:-1] + b"]")
        except JSON_ERRORS as error:
            self.error, self.unreadable = f"events that cannot be read: {error}", True
            return
        self._ids += ids
        if self._entries is not None:
            self._entries += entries
        if self._grows_ids:
            self._pieces[:] = [self._last_text]
        else:
            self._pieces += map(bytes, texts)  # one that is no text is an error of the reply, as if it had been decoded
            self._last_text = self._pieces[-1]

    @property
    def ids(self) -> list[int]:
        """The sampled token ids so far."""
        self._settle()
        return self._ids

    @property
    def logprobs(self) -> list[LogprobEntry]:
        """The logprobs so far, one entry per token."""
        self._settle()
        return self._entries or []

    @property
    def finished(self) -> bool:
        """Whether the last event says how the generation ended."""
        return self._meta is not None and self._meta.finish_reason is not None

    def reply(self) -> Reply | None:
        """Return the reply so far; None before the first event. Raise UnreadableReplyError if its text is invalid."""
        self._settle()
        if self._meta is None:
            return None
        first, other = self._texts()
        meta = self._meta
        if (
            meta.finish_reason is None
            and meta.completion_tokens is not None
            and meta.completion_tokens < len(self._ids)
        ):
            meta = msgspec.structs.replace(meta, completion_tokens=None)  # counted too early, see `_is_delta`
        ambiguous = self._entries is None and not self._cumulative_ids and first != other
        logprobs, logprob_ids = columns(self._entries)
        ids = self._ids if self._had_ids else list(logprob_ids or ())
        reply = assemble(meta, packed_ids(ids), first, logprobs, logprob_ids, other if ambiguous else None)
        if self._prompt:
            reply = msgspec.structs.replace(reply, prompt_ids=self._prompt[0], places=_places(self._prompt[1]))
        return msgspec.structs.replace(reply, updated=True) if self._updated else reply

    def _texts(self) -> tuple[str, str]:
        """Return the text so far, and what it would be if the events had the other form."""
        try:
            cumulative = _decode_text(self._last_text)
            joined = "".join(map(_decode_text, self._pieces))
        except JSON_ERRORS as error:
            raise UnreadableReplyError(f"a text that is none: {error}") from error
        return (cumulative, joined) if self._cumulative_text else (joined, cumulative)

    def _without_repetition(self, fields: dict[str, Raw], entries: Raw, completed: int | None) -> Raw:
        """Remove from a last event what SGLang repeats in it. Return its logprobs.

        If a pause retracts a stream of deltas and it is then aborted, SGLang 0.5.23 ends it with the last id again, the whole
        text, and all logprobs. Sometimes the previous delta is joined in front. Too many logprobs distinguish it from an event
        of another form; without logprobs, it cannot be distinguished.
        """
        ids = msgspec.json.decode(fields.get("output_ids", Raw(b"[]")), type=list[int])
        values, new, known = decode_entries(entries), ids[:-1], self._texts()[0]
        text = msgspec.json.decode(fields["text"], type=str)
        added = text[: (len(text) - len(known)) // 2]
        repeats = (
            len(self._ids) + len(new) == completed
            and len(values) == len(new) + completed
            and ids[-1:] == [*self._ids, *new][-1:]
            and values[len(new) :] == [*(self._entries or ()), *values[: len(new)]]
            and text == added + known + added
        )
        if not repeats:
            return entries
        fields["output_ids"] = Raw(msgspec.json.encode(new))
        fields["text"] = Raw(msgspec.json.encode(added))
        return Raw(msgspec.json.encode(values[: len(new)]))

    def whole(self, news: bytes) -> bytes:
        """Return `news`, possibly edited, with the text and ids that were cut out of it put back."""
        text, ids = self._cut
        before, key, after = news.partition(_TEXT)
        middle, ids_key, behind = after.partition(_IDS)
        comma = b"" if behind.startswith(b"]") else b","
        return b"".join((before, key, text, middle, ids_key, ids, comma, behind))

    def _shrink(self, data: bytes) -> bytes | None:
        """Return a cumulative event without its known part; None if it is not cumulative, or not in SGLang's layout."""
        if not self._grows_ids or (self._entries is not None and not self._grows_logprobs):
            return None
        # Quotes are escaped inside strings, so these bytes can only be a key.
        known: list[tuple[bytes, bytes | bytearray]] = [(_TEXT, self._last_text[1:-1]), (_IDS, self._raw_ids)]
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
        self._cut = self._last_text[1:-1], self._raw_ids
        return b"".join(pieces)

    def _take_news(self, news: bytes) -> bool:
        """Take the new part of a cumulative event. Return False and change nothing if its numbers show another form."""
        fields = decode_object(news)
        raw_meta = decode_object(fields["meta_info"])
        raw_entries = raw_meta.pop("output_token_logprobs", None)
        meta = msgspec.json.decode(msgspec.json.encode(raw_meta), type=Meta)
        ids = msgspec.json.decode(fields["output_ids"], type=list[int])
        entries = decode_entries(raw_entries) if raw_entries is not None and self._entries is not None else []
        completed = meta.completion_tokens
        if completed is None or len(self._ids) + len(ids) < completed:
            return False
        if self._entries is not None:
            if raw_entries is None or len(self._entries) + len(entries) < completed:
                return False
            self._entries += entries
            self._raw_logprobs = _joined(self._raw_logprobs, raw_entries)
        self._ids += ids
        self._raw_ids = _joined(self._raw_ids, fields["output_ids"])
        new = bytes(fields["text"])
        self._last_text = self._last_text[:-1] + new[1:]
        self._pieces[:] = [self._last_text]
        if self.added is not None:
            self.added.append(new)
        self._take_meta(meta)
        self.last_meta, self.last_fields = raw_meta, fields
        if "prompt_token_ids" in fields:
            self._prompt = bytes(fields["prompt_token_ids"]), bytes(fields.get(PLACES, b"null"))
        return True

    def _take_meta(self, meta: Meta) -> None:
        known = None if self._meta is None else self._meta.weight_version
        if None not in (known, meta.weight_version) and known != meta.weight_version:
            self._updated = True
        self._meta = meta

    def _take_ids(self, raw: bytes, completed: int | None) -> None:
        inner = raw.strip()[1:-1]
        count = inner.count(b",") + 1 if inner else 0
        before = len(self._ids)
        self._check_first(before, count, completed)
        if before and self._is_delta(before, count, completed, inner, self._raw_ids):
            self._cumulative_ids = self._grows_ids = False
            self._ids += msgspec.json.decode(raw, type=list[int])
            return
        # After deltas, `_raw_ids` is not the start of the list.
        goes_on = bool(before and self._cumulative_ids and inner.startswith(self._raw_ids))
        self._grows_ids = goes_on and completed is not None
        if goes_on:
            new = inner[len(self._raw_ids) :].lstrip(b", ")
            self._ids += msgspec.json.decode(b"[" + new + b"]", type=list[int])
        else:
            self._ids = msgspec.json.decode(raw, type=list[int])
        self._raw_ids = inner

    def _take_logprobs(self, raw: bytes, completed: int | None) -> None:
        inner = raw.strip()[1:-1]
        plain = b'"' not in inner  # otherwise the entries contain texts, with any character
        count = (inner.count(b"[") if plain else len(decode_any(raw))) if inner else 0
        self._check_first(len(self._entries or ()), count, completed)
        known = len(self._entries or ())
        # No form has deltas of logprobs beside ids that repeat all before them.
        if known and not self._grows_ids and self._is_delta(known, count, completed, inner, self._raw_logprobs):
            assert self._entries is not None
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

    def _check_first(self, before: int, count: int, completed: int | None) -> None:
        """Note a first list that lacks tokens. No form has one, so the numbers do not show which form this stream has."""
        if not before and completed is not None and count < completed:
            self._miscounted = True

    def _is_delta(
        self, before: int, count: int, completed: int | None, inner: bytes, previous: bytes | bytearray
    ) -> bool:
        """Return whether a later list holds only what is new: then it is shorter than `completed`.

        A list that repeats all before it is cumulative, although tokens are missing at its end: with what was there before it,
        it would have too many.

        A cumulative list may be longer than `completed`: SGLang 0.5.23 counts the tokens when it creates an event and prints
        the list when it sends the event, and a busy worker adds to the list in between. In a stream that miscounts, no list is
        joined to another: in the end there are fewer tokens than `completed`, and the reply is inexact.
        """
        if self._miscounted:
            return False
        repeats = inner.startswith(previous)
        if completed is None:
            return not repeats
        return count < completed and not (repeats and before <= count and before + count > completed)

    def _take_text(self, raw: bytes) -> None:
        form_is_known = self._entries is not None or self._cumulative_ids
        if not form_is_known and not raw.startswith(self._last_text[:-1]):
            self._cumulative_text = False
        cumulative = form_is_known and self._cumulative_text
        if self.added is not None:
            goes_on = self._cumulative_text and raw.startswith(self._last_text[:-1])
            self.added.append(b'"' + raw[len(self._last_text) - 1 :] if goes_on else raw)
        self._last_text = raw
        if cumulative:
            self._pieces[:] = [raw]
        else:
            self._pieces.append(raw)
