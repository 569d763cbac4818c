"""The spans of one session, and their records in the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from msgspec import Raw
from msgspec.structs import replace

from middleware_hub.sessions.events import TurnCommitted
from middleware_hub.sessions.trie.trie import MessageTrie
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.spans.hidden_tail import HiddenToken
from middleware_hub.spans.per_token import numbers_in, written
from middleware_hub.store.chains import Stored, record_of, span_of
from middleware_hub.store.errors import DamagedRecordError, MissingRecordError
from middleware_hub.store.paths import Namespace, TextPath
from middleware_hub.store.protocol import Store
from middleware_hub.store.records import Blob, Serials, SpanRecord, identified

_INT32: Final = "int32"
_JSON: Final = "json"
_LOOKS: Final = 2
"""Between two look-ups, another router may write a session again that the store has forgotten."""


class Packed(NamedTuple):
    """A further field of a worker's reply, as it is stored."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Kept(NamedTuple):
    """A span, and the further parts of its record; `flags` are the record's, because its id covers them."""

    span: TokenSpan
    lora: str
    flags: int
    tail: tuple[HiddenToken, ...] = ()
    fields: Mapping[str, Packed] = {}


class SpanBook:
    """Knows which record is which span; see `SpanRecord`.

    All chains of a session begin after one empty context, its root: they are forgotten together, or not at all. No look-up by
    text finds the records of a session: its log names them all.

    Args:
        name: that of its log. It salts the records: equal spans of another session, or of an earlier life of this session, have
            other records.
    """

    def __init__(self, store: Store, serials: Serials, tenant: str, name: str) -> None:
        self._store = store
        self._bare: dict[str, SpanRecord] = {}
        """Maps a generation to the record whose further fields only the store has."""
        self._paths: dict[Namespace, TextPath] = {}
        self._tenant = tenant
        self._name = name
        self._serials = serials
        self._kept: dict[bytes, _Kept] = {}
        self._root_record = identified(
            SpanRecord(
                id=b"", root=b"", namespace=self._namespace(""), serial=0, stamp="", start=0, width=0, text="", ids=b""
            )
        )
        root = self._root_record.id
        self._root = TokenSpan(None, 0, 0, b"", 0, stored=Stored(root, root))

    def __contains__(self, record: object) -> bool:
        return record == self.root or record in self._kept

    @property
    def root(self) -> bytes:
        return self._root_record.id

    @property
    def kept(self) -> list[bytes]:
        """Return the ids of all records of the session, each after the records on which it builds."""
        return [self.root, *self._kept]

    def _namespace(self, lora: str) -> Namespace:
        return self._tenant, lora, "", self._name

    # Into the store ----------------------------------------------------------------------------------------------------

    def root_record(self, stamp: str) -> SpanRecord:
        return replace(self._root_record, serial=self._serials.next(), stamp=stamp)

    def records(
        self, span: TokenSpan, lora: str, stamp: str, tail: tuple[HiddenToken, ...], fields: Mapping[str, Packed]
    ) -> list[SpanRecord]:
        """Return the record of a sampled span, and of its context if that has none, and name them in the spans."""
        made = []
        context = span.parent
        if context is not None and context.stored is None:
            made.append(self._record(context, _Kept(context, lora, context.flags), stamp))
        made.append(self._record(span, _Kept(span, lora, span.flags, tail, fields), stamp))
        return made

    def _record(self, span: TokenSpan, kept: _Kept, stamp: str) -> SpanRecord:
        """Return the record of a span; a span that is stored already keeps its record."""
        old = span.stored
        made = record_of(
            span if span.flags == kept.flags else replace(span, flags=kept.flags),
            self._namespace(kept.lora),
            serial=self._serials.next() if old is None else old.serial,
            stamp=stamp if old is None else old.stamp,
            line=self._root if span.parent is None else None,
            tail=kept.tail,
            extras=tuple(kept.fields) if old is None else old.extras,
        )
        if old is None:
            span.stored = Stored(made.id, made.root, made.serial, stamp=made.stamp, ends=made.ends, extras=made.extras)
        self._kept[made.id] = kept
        return made

    def again(self, missing: Iterable[bytes], stamp: str) -> list[SpanRecord]:
        """Return the records of spans that the store has forgotten. Raises KeyError for a span that is not here."""
        return [
            self.root_record(stamp)
            if record == self.root
            else self._record(self._kept[record].span, self._kept[record], stamp)
            for record in missing
        ]

    def paths(self, records: Iterable[SpanRecord]) -> dict[bytes, TextPath]:
        """Return the paths of records, all of which have the empty text."""
        found = {}
        for record in records:
            path = self._paths.get(record.namespace)
            if path is None:
                path = self._paths[record.namespace] = TextPath(record.namespace, "")
            found[record.id] = path
        return found

    def blobs(self, records: Iterable[SpanRecord]) -> list[Blob]:
        """Return the further fields of replies among these records."""
        kept = [(one.id, self._kept[one.id]) for one in records if one.id != self.root]
        return [Blob(record, name, *field) for record, one in kept for name, field in one.fields.items()]

    # Out of the store --------------------------------------------------------------------------------------------------

    async def fetch(self, turns: Iterable[TurnCommitted]) -> dict[bytes, SpanRecord]:
        """Return the records of these turns that are not known here.

        Raises StoreUnreachableError, DamagedRecordError, and MissingRecordError if the store has forgotten the session.
        """
        named = [one for turn in turns for one in (turn.context, turn.span) if one is not None]
        wanted = [one for one in dict.fromkeys(named) if one not in self]
        if not wanted:
            return {}
        for _ in range(_LOOKS):
            found = await self._store.get(wanted, known=self, roots=dict.fromkeys(wanted, self.root))
            records = {record.id: record for record in found.records}
            # A turn that was sampled here meanwhile has made its context known, which may be the very same: it is not brought.
            missing = tuple(one for one in wanted if one not in records and one not in self)
            if not missing:
                return records
            root = await self._store.get([self.root], roots={self.root: self.root})
            if not (found.damaged or root.records):
                raise MissingRecordError(missing)
        raise DamagedRecordError("a session cannot be read whole: run `tito-router store verify` on the store")

    def restore(self, turn: TurnCommitted, records: Mapping[bytes, SpanRecord]) -> TokenSpan:
        """Return the sampled span of a turn. Raises KeyError for a record that is neither here nor among these."""
        context = turn.context
        if context is not None:
            if context in records and not (turn.shared and context in self._kept):
                self._keep(records[context])
            elif not turn.shared:
                # Equal contexts that were not shared are separate spans, and are counted separately.
                kept = self._kept[context]
                self._kept[context] = kept._replace(span=replace(kept.span, users=0))
            self._kept[context].span.flags |= turn.flags
        return self._keep(records[turn.span])

    def bare(self, generation: str, record: SpanRecord) -> None:
        """Note that only the store has the further fields of a generation's reply."""
        if record.extras:
            self._bare[generation] = record

    async def fill(self, trie: MessageTrie) -> None:
        """Give the checkpoints of a trie the further fields of their replies. Raises StoreUnreachableError."""
        for generation, record in list(self._bare.items()):
            blobs = {blob.name: blob for blob in await self._store.blobs(record.id, root=record.root)}
            checkpoint = trie.checkpoint(generation)
            if checkpoint is not None and self._bare.pop(generation, None) is not None:
                checkpoint.extra = {name: value_of(blobs[name]) for name in record.extras if name in blobs}

    def _keep(self, record: SpanRecord) -> TokenSpan:
        spans = {} if record.parent is None else {record.parent: self._kept[record.parent].span}
        span = span_of(record, spans)
        self._kept[record.id] = _Kept(span, record.namespace[1], record.flags, record.tail)
        return span


def packed(name: str, value: Raw) -> Packed:
    """Return a field of a worker's reply as it is stored: arrays in the engine's dtype, all else as the JSON that came."""
    numbers = numbers_in(name, value)
    if numbers is None:
        return Packed(_JSON, (len(value),), bytes(value))
    return Packed(_INT32, (len(numbers) // 4,), numbers)


def value_of(blob: Blob) -> Raw:
    """Return the field of the worker's reply, byte for byte as it came."""
    return Raw(blob.data) if blob.dtype == _JSON else Raw(written(blob.data))
