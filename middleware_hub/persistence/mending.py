"""Conversations in memory that the store has forgotten or lost: their records are made again from the spans."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Container, Mapping
from heapq import nlargest
from typing import Final

from msgspec.structs import replace

from middleware_hub.radix.node import Generation, RadixNode
from middleware_hub.spans.chain import TokenSpan, links
from middleware_hub.spans.extras import Extra
from middleware_hub.store.chains import record_of
from middleware_hub.store.errors import StoreError, StoreUnreachableError
from middleware_hub.store.paths import TextEnd, TextPath
from middleware_hub.store.protocol import Batch, Refill
from middleware_hub.store.records import Blob, SpanRecord

logger = logging.getLogger(__name__)

_ASKED: Final = 500
"""Records that are asked for at once."""
_NEWEST: Final = 200
"""Replies that show whether a store has lost its indexes: each of many nodes has something of some of them."""
_AT_ONCE: Final = 32
"""Replies that are appended at once."""


def whole_chain(
    keep: Callable[[TokenSpan, bytes], None],
    generation: Generation,
    extras: Callable[[TokenSpan], Mapping[str, Extra]],
    apart: Callable[[TokenSpan, TextPath, TokenSpan | None], tuple[bool, TextEnd | None]],
    only: Collection[bytes] | None = None,
) -> Batch:
    """Return a batch with the records of a reply's whole chain.

    Args:
        keep: called with each span and the id of its record.
        extras: returns the per-token data that this process still has. The rest is forgotten.
        apart: `Spelling.apart`.
        only: the ids of the records that are wanted; None for all.
    """
    records: list[SpanRecord] = []
    paths: dict[bytes, TextPath] = {}
    namespace = generation.namespace
    blobs: list[Blob] = []
    chain: list[tuple[TokenSpan, TokenSpan | None]] = []
    line: TokenSpan | None = None
    # From the end up, because a context is on the line of the reply after it.
    for span, _ in links(generation.span, generation.span.count):
        if isinstance(span.owner, Generation):
            line = None if span.owner.continues is None else span.owner.continues.span
        chain.append((span, line))
    for span, continued in reversed(chain):
        text, base = _text(span), continued
        if span.sampled and ends_before(span):
            base = span.parent
        old = span.stored
        if only is not None and old.id not in only:
            continue
        path, plain, spelled = TextPath(namespace, text), True, None
        if span.sampled:
            plain, spelled = apart(span, path, continued)
        blobs += [Blob(old.id, name, "int32", *extra) for name, extra in extras(span).items()]
        record = record_of(
            span,
            namespace,
            serial=old.serial,
            stamp=old.stamp,
            text=text[0 if base is None else len(_text(base)) :],
            line=continued,
            base=base,
            tail=span.owner.tail if span.sampled else (),
            extras=old.extras,
            spelled=None if spelled is None else spelled.place(),
        )
        if span.sampled:
            paths[record.id] = path
        span.stored = replace(
            old,
            id=record.id,
            root=record.root,
            plain=plain,
            state=path.state(len(text)),
            spelled=spelled,
            rewritten=old.rewritten + 1,
        )
        keep(span, record.id)
        records.append(record)
    return Batch(records, paths, blobs)


class Refilling:
    """Appends the records that a store has lost and a tree has, whichever router recorded them.

    Args:
        stored: the spans of the tree, by the ids of their records.
        unsettled: the ids of records that are on their way into the store by themselves.
        chain: returns `whole_chain` of a reply, with the wanted records only.
    """

    def __init__(
        self,
        stored: Mapping[bytes, TokenSpan],
        unsettled: Container[bytes],
        chain: Callable[[Generation, Collection[bytes]], Batch],
    ) -> None:
        self._stored = stored
        self._unsettled = unsettled
        self._chain = chain

    async def run(self, store: Refill) -> None:
        """Append it. Raises StoreUnreachableError."""
        roots = {record: span.stored.root for record, span in self._stored.items() if record not in self._unsettled}
        lacking = await self._lacking(store, roots) if await self._finds_newest(store, roots) else set(roots)
        found = [self._stored[record].owner for record in lacking if record in self._stored]
        lost = sorted((one for one in found if isinstance(one, Generation)), key=lambda one: one.serial)
        for at in range(0, len(lost), _AT_ONCE):
            batches = []
            for generation in lost[at : at + _AT_ONCE]:
                if generation.span.stored.id not in self._stored:
                    continue  # it was collected meanwhile
                batches.append(self._chain(generation, lacking))
                lacking.difference_update(record.id for record in batches[-1].records)
            # They are appended in the order in which they are asked for: one may build on another.
            for done in await asyncio.gather(*map(store.append, batches), return_exceptions=True):
                if isinstance(done, StoreError | ValueError) and not isinstance(done, StoreUnreachableError):
                    logger.error("a reply that the store has lost cannot be written again: %s", done)
                elif done is not None:
                    raise done
        if lost:
            logger.warning("%d replies that the store had lost, and this router knew, are in it again", len(lost))

    async def _finds_newest(self, store: Refill, roots: Container[bytes]) -> bool:
        """Return whether the store finds the newest replies.

        A server loses the newest of its writes, few or many. So if it finds these, it finds the older ones.
        """
        owners = [span.owner for record, span in self._stored.items() if record in roots]
        replies = nlargest(_NEWEST, (one for one in owners if isinstance(one, Generation)), key=lambda one: one.serial)
        for one in replies:
            if one.span.stored.id in self._stored and not await store.finds(self._chain(one, {one.span.stored.id})):
                return False
        return True

    async def _lacking(self, store: Refill, roots: Mapping[bytes, bytes]) -> set[bytes]:
        names, lacking = list(roots), set[bytes]()
        for at in range(0, len(names), _ASKED):
            lacking |= await store.lacking({record: roots[record] for record in names[at : at + _ASKED]})
        return lacking


def _text(span: TokenSpan) -> str:
    node: RadixNode = span.owner.node if isinstance(span.owner, Generation) else span.owner
    return node.text


def ends_before(span: TokenSpan) -> bool:
    """Return whether a reply begins after the whole text of a context, which is then the base of its record."""
    before = span.parent
    return (
        before is not None
        and not before.sampled
        and span.take == before.count
        and before.text_end == span.start
        and _text(span).startswith(_text(before))
    )
