"""What stands between the radix tree and the store: the tree asks nobody, so it is filled before it is asked.

*The store finds, the tree decides.* Before a text is matched or retrieved, the store is asked for what lies on its path behind
what the tree knows, and that is put in by the code that records. While nobody else has written, and the tree has let go of
nothing, there is nothing to ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from msgspec.structs import replace

from middleware_hub.persistence.mending import whole_chain
from middleware_hub.persistence.restoring import restore
from middleware_hub.persistence.saving import Saving
from middleware_hub.persistence.spelling import Spelling
from middleware_hub.persistence.weight_versions import VersionLog
from middleware_hub.radix.match import PrefixMatch
from middleware_hub.radix.node import Generation
from middleware_hub.radix.records import NO_PARENT, Context, Namespace, Recall, SampledReply
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.spans.extras import Extra
from middleware_hub.store.chains import Stored, record_of
from middleware_hub.store.errors import DamagedRecordError, StoreError
from middleware_hub.store.paths import BLOCK, TextPath
from middleware_hub.store.protocol import Batch, Found, Query, Store, StoreStats
from middleware_hub.store.records import Blob, Mark, Serials

logger = logging.getLogger(__name__)

TEND_SECONDS = 20.0
"""How often the size of the store is looked at, and compared with `--store-max-bytes`."""
_MOST_NAMES = 10_000
_MOST_ROUNDS = 8


class Memory:
    """See the top of this file. The store is open while it is used.

    Args:
        max_bytes: what `--store-max-bytes` says.

    Attributes:
        lookups: how often texts were looked up, by result.
        restored: records that came from the store.
        size: of the store, some seconds ago.
        forgotten: conversations, to keep to `max_bytes`; `forgotten_unretrieved` of them were never retrieved.
    """

    def __init__(
        self,
        tree: RadixTree,
        store: Store,
        serials: Serials,
        versions: VersionLog,
        spelling: Spelling,
        max_bytes: int | None = None,
    ) -> None:
        self.tree = tree
        self.store = store
        self.saving = Saving(store)
        self._serials = serials
        self._versions = versions
        self._spelling = spelling
        self._max_bytes = max_bytes
        self._others = -1
        self._names: OrderedDict[tuple[Namespace, str], int] = OrderedDict()
        self._tending: asyncio.Task[None] | None = None
        self.lookups: Counter[str] = Counter()
        self.size = StoreStats()
        self.restored = self.forgotten = self.forgotten_unretrieved = 0

    async def open(self) -> None:
        """Begin what goes on beside requests."""
        self._tending = asyncio.create_task(self._keep_tending())

    async def close(self) -> None:
        """Write all that waits."""
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait([self._tending])
        await self.saving.close()
        with contextlib.suppress(StoreError):
            await self._versions.write()

    # Before the tree decides -------------------------------------------------------------------------------------------

    async def matched(self, match: PrefixMatch, parent: str | None, again: Callable[[], PrefixMatch]) -> PrefixMatch:
        """Return the match of a text, given that of what the tree knows; `again` matches once more."""
        names = () if parent is None else (parent,)
        try:
            if parent == NO_PARENT:
                await self._heard()
                return match
            found = await self._look_up(match, names, named=not match.unknown_parent)
        except StoreError as error:
            self._unreachable(error)
            return replace(again(), unasked=True)  # some of it may have been found
        return again() if found else match

    async def cover(
        self, namespace: Namespace, text: str, names: Sequence[str] = (), *, parent: str | None = None
    ) -> bool:
        """Fill the tree with what it needs for a text, and with the replies of these names; return whether that was possible.

        `parent` is the name of a reply that the text has to begin with.
        """
        match = self.tree.match(namespace, text, parent=parent)
        try:
            await self._look_up(match, [*names, parent] if parent else names, named=not match.unknown_parent)
        except StoreError as error:
            self._unreachable(error)
            return False
        return True

    async def _look_up(self, match: PrefixMatch, names: Sequence[str], *, named: bool) -> bool:
        """Fill the tree with what lies behind a match; return whether there was anything."""
        others = await self._heard()
        whole = not self.tree.stats.evicted_tokens
        if whole and others == 0:
            self.lookups["known"] += 1
            return False
        namespace, line = match.namespace, match.continues
        known_from, stored = 0, None
        if line is not None and named and not match.foreign:
            known_from, stored = line.span.text_end, line.span.stored
        path = TextPath(namespace, match.text, None if stored is None else stored.state)
        if line is not None and stored is not None and stored.state is None:
            line.span.stored = stored._replace(state=path.state(known_from))
        asked = [name for name in names if not whole or self._names.get((namespace, name)) != others]
        found = await self.store.find(Query(path, known_from, self.tree.stored, asked, complete=whole))
        for name in asked:
            self._note_name(namespace, name, others)
        self.lookups["found" if found.records else "nothing"] += 1
        restored = await self._restore(found)
        if found.damaged:
            # Without this the text of lost tokens would read as context, and be called exact.
            raise DamagedRecordError(f"{found.damaged} records cannot be read: run `tito-router store verify`")
        return restored

    async def _heard(self) -> int:
        """Return what `Store.others` does. If others have written, hear of weight versions first."""
        others = self.store.others()
        if others not in (0, self._others):
            await self._versions.read()
            self._others = others
        return others

    async def _restore(self, found: Found) -> bool:
        """Put records into the tree. What they need may have been collected while they were read: then it is read again."""
        records, lacking = found.records, restore(self.tree, found)
        for _ in range(_MOST_ROUNDS):
            if not lacking:
                break
            more = await self.store.get(list(lacking), known=self.tree.stored)
            records = [*more.records, *records]
            lacking = restore(self.tree, Found(records, {**more.marks, **found.marks}))
        self.restored += len(records)
        return bool(records)

    def _note_name(self, namespace: Namespace, name: str, others: int) -> None:
        self._names[namespace, name] = others
        if len(self._names) > _MOST_NAMES:
            self._names.popitem(last=False)

    def _unreachable(self, error: StoreError) -> None:
        self.lookups["failed"] += 1
        self.saving.complain("texts are looked up in this process alone: %s", error)

    # After it ----------------------------------------------------------------------------------------------------------

    def record(
        self, match: PrefixMatch, context: Context | None, reply: SampledReply
    ) -> tuple[Generation, Awaitable[bool]]:
        """Record a reply in the tree, and begin to append it. The task says whether the store has acknowledged it."""
        generation = self.tree.record(match, context, reply, serial=self._serials.next())
        return generation, self._save(match, context is not None, generation, reply)

    def _save(
        self, match: PrefixMatch, own_context: bool, generation: Generation, reply: SampledReply
    ) -> Awaitable[bool]:
        span, line = generation.span, match.continues
        above = None if line is None else line.span
        stamp = self.tree.clock.current or ""
        records, extras = [], self.tree.extras.of(span)
        base, text, behind = above, match.text + reply.text, 0 if line is None else line.span.text_end
        if own_context:
            assert span.parent is not None
            base = span.parent
            if span.parent.stored is None:
                context = record_of(
                    span.parent,
                    match.namespace,
                    serial=self._serials.next(),
                    stamp=stamp,
                    text=match.text[behind:],
                    line=above,
                    base=above,
                )
                records.append(context)
                span.parent.stored = Stored(context.id, context.root, context.serial)
                self.tree.keep(span.parent, context.id)
            behind = span.start
        elif match.known is not None:
            base, behind = match.known, span.start
        spelled = self._spelling.apart(span, text)
        sampled = record_of(
            span,
            match.namespace,
            serial=generation.serial,
            stamp=stamp,
            text=text[behind:],
            line=above,
            base=base,
            tail=reply.tail,
            spelled=None if spelled is None else _end_of(TextPath(match.namespace, spelled)),
            extras=tuple(extras),
        )
        records.append(sampled)
        blobs = [Blob(sampled.id, name, "int32", *one) for name, one in extras.items()]
        path = TextPath(match.namespace, text, None if above is None else above.stored.state)
        span.stored = Stored(sampled.id, sampled.root, sampled.serial, spelled is None, path.state(len(text)))
        self.tree.keep(span, sampled.id)
        for name in reply.request_ids:
            self._note_name(match.namespace, name, self._others)
        return self._append(generation, Batch(records, {sampled.id: path}, blobs, self._versions.news()))

    def _append(self, generation: Generation, batch: Batch) -> Awaitable[bool]:
        span = generation.span
        self.tree.hold(span)  # until it is in the store it cannot come back from there
        return self.saving.append(
            batch,
            mend=lambda _: whole_chain(self.tree.keep, generation, batch, self.tree.extras.of),
            over=lambda: self.tree.release(span),
        )

    async def extras(self, span: TokenSpan, names: Sequence[str]) -> Mapping[str, Extra] | None:
        """Return what the store has beside a reply under these names; None if it cannot be read."""
        if span.stored is None:
            return {}
        try:
            return {one.name: Extra(one.shape, one.data) for one in await self.store.blobs(span.stored.id, names)}
        except StoreError as error:
            self._unreachable(error)
            return None

    def retrieved(self, recall: Recall | None) -> None:
        """Note that a conversation was retrieved: it may be forgotten before others."""
        span = None if recall is None else recall.cut.span
        if span is not None and span.stored is not None:
            self.store.note([Mark(span.stored.root, 0, retrieved=True)])

    async def write_versions(self) -> None:
        """Write down that the workers were given another weight version."""
        try:
            await self._versions.write()
        except StoreError as error:
            self.saving.complain("a new weight version is not written down: %s", error)

    # The size of the store ---------------------------------------------------------------------------------------------

    async def _keep_tending(self) -> None:
        """Look at the size of the store now and then, and forget what is too much."""
        while True:
            try:
                if self._max_bytes is not None:
                    await self._forget(self._max_bytes)
                self.size = await self.store.stats()
            except StoreError as error:
                self.saving.complain("the size of the store is not known: %s", error)
            await asyncio.sleep(TEND_SECONDS)

    async def _forget(self, max_bytes: int) -> None:
        gone = await self.store.forget(max_bytes)
        self.forgotten += gone.retrieved + gone.unretrieved
        self.forgotten_unretrieved += gone.unretrieved
        if gone.unretrieved:
            logger.warning(
                "%d conversations were forgotten that nobody had retrieved: raise --store-max-bytes", gone.unretrieved
            )

    async def stats(self) -> dict[str, Any]:
        """Return the size of the store, and what happened to it since the start, for `/radix_tree/stats`."""
        saving = self.saving
        try:
            size = asdict(await self.store.stats())
        except StoreError as error:
            size = {"error": error.message}
        return {
            **size,
            "restored": self.restored,
            "lookups": dict(self.lookups),
            "saved": saving.saved,
            "unsaved": saving.unsaved,
            "waiting": saving.waiting,
            "lost": saving.lost,
            "forgotten": self.forgotten,
            "forgotten_unretrieved": self.forgotten_unretrieved,
        }


def _end_of(path: TextPath) -> tuple[bytes, int, bytes]:
    """Return where a reply is entered whose chain spells this text."""
    size = len(path.text)
    return path.key(size // BLOCK), size, path.hash(size)
