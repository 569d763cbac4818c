"""A batch, ready to be sent: encoded, checked by itself, and sorted by root, because the server stores each root together."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from middleware_hub.store.errors import ConflictingRecordError, StoreError
from middleware_hub.store.look_up import MOST_CHAINS, MOST_NAMED, MOST_VARIANTS
from middleware_hub.store.paths import END, END_ALONE, NAME, PASS, START, WAY, Place, TextPath
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import (
    Event,
    Mark,
    SpanRecord,
    encode,
    encode_blob,
    encode_event,
    faults,
    path_of,
    places_of,
)

GENERATION_SIZE: Final = 4
_RETRIEVED: Final = 1 << 52
TRY_SIZE: Final = 8
"""Bytes in front of an event: its append, and its number in that. So an append that is tried again is not doubled."""
_ATTEMPT: Final = TRY_SIZE - 2
MOST: Final[Mapping[int, int]] = {
    START: MOST_CHAINS + 1,
    END: MOST_VARIANTS + 1,
    END_ALONE: MOST_VARIANTS + 1,
    PASS: 2 * MOST_CHAINS + 1,
    NAME: MOST_NAMED,
}
"""How many of the newest records a place holds, by kind of place."""
RECORD_COST: Final = 400
ROOT_COST: Final = 200
PLACE_COST: Final = 120
"""Bytes that a record, the root of a conversation, and a place take besides the record itself: measured with MEMORY USAGE."""
_NOBODY: Final = bytes(16)


Answers = list[list[int] | StoreError]
"""For each batch the numbers of its events, or why it was refused."""


class Entered(NamedTuple):
    """A place of a record, and its reference without the generation."""

    place: Place
    root: bytes
    reference: bytes


@dataclass(slots=True)
class Part:
    """The part of a batch that belongs to one root."""

    root: bytes
    generation: bytes
    records: list[tuple[SpanRecord, bytes, int]] = field(default_factory=list)
    """The records, with their bytes and their cost."""
    blobs: list[tuple[bytes, str, bytes]] = field(default_factory=list)
    mark: Mark | None = None


@dataclass(slots=True)
class SortedBatch:
    """A batch, ready to be sent."""

    parts: dict[bytes, Part] = field(default_factory=dict)
    places: list[Entered] = field(default_factory=list)
    events: list[tuple[Event, bytes]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Return about how many bytes are sent."""
        parts = self.parts.values()
        return sum(cost for part in parts for *_, cost in part.records) + sum(
            len(b) for p in parts for *_, b in p.blobs
        )


def prepare(batch: Batch, roots: Mapping[bytes, bytes]) -> SortedBatch:
    """Encode a batch. `roots` has the roots of the records outside the batch to which blobs belong.

    Raises ValueError for a record that is wrong in itself, ConflictingRecordError for a record that is not in the root of its
    links.
    """
    done = SortedBatch()
    own: dict[bytes, bytes] = {}
    for record in batch.records:
        wrong = faults(record)
        if wrong:
            raise ValueError(f"record {record.id.hex()}: {'; '.join(wrong)}")
        for link in record.links:
            if own.get(link, record.root) != record.root:
                raise ConflictingRecordError(f"record {record.id.hex()} builds on records of another root")
        own[record.id] = record.root
        _add(done, record, batch.paths)
    for blob in batch.blobs:
        root = own.get(blob.record) or roots[blob.record]
        part = done.parts.setdefault(root, Part(root, os.urandom(GENERATION_SIZE)))
        part.blobs.append((blob.record, blob.name, encode_blob(blob)))
    if batch.events:
        reply = next((record.id for record in reversed(batch.records) if record.sampled), None)
        attempt = os.urandom(_ATTEMPT) if reply is None else reply[-_ATTEMPT:]
        done.events = [
            (event, attempt + at.to_bytes(2, "big") + encode_event(event)) for at, event in enumerate(batch.events)
        ]
    return done


def _add(done: SortedBatch, record: SpanRecord, paths: Mapping[bytes, TextPath]) -> None:
    body = encode(record)
    entered: list[Entered] = []
    if record.findable:
        entered = entries(record, places_of(record, path_of(record, paths.get(record.id))))
    part = done.parts.get(record.root)
    if part is None:
        part = done.parts[record.root] = Part(record.root, os.urandom(GENERATION_SIZE))
    cost = len(body) + RECORD_COST + PLACE_COST * len(entered) + (ROOT_COST if record.id == record.root else 0)
    part.records.append((record, body, cost))
    if record.sampled or record.id == record.root:
        mark = Mark(record.root, record.serial, record.stamp)
        part.mark = mark if part.mark is None else part.mark.merged(mark)
    done.places += entered


def entries(record: SpanRecord, where: Iterable[Place]) -> list[Entered]:
    """Return the entries of a reply in its places."""
    reference = b"".join((record.root, record.id, record.parent or _NOBODY))
    named = reference + record.text_end.to_bytes(4, "big")
    return [
        Entered(place, record.root, named if place.kind == NAME else reference) for place in where if place.kind != WAY
    ]


def has_entry(kind: int, reference: bytes, held: bytes | None) -> bool:
    """Return whether a place holds a reference, or enough newer ones to have crowded it out."""
    return held is not None and (reference in held or len(held) >= MOST[kind] * (GENERATION_SIZE + len(reference)))


def outside(batch: Batch) -> list[bytes]:
    """Return the records outside a batch to which its blobs belong."""
    own: Container[bytes] = {record.id for record in batch.records}
    return [blob.record for blob in batch.blobs if blob.record not in own]


def pack_mark(mark: Mark | None) -> bytes:
    """Return a mark as it is stored."""
    if mark is None:
        return b""
    return (
        mark.tick.to_bytes(8, "big") + (b"1" if mark.retrieved else b"0") + mark.stamp.encode("utf-8", "surrogatepass")
    )


def score(mark: bytes) -> int:
    """Return the place of a mark in the order of forgetting, as `append.lua` does."""
    tick = int.from_bytes(mark[:8], "big") // 1_000
    return tick - _RETRIEVED if mark[8:9] == b"1" else tick


def unpack_mark(root: bytes, data: bytes) -> Mark:
    """Return a stored mark."""
    stamp = data[9:].decode("utf-8", "surrogatepass")
    return Mark(root, int.from_bytes(data[:8], "big"), stamp, data[8:9] == b"1")
