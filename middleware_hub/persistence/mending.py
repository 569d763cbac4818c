"""A conversation that goes on here although the store has forgotten it: its records, made again from the spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from middleware_hub.radix.node import Generation, RadixNode
from middleware_hub.spans.chain import TokenSpan, links
from middleware_hub.spans.extras import Extra
from middleware_hub.store.chains import Stored, record_of
from middleware_hub.store.paths import TextPath
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Blob, SpanRecord


def whole_chain(
    keep: Callable[[TokenSpan, bytes], None],
    generation: Generation,
    batch: Batch,
    extras: Callable[[TokenSpan], Mapping[str, Extra]],
) -> Batch:
    """Return a batch with the records of the whole chain of a reply, of which `batch` was to append the end.

    Args:
        keep: is told the id of each span's record.
        extras: returns what this process still has beside a reply. What else was beside it is forgotten.
    """
    records: list[SpanRecord] = []
    paths: dict[bytes, TextPath] = {}
    namespace = generation.namespace
    blobs = {(blob.record, blob.name): blob for blob in batch.blobs}
    chain: list[tuple[TokenSpan, TokenSpan | None]] = []
    line: TokenSpan | None = None
    # From the end up, because a context is on the line of the reply behind it.
    for span, _ in links(generation.span, generation.span.count):
        if isinstance(span.owner, Generation):
            line = None if span.owner.continues is None else span.owner.continues.span
        chain.append((span, line))
    for span, continued in reversed(chain):
        text, base = _text(span), continued
        if span.sampled and span.parent is not None and not span.parent.sampled and _ends_before(span):
            base = span.parent
        old = span.stored
        for name, extra in extras(span).items():
            blobs[old.id, name] = Blob(old.id, name, "int32", *extra)
        record = record_of(
            span,
            namespace,
            serial=old.serial,
            stamp=_last_version(span),
            text=text[0 if base is None else len(_text(base)) :],
            line=continued,
            base=base,
            tail=span.owner.tail if span.sampled else (),
            extras=tuple(name for owner, name in blobs if owner == old.id),
        )
        if span.sampled:
            record = replace(record, id=old.id, root=record.root if record.links else old.id)
            paths[record.id] = TextPath(namespace, text)
        span.stored = Stored(record.id, record.root, old.serial, old.plain, old.state)
        keep(span, record.id)
        records.append(record)
    return Batch(records, paths, [*blobs.values()], batch.events)


def _text(span: TokenSpan) -> str:
    node: RadixNode = span.owner.node if isinstance(span.owner, Generation) else span.owner
    return node.text


def _ends_before(span: TokenSpan) -> bool:
    """Return whether a reply stands behind the whole text of the context before it."""
    assert span.parent is not None
    return (
        span.take == span.parent.count
        and span.parent.text_end == span.start
        and _text(span).startswith(_text(span.parent))
    )


def _last_version(span: TokenSpan) -> str:
    versions = span.versions
    return "" if versions is None else versions if isinstance(versions, str) else versions[-1][0]
