"""A batch as bytes, and back.

Of a path, only what follows its first known block is kept: with the hashes up to there, a store needs no more of it.
"""

from __future__ import annotations

import msgspec

from middleware_hub.store.errors import DamagedRecordError
from middleware_hub.store.media import MediaFile
from middleware_hub.store.paths import BLOCK, Namespace, PathState, TextPath
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Blob, Event, SpanRecord


class _Path(msgspec.Struct, frozen=True, array_like=True):
    """The path of a record, or of several: `text` begins with the block after `state`."""

    records: tuple[bytes, ...]
    namespace: Namespace
    state: PathState
    text: str


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    records: tuple[SpanRecord, ...]
    paths: tuple[_Path, ...]
    blobs: tuple[Blob, ...]
    events: tuple[Event, ...]
    media: tuple[MediaFile, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Batch)


def pack(batch: Batch) -> bytes:
    """Return a batch as bytes. Raises ValueError if a text holds half of a surrogate pair."""
    named: dict[int, tuple[TextPath, list[bytes]]] = {}
    for record, path in batch.paths.items():
        named.setdefault(id(path), (path, []))[1].append(record)
    paths = [
        _Path(tuple(records), path.namespace, path.state(path.first * BLOCK), path.text[path.first * BLOCK :])
        for path, records in named.values()
    ]
    events, media = tuple(batch.events), tuple(batch.media)
    try:
        return _encoder.encode(_Batch(tuple(batch.records), tuple(paths), tuple(batch.blobs), events, media))
    except UnicodeEncodeError as error:
        raise ValueError(f"a text with half of a surrogate pair cannot be stored: {error}") from error


def unpack(data: bytes | memoryview) -> Batch:
    """Return the batch of these bytes. Raises DamagedRecordError."""
    try:
        found = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedRecordError(f"what waited for the store is whole, but is no batch: {error}") from error
    paths = {}
    for one in found.paths:
        path = TextPath(one.namespace, "\0" * (one.state.blocks * BLOCK) + one.text, one.state)
        paths.update(dict.fromkeys(one.records, path))
    return Batch(found.records, paths, found.blobs, found.events, media=found.media)
