"""Maps the spans of this process to the records of a store: the same chains, linked by pointers here and by ids there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import msgspec

from middleware_hub.spans.chain import SpanFlag, TokenSpan
from middleware_hub.spans.hidden_tail import HiddenToken
from middleware_hub.store.paths import Namespace, PathState, TextEnd
from middleware_hub.store.records import ID_SIZE, SpanRecord, identified, new_id


class Stored(msgspec.Struct, frozen=True, gc=False):
    """The fields of its record that a span keeps (`TokenSpan.stored`).

    Attributes:
        id, root, serial: of the record.
        plain: whether the ids of its chain spell its text.
        state: the hashes of the whole text up to the last block's end in it, for the look-up of a text that continues it; None
            where texts are not looked up.
        spelled: the end of what the ids of its chain spell, if that differs from its text and is known here.
        stamp, ends, extras: of the record, so that the same record can be made again. (A span may be measured later.)
        rewritten: how often it was written again, because the store had forgotten or lost it.
    """

    id: bytes
    root: bytes
    serial: int = 0
    plain: bool = True
    state: PathState | None = None
    spelled: TextEnd | None = None
    stamp: str = ""
    ends: bytes | None = None
    extras: tuple[str, ...] = ()
    rewritten: int = 0


def record_of(
    span: TokenSpan,
    namespace: Namespace,
    *,
    serial: int,
    stamp: str,
    text: str = "",
    line: TokenSpan | None = None,
    base: TokenSpan | None = None,
    tail: tuple[HiddenToken, ...] = (),
    extras: tuple[str, ...] = (),
    spelled: tuple[bytes, int, bytes] | None = None,
) -> SpanRecord:
    """Return the record of a span. Its parent, `line` and `base` are `stored`. A stored span keeps its id and its ends.

    Args:
        text: that of the span, after the whole text of `base`.
        line: the complete reply that its prompt continued.
        tail, extras, spelled: fields of the record.
    """
    above = span.parent or line
    name = b"" if not span.sampled else new_id() if span.stored is None else span.stored.id
    record = SpanRecord(
        id=name,
        root=name if above is None else above.stored.root,
        namespace=namespace,
        serial=serial,
        stamp=stamp,
        start=span.start,
        width=span.width,
        text=text,
        ids=span.ids,
        parent=None if span.parent is None else span.parent.stored.id,
        take=span.take,
        line=None if line is None else line.stored.id,
        base=None if base is None else base.stored.id,
        logprobs=span.logprobs,
        versions=span.versions,
        flags=_as_recorded(span.flags),
        visible=span.visible,
        ends=span.ends if span.stored is None else span.stored.ends,
        request_ids=span.request_ids,
        finish=span.finish,
        left_from=(0 if line is None else line.text_end) if span.sampled and _is_foreign(span) else None,
        tail=tail,
        extras=extras,
        spelled=spelled,
        media=span.media,
        kv_version=span.kv_version,
    )
    return record if span.sampled else identified(record)


def _as_recorded(flags: int) -> int:
    """Return the flags that a span had when it was recorded: whether the store was asked later is found out again."""
    return flags & ~SpanFlag.ASKED_LATE | SpanFlag.UNASKED if flags & SpanFlag.ASKED_LATE else flags


def _is_foreign(reply: TokenSpan) -> bool:
    """Return whether the context of a reply has tokens of a chain that was recorded under another text."""
    before = reply.parent
    context = 0 if before is None or before.sampled else before.flags
    return bool((reply.flags | context) & SpanFlag.FOREIGN)


def note_on(
    reply: Stored, namespace: Namespace, names: Sequence[str], note: bytes, *, serial: int, stamp: str
) -> SpanRecord:
    """Return the record of a note on a reply. A reply has one note, and notes are in the order of their replies."""
    name = reply.id[:8] + blake2b(reply.id, digest_size=ID_SIZE - 8, person=b"tito-note").digest()
    return SpanRecord(
        *(name, reply.root, namespace, serial, stamp, 0, 0, "", b"", reply.id), request_ids=tuple(names), note=note
    )


def span_of(record: SpanRecord, spans: Mapping[bytes, TokenSpan], state: PathState | None = None) -> TokenSpan:
    """Return the span of a record. Its parent is in `spans`, by the id of its record."""
    return TokenSpan(
        None if record.parent is None else spans[record.parent],
        record.take,
        record.start,
        record.ids,
        record.width,
        logprobs=record.logprobs,
        versions=record.versions,
        flags=record.flags,
        visible=record.visible,
        ends=record.ends,
        request_ids=record.request_ids,
        finish=record.finish,
        media=record.media,
        kv_version=record.kv_version,
        stored=Stored(
            record.id,
            record.root,
            record.serial,
            record.spelled is None,
            state,
            stamp=record.stamp,
            ends=record.ends,
            extras=record.extras,
        ),
    )
