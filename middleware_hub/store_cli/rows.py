"""A row of an export: one recorded sequence, from its first prompt to the end of a reply.

It is the answer of `/retrieve_from_text` for the whole text of that reply: the same code flattens the same spans.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, NamedTuple

from middleware_hub.radix.cut import Cut, end_of
from middleware_hub.radix.node import common_length
from middleware_hub.spans.chain import INEXACT, SpanFlag, TokenSpan, links, settle
from middleware_hub.spans.media import MediaSpan, chain_media
from middleware_hub.spans.trajectory import TokenTrajectory, flatten
from middleware_hub.store.chains import span_of
from middleware_hub.store.paths import TextPath
from middleware_hub.store.protocol import Query, Store
from middleware_hub.store.records import Mark, SpanRecord
from middleware_hub.store_cli.selection import session_of

_AT_ONCE: Final = 32
"""Sequences that are read in one look-up."""


class Row(NamedTuple):
    """One sequence.

    Attributes:
        record: the reply that it ends with.
        text: the whole text, with a mark for each image; None for a turn of a session, which has messages instead.
        flat: its tokens.
        request_ids: one for each reply that ends with exactly this text, newest first.
        mark: what was last done with its conversation.
        media: the media spans among the tokens.
    """

    record: SpanRecord
    text: str | None
    flat: TokenTrajectory
    request_ids: tuple[str, ...]
    mark: Mark | None
    media: Sequence[MediaSpan] = ()

    @property
    def exact(self) -> bool:
        """Return whether it is exact: nothing is known to be missing or wrong."""
        return INEXACT.isdisjoint(self.flat.reasons)


class Ends:
    """Collects the replies that end a row, from all records of a store in the order of `Store.scan`.

    A reply that another reply continues, or all of whose visible tokens another reply has, is inside the other's row. With
    `every=True` it also has its own row.
    """

    def __init__(self, *, every: bool = False) -> None:
        self._every = every
        self._visible: dict[bytes, tuple[int, bytes]] = {}

    def add(self, record: SpanRecord, wanted: bool) -> None:
        """Take the next record; `wanted` says whether it may end a row."""
        if not self._every and not record.note:
            if record.line is not None:
                self._visible.pop(record.line, None)
            above = None if record.parent is None else self._visible.get(record.parent)
            if above is not None and record.parent is not None and record.take >= above[0]:
                del self._visible[record.parent]
        if wanted:
            count = record.count if record.visible < 0 else record.visible
            self._visible[record.id] = count, record.root

    @property
    def roots(self) -> dict[bytes, bytes]:
        """Return the ids of the replies with their roots, in the order of recording."""
        return {record: root for record, (_, root) in self._visible.items()}


async def read_rows(store: Store, roots: Mapping[bytes, bytes], *, at_once: int = _AT_ONCE) -> AsyncIterator[list[Row]]:
    """Yield the rows that end with these replies, which are named with their roots, some at a time.

    Rows of one step share their spans. A reply that cannot be read, or was forgotten, has no row.
    """
    ids = list(roots)
    for at in range(0, len(ids), at_once):
        some = ids[at : at + at_once]
        found = await store.get(some, roots=roots)
        records = {record.id: record for record in found.records}
        spans: dict[bytes, TokenSpan] = {}
        for record in found.records:
            spans[record.id] = span_of(record, spans)
        rows = []
        for wanted in some:
            if wanted not in records:
                continue
            record, span = records[wanted], spans[wanted]
            text = None if session_of(record.namespace) else whole_text(record, records)
            same = [record] if text is None else await _variants(store, record, text, records)
            names = tuple(one.request_ids[0] if one.request_ids else "" for one in same)
            if text is not None:
                await _ask_late(store, span, records)
            media = chain_media(span, span.count)
            rows.append(Row(record, text, flatten(span, span.count), names, found.marks.get(record.root), media))
        yield rows


def whole_text(record: SpanRecord, records: Mapping[bytes, SpanRecord]) -> str:
    """Return the whole text of a record; its links are in `records`."""
    parts = [record.text]
    while record.base is not None:
        record = records[record.base]
        parts.append(record.text)
    return "".join(reversed(parts))


async def _ask_late(store: Store, end: TokenSpan, records: Mapping[bytes, SpanRecord]) -> None:
    """Make up for look-ups that the store could not answer when the prompts of a chain were made, as a router does.

    Without a vocabulary nobody knows where tokens end: so a reply counts as passed over from its first character on.
    """
    for span, _ in links(end, end.count):
        if not span.flags & SpanFlag.UNASKED:
            continue
        own = records[span.stored.id]
        text = whole_text(own, records)[: own.start if own.sampled else own.text_end]
        prompt = Cut(span.parent, span.take, span.start) if span.sampled else end_of(span)
        used = prompt.sampled_base[2]
        chain = {part.stored.id for part, _ in links(end, end.count)}
        found = (await store.find(Query(TextPath(own.namespace, text), used, chain))).records if text else ()
        every = {**records, **{one.id: one for one in found}}
        missed = any(
            _goes_on(one, whole_text(one, every), own.line, text, used) for one in found if one.id not in chain
        )
        settle(span, missed=missed)


def _goes_on(reply: SpanRecord, whole: str, line: bytes | None, text: str, used: int) -> bool:
    """Return whether a prompt has, after its first `used` characters, text of a reply: a whole one, or a part after `line`."""
    if not reply.sampled or reply.flags & SpanFlag.MISMATCH:
        return False
    if text.startswith(whole):
        return len(whole) > used
    return reply.line == line and common_length(whole, text, 0) > max(used, reply.start)


async def _variants(
    store: Store, record: SpanRecord, text: str, records: Mapping[bytes, SpanRecord]
) -> list[SpanRecord]:
    """Return all replies with this text, newest first."""
    asked = Query(TextPath(record.namespace, text), known_from=len(text), known=records.keys() - {record.id})
    others = {other.id: other for other in (await store.find(asked)).records}
    for other in records.values():
        if other.text_end == len(text) and other.namespace == record.namespace:
            others[other.id] = other
    every = {**records, **others}
    same = [
        other
        for other in others.values()
        if other.sampled and other.text_end == len(text) and whole_text(other, every) == text
    ]
    same.sort(key=lambda other: other.serial, reverse=True)
    return same
