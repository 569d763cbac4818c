"""Checks of a record, a blob, a file of media and an event, which are the same in every store."""

from __future__ import annotations

from collections.abc import Container

from middleware_hub.store.errors import VERIFY, DamagedRecordError, StoreError, StoreMismatchError
from middleware_hub.store.paths import NAME, Place
from middleware_hub.store.protocol import Finding
from middleware_hub.store.records import SpanRecord, decode, decode_blob, decode_event, decode_file, faults
from middleware_hub.store.retracing import Retracer


def check_record(key: bytes, body: bytes) -> tuple[SpanRecord | None, list[Finding]]:
    """Return the record that is stored under an id, if it can be read, and its own faults."""
    try:
        record = decode(body)
    except (DamagedRecordError, StoreMismatchError) as error:
        return None, [Finding("record", f"record {key.hex()}: {error.message.removesuffix(VERIFY)}", key)]
    return record, [
        Finding("record", f"record {record.id.hex()}: {wrong}", key) for wrong in faults(record, thorough=True)
    ]


def check_links(record: SpanRecord, key: bytes, there: Container[bytes]) -> list[Finding]:
    """Return which of the records that a record builds on are not `there`."""
    return [
        Finding("link", f"record {record.id.hex()}: {link.hex()}, which it builds on, is not there", key)
        for link in dict.fromkeys((*record.links, record.root))
        if link not in there
    ]


def check_chain(record: SpanRecord, key: bytes, retracer: Retracer) -> tuple[list[Place], list[Finding]]:
    """Return where a record has to be entered, and whether its tokens and its text continue those that it builds on."""
    name, found = f"record {record.id.hex()}", []
    tokens = None if record.parent is None else retracer.tokens(record.parent)
    if tokens is not None and record.take > tokens:
        found.append(Finding("link", f"{name} takes {record.take} tokens of a parent that has {tokens}", key))
    length = None if record.base is None else retracer.length(record.base)
    if length is not None and length != record.text_from:
        found.append(Finding("link", f"{name}: its text begins at {record.text_from}, its base ends at {length}", key))
    places = retracer.places(record)
    if places is None:
        found.append(Finding("link", f"{name}: a text that it builds on cannot be read", key))
    return places or [], found


def not_entered(record: bytes, place: Place) -> Finding:
    """Return the finding that a record is not in a place."""
    how = "one of its names" if place.kind == NAME else f"its text (length {place.length}, {place.kind})"
    return Finding("index", f"record {record.hex()} cannot be found by {how}", record)


def check_blob(name: str | bytes, body: bytes, record: bytes | None = None) -> list[Finding]:
    try:
        decode_blob(body)
    except StoreError as error:
        return [Finding("blob", f"a blob {name!r}: {error.message.removesuffix(VERIFY)}", record)]
    return []


def check_file(key: bytes, about: bytes, data: bytes, *, named: bool) -> list[Finding]:
    """Return what is wrong with a file of media: its bytes, or that no record names it."""
    found, name = list[Finding](), key.hex()
    try:
        name = decode_file("", about, None, {}).digest
        decode_file("", about, data, {})
    except StoreError as error:
        found.append(Finding("media", f"the file {name}: {error.message.removesuffix(VERIFY)}"))
    if not named:
        found.append(Finding("media", f"the file {name} is named by no record"))
    return found


def check_event(log: str, number: int, body: bytes) -> list[Finding]:
    try:
        decode_event(log, number, body)
    except StoreError as error:
        return [Finding("event", error.message.removesuffix(VERIFY))]
    return []
