"""The memory between the radix tree and the store. The tree never reads the store, so this fills the tree before a match.

*The store finds, the tree decides.* Before a text is matched or retrieved, a look-up reads the records on its path that the
tree lacks, and the code that records replies puts them into the tree. While no other router has written and the tree has
evicted nothing, no look-up is needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from msgspec.structs import replace

from middleware_hub.persistence.saving import Saving
from middleware_hub.persistence.spelling import Spelling
from middleware_hub.persistence.turn_writer import Beside, TurnWriter, joined
from middleware_hub.persistence.weight_versions import LOG, VersionLog
from middleware_hub.radix.cut import Cut, end_of
from middleware_hub.radix.late_answers import Doubt, doubts, passed_over
from middleware_hub.radix.match import PrefixMatch
from middleware_hub.radix.node import Generation, StoredSpan
from middleware_hub.radix.records import NO_PARENT, Context, Namespace, Recall, SampledReply
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import SpanFlag, TokenSpan, settle
from middleware_hub.spans.extras import Extra
from middleware_hub.store.chains import note_on, span_of
from middleware_hub.store.errors import DamagedRecordError, MissingRecordError, StoreError, StoreUnreachableError
from middleware_hub.store.look_up import MOST_NAMED
from middleware_hub.store.paths import TextPath
from middleware_hub.store.protocol import Batch, Found, Query, Store, StoreStats
from middleware_hub.store.records import Mark, Serials

logger = logging.getLogger(__name__)

TEND_SECONDS = 20.0
"""How often the size of the store is compared with `--store-max-bytes`."""
_MOST_ROUNDS = 8
_AT_ONCE = 16  # look-ups for one chain
_LEFT = "a router that died has left replies that are not in the store yet"


class Memory:
    """See the top of this file. The store is open while it is used.

    Args:
        max_bytes: the value of `--store-max-bytes`.
        saving: appends to this store, also for others.

    Attributes:
        lookups: how often texts were looked up, by result.
        restored: records that came from the store.
        size: that of the store, some seconds ago.
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
        saving: Saving | None = None,
    ) -> None:
        self.tree = tree
        self.store = store
        self.saving = Saving(store) if saving is None else saving
        self._serials = serials
        self._versions = versions
        self._turns = TurnWriter(tree, self.saving, versions, spelling, self._handed_over)
        self._max_bytes = max_bytes
        self._others = -1
        self._changes = 0  # grows with everything that is put into the tree
        self._tending: asyncio.Task[None] | None = None
        self._late: deque[Generation] = deque()
        self._asking: asyncio.Task[None] | None = None
        self.lookups: Counter[str] = Counter()
        self.size = StoreStats()
        self.restored = self.forgotten = self.forgotten_unretrieved = 0

    @property
    def away(self) -> bool:
        """Return whether the store is known not to answer: then replies are not saved at once."""
        return self.saving.away

    async def open(self) -> None:
        """Start the background work."""
        self.store.on_loss(self._turns.refill)
        self._tending = asyncio.create_task(self._keep_tending())

    async def close(self) -> None:
        """Write everything that waits."""
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait([self._tending])
        self._turns.flush()
        await self.write_versions()
        await self.saving.close()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    # Before the tree decides -------------------------------------------------------------------------------------------

    async def matched(self, match: PrefixMatch, parent: str | None, again: Callable[[], PrefixMatch]) -> PrefixMatch:
        """Return the match of a text, given the match in the tree as it is now; `again` matches once more."""
        names = () if parent is None else (parent,)
        try:
            if parent == NO_PARENT:
                with suppress(StoreUnreachableError):  # the versions are heard of later, and no text is looked for
                    await self._hear()
                return match
            path = self._path(match)
            found = await self._look_up(match, path, names)
        except StoreError as error:
            self._unreachable(error)
            return replace(again(), unasked=True)  # the tree may have got some of it
        if found:
            match = again()
        return match if match.foreign else replace(match, hashed=path)

    async def cover(
        self, namespace: Namespace, text: str, names: Sequence[str] = (), *, parent: str | None = None
    ) -> bool:
        """Fill the tree with the records of a text, and with the replies of these names; return whether that was possible.

        `parent` is the name of a reply with which the text has to begin.
        """
        match = self.tree.match(namespace, text, parent=parent)
        try:
            await self._look_up(match, self._path(match), [*names, parent] if parent else names)
        except StoreError as error:
            self._unreachable(error)
            return False
        return True

    async def asked_late(self, namespace: Namespace, cut: Cut, *, again: bool = True) -> Sequence[str]:
        """Make the look-ups that failed when the prompts of a chain were made, and note the results in its flags.

        Returns the names of the replies that these prompts passed over. The flags stay where the store does not answer, and
        where the tree has collected the chain: what is gone cannot be held. `again`: also those that were made late before,
        because another router may have handed over more since.
        """
        open_ones = [doubt for doubt in doubts(namespace, cut) if again or doubt.span.flags & SpanFlag.UNASKED]
        if cut.span is None or not cut.span.users or not open_ones:
            return ()
        missed: dict[str, None] = {}
        self.tree.hold(cut.span)
        try:
            for at in range(0, len(open_ones), _AT_ONCE):
                some = map(self._asked_late, open_ones[at : at + _AT_ONCE])
                for names in await asyncio.gather(*some, return_exceptions=True):
                    if isinstance(names, BaseException):
                        raise names
                    missed.update(dict.fromkeys(names))
        except StoreError as error:
            self._unreachable(error)
        finally:
            self.tree.release(cut.span)
        return list(missed)

    def _handed_over(self, reply: Generation) -> None:
        """Make the look-up that failed when the prompt of a reply was made: the reply is in the store now.

        Replies take turns. After an outage many are handed over at once, several of one chain: each look-up is made once,
        and leaves the event loop to the hand-over and to requests.
        """
        self.tree.hold(reply.span)
        self._late.append(reply)
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask_late())

    async def _ask_late(self) -> None:
        try:
            while self._late:
                reply = self._late.popleft()
                try:
                    await self.asked_late(reply.namespace, end_of(reply.span), again=False)
                except Exception:
                    logger.exception("a look-up that was made late failed")
                finally:
                    self.tree.release(reply.span)
        finally:
            self._asking = None
            while self._late:
                self.tree.release(self._late.popleft().span)

    async def _asked_late(self, doubt: Doubt) -> Sequence[str]:
        known = KnownRecords(self.tree.stored)
        found = await self.store.find(Query(TextPath(doubt.namespace, doubt.text), doubt.used.start, known))
        lost = await self._restore(found, known)
        if self.saving.incomplete:
            raise StoreUnreachableError(_LEFT)
        if lost:
            raise DamagedRecordError(f"{lost} records cannot be read: run `tito-router store verify`")
        names = passed_over(self.tree, doubt)
        settle(doubt.span, missed=names is not None)
        return names or ()

    @staticmethod
    def _path(match: PrefixMatch) -> TextPath:
        """Return the path of a text, from the end of its known part."""
        line = match.continues
        stored = None if line is None or match.unknown_parent or match.foreign else line.span.stored
        path = TextPath(match.namespace, match.text, None if stored is None else stored.state)
        if line is not None and stored is not None and stored.state is None:
            line.span.stored = replace(stored, state=path.state(line.span.text_end))
        return path

    async def _look_up(self, match: PrefixMatch, path: TextPath, names: Sequence[str]) -> bool:
        """Fill the tree with the records beyond a match; return whether there were any."""
        whole, line = not self.tree.stats.evicted_tokens, match.continues
        known_from = 0 if line is None or match.unknown_parent or match.foreign else line.span.text_end
        known, changes = KnownRecords(self.tree.stored), self._changes
        query = Query(path, known_from, known, names, complete=whole, logs=(LOG,))
        spared = None if self.saving.incomplete else self.store.spared(query)
        if spared is not None:
            self.lookups["known"] += 1
            await self._versions.read_to(spared.ends.get(LOG, 0))
            return self._changes != changes
        self.tree.pin(match)
        try:
            found = await self.store.find(query)
            await self._versions.read_to(found.ends.get(LOG, 0))
            self.lookups["found" if found.records else "nothing"] += 1
            lost = await self._restore(found, known)
        finally:
            self.tree.unpin(match)
        if self.saving.incomplete:
            raise StoreUnreachableError(_LEFT)
        if lost:
            # Without this the text of lost tokens would look like context, and be called exact.
            raise DamagedRecordError(f"{lost} records cannot be read: run `tito-router store verify`")
        return self._changes != changes  # true also if another request has added records that this look-up left out

    async def notes(self, namespace: Namespace, names: Sequence[str], *, whole: bool) -> Sequence[tuple[bytes, bytes]]:
        """Return the notes of these names, oldest first, each after the id of its reply; fill the tree with these replies.

        `whole` says that the caller still has all notes that it made or found. Raises StoreError.
        """
        known = KnownRecords(self.tree.stored)
        query = Query(TextPath(namespace, ""), known=known, parents=names, each=MOST_NAMED, complete=whole)
        if not names or (not self.saving.incomplete and self.store.spared(query) is not None):
            return ()
        found = await self.store.find(query)
        if self.saving.incomplete:
            raise StoreUnreachableError(_LEFT)
        records = [record for record in found.records if not record.note]
        if await self._restore(Found(records, found.marks, damaged=found.damaged), known):
            raise DamagedRecordError("replies of a chat cannot be read: run `tito-router store verify`")
        notes = sorted((record for record in found.records if record.note), key=lambda record: record.serial)
        self._serials.saw(max((record.serial for record in notes), default=0))
        return [(record.parent or b"", record.note) for record in notes]

    async def bring(self, records: Mapping[bytes, bytes]) -> None:
        """Fill the tree with these replies, given by the ids of their records and their roots, if the store has them.

        Those that the store has are all there when this returns, whatever the tree collects meanwhile. Raises StoreError.
        """
        held: list[TokenSpan] = []
        try:
            for number in range(_MOST_ROUNDS):
                lacking = [record for record in records if record not in self.tree.stored]
                if not lacking:
                    break
                for span in filter(None, map(self.tree.stored.get, records)):
                    self.tree.hold(span)
                    held.append(span)
                known = KnownRecords(self.tree.stored)
                # A conversation that was recorded again may have another root.
                found = await self.store.get(lacking, known=known, roots=None if number else records)
                if number and not found.records:
                    break
                await self._restore(found, known)
        finally:
            for span in held:
                self.tree.release(span)

    async def _hear(self) -> None:
        """Read new weight versions, if other routers have written."""
        others = self.store.others()
        if others not in (0, self._others):
            await self._versions.read()
            self._others = others

    async def _restore(self, found: Found, known: KnownRecords) -> int:
        """Put records into the tree, and return how many cannot be read.

        While they were read, the tree may have collected spans that they need: these are read again.
        """
        records, marks, damaged = found.records, found.marks, found.damaged
        self._serials.saw(max((record.serial for record in records), default=0))
        for _ in range(_MOST_ROUNDS):
            roots = restore(self.tree, Found(records, marks))
            self._changes += len(records)
            lacking = known.gone() | roots.keys()
            if not lacking:
                break
            more = await self.store.get(list(lacking), known=known, roots=roots)
            damaged += more.damaged
            records, marks = [*more.records, *records], {**more.marks, **marks}
        if records:
            asyncio.get_running_loop().call_soon(self.tree.settle)  # the request goes on to its worker first
        self.restored += len(records)
        return damaged or len(roots)

    def _unreachable(self, error: StoreError) -> None:
        self.lookups["failed"] += 1
        self.saving.complain("this process looks texts up in its own memory alone: %s", error)

    # After it ----------------------------------------------------------------------------------------------------------

    def record(
        self, match: PrefixMatch, context: Context | None, reply: SampledReply, beside: Beside | None = None
    ) -> tuple[Generation, Awaitable[bool]]:
        """Record a reply in the tree, and begin to append it. The future says whether the store has acknowledged it.

        `beside` returns events that are appended together with it.
        """
        generation = self.tree.record(match, context, reply, serial=self._serials.next())
        saved = self._turns.add(match, generation, reply, own_context=context is not None, beside=beside)
        return generation, saved

    def note(self, reply: Generation, notes: Callable[[], Sequence[Batch]]) -> Awaitable[bool]:
        """Begin to save the notes on a reply and those before it, see `noting`; the result tells whether they are in the store.

        `notes` makes them. If the store has forgotten the conversation meanwhile, that is written again, with what `notes`
        returns then; nothing is, if it returns nothing.
        """

        def mend(batch: Batch, error: MissingRecordError) -> Batch | None:
            again, made = self._turns.again(reply), notes()
            return joined([again, *made]) if made else None

        tree, span = self.tree, reply.span
        if tree.stored.get(span.stored.id) is not span:  # collected already, so it cannot be written again
            return self.saving.append(joined(notes()))
        tree.hold(span)
        return self.saving.append(joined(notes()), on_missing=mend, on_done=lambda _: tree.release(span))

    def noting(self, reply: TokenSpan, namespace: Namespace, names: Sequence[str], note: bytes) -> Batch:
        """Return the batch of a note on a reply. The names find the note."""
        stamp = self.tree.clock.current or ""
        record = note_on(reply.stored, namespace, names, note, serial=self._serials.next(), stamp=stamp)
        return Batch([record], {record.id: TextPath(namespace, "")})

    async def extras(self, span: TokenSpan, names: Sequence[str]) -> Mapping[str, Extra] | None:
        """Return the blobs beside a reply, by these names; None if the store cannot be read."""
        if span.stored is None:
            return {}
        try:
            blobs = await self.store.blobs(span.stored.id, names, root=span.stored.root)
            return {blob.name: Extra(blob.shape, blob.data) for blob in blobs}
        except StoreError as error:
            self._unreachable(error)
            return None

    def retrieved(self, recall: Recall | None) -> None:
        """Note that a conversation was retrieved: it may be forgotten before others."""
        span = None if recall is None else recall.cut.span
        if span is not None and span.stored is not None:
            self.taken(span.stored.root)

    def taken(self, root: bytes) -> None:
        """Note that the conversation with this root was retrieved. It need not be in memory."""
        # The store ignores marks of conversations that it does not have yet.
        self._turns.when_there(root, self._retrieved)

    def _retrieved(self, root: bytes) -> None:
        self.store.note([Mark(root, 0, retrieved=True)])

    async def write_versions(self) -> None:
        """Write down that all workers were set to another weight version."""
        events = self._versions.news()
        if events:
            await self.saving.append(Batch(events=events))

    async def read_versions(self) -> None:
        """Read the weight versions of other routers, and write those that could not be written before."""
        try:
            await self._versions.write()
            await self._versions.read()
        except StoreError as error:
            self.saving.complain("this router cannot read new weight versions: %s", error)

    # The size of the store ---------------------------------------------------------------------------------------------

    async def _keep_tending(self) -> None:
        """Check the size of the store now and then, and forget what exceeds the limit."""
        while True:
            try:
                if self._max_bytes is not None:
                    await self._forget(self._max_bytes)
                self.size = await self.store.stats()
            except StoreError as error:
                self.saving.complain("this router cannot ask for the size of the store: %s", error)
            await asyncio.sleep(TEND_SECONDS)

    async def _forget(self, max_bytes: int) -> None:
        gone = await self.store.forget(max_bytes)
        self.forgotten += gone.retrieved + gone.unretrieved
        self.forgotten_unretrieved += gone.unretrieved
        if gone.unretrieved:
            logger.warning(
                "%d conversations were forgotten before they were retrieved: raise --store-max-bytes", gone.unretrieved
            )

    async def stats(self) -> dict[str, Any]:
        """Return the size of the store and its counts since the start, for `/radix_tree/stats`.

        The weight versions that others have noted are read, too: a router that is not asked for texts would show an old one.
        """
        saving = self.saving
        try:
            await self._versions.read()
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
            "waiting_bytes": saving.waiting_bytes,
            "held_bytes": saving.held_bytes,
            "handed_over": saving.handed_over,
            "lost": saving.lost,
            "forgotten": self.forgotten,
            "forgotten_unretrieved": self.forgotten_unretrieved,
        }


