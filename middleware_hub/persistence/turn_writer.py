"""Recorded replies on their way into the store: they get ids at once, and are written together.

    record   a turn gets the ids of its records. What is recorded after it may build on it from now on
    later    texts are hashed and records made, of all turns that came in meanwhile: one batch
    then     each turn is told whether it is saved

If the store refuses such a batch, each turn is appended by itself, so that no turn is lost because of another.

Conversations that the store has forgotten or lost are in memory still: their records are made again from the spans.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from msgspec.structs import replace

from middleware_hub.persistence.saving import Saving
from middleware_hub.persistence.spelling import Spelling
from middleware_hub.persistence.weight_versions import VersionLog
from middleware_hub.radix.match import PrefixMatch
from middleware_hub.radix.node import Generation, RadixNode
from middleware_hub.radix.records import SampledReply
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import TokenSpan, links
from middleware_hub.spans.extras import Extra
from middleware_hub.store.chains import Stored, record_of
from middleware_hub.store.errors import MissingRecordError, StoreError, StoreUnreachableError
from middleware_hub.store.gathering import Gathering
from middleware_hub.store.paths import BLOCK, TextEnd, TextPath
from middleware_hub.store.protocol import Batch, Refill
from middleware_hub.store.records import Blob, Event, SpanRecord, new_id

logger = logging.getLogger(__name__)

_PATIENCE: Final = 0.02
"""The longest time, in seconds, for which turns are gathered."""
_ENOUGH: Final = 1 << 18
"""Bytes of gathered turns that are appended at once."""
_A_TURN: Final = 2_000
"""Bytes that a turn counts besides its tokens and text."""
_ASKED: Final = 500
"""Records that are asked for at once."""
_NEWEST: Final = 200
"""Replies that show whether a store has lost its indexes: each of many nodes has something of some of them."""
_AT_ONCE: Final = 32
"""Replies that are appended at once."""


Beside = Callable[[Generation], Sequence[Event]]
"""Returns the events that are appended with the record of a reply. The span of the reply has its id by then."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A reply that is recorded in the tree.

    Attributes:
        context: the record of its context, if that is new.
        base, text_from: the record's text begins there, after the whole text of `base`.
        begins: the root of the conversation that begins with this turn.
        saved: for the request that waits.
        events: appended together with it.
    """

    match: PrefixMatch
    generation: Generation
    reply: SampledReply
    stamp: str
    context: SpanRecord | None
    base: TokenSpan | None
    text_from: int
    begins: bytes | None
    saved: asyncio.Future[bool]
    events: Sequence[Event] = ()


@dataclass(slots=True, eq=False)
class _Group:
    """Turns that are appended together.

    Attributes:
        batches: one for each.
        news: appended with them.
        split: whether the store refused them together.
    """

    turns: Sequence[_Turn]
    batches: list[Batch]
    news: Sequence[Event] = ()
    split: bool = False


class TurnWriter:
    """See the top of this file."""

    def __init__(
        self,
        tree: RadixTree,
        saving: Saving,
        versions: VersionLog,
        spelling: Spelling,
        handed_over: Callable[[Generation], None] = lambda _: None,
    ) -> None:
        """`handed_over` is called with a reply that is in the store now, and whose prompt was made without the store."""
        self._tree = tree
        self._handed_over = handed_over
        self._saving = saving
        self._versions = versions
        self._spelling = spelling
        self._gathered = Gathering[_Turn](self._write, _PATIENCE, _ENOUGH)
        self._coming: dict[bytes, Callable[[bytes], None] | None] = {}
        """By root, the conversations that are not in the store yet, and the work that waits for them."""
        self._unsettled: set[bytes] = set()
        """The ids of records that are not in the store yet, and not given up."""

    def add(
        self,
        match: PrefixMatch,
        generation: Generation,
        reply: SampledReply,
        *,
        own_context: bool,
        beside: Beside | None = None,
    ) -> asyncio.Future[bool]:
        """Name the records of a reply, and save it soon; the future says whether the store has acknowledged it.

        `beside` returns events to be appended together with it.
        """
        span, line = generation.span, match.continues
        stamp = self._tree.clock.current or ""
        base = None if line is None else line.span
        text_from = 0 if base is None else base.text_end
        context = None
        if own_context:
            base = span.parent
            assert base is not None
            if base.stored is None:
                context = self._context(match, base, stamp, generation.serial - 1)  # it is unused, see `Serials`
            text_from = span.start
        elif match.known is not None or ends_before(span):
            base, text_from = span.parent, span.start
        above = span.parent or (None if line is None else line.span)
        name = new_id()
        of_root = name if above is None else above.stored.root
        span.stored = Stored(name, of_root, generation.serial, stamp=stamp, ends=span.ends)
        root = span.stored.root
        begins = root if root in (name, context and context.id) else None
        if begins is not None:
            self._coming.setdefault(begins)
        self._tree.keep(span, name)
        self._tree.hold(span)  # until it is in the store, it cannot be restored from there
        self._unsettled.add(name)
        saved: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        events = () if beside is None else beside(generation)
        turn = _Turn(match, generation, reply, stamp, context, base, text_from, begins, saved, events)
        size = len(match.text) - text_from + len(reply.text) + len(reply.ids) + len(reply.logprobs or b"")
        self._gathered.add(turn, _A_TURN + size + (0 if context is None else len(context.ids)))
        return saved

    def when_there(self, root: bytes, work: Callable[[bytes], None]) -> None:
        """Do something with a conversation of the store, given its root: now, or as soon as it is in the store."""
        if root in self._coming:
            self._coming[root] = work
        else:
            work(root)

    def _over(self, turn: _Turn, *, saved: bool) -> None:
        """Note that a turn is in the store (`saved`) or was given up."""
        span = turn.generation.span
        work = None if turn.begins is None else self._coming.pop(turn.begins, None)
        if work is not None:
            work(span.stored.root)
        self._unsettled.discard(span.stored.id)
        if saved and turn.match.unasked:
            self._handed_over(turn.generation)
        self._tree.release(span)

    def again(self, generation: Generation) -> Batch:
        """Return the batch of a recorded reply whose conversation the store has forgotten."""
        return self._chain(generation, None)

    def _chain(self, generation: Generation, only: Collection[bytes] | None) -> Batch:
        tree = self._tree
        return whole_chain(tree.keep, generation, tree.extras.of, self._spelling.apart, only)

    def _context(self, match: PrefixMatch, span: TokenSpan, stamp: str, serial: int) -> SpanRecord:
        """Return the record of a context. Its id covers all of its content, so it is made before a match adds to the span."""
        line = None if match.continues is None else match.continues.span
        record = record_of(
            span,
            match.namespace,
            serial=serial,
            stamp=stamp,
            text=match.text[0 if line is None else line.text_end :],
            line=line,
            base=line,
        )
        span.stored = Stored(record.id, record.root, record.serial, stamp=stamp, ends=record.ends)
        self._tree.keep(span, record.id)
        return record

    def flush(self) -> None:
        """Begin to append the gathered turns."""
        self._write(self._gathered.take())

    def _write(self, turns: Sequence[_Turn]) -> None:
        written, batches = [], []
        for turn in turns:
            try:
                batches.append(self._batch(turn))
                written.append(turn)
            except Exception:
                logger.exception("a reply could not be written down")
                self._over(turn, saved=False)
                turn.saved.set_result(False)
        if written:
            self._append(_Group(written, batches, self._versions.news()))

    def _batch(self, turn: _Turn) -> Batch:
        """Return the batch of a turn. Earlier turns have been written."""
        match, reply, span = turn.match, turn.reply, turn.generation.span
        line = None if match.continues is None else match.continues.span
        text = match.text + reply.text
        path: TextPath | None = match.hashed
        if path is not None and BLOCK * path.first <= (0 if line is None else line.text_end):
            path = path.longer(text)
        else:
            path = TextPath(match.namespace, text, None if line is None else line.stored.state)
        plain, spelled = self._spelling.apart(span, path, line)
        extras = self._tree.extras.of(span)
        record = record_of(
            span,
            match.namespace,
            serial=turn.generation.serial,
            stamp=turn.stamp,
            text=text[turn.text_from :],
            line=line,
            base=turn.base,
            tail=reply.tail,
            spelled=None if spelled is None else spelled.place(),
            extras=tuple(extras),
        )
        span.stored = replace(
            span.stored, plain=plain, state=path.state(len(text)), spelled=spelled, extras=record.extras
        )
        blobs = [Blob(record.id, name, "int32", *one) for name, one in extras.items()]
        return Batch(
            [record] if turn.context is None else [turn.context, record], {record.id: path}, blobs, turn.events
        )

    # Appending ---------------------------------------------------------------------------------------------------------

    def _append(self, group: _Group) -> None:
        def done(saved: bool) -> None:
            for turn in group.turns:
                self._over(turn, saved=saved)

        def apart() -> None:
            group.split = True

        together = _together(group)
        count = len(together.records)
        saving = self._saving.append(
            together,
            on_missing=lambda batch, error: self._mended(group.turns, batch, error, first=len(batch.records) == count),
            on_done=done,
            on_refused=apart if len(group.turns) > 1 else None,
            parts=[_with(group.batches[0], group.news), *group.batches[1:]],
        )
        saving.add_done_callback(lambda done: self._answer(group, saved=not done.cancelled() and done.result()))

    def _mended(self, turns: Sequence[_Turn], batch: Batch, error: MissingRecordError, *, first: bool) -> Batch:
        """Return a batch with the whole chains of its turns, because the store has forgotten something of them.

        The `first` time the batch gets only the missing records, which may be enough: a context that several samples share is
        appended with one of them, which may come later than the others. The batch may be one of several that waited: what the
        other `turns` recorded is not in it, and the store may refuse that.
        """
        here = {record.id for record in batch.records}
        replies = [turn.generation for turn in turns if turn.generation.span.stored.id in here]
        chains = joined([self._chain(reply, error.missing if first else None) for reply in replies])
        again = {record.id for record in chains.records}
        records = [*chains.records, *(record for record in batch.records if record.id not in again)]
        return Batch(
            records, {**batch.paths, **chains.paths}, [*batch.blobs, *chains.blobs], batch.events, gathered=True
        )

    def _answer(self, group: _Group, *, saved: bool) -> None:
        if group.split:
            for at, turn in enumerate(group.turns):
                self._append(_Group([turn], [group.batches[at]], () if at else group.news))
            return
        group.batches.clear()  # the turns that were not saved wait in a file
        for turn in group.turns:
            if not turn.saved.done():
                turn.saved.set_result(saved)

    # What the store has lost --------------------------------------------------------------------------------------------

    async def refill(self, store: Refill) -> None:
        """Append the records that a store has lost and the tree has, whichever router recorded them.

        Raises StoreUnreachableError.
        """
        stored = self._tree.stored
        roots = {record: span.stored.root for record, span in stored.items() if record not in self._unsettled}
        lacking = await self._lacking(store, roots) if await self._finds_newest(store, roots) else set(roots)
        found = [stored[record].owner for record in lacking if record in stored]
        lost = sorted((one for one in found if isinstance(one, Generation)), key=lambda one: one.serial)
        for at in range(0, len(lost), _AT_ONCE):
            batches = []
            for generation in lost[at : at + _AT_ONCE]:
                if generation.span.stored.id not in stored:
                    continue  # it was collected meanwhile
                batches.append(self._saving.with_media(self._chain(generation, lacking)))
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
        stored = self._tree.stored
        owners = [span.owner for record, span in stored.items() if record in roots]
        replies = nlargest(_NEWEST, (one for one in owners if isinstance(one, Generation)), key=lambda one: one.serial)
        for one in replies:
            if one.span.stored.id in stored and not await store.finds(self._chain(one, {one.span.stored.id})):
                return False
        return True

    async def _lacking(self, store: Refill, roots: Mapping[bytes, bytes]) -> set[bytes]:
        names, lacking = list(roots), set[bytes]()
        for at in range(0, len(names), _ASKED):
            lacking |= await store.lacking({record: roots[record] for record in names[at : at + _ASKED]})
        return lacking


def _with(one: Batch, news: Sequence[Event]) -> Batch:
    return Batch(one.records, one.paths, one.blobs, [*one.events, *news], gathered=True)


def _together(group: _Group) -> Batch:
    if len(group.batches) == 1:
        return _with(group.batches[0], group.news)
    return _with(joined(group.batches), group.news)


def joined(batches: Sequence[Batch]) -> Batch:
    """Return one batch with everything in these."""
    return Batch(
        [record for one in batches for record in one.records],
        {record: path for one in batches for record, path in one.paths.items()},
        [blob for one in batches for blob in one.blobs],
        [event for one in batches for event in one.events],
    )


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