class KnownRecords:
    """The records of a tree, as `Query.known`. Notes which of them a store leaves out because the tree has them.

    A store may ask several times while it reads. What it was told is true until `gone` is called: otherwise what builds on a
    record that the tree drops meanwhile would look damaged.
    """

    def __init__(self, stored: Container[bytes]) -> None:
        self._stored = stored
        self._relied: set[bytes] = set()

    def __contains__(self, record: object) -> bool:
        if record in self._relied:
            return True
        if not isinstance(record, bytes) or record not in self._stored:
            return False
        self._relied.add(record)
        return True

    def gone(self) -> set[bytes]:
        """Return the records left out that the tree has dropped since. They are no longer known."""
        gone = {record for record in self._relied if record not in self._stored}
        self._relied -= gone
        return gone


def restore(tree: RadixTree, found: Found) -> dict[bytes, bytes]:
    """Put the records of a look-up into a tree.

    Returns the records that are needed but neither found nor in the tree, by id with their roots; what builds on them is left
    out.
    """
    lacking: dict[bytes, bytes] = {}
    contexts: list[TokenSpan] = []
    known = tree.stored
    for record in found.records:
        if record.id in known:
            continue
        lacks = [link for link in record.links if link not in known]
        if lacks:
            lacking.update(dict.fromkeys(lacks, record.root))
            continue
        span, mark = span_of(record, known), found.marks.get(record.root)
        tree.restore(
            StoredSpan(
                span,
                record.id,
                record.namespace,
                record.text,
                None if record.base is None else known[record.base],
                None if record.line is None else known[record.line],
                record.tail,
                record.serial,
                record.stamp if mark is None else mark.stamp,
                mark is not None and mark.retrieved,
            )
        )
        if not span.sampled:
            tree.hold(span)
            contexts.append(span)
    for span in contexts:
        tree.release(span)  # a span on which nothing builds is removed again
    return lacking
